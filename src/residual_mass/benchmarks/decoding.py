"""How a benchmark's texts were generated, in words, which its result CSV repeats; imports nothing heavy."""

from __future__ import annotations

import re


def decoding_words(
    chat_template: bool, answer_margin: int | None, stop_when_saturated: bool, budget_length: str, truncate_to: str
) -> str:
    """What tells one way to generate a benchmark's texts from another, for its result CSV."""
    parts = {
        "chat template": chat_template,
        f"up to {answer_margin} tokens past the references": answer_margin is not None,
        "stops when settled": stop_when_saturated,
        f"budgets of the {budget_length} length": True,
        f"cut to {truncate_to}": True,
    }
    return "; ".join(["greedy", *(text for text, holds in parts.items() if holds)])


def decoding_settings(words: str) -> dict[str, bool | int | str | None]:
    """What `decoding_words` was told of what can change a score; what other words do not say is left out."""
    patterns = {
        "answer_margin": r"up to (\d+) tokens past the references",
        "budget_length": r"budgets of the (\w+) length",
        "truncate_to": r"cut to (\w+)",
    }
    parts = words.split("; ")
    found = {
        name: match[1] for name, pattern in patterns.items() for part in parts if (match := re.fullmatch(pattern, part))
    }
    margin = found.pop("answer_margin", None)
    return {
        "chat_template": "chat template" in parts,
        "answer_margin": None if margin is None else int(margin),
        **found,
    }
