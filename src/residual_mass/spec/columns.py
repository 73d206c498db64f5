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
FOLLOWING, GOLD, GREEDY, DRAFT = "following", "gold", "greedy", "draft"
"""Continuations: the text that follows, the right answer, the greedy answer of full attention, and its greedy
continuation of a document, which methods draft.
"""
DRAFTED = 32
"""Tokens of a draft, unless full attention ends its text earlier."""
OWN, DENSE = "own", "dense"
"""States of the forced tokens: the arm's own, or those of full attention."""
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
    parts = {
        "chat template": settings.chat_template,
        f"up to {settings.answer_margin} tokens past the references": settings.answer_margin is not None,
        "stops when settled": settings.stop_when_saturated,
        f"budgets of the {settings.budget_length} length": True,
        f"cut to {truncate_to}": True,
    }
    return "; ".join(["greedy", *(text for text, holds in parts.items() if holds)])


def decoding_settings(words: str) -> dict[str, bool | int | str | None]:
    """Parses the settings that can change a score from `decoding_words`; leaves out those that it does not state."""
    patterns = r"up to (\d+) tokens past", r"budgets of the (\w+) length", r"cut to (\w+)"
    margin, length, cut = (re.search(pattern, words) for pattern in patterns)
    return {
        "chat_template": "chat template" in words,
        "answer_margin": int(margin[1]) if margin else None,
        **{name: match[1] for name, match in (("budget_length", length), ("truncate_to", cut)) if match},
    }
