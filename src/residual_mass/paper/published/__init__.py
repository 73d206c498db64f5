"""The paper's own values, one CSV per table: what it printed in each cell and whether that was bold."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from residual_mass.paper.cells import Point

MODELS = {"1b": "meta-llama/Llama-3.2-1B-Instruct", "3b": "meta-llama/Llama-3.2-3B-Instruct"}
"""The paper's backbones by their name in the CSVs."""
BENCHMARK_OF = {"ruler_sweep": "ruler", "babilong_sweep": "babilong"}
"""Benchmark of the tables that show a single one and so have no column for it."""


@dataclass(frozen=True)
class Fact:
    """One published cell."""

    point: Point
    text: str
    bold: bool


def load(label: str) -> list[Fact]:
    """All cells of the paper's table `label`, in its order.

    Raises:
        ValueError: no published values are stored for that table.
    """
    path = Path(__file__).with_name(f"{label}.csv")
    if not path.is_file():
        known = ", ".join(sorted(csv_path.stem for csv_path in path.parent.glob("*.csv")))
        raise ValueError(f"no published values for table {label!r}; stored are {known}")
    with open(path, encoding="utf-8", newline="") as stream:
        return [_fact(row, label) for row in csv.DictReader(stream)]


def _fact(row: dict[str, str], label: str) -> Fact:
    full = row["method"] == "full"  # the 1 % table repeats its budget on the rows of full attention
    point = Point(
        benchmark=row["benchmark"] if "benchmark" in row else BENCHMARK_OF[label],
        length=row["length"],
        backbone=row["backbone"],
        method=row["method"],
        budget_percent=None if full else float(row["budget_percent"]),
    )
    return Fact(point, row["value"], row["bold"] == "1")
