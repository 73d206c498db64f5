"""Captured rows (Parquet) for figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from residual_mass.files import read_parquet
from residual_mass.study.specs import FigureSpec

TEXT = ["backbone", "corpus", "length"]
HEAD = ["layer", "head"]


def only_file(spec: FigureSpec, data: Sequence[Path], what: str = "one diagnostics file") -> Path:
    """Raises ValueError unless `data` is one file."""
    (path,) = exactly(1, spec, data, what)
    return path


def exactly(count: int, spec: FigureSpec, data: Sequence[Path], what: str) -> Sequence[Path]:
    """Raises ValueError unless `data` are so many files."""
    if len(data) != count:
        raise ValueError(f"figure {spec.label} shows {what}, {len(data)} were given; give {count}")
    return data


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


def the_one(frame: pd.DataFrame, column: str) -> object:
    """The value of a column that is constant in a file."""
    return frame[column].iloc[0]


def check_same(columns: Sequence[str], path: Path, frame: pd.DataFrame, other: Path, others: pd.DataFrame) -> None:
    """Raises ValueError when two files differ in what is constant in each."""
    for name in columns:
        value, expected = the_one(frame, name), the_one(others, name)
        if value != expected:
            raise ValueError(f"{path}: {name} is {value}, but {expected} in {other}; pass files of the same {name}")
