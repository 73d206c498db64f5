"""Logs of the train stage: read with suspicion, put into one, and reduced to the rows that figures show."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from residual_mass.files import csv_text, read_csv, write_text
from residual_mass.provenance import Record

COLUMNS = (
    "recipe variant seed step seconds corpus k layer e_topk e_sub e_nosub heads_below_topk kl log_z_error clamped_share"
).split()
LATER = ("clamped_share",)
"""Columns that logs of earlier versions lack; empty there."""
COUNTS = ("seed", "step", "k")
NUMBERS = ("seconds", "e_topk", "e_sub", "e_nosub", "kl")
RUN = ["recipe", "variant", "seed"]
"""What tells one training from another."""
ALL_LAYERS = "all"

Row = dict[str, str]


def join(files: Sequence[Path], out: Path) -> None:
    """Writes the rows of several training logs as one, in the order of the files.

    Raises:
        ValueError: a file is missing, cut or without rows, or repeats a training of another one; names it.
    """
    record = Record("join-training", {}, files)
    rows: list[Row] = []
    file_of: dict[tuple[str, ...], Path] = {}
    for path in files:
        more = read_log(path)
        for run in dict.fromkeys(map(_run, more)):
            if run in file_of:
                name = f"recipe {run[0]} ({run[1]}, seed {run[2]})"
                raise ValueError(f"{path}: {name} is in {file_of[run]} as well; give one of the two")
            file_of[run] = path
        rows += more
    write_text(out, csv_text(COLUMNS, rows))
    record.write(out)


def read_log(path: Path) -> list[Row]:
    """All rows of one log, as text.

    Raises:
        ValueError: the file is missing, cut, or without rows or a column; names it.
    """
    rows = read_csv(path, [name for name in COLUMNS if name not in LATER], _stage(path))
    if not rows:
        raise ValueError(f"{path}: has no rows; {_remedy(path)}")
    return [{name: row.get(name, "") for name in COLUMNS} for row in rows]


def shown_rows(path: Path) -> pd.DataFrame:
    """What figures show of one log: the means over all layers on the first held-out text, as numbers.

    Two columns are added: `length`, the label of the trained length, which the file's name holds, and `rank`: 0 at the
    largest K. Budgets of different lengths are compared by their rank, counted from the top because short sequences
    have several budgets in which nothing but the anchors fits, and their K is 0 alike.

    Raises:
        ValueError: the file is missing, damaged or misnamed, has no such rows, or a value that is not finite.
    """
    rows = read_log(path)
    text = rows[0]["corpus"]
    shown = [row for row in rows if row["layer"] == ALL_LAYERS and row["corpus"] == text]
    measured = {_run(row) for row in shown}
    for recipe, variant, seed in (run for run in map(_run, rows) if run not in measured):
        where = f"recipe {recipe} ({variant}, seed {seed})"
        raise ValueError(f"{path}: {where} has no rows of layer {ALL_LAYERS} on {text}; {_remedy(path)}")
    frame = pd.DataFrame({name: [row[name] for row in shown] for name in ("recipe", "variant", "corpus")})
    for name in COUNTS:
        frame[name] = [_number(path, name, row[name], whole=True) for row in shown]
    for name in NUMBERS:
        frame[name] = [_number(path, name, row[name]) for row in shown]
    ranks = {k: rank for rank, k in enumerate(sorted(set(frame["k"]), reverse=True))}
    # Budgets with the same K say the same twice.
    return frame.assign(length=trained_length(path), rank=frame["k"].map(ranks)).drop_duplicates([*RUN, "step", "k"])


def trained_length(path: Path) -> str:
    """`results/training_smol_2k.csv` is about maps that are trained at `2k`."""
    match = re.fullmatch(r"(?:training|recipes)_[^_]+_([1-9]\d*k?)\.csv", path.name)
    if match is None:
        raise ValueError(
            f"{path}: its name does not say the trained length; call it training_<backbone>_<length>.csv or "
            "recipes_<backbone>_<length>.csv"
        )
    return match[1]


def check_one_training(path: Path, rows: pd.DataFrame) -> None:
    """Raises ValueError when the rows are of several trainings."""
    for column in RUN:
        if (count := rows[column].nunique()) > 1:
            raise ValueError(f"{path}: {column} has {count} values, but a line shows one training; pass its own log")


def _run(row: Row) -> tuple[str, ...]:
    return tuple(row[name] for name in RUN)


def _number(path: Path, name: str, text: str, whole: bool = False) -> float:
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        kind = "a whole number" if whole else "a finite number"
        raise ValueError(f"{path}: {name} holds {text!r}, which is not {kind}; {_remedy(path)}")
    return value


def _stage(path: Path) -> str:
    return "join-training" if path.name.startswith("recipes_") else "train"


def _remedy(path: Path) -> str:
    return f"delete it and run the {_stage(path)} stage again"
