"""Holm's correction for several comparisons, for every stage that makes some."""

from __future__ import annotations

from collections.abc import Sequence


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the order given: rejecting those below alpha keeps the chance of any false rejection
    below alpha, however the tests depend on each other.
    """
    assert all(0 <= p <= 1 for p in p_values), p_values
    adjusted = [0.0] * len(p_values)
    floor = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        # A larger p must not end up below a smaller one, though its factor is smaller.
        floor = max(floor, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = floor
    return adjusted
