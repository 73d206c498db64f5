"""Columns of the CSVs that the findings stage writes."""

_MAPS = "model_id revision weights phi_sha"
ACCOUNTING = (
    "study backbone corpus length maps budget_percent k e_topk e_topk_ci_low e_topk_ci_high e_nosub e_nosub_ci_low "
    "e_nosub_ci_high e_sub e_sub_ci_low e_sub_ci_high e_exact_sub e_exact_nosub log_z_error log_z_error_ci_low "
    f"log_z_error_ci_high clamped_share packs heads rows {_MAPS}"
).split()
STATE_DTYPE = (
    "study backbone corpus length maps budget_percent k state_dtype e_sub e_nosub nosub_minus_sub "
    "nosub_minus_sub_ci_low nosub_minus_sub_ci_high heads_nosub_wins heads_nosub_wins_ci_low heads_nosub_wins_ci_high "
    "change change_ci_low change_ci_high change_in_wins change_in_wins_ci_low change_in_wins_ci_high log_z_error "
    f"change_in_log_z change_in_log_z_ci_low change_in_log_z_ci_high clamped_share {_MAPS}"
).split()
