"""Holm's correction for multiple comparisons."""

from __future__ import annotations

from collections.abc import Sequence


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns Holm's adjusted p-values in the given order. Rejecting those below alpha bounds the probability of any
    false rejection by alpha, however the tests depend on each other.
    """
    assert all(0 <= p <= 1 for p in p_values), p_values
    adjusted = [0.0] * len(p_values)
    floor = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        # Adjusted values must keep the order of the p-values, although factors decrease.
        floor = max(floor, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = floor
    return adjusted
