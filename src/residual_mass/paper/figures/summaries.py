"""What several figures compute of captured rows: means over heads, equal parts, medians, quartiles and ranges."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from pandas.api.typing import SeriesGroupBy

FAR_OUT = 3
"""Values that lie so many interquartile ranges outside of the quartiles do not widen an axis (Tukey's outer fences)."""


def head_means(frame: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """One row per combination of `by`, in ascending order: `by` and the means of all other columns, in float64."""
    values = [name for name in frame if name not in by]
    return frame.astype(dict.fromkeys(values, float)).groupby([*by], as_index=False, observed=True)[values].mean()


def equal_parts(values: pd.Series, parts: int) -> pd.Series:
    """The part of every value, 0 to `parts` - 1, when they are split in ascending order into parts whose sizes differ
    by one at most; of equal values the first goes to the lower part.
    """
    return (values.round(12).rank(method="first").astype(int) - 1) * parts // len(values)


def binned_medians(frame: pd.DataFrame, x: str, values: Sequence[str], width: float) -> pd.DataFrame:
    """Columns `bin_{name}` for `x` and every one of `values`: medians over the rows of the same bin of `x`."""
    return frame[[x, *values]].groupby(frame[x] // width).transform("median").add_prefix("bin_")


def quartiles(groups: SeriesGroupBy) -> pd.DataFrame:
    """Columns `low`, `y` and `high`: lower quartile, median and upper quartile of every group."""
    return pd.DataFrame({name: groups.quantile(share) for name, share in (("low", 0.25), ("y", 0.5), ("high", 0.75))})


def bulk(values: np.ndarray) -> tuple[float, float]:
    """The range of the values, without those far out. There must be some."""
    lower, upper = np.quantile(values, (0.25, 0.75))
    reach = FAR_OUT * (upper - lower)
    return float(max(values.min(), lower - reach)), float(min(values.max(), upper + reach))
