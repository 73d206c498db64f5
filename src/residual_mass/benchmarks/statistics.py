"""Means over examples and over tasks, with standard errors and bootstrap intervals."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEVEL = 0.95
CHUNK = 256
"""Resamples drawn at a time, to bound memory; part of no result."""


@dataclass(frozen=True)
class Estimate:
    """A mean score.

    Attributes:
        stderr: its sample standard error; None where one example makes it undefined.
        draws: the mean in each bootstrap resample.
    """

    value: float
    stderr: float | None
    draws: np.ndarray

    @property
    def interval(self) -> tuple[float, float]:
        """Percentile bootstrap interval."""
        low, high = np.quantile(self.draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return float(low), float(high)


def estimate_task(scores: Sequence[float], resamples: int, seed: int, task: str) -> Estimate:
    """Mean over examples; resamples depend on seed, task and number of examples alone, so arms are resampled alike."""
    values = np.asarray(scores, dtype=np.float64)
    n = len(values)
    digest = hashlib.sha256(f"{seed} {task}".encode()).digest()
    rng = np.random.default_rng(int.from_bytes(digest[:8]))
    sizes = [min(CHUNK, resamples - start) for start in range(0, resamples, CHUNK)]
    draws = np.concatenate([values[rng.integers(n, size=(size, n))].mean(axis=1) for size in sizes])
    stderr = float(values.std(ddof=1) / np.sqrt(n)) if n > 1 else None
    return Estimate(float(values.mean()), stderr, draws)


def estimate_over_tasks(tasks: Sequence[Estimate]) -> Estimate:
    """Unweighted mean over tasks, each task resampled within itself."""
    errors = [task.stderr for task in tasks if task.stderr is not None]
    stderr = float(np.sqrt(np.square(errors).sum()) / len(tasks)) if len(errors) == len(tasks) else None
    draws = np.mean([task.draws for task in tasks], axis=0)
    return Estimate(float(np.mean([task.value for task in tasks])), stderr, draws)
