"""Captured rows (Parquet) for figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from residual_mass.files import read_parquet

TEXT = ["backbone", "corpus", "length"]
HEAD = ["layer", "head"]


def rows_at_budget(path: Path, columns: Sequence[str], budget_percent: float | None) -> pd.DataFrame:
    """Reads `columns` of the rows of one budget from a diagnostics file.

    Raises:
        ValueError: as `read_parquet`; no budget is given, or the file has no row of it.
    """
    if budget_percent is None:
        raise ValueError(f"{path}: a figure of it shows one budget, but none is given; set spec.budget_percent")
    frame = read_parquet(path, [*dict.fromkeys([*columns, "budget_percent"])], "capture")
    rows = frame[frame["budget_percent"] == budget_percent]
    if rows.empty:
        budgets = ", ".join(f"{budget:g}" for budget in sorted(set(frame["budget_percent"])))
        raise ValueError(f"{path}: no rows at a budget of {budget_percent:g}%; spec.budget_percent can be {budgets}")
    return rows[[*columns]].reset_index(drop=True)
