"""Columns of the files that the diagnostics write."""

_MAPS = "model_id revision weights phi_sha"
ACCOUNTING = (
    "study backbone corpus length maps budget_percent k e_topk e_topk_ci_low e_topk_ci_high e_nosub e_nosub_ci_low "
    "e_nosub_ci_high e_sub e_sub_ci_low e_sub_ci_high e_exact_sub e_exact_nosub log_z_error log_z_error_ci_low "
    f"log_z_error_ci_high clamped_share packs heads rows {_MAPS}"
).split()
RESIDUAL_ERRORS = (
    "study backbone corpus length method maps budget_percent k error error_ci_low error_ci_high over_topk "
    "over_topk_ci_low over_topk_ci_high heads_below_topk heads_below_phi log_z_error recall tokens_read "
    "scan_bytes row_bytes summary_bytes step_share state_bytes state_share kept_share held_share "
    f"training_steps packs heads rows {_MAPS}"
).split()
RESIDUAL_HEADS = (
    "backbone corpus length pack layer head method budget_percent k error log_z_error log_z_rows residual_share_hat "
    "recall tokens_read h_mid skewness kurtosis"
).split()
