"""Captured rows (Parquet) for figures, read with suspicion."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from pandas.api.types import is_numeric_dtype

from residual_mass.files import read_parquet
from residual_mass.study.specs import FigureSpec

TEXT = ["backbone", "corpus", "length"]
HEAD = ["layer", "head"]
LOG_MASSES = ("log_z_hat", "log_z_true", "log_z_hat_bf16")
"""-inf where nothing is left outside of the retrieved tokens."""


def only_file(spec: FigureSpec, data: Sequence[Path], what: str = "one diagnostics file") -> Path:
    """Raises ValueError unless `data` is one file."""
    if len(data) != 1:
        raise ValueError(f"figure {spec.label} shows {what}, {len(data)} were given; pass one to --data")
    return data[0]


def two_files(spec: FigureSpec, data: Sequence[Path], what: str) -> tuple[Path, Path]:
    """Raises ValueError unless `data` are two files."""
    if len(data) != 2:
        raise ValueError(f"figure {spec.label} shows {what}, {len(data)} were given; pass these two to --data")
    return data[0], data[1]


def rows_at_budget(path: Path, columns: Sequence[str], budget_percent: float | None) -> pd.DataFrame:
    """Reads `columns` of the rows of one budget from a diagnostics file.

    Raises:
        ValueError: as `read_diagnostics`; no budget is given, or the file has no row of it.
    """
    if budget_percent is None:
        raise ValueError(f"{path}: a figure of it shows one budget, but none is given; set spec.budget_percent")
    frame = read_diagnostics(path, [*dict.fromkeys([*columns, "budget_percent"])])
    rows = frame[frame["budget_percent"] == budget_percent]
    if rows.empty:
        budgets = ", ".join(f"{budget:g}" for budget in sorted(set(frame["budget_percent"])))
        raise ValueError(f"{path}: no rows at a budget of {budget_percent:g}%; spec.budget_percent can be {budgets}")
    return rows[[*columns]].reset_index(drop=True)


def read_diagnostics(path: Path, columns: Sequence[str], stage: str = "capture") -> pd.DataFrame:
    """Reads `columns` of a diagnostics file that `stage` makes.

    Raises:
        ValueError: the file is missing, damaged or empty, or a column is missing or holds a value that is not finite;
            logarithms of masses may be -inf.
    """
    frame = read_parquet(path, columns, stage)
    for name in columns:
        if not _sound(frame[name]).all():
            raise ValueError(
                f"{path}: {name} holds values that are not finite; delete it and run the {stage} stage again"
            )
    return frame


def _sound(column: pd.Series) -> pd.Series:
    """Which values are finite numbers or text."""
    if not is_numeric_dtype(column):
        return column.notna()
    finite = column.abs().lt(float("inf"))
    return finite | column.eq(-float("inf")) if column.name in LOG_MASSES else finite


def the_one(path: Path, frame: pd.DataFrame, column: str, stage: str = "capture") -> object:
    """The value of a column that is constant in a file that `stage` makes.

    Raises:
        ValueError: it is not.
    """
    values = frame[column].unique()
    if len(values) > 1:
        raise ValueError(f"{path}: {column} has {len(values)} values; delete it and run the {stage} stage again")
    return values[0]


def check_same(columns: Sequence[str], path: Path, frame: pd.DataFrame, other: Path, others: pd.DataFrame) -> None:
    """Raises ValueError when two files differ in what is constant in each."""
    for name in columns:
        value, expected = the_one(path, frame, name), the_one(other, others, name)
        if value != expected:
            raise ValueError(f"{path}: {name} is {value}, but {expected} in {other}; pass files of the same {name}")
