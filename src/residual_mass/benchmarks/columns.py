"""Columns of the CSVs that these stages write."""

RESULTS = (
    "benchmark backbone length task method budget_percent maps metric value stderr ci_low ci_high "
    "original_value original_stderr original_ci_low original_ci_high n "
    "gain gain_ci_low gain_ci_high gain_p mde full_gap full_gap_p right_to_wrong wrong_to_right flags data "
    "k_mean k_zero_share cut_share decoding study model_id revision phi_sha prompts_sha weights"
).split()
FORCED = (
    "text task index continuation state method budget_percent maps phi_sha k position token "
    "nll full_nll kl same_top first"
).split()
