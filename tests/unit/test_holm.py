"""Holm's correction against its definition as a closed test."""

from __future__ import annotations

import itertools
import random

import pytest

from residual_mass.holm import holm


def closed_bonferroni(p_values: list[float]) -> list[float]:
    """Adjusted p of a hypothesis: the largest Bonferroni p of any set of hypotheses that holds it."""
    indices = range(len(p_values))
    sets = [chosen for size in indices for chosen in itertools.combinations(indices, size + 1)]
    p_of = {chosen: min(1.0, len(chosen) * min(p_values[i] for i in chosen)) for chosen in sets}
    return [max(p for chosen, p in p_of.items() if i in chosen) for i in indices]


def test_a_worked_example() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


def test_it_is_the_closed_test_of_bonferroni() -> None:
    generator = random.Random(3)
    for size in range(1, 8):
        for _ in range(20):
            p_values = [generator.choice((generator.random(), generator.random() / 50, 0.02)) for _ in range(size)]
            assert holm(p_values) == pytest.approx(closed_bonferroni(p_values), abs=1e-12), p_values


def test_no_comparison_needs_no_correction() -> None:
    assert holm([]) == [] and holm([0.3]) == [0.3]
