"""Compares a study with the paper's values."""
