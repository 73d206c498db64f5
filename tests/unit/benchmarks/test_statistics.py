from __future__ import annotations

import hashlib
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.benchmarks.pairs import compare_task, estimate_task

from residual_mass.benchmarks.statistics import (
    EXACT,
    compare_arms,
    compare_over_tasks,
    estimate_over_tasks,
    minimal_detectable_effect,
    skewed_interval,
)

scores_lists = st.lists(st.floats(0, 1), min_size=2, max_size=12)
quarters = st.sampled_from([-1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0])
"""Paired differences with many ties, whose sums are exact in floating point."""


@given(scores_lists)
def test_mean_and_standard_error_by_definition(scores: list[float]) -> None:
    exact = [Fraction(score) for score in scores]
    mean = sum(exact) / len(exact)
    variance = sum((score - mean) ** 2 for score in exact) / (len(exact) - 1)
    estimate = estimate_task(scores, 10, 0, "t")
    assert estimate.value == pytest.approx(float(mean), abs=1e-12)
    assert estimate.stderr == pytest.approx(math.sqrt(variance / len(exact)), abs=1e-9)


def test_interval_is_the_percentile_interval_of_the_draws() -> None:
    estimate = estimate_task([0.0, 0.25, 0.5, 1.0], 999, 2, "t")
    ordered = sorted(estimate.draws)
    low, high = estimate.interval
    assert ordered[23] <= low <= ordered[25]
    assert ordered[973] <= high <= ordered[975]


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


def test_draws_are_means_of_the_drawn_examples() -> None:
    scores, resamples = [0.5, 0.0, 0.25, 1.0, 0.75], 300
    digest = hashlib.sha256(b"4 t").digest()
    rng = np.random.default_rng(int.from_bytes(digest[:8]))
    drawn = [*rng.integers(5, size=(256, 5)), *rng.integers(5, size=(44, 5))]
    expected = [sum(scores[i] for i in indices) / 5 for indices in drawn]
    assert np.allclose(estimate_task(scores, resamples, 4, "t").draws, expected, atol=1e-12)


def signs_p(tasks: list[list[float]]) -> float:
    """The exact p-value by definition: all signs of all differences, in exact arithmetic."""
    shares = [Fraction(d) / len(task) / len(tasks) for task in tasks for d in task]
    observed = abs(sum(shares))
    flipped = [
        abs(sum(sign * share for sign, share in zip(signs, shares, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(shares))
    ]
    return sum(mean >= observed for mean in flipped) / len(flipped)


@given(st.lists(quarters, min_size=1, max_size=10))
def test_exact_p_of_one_task_by_enumeration(differences: list[float]) -> None:
    comparison = compare_task(differences, [0.0] * len(differences), 1024, 0, "t")
    assert comparison.p == pytest.approx(signs_p([differences]), abs=1e-12)


@given(st.lists(st.lists(quarters, min_size=1, max_size=4), min_size=1, max_size=3))
def test_exact_p_over_tasks_by_enumeration(tasks: list[list[float]]) -> None:
    parts = [compare_task(d, [0.0] * len(d), 4096, 0, f"t{number}") for number, d in enumerate(tasks)]
    assert compare_over_tasks(parts).p == pytest.approx(signs_p(tasks), abs=1e-12)


def test_rounding_breaks_no_tie() -> None:
    differences = [0.1, 0.2, -0.3, 0.7, 0.1, -0.1]  # 0.1 + 0.2 is not 0.3 in floating point
    tenths = [round(10 * d) for d in differences]
    sums = [
        abs(sum(s * d for s, d in zip(signs, tenths, strict=True))) for signs in itertools.product((1, -1), repeat=6)
    ]
    expected = sum(value >= 7 for value in sums) / 64
    assert compare_task(differences, [0.0] * 6, 64, 0, "t").p == expected


def test_enumeration_is_used_up_to_so_many_differences() -> None:
    for n in (1, 8, EXACT):  # of whose patterns two are as extreme, whatever the number of resamples
        assert compare_task([1.0] * n + [0.0] * 30, [0.0] * (n + 30), 50, 0, "t").p == 2 / 2**n
    sampled = compare_task([1.0] * (EXACT + 1), [0.0] * (EXACT + 1), 50, 0, "t").p * 51
    assert sampled == pytest.approx(round(sampled)) and 1 <= sampled <= 3  # (b + 1) / (B + 1)


def test_sampled_p_is_near_the_exact_one() -> None:
    differences = [1.0] * 6 + [-1.0, -1.0, 0.5, 0.5, 0.25, 1.0, -0.25, 0.25, 0.5, 0.25, -0.25]
    assert len(differences) == EXACT + 1
    signs = 1 - 2 * (np.arange(2**17)[:, None] >> np.arange(17) & 1)
    exact = float(np.mean(np.abs(signs @ np.array(differences)) >= sum(differences)))
    sampled = compare_task(differences, [0.0] * 17, 10_000, 0, "t")
    by_definition = (1 + sum(abs(mean) >= sum(differences) / 17 - 1e-9 for mean in sampled.flipped)) / 10_001
    assert sampled.p == pytest.approx(by_definition)
    assert sampled.p == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / 10_000))


def test_sampled_p_is_never_zero() -> None:
    assert compare_task([1.0] * 200, [0.0] * 200, 999, 0, "t").p == 1 / 1000


def test_p_holds_its_level_under_the_null() -> None:
    rng, trials = np.random.default_rng(11), 800
    for resamples, n in ((512, 9), (199, 30)):  # enumerated; sampled
        differences = rng.choice([-1.0, -0.5, 0.0, 0.5, 1.0], size=(trials, n))
        ps = [c.p for c in compare_arms(differences, resamples, 0, "t")]
        rejected = np.mean([p <= 0.05 for p in ps])
        assert rejected <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / trials)
        assert rejected >= 0.02  # it can reject


def test_signs_are_random_independent_and_shared_by_pairs() -> None:
    units = compare_arms(np.eye(20), 2000, 0, "t")
    signs = 20 * np.array([pair.flipped for pair in units])
    assert set(np.unique(signs.round(12))) == {-1.0, 1.0}
    assert np.abs(signs.mean(axis=1)).max() < 4.5 / math.sqrt(2000)
    correlation = signs @ signs.T / 2000
    assert np.abs(correlation - np.eye(20)).max() < 4.5 / math.sqrt(2000)
    differences = np.random.default_rng(1).random(20)
    assert np.allclose(compare_task(differences, np.zeros(20), 2000, 0, "t").flipped, differences @ signs / 20)
    assert not np.array_equal(compare_arms(np.eye(20), 2000, 0, "u")[0].flipped, units[0].flipped)
    assert not np.array_equal(compare_arms(np.eye(20), 2000, 1, "t")[0].flipped, units[0].flipped)


def test_comparison_over_tasks_is_unweighted_and_stratified() -> None:
    small, large = compare_task([1.0, 0.0], [0.0, 0.0], 400, 0, "s"), compare_task([0.25] * 90, [0.5] * 90, 400, 0, "l")
    both = compare_over_tasks([small, large])
    assert both.mean.value == pytest.approx((0.5 - 0.25) / 2)
    assert np.allclose(both.flipped, (small.flipped + large.flipped) / 2)
    assert np.allclose(both.mean.draws, (small.mean.draws + large.mean.draws) / 2)
    assert [len(task) for task in both.differences] == [2, 90]


def test_detectable_effect_by_definition() -> None:
    first, second = np.array([0.0, 1.0, 1.0, 0.5]), np.array([0.25, 0.25, -1.0])
    deviations = [
        sum((d - sum(task) / len(task)) ** 2 for d in task) / (len(task) - 1) / len(task) for task in (first, second)
    ]
    quantiles = 1.959963985 + 0.841621234  # of the standard normal distribution, at 0.975 and 0.80
    expected = quantiles * math.sqrt(sum(deviations)) / 2
    assert minimal_detectable_effect([first, second]) == pytest.approx(expected, rel=1e-8)
    assert minimal_detectable_effect([np.full(8, 0.5)]) is None
    assert minimal_detectable_effect([first, np.array([0.5])]) is None
    pair = [compare_task(d, [0.0] * len(d), 10, 0, str(len(d))) for d in (first, second)]
    assert compare_over_tasks(pair).detectable == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("spread", [0.5, 0.7, 1.0])
@pytest.mark.parametrize("documents", [6, 8, 16])
def test_the_interval_of_skewed_values_covers_their_mean(documents: int, spread: float) -> None:
    """Of log-normal documents, whose mean is exp(spread^2 / 2), it misses at most 7 % (the 95 % are nominal)."""
    draws = np.exp(np.random.default_rng(documents).normal(0, spread, (4000, documents)))
    ends = np.array([skewed_interval([values]) for values in draws])
    low, high = ends.T
    covered = ((low <= np.exp(spread**2 / 2)) & (np.exp(spread**2 / 2) <= high)).mean()
    resampled = np.random.default_rng(0).integers(documents, size=(4000, documents))
    percentile = np.quantile([values[resampled].mean(1) for values in draws[:500]], [0.025, 0.975], axis=1)
    before = ((percentile[0] <= np.exp(spread**2 / 2)) & (np.exp(spread**2 / 2) <= percentile[1])).mean()
    assert 0.93 <= covered <= 0.97 and before < covered
    assert ((low <= draws.mean(1)) & (draws.mean(1) <= high)).all() and (low > 0).all()


def test_the_interval_of_skewed_values_over_tasks() -> None:
    """Two examples of each of twelve tasks, whose means differ more than their examples do."""
    rng = np.random.default_rng(1)
    means = np.exp(rng.normal(0, 1, (2000, 12)))
    draws = means[..., None] * np.exp(rng.normal(0, 0.7, (2000, 12, 2)))
    ends = np.array([skewed_interval(list(tasks)) for tasks in draws])
    target = means.mean(1) * np.exp(0.7**2 / 2)
    assert 0.93 <= ((ends[:, 0] <= target) & (target <= ends[:, 1])).mean() <= 0.97


def test_zeros_and_extremes_keep_finite_intervals() -> None:
    assert skewed_interval([np.zeros(3)]) == (0, 0)
    for values in ([0.0, 1.0], [1e-9, 30.0], [1e-9, 1e-9, 2.0], [0.5, 0.5, 0.5]):
        low, high = skewed_interval([np.array(values)])
        assert 0 < low <= np.mean(values) <= high < np.inf
