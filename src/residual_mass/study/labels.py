"""Names of methods, tables and figures that more than one place tells from others."""

METHODS = ("full", "topk", "topk_phi", "topk_phi_nosub")
"""Those of the paper, in the order of its tables; `residual_mass.methods` has all."""
TOPK = METHODS[1]
ORACLES = ("topk_exact_mass",)
"""Methods whose residual uses scores of tokens that they do not read; they do not compete with the others."""
ABLATION_TABLES = {"dphi_ablation": "dphi", "loss_ablation": "loss"}
"""The ablation that each of these tables shows."""
ACCOUNTING_TABLE = "exact_accounting"
FIDELITY_TABLE, FIDELITY_ANSWERS = FIDELITY_TABLES = "fidelity", "fidelity_answers"
"""Of held-out texts, and of the answers to a benchmark's prompts."""
RESIDUAL_TABLE, DEPLOYABLE_TABLE = RESIDUAL_TABLES = "residual_estimators", "deployable"
"""Of all methods, and of those that no other one beats in bytes and in distance."""
RUNTIME_TABLES = "runtime_"
"""What the tables of latencies begin with; the backbone follows."""
PUBLISHED = "published"
"""The folder of the tables with the paper's own values, in place of a study's name."""
ERROR_BY_K, SELECTION_RECALL, FIDELITY_BY_BYTES = RESIDUAL_FIGURES = (
    "error_by_k", "selection_recall", "fidelity_by_bytes",
)  # fmt: skip
"""Of the methods' errors, of what their selectors find, and of errors and distances against the bytes of a step."""
KERNEL_FIDELITY = "ablation_kernel_fidelity"
"""The figure that shows the maps of the ablations, at their length."""
