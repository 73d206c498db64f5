"""Figures: what each shows, computed apart from the drawing."""
