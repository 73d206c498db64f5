"""Cells of a score table: the point of a study that each shows, what is printed there, and which are set in bold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

ALL_TASKS = "all"
"""Task of the mean over a benchmark's tasks."""


@dataclass(frozen=True)
class Point:
    """One evaluated method at one budget.

    Attributes:
        budget_percent: None for full attention.
        task: its name in the harness, or `all` for the mean over tasks.
        maps: label of the feature maps; None for a method without, or for the only ones that a study's sweep has.
    """

    benchmark: str
    length: str
    backbone: str
    method: str
    budget_percent: float | None
    task: str = ALL_TASKS
    maps: str | None = None

    def __str__(self) -> str:
        task = "" if self.task == ALL_TASKS else f" {self.task}"
        budget = "" if self.budget_percent is None else f" at {self.budget_percent:g}%"
        maps = "" if self.maps is None else f" with maps {self.maps}"
        return f"{self.benchmark} {self.backbone} {self.length}{task} {self.method}{budget}{maps}"


@dataclass(frozen=True)
class Cell:
    """What is printed for one point; `gain` marks a change against top-k that is more than chance."""

    text: str
    bold: bool = False
    gain: Literal["", "above", "below"] = ""


LEFT_OUT = Cell("--")
"""A point that the study does not evaluate."""


def format_score(value: float) -> str:
    """The three decimals that the paper prints; what rounds to zero has no minus."""
    return f"{value:z.3f}"


def best_of_columns(scores: Mapping[Point, str]) -> set[Point]:
    """The best partial-KV points of each column: by the printed digits, with ties, and without full attention."""
    best: dict[Point, float] = {}
    for point, text in scores.items():
        if point.method != "full":
            column = _column(point)
            best[column] = max(best.get(column, float(text)), float(text))
    return {point for point, text in scores.items() if float(text) == best.get(_column(point))}


def _column(point: Point) -> Point:
    """What competing rows share. A full-attention point, which has no budget, shares it with none of them."""
    return replace(point, method="", maps=None)
