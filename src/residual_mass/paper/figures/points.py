"""How figures read captured rows: rows of one budget, means over heads, equal parts and ranges."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from residual_mass.files import read_parquet

HEAD = ["layer", "head"]
BUDGET = ["k", "budget_percent"]
FAR_OUT = 3
"""Values this many interquartile ranges outside of the quartiles do not widen an axis (Tukey's outer fences)."""


def captured(path: Path, columns: list[str], budget_percent: float | None = None) -> pd.DataFrame:
    """These columns of the captured rows of one budget, or of all. Raises ValueError as `read_parquet`."""
    if budget_percent is None:
        return read_parquet(path, columns, "capture")
    rows = read_parquet(path, dict.fromkeys([*columns, "budget_percent"]), "capture")
    return rows.loc[rows["budget_percent"] == budget_percent, columns]


def head_means(path: Path, by: list[str], values: list[str], budget_percent: float | None = None) -> pd.DataFrame:
    """Averages captured values in float64 for each combination of `by`, in ascending order."""
    rows = captured(path, [*by, *values], budget_percent).astype(dict.fromkeys(values, float))
    return rows.groupby(by, as_index=False, observed=True).mean()


def equal_parts(values: pd.Series, parts: int) -> pd.Series:
    """Splits values in ascending order into parts whose sizes differ by at most one; returns the part of each value, 0
    to `parts` - 1. Of equal values the first goes to the lower part.
    """
    return (values.round(12).rank(method="first").astype(int) - 1) * parts // len(values)


def bulk(values: pd.Series) -> tuple[float, float]:
    """Returns the range of the values without those far out."""
    lower, upper = np.quantile(values, (0.25, 0.75))
    reach = FAR_OUT * (upper - lower)
    return float(max(values.min(), lower - reach)), float(min(values.max(), upper + reach))
