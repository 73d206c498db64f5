"""Paired differences to top-k as cells have them: corrected for the other comparisons of a table, and with a mark where
they are more than chance.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from residual_mass.holm import holm
from residual_mass.paper.table import Gain, Interval, Mark

Key = TypeVar("Key")

ALPHA = 0.05
"""Chance of any false mark among comparisons that are corrected together."""


def corrected(p_values: Mapping[Key, float]) -> dict[Key, float]:
    """The p-values after Holm's correction over all of them."""
    return dict(zip(p_values, holm(list(p_values.values())), strict=True))


def gain_of(row: Mapping[str, str], p_holm: float | None) -> Gain | None:
    """What a row of results says of its gain; None without a test."""
    if p_holm is None:
        return None
    value, low, high, p = (float(row[name]) for name in ("gain", "gain_ci_low", "gain_ci_high", "gain_p"))
    return Gain(value, Interval(low, high), p, p_holm)


def mark_of(gain: Gain | None) -> Mark:
    if gain is None or gain.p_holm >= ALPHA or not gain.value:
        return ""
    return "above" if gain.value > 0 else "below"


def fields_of(gain: Gain | None) -> dict[str, str]:
    """What the CSV of a table adds to a row of results."""
    return {} if gain is None else {"gain_p_holm": f"{gain.p_holm:.6f}"}
