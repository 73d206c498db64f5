"""Names of methods and folders that several modules use."""

TOPK = "topk"
TOPK_PHI = "topk_phi"
TOPK_PHI_NOSUB = "topk_phi_nosub"
PAPER_METHODS = ("full", TOPK, TOPK_PHI, TOPK_PHI_NOSUB)
"""The paper's methods, in the order of its tables; `residual_mass.methods` has all methods."""
PUBLISHED = "published"
"""Stands for the name of a study where tables show the paper's own values."""
