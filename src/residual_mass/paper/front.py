"""The Pareto front of points of which less is better in both coordinates."""

from __future__ import annotations

from collections.abc import Sequence


def on_front(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Tells of each point whether no other one is at most as large in both coordinates and smaller in one of them.

    Equal points are on the front together.
    """
    return [not any(_beats(other, point) for other in points) for point in points]


def _beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one != other and one[0] <= other[0] and one[1] <= other[1]
