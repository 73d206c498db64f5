"""Training of the feature maps; here the columns of the held-out log."""

RUN = ("recipe", "variant", "seed")
"""Columns that identify a training."""
MEASURES = ("e_topk", "e_sub", "e_nosub", "heads_below_topk", "kl", "log_z_error", "clamped_share")
COLUMNS = (*RUN, "step", "seconds", "corpus", "k", "layer", *MEASURES)
