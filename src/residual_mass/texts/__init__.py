"""What studies read and do not make: files of pinned wheels, and models and data sets of the hub."""
