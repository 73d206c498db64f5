from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from residual_mass.benchmarks.statistics import estimate_over_tasks, estimate_task

scores_lists = st.lists(st.floats(0, 1), min_size=2, max_size=12)


@given(scores_lists)
def test_mean_and_standard_error_by_definition(scores: list[float]) -> None:
    exact = [Fraction(score) for score in scores]
    mean = sum(exact) / len(exact)
    variance = sum((score - mean) ** 2 for score in exact) / (len(exact) - 1)
    estimate = estimate_task(scores, 10, 0, "t")
    assert estimate.value == pytest.approx(float(mean), abs=1e-12)
    assert estimate.stderr == pytest.approx(math.sqrt(variance / len(exact)), abs=1e-9)


def test_standard_error_of_known_scores() -> None:
    assert estimate_task([0.0, 1.0, 1.0, 0.0], 10, 0, "t").stderr == pytest.approx(math.sqrt(1 / 12))
    assert estimate_task([0.5], 10, 0, "t").stderr is None


def test_draws_follow_the_exact_bootstrap_distribution() -> None:
    scores = [0.0, 0.25, 1.0]
    exact = [sum(sample) / 3 for sample in itertools.product(scores, repeat=3)]  # all 27 equally likely resamples
    draws = estimate_task(scores, 40_000, 1, "t").draws
    for mean in set(exact):
        expected = exact.count(mean) / 27
        assert np.isclose(draws, mean).mean() == pytest.approx(expected, abs=4 * math.sqrt(expected / 40_000))


def test_interval_is_the_percentile_interval_of_the_draws() -> None:
    estimate = estimate_task([0.0, 0.25, 0.5, 1.0], 999, 2, "t")
    ordered = sorted(estimate.draws)
    low, high = estimate.interval
    assert ordered[23] <= low <= ordered[25]
    assert ordered[973] <= high <= ordered[975]


@given(st.floats(0, 1), st.integers(1, 9))
def test_interval_of_equal_scores_is_a_point(score: float, n: int) -> None:
    low, high = estimate_task([score] * n, 50, 0, "t").interval
    assert low == pytest.approx(score) and high == pytest.approx(score)


def test_draws_depend_on_seed_and_task_alone() -> None:
    scores = [0.0, 0.0, 1.0, 1.0, 1.0]
    draws = estimate_task(scores, 300, 0, "a").draws
    assert np.array_equal(estimate_task(scores, 300, 0, "a").draws, draws)
    assert not np.array_equal(estimate_task(scores, 300, 1, "a").draws, draws)
    assert not np.array_equal(estimate_task(scores, 300, 0, "b").draws, draws)
    flipped = estimate_task([1 - score for score in scores], 300, 0, "a").draws  # another arm, resampled alike
    assert np.allclose(draws + flipped, 1)


def test_over_tasks_is_unweighted_and_stratified() -> None:
    small, large = [0.0, 1.0], [1.0] * 98 + [0.0, 0.5]
    tasks = [estimate_task(small, 500, 0, "small"), estimate_task(large, 500, 0, "large")]
    both = estimate_over_tasks(tasks)
    assert both.value == pytest.approx((0.5 + 98.5 / 100) / 2)
    assert both.stderr == pytest.approx(math.hypot(tasks[0].stderr or 0, tasks[1].stderr or 0) / 2)
    assert np.allclose(both.draws, [(a + b) / 2 for a, b in zip(tasks[0].draws, tasks[1].draws, strict=True)])


def test_over_tasks_has_no_standard_error_when_a_task_has_none() -> None:
    assert estimate_over_tasks([estimate_task([1.0], 5, 0, "a"), estimate_task([0.0, 1.0], 5, 0, "b")]).stderr is None
