"""Computations that figures share: rows of one budget, means over heads, equal parts, quartiles and ranges."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from pandas.api.typing import SeriesGroupBy

from residual_mass.files import read_parquet

HEAD = ["layer", "head"]
BUDGET = ["k", "budget_percent"]
FAR_OUT = 3
"""Values this many interquartile ranges outside of the quartiles do not widen an axis (Tukey's outer fences)."""


def rows_at_budget(path: Path, columns: Sequence[str], budget_percent: float | None) -> pd.DataFrame:
    """These columns of the captured rows of one budget. Raises ValueError as `read_parquet`."""
    rows = read_parquet(path, dict.fromkeys([*columns, "budget_percent"]), "capture")
    return rows.loc[rows["budget_percent"] == budget_percent, [*columns]].reset_index(drop=True)


def head_means(frame: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Averages all other columns in float64 for each combination of `by`, in ascending order."""
    values = [name for name in frame if name not in by]
    return frame.astype(dict.fromkeys(values, float)).groupby([*by], as_index=False, observed=True)[values].mean()


def equal_parts(values: pd.Series, parts: int) -> pd.Series:
    """Splits values in ascending order into parts whose sizes differ by at most one; returns the part of each value, 0
    to `parts` - 1. Of equal values the first goes to the lower part.
    """
    return (values.round(12).rank(method="first").astype(int) - 1) * parts // len(values)


def quartiles(groups: SeriesGroupBy) -> pd.DataFrame:
    """Returns columns `low`, `y` and `high`: lower quartile, median and upper quartile of every group."""
    return pd.DataFrame({name: groups.quantile(share) for name, share in (("low", 0.25), ("y", 0.5), ("high", 0.75))})


def bulk(values: np.ndarray) -> tuple[float, float]:
    """Returns the range of the values (at least one) without those far out."""
    lower, upper = np.quantile(values, (0.25, 0.75))
    reach = FAR_OUT * (upper - lower)
    return float(max(values.min(), lower - reach)), float(min(values.max(), upper + reach))
