"""`residual-mass measure`: how much of its cache a model may leave unread on given texts."""
