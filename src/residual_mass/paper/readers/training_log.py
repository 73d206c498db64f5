"""Logs of the train stage: joined into one, and reduced to the rows that figures show."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from residual_mass.files import csv_text, read_csv, write_text
from residual_mass.provenance import Record
from residual_mass.training.columns import RUN

ALL_LAYERS = "all"


def join(files: Sequence[Path], out: Path) -> None:
    """Writes the rows of several training logs as one, in the order of the files.

    Raises:
        ValueError: a file is not what was recorded, or repeats a training of another one; names it.
    """
    record = Record("join-training", {}, files)
    rows: list[dict[str, str]] = []
    owners: dict[tuple[str, ...], Path] = {}
    for path in files:
        more = read_log(path)
        for run in dict.fromkeys(tuple(row[name] for name in RUN) for row in more):
            if run in owners:
                name = f"recipe {run[0]} ({run[1]}, seed {run[2]})"
                raise ValueError(f"{path}: {name} is in {owners[run]} as well; give one of the two")
            owners[run] = path
        rows += more
    columns = list(dict.fromkeys(name for row in rows for name in row))  # logs of earlier versions have fewer
    write_text(out, csv_text(columns, rows))
    record.write(out)


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
