"""`residual-mass measure`: how much of the cache a model may leave unread on given texts, by the studies' measures."""
