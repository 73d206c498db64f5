"""One arm or one pair of arms at a time, where the package takes all at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from residual_mass.benchmarks.statistics import Comparison, MeanScore, compare_arms, estimate_arms


def estimate_task(scores: ArrayLike, resamples: int, seed: int, task: str) -> MeanScore:
    return estimate_arms(np.asarray([scores], dtype=np.float64), resamples, seed, task)[0]


def compare_task(first: ArrayLike, second: ArrayLike, resamples: int, seed: int, task: str) -> Comparison:
    """`first` minus `second`, scores of two arms on the same examples."""
    difference = np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64)
    return compare_arms(difference[None], resamples, seed, task)[0]
