"""Logs of the train stage, reduced to the rows that figures show."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from residual_mass.files import read_csv
from residual_mass.training.columns import RUN

ALL_LAYERS = "all"


def read_log(path: Path) -> list[dict[str, str]]:
    return read_csv(path, RUN, "train")


def shown_rows(path: Path, length: str) -> pd.DataFrame:
    """What figures show of one log: the means over all layers on the first held-out text.

    Two columns are added: the trained `length`, and `rank`: 0 at the largest K. Budgets of different lengths are
    compared by their rank, counted from the top because short sequences have several budgets in which nothing but the
    anchors fits, and their K is 0 alike.
    """
    frame = pd.read_csv(path, dtype={"recipe": str, "variant": str, "layer": str}, keep_default_na=False, na_values="")
    frame = frame[(frame["layer"] == ALL_LAYERS) & (frame["corpus"] == frame["corpus"].iloc[0])]
    ranks = {k: rank for rank, k in enumerate(sorted(set(frame["k"]), reverse=True))}
    # Budgets with the same K say the same twice.
    return frame.assign(length=length, rank=frame["k"].map(ranks)).drop_duplicates([*RUN, "step", "k"])


def check_one_training(path: Path, rows: pd.DataFrame) -> None:
    """Raises ValueError when the rows are of several trainings."""
    for column in RUN:
        if (count := rows[column].nunique()) > 1:
            raise ValueError(f"{path}: {column} has {count} values, but a line shows one training; pass its own log")
