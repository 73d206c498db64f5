"""Names of methods and folders that several modules use."""

PAPER_METHODS = ("full", "topk", "topk_phi", "topk_phi_nosub")
"""The paper's methods, in the order of its tables; `residual_mass.methods` has all methods."""
TOPK = PAPER_METHODS[1]
PUBLISHED = "published"
"""Stands for the name of a study where tables show the paper's own values."""
