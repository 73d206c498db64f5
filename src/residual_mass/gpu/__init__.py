"""Optional: Triton's kernels, the backend of their steps with its CUDA graphs, and passes of the training.

Only the table of backends, the engine's choice of terms, and the trainer import it.
"""
