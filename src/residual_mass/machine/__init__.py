"""What a machine has and lacks for a study: GPUs, SLURM, access, room on its disk."""
