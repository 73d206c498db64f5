"""Names of methods, tables and figures that more than one place tells from others."""

METHODS = ("full", "topk", "topk_phi", "topk_phi_nosub")
"""Those of the paper, in the order of its tables; `residual_mass.methods` has all."""
TOPK = METHODS[1]
ORACLES = ("topk_exact_mass",)
"""Methods whose residual uses scores of tokens that they do not read; they do not compete with the others."""
PUBLISHED = "published"
"""The folder of the tables with the paper's own values, in place of a study's name."""
ERROR_BY_K, SELECTION_RECALL, FIDELITY_BY_BYTES = RESIDUAL_FIGURES = (
    "error_by_k", "selection_recall", "fidelity_by_bytes",
)  # fmt: skip
"""Of the methods' errors, of what their selectors find, and of errors and distances against the bytes of a step."""
KERNEL_FIDELITY = "ablation_kernel_fidelity"
"""The figure that shows the maps of the ablations, at their length."""
