"""Columns of the files that these stages write, and the words in them; imports nothing heavy."""

RESULTS = (
    "benchmark backbone length task method budget_percent maps metric value stderr ci_low ci_high "
    "original_value original_stderr original_ci_low original_ci_high n "
    "gain gain_ci_low gain_ci_high gain_p mde full_gap full_gap_p right_to_wrong wrong_to_right flags data "
    "k_mean k_zero_share cut_share decoding study model_id revision phi_sha prompts_sha weights"
).split()
FOLLOWING, GOLD, GREEDY = "following", "gold", "greedy"
"""Continuations: the text that follows, the right answer, and the greedy answer of full attention."""
OWN, DENSE = "own", "dense"
"""States of the forced tokens: the arm's own, or those of full attention."""
FORCED = (
    "text task index continuation state method budget_percent maps phi_sha k position token seen "
    "nll full_nll kl same_top first"
).split()
FIDELITY = (
    "text backbone length task continuation state method budget_percent maps metric value stderr ci_low ci_high "
    "gain gain_ci_low gain_ci_high gain_p documents tokens k_mean study model_id revision phi_sha weights"
).split()
