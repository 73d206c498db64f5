"""Checks of a machine for a study: GPUs, SLURM, access to models, disk space."""
