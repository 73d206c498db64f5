"""The Pareto front of points of which less is better."""

from __future__ import annotations

import random

import pytest

from residual_mass.paper.front import on_front


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([], []),
        ([(3, 4)], [True]),
        ([(1, 2), (2, 1)], [True, True]),
        ([(1, 2), (2, 3)], [True, False]),
        ([(1, 2), (1, 2)], [True, True]),
        ([(1, 2), (1, 3), (2, 2)], [True, False, False]),
        ([(4, 1), (1, 4), (3, 3), (2, 2), (3, 2)], [True, True, False, True, False]),
    ],
)
def test_what_another_point_beats_is_not_on_the_front(points: list[tuple[float, float]], expected: list[bool]) -> None:
    assert on_front(points) == expected


def test_the_front_is_what_a_sweep_by_the_first_coordinate_finds() -> None:
    generator = random.Random(0)
    points = [(generator.randrange(12), generator.randrange(12)) for _ in range(60)]
    swept, least = set(), float("inf")
    for point in sorted(points):
        if point[1] < least:
            swept.add(point)
            least = point[1]
    assert on_front(points) == [point in swept for point in points]
