"""Names of methods, tables and folders that more than one place tells from others."""

METHODS = ("full", "topk", "topk_phi", "topk_phi_nosub")
"""Those of the paper, in the order of its tables; `residual_mass.methods` has all."""
TOPK = METHODS[1]
PUBLISHED = "published"
"""The folder of the tables with the paper's own values, in place of a study's name."""
