"""The paper's statements in result files: their columns, and how an interval decides."""

from __future__ import annotations

COLUMNS = (
    "study backbone claim statement shown_in corpus length k primary statistic estimate ci_low ci_high verdict "
    "clamped_share packs heads model_id revision weights phi_sha"
).split()


def verdict(low: str, high: str) -> str:
    """Judges the printed interval, so that rounding errors around 0 decide nothing; an empty one is undecided."""
    if low and float(low) > 0:
        return "holds"
    return "does not hold" if high and float(high) < 0 else "undecided"
