"""Inputs of the studies: files of pinned wheels, and models and data sets of the hub."""
