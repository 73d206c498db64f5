"""Figures, each with a function that computes its points and one that draws them."""
