"""Files of other stages as typed rows. What they hold is trusted: stages check every input against its record."""

from __future__ import annotations


def optional(text: str) -> float | None:
    """A field of a CSV that is empty where the number is not defined."""
    return float(text) if text else None
