"""Columns of the files of the benchmark stages, and the words in them."""

from __future__ import annotations

import re

from residual_mass.spec.sections import Decoding

SCORE_COLUMNS = (
    "benchmark backbone length task method budget_percent maps metric value stderr ci_low ci_high "
    "original_value original_stderr original_ci_low original_ci_high n "
    "gain gain_ci_low gain_ci_high gain_p mde full_gap full_gap_p right_to_wrong wrong_to_right flags data "
    "k_mean k_zero_share cut_share decoding study model_id revision phi_sha prompts_sha weights"
).split()
FOLLOWING = "following"
"""A continuation: the text that follows."""
GOLD = "gold"
"""A continuation: the right answer."""
GREEDY = "greedy"
"""A continuation: the greedy answer of full attention."""
OWN = "own"
"""A state of the forced tokens: the arm's own."""
DENSE = "dense"
"""A state of the forced tokens: that of full attention."""
FORCED_COLUMNS = (
    "text task index continuation state method budget_percent maps phi_sha k position token seen "
    "nll full_nll kl same_top first"
).split()
FIDELITY_COLUMNS = (
    "text backbone length task continuation state method budget_percent maps metric value stderr ci_low ci_high "
    "gain gain_ci_low gain_ci_high gain_p documents tokens k_mean study model_id revision phi_sha weights"
).split()


def decoding_words(settings: Decoding, truncate_to: str) -> str:
    """Describes the settings that affect a benchmark's generated texts, for its result CSV."""
    words = ["greedy"]
    if settings.chat_template:
        words.append("chat template")
    if settings.answer_margin is not None:
        words.append(f"up to {settings.answer_margin} tokens past the references")
    if settings.stop_when_saturated:
        words.append("stops when settled")
    words.append(f"budgets of the {settings.budget_length} length")
    words.append(f"cut to {truncate_to}")
    return "; ".join(words)


def decoding_settings(words: str) -> dict[str, bool | int | str | None]:
    """Parses the settings that can change a score from `decoding_words`; leaves out those that it does not state."""
    margin = re.search(r"up to (\d+) tokens past", words)
    length = re.search(r"budgets of the (\w+) length", words)
    cut = re.search(r"cut to (\w+)", words)
    settings: dict[str, bool | int | str | None] = {
        "chat_template": "chat template" in words,
        "answer_margin": int(margin[1]) if margin else None,
    }
    if length:
        settings["budget_length"] = length[1]
    if cut:
        settings["truncate_to"] = cut[1]
    return settings
