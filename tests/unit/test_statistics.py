from __future__ import annotations

import hashlib
import itertools
import math
import random
import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from residual_mass.statistics import (
    MAX_EXACT_SIGNS,
    Tasks,
    holm,
    means,
    minimal_detectable_effect,
    sign_flip_p,
    skewed_interval,
)

ROOT = Path(__file__).parents[2]
scores_lists = st.lists(st.floats(0, 1), min_size=2, max_size=12)
quarters = st.sampled_from([-1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0])
"""Paired differences with many ties, whose sums are exact in floating point."""


def row(**tasks: list[float]) -> Tasks:
    """A single row of values."""
    return {task: np.array([values], dtype=np.float64) for task, values in tasks.items()}


# ---- means -----------------------------------------------------------------------------------------------------------


@given(scores_lists)
def test_mean_and_standard_error_by_definition(scores: list[float]) -> None:
    exact = [Fraction(score) for score in scores]
    mean = sum(exact) / len(exact)
    variance = sum((score - mean) ** 2 for score in exact) / (len(exact) - 1)
    found = means(row(t=scores), 10, 0)
    assert found.value == pytest.approx([float(mean)], abs=1e-12)
    assert found.stderr == pytest.approx([math.sqrt(variance / len(exact))], abs=1e-9)


def test_draws_are_means_of_the_drawn_examples_and_intervals_their_percentiles() -> None:
    scores, resamples = [0.5, 0.0, 0.25, 1.0, 0.75], 999
    rng = np.random.default_rng(int.from_bytes(hashlib.sha256(b"4 t").digest()[:8]))
    drawn = [indices for size in (256, 256, 256, 231) for indices in rng.integers(5, size=(size, 5))]
    found = means({"t": np.array([scores, scores[::-1]])}, resamples, 4)
    for of_row, values in zip(found.draws, (scores, scores[::-1]), strict=True):  # all rows are resampled alike
        assert np.allclose(of_row, [sum(values[i] for i in indices) / 5 for indices in drawn], atol=1e-12)
    for of_row, low, high in zip(found.draws, found.frame["ci_low"], found.frame["ci_high"], strict=True):
        ordered = sorted(of_row)
        assert ordered[23] <= low <= ordered[25] and ordered[973] <= high <= ordered[975]
    assert not np.array_equal(means(row(t=scores), resamples, 5).draws[0], found.draws[0])
    assert not np.array_equal(means(row(u=scores), resamples, 4).draws[0], found.draws[0])


def test_over_tasks_is_unweighted_and_stratified() -> None:
    small, large = [0.0, 1.0], [1.0] * 98 + [0.0, 0.5]
    both = means(row(small=small, large=large), 500, 0)
    first, second = means(row(small=small), 500, 0), means(row(large=large), 500, 0)
    assert both.value == pytest.approx([(0.5 + 98.5 / 100) / 2])
    assert both.stderr == pytest.approx([math.hypot(first.stderr[0], second.stderr[0]) / 2])
    assert np.allclose(both.draws, (first.draws + second.draws) / 2)


def test_one_example_has_no_interval() -> None:
    """And so has a mean over tasks, of which one has a single example."""
    values = {"one": np.array([[0.25], [0.75]]), "two": np.array([[0.5, 0.5], [0.0, 1.0]])}
    for tasks in ({"one": values["one"]}, values):
        found = means(tasks, 50, 0).frame
        assert found[["stderr", "ci_low", "ci_high"]].isna().all(axis=None) and found["value"].notna().all()
    alike = means({"two": values["two"]}, 50, 0).frame
    assert (alike["ci_low"][0], alike["ci_high"][0]) == (0.5, 0.5) and alike["ci_low"][1] < alike["ci_high"][1]


# ---- tests -----------------------------------------------------------------------------------------------------------


def signs_p(tasks: list[list[float]]) -> float:
    """The exact p-value by definition: all signs of all differences, in exact arithmetic."""
    shares = [Fraction(d) / len(task) / len(tasks) for task in tasks for d in task]
    observed = abs(sum(shares))
    flipped = [
        abs(sum(sign * share for sign, share in zip(signs, shares, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(shares))
    ]
    return sum(mean >= observed for mean in flipped) / len(flipped)


@given(st.lists(st.lists(quarters, min_size=1, max_size=4), min_size=1, max_size=3))
def test_exact_p_by_enumeration(tasks: list[list[float]]) -> None:
    differences = row(**{f"t{number}": values for number, values in enumerate(tasks)})
    assert sign_flip_p(differences, 9, 0) == pytest.approx([signs_p(tasks)], abs=1e-12)


def test_rounding_breaks_no_tie() -> None:
    differences = [0.1, 0.2, -0.3, 0.7, 0.1, -0.1]  # 0.1 + 0.2 is not 0.3 in floating point
    tenths = [round(10 * d) for d in differences]
    sums = [
        abs(sum(s * d for s, d in zip(signs, tenths, strict=True))) for signs in itertools.product((1, -1), repeat=6)
    ]
    assert sign_flip_p(row(t=differences), 64, 0) == [sum(value >= 7 for value in sums) / 64]


def test_enumeration_is_used_up_to_so_many_differences() -> None:
    for n in (1, 8, MAX_EXACT_SIGNS):  # of whose patterns two are as extreme, whatever the number of permutations
        assert sign_flip_p(row(t=[1.0] * n + [0.0] * 30), 50, 0) == [2 / 2**n]
    sampled = sign_flip_p(row(t=[1.0] * (MAX_EXACT_SIGNS + 1)), 50, 0)[0] * 51
    assert sampled == pytest.approx(round(sampled)) and 1 <= sampled <= 3  # (b + 1) / (B + 1)
    assert sign_flip_p(row(t=[1.0] * 200), 999, 0) == [1 / 1000]  # never zero


def test_sampled_p_by_definition() -> None:
    first = [1.0] * 6 + [-1.0, -1.0, 0.5, 0.5, 0.25, 1.0, -0.25, 0.25, 0.5, 0.25, -0.25]
    tasks, shares = {"a": np.array([first]), "b": np.array([[0.5, -0.5]])}, np.array([*first, 0, 0]) / 34
    shares[17:] = [0.125, -0.125]
    signs = []
    for task, n in (("a", 17), ("b", 2)):
        rng = np.random.default_rng(int.from_bytes(hashlib.sha256(f"0 {task} signs".encode()).digest()[:8]))
        sizes = [256] * 39 + [16]
        signs.append(np.concatenate([2.0 * rng.integers(2, size=(size, n), dtype=np.int8) - 1 for size in sizes]))
    means_of = np.concatenate(signs, axis=1) @ shares
    expected = (1 + (np.abs(means_of) >= shares.sum() - 1e-9).sum()) / 10_001
    assert sign_flip_p(tasks, 10_000, 0) == pytest.approx([expected])


def test_detectable_effect_by_definition() -> None:
    first, second = [0.0, 1.0, 1.0, 0.5], [0.25, 0.25, -1.0]
    deviations = [
        sum((d - sum(task) / len(task)) ** 2 for d in task) / (len(task) - 1) / len(task) for task in (first, second)
    ]
    quantiles = 1.959963985 + 0.841621234  # of the standard normal distribution, at 0.975 and 0.80
    expected = quantiles * math.sqrt(sum(deviations)) / 2
    assert minimal_detectable_effect(means(row(a=first, b=second), 5, 0).stderr) == pytest.approx([expected], rel=1e-8)
    for tasks in (row(a=[0.5] * 8), row(a=first, b=[0.5])):
        assert np.isnan(minimal_detectable_effect(means(tasks, 5, 0).stderr)).all()


# ---- Holm's correction against its definition as a closed test -------------------------------------------------------


def closed_bonferroni(p_values: list[float]) -> list[float]:
    """Adjusted p of a hypothesis: the largest Bonferroni p of any set of hypotheses that holds it."""
    indices = range(len(p_values))
    sets = [chosen for size in indices for chosen in itertools.combinations(indices, size + 1)]
    p_of = {chosen: min(1.0, len(chosen) * min(p_values[i] for i in chosen)) for chosen in sets}
    return [max(p for chosen, p in p_of.items() if i in chosen) for i in indices]


def test_holm_is_the_closed_test_of_bonferroni() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == [] and holm([0.3]) == [0.3]
    generator = random.Random(3)
    for size in range(1, 8):
        for _ in range(20):
            p_values = [generator.choice((generator.random(), generator.random() / 50, 0.02)) for _ in range(size)]
            assert holm(p_values) == pytest.approx(closed_bonferroni(p_values), abs=1e-12), p_values


# ---- skewed values ---------------------------------------------------------------------------------------------------


def covered(draws: np.ndarray, mean: float) -> float:
    """The share of samples [N, documents] whose interval holds the mean of their distribution."""
    low, high = np.array([skewed_interval([values]) for values in draws]).T
    assert ((low <= draws.mean(1)) & (draws.mean(1) <= high)).all() and (low > 0).all()
    return ((low <= mean) & (mean <= high)).mean()


@pytest.mark.parametrize("spread", [0.7, *(pytest.param(far, marks=pytest.mark.slow) for far in (0.5, 1.0))])
def test_the_interval_of_skewed_values_covers_their_mean(spread: float) -> None:
    """Of log-normal documents, whose mean is exp(spread^2 / 2), it misses at most 7 % (the 95 % are nominal)."""
    shares = [
        covered(np.exp(np.random.default_rng(size).normal(0, spread, (4000, size))), np.exp(spread**2 / 2))
        for size in (6, 8, 16)
    ]
    assert 0.93 <= min(shares) <= max(shares) <= 0.97
    printed = " | ".join(format(share, ".3f") for share in shares)
    assert f"| {spread} | {printed} |" in (ROOT / "docs" / "fidelity.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_document_far_from_the_others_is_missed_as_often_as_the_page_says() -> None:
    page = " ".join((ROOT / "docs" / "fidelity.md").read_text(encoding="utf-8").split())
    for factor in (3, 5, 10):
        shares = []
        for spread, size in itertools.product((0.5, 0.7), (6, 8, 16)):
            rng = np.random.default_rng(0)
            far = np.where(rng.random((4000, size)) < 1 / 8, factor, 1)
            mean = np.exp(spread**2 / 2) * (1 + (factor - 1) / 8)
            shares.append(covered(far * np.exp(rng.normal(0, spread, (4000, size))), mean))
        said = rf"{factor} times as far( as the others,)? {100 * min(shares):.0f} to {100 * max(shares):.0f} %"
        assert re.search(said, page), said


def test_zeros_and_extremes_keep_finite_intervals() -> None:
    assert skewed_interval([np.zeros(3)]) == (0, 0)
    for values in ([0.0, 1.0], [1e-9, 30.0], [1e-9, 1e-9, 2.0], [0.5, 0.5, 0.5]):
        low, high = skewed_interval([np.array(values)])
        assert 0 < low <= np.mean(values) <= high < np.inf
