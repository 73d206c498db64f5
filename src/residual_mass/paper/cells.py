"""Cells of a score table: the point of a study that each shows, what is printed there, and which are set in bold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Point:
    """One evaluated method at one budget; `budget_percent` is None for full attention."""

    benchmark: str
    length: str
    backbone: str
    method: str
    budget_percent: float | None

    def __str__(self) -> str:
        budget = "" if self.budget_percent is None else f" at {self.budget_percent:g}%"
        return f"{self.benchmark} {self.backbone} {self.length} {self.method}{budget}"


@dataclass(frozen=True)
class Cell:
    """What is printed for one point."""

    text: str
    bold: bool = False


LEFT_OUT = Cell("--")
"""A point that the study does not evaluate."""


def format_score(value: float) -> str:
    """The three decimals that the paper prints."""
    return f"{value:.3f}"


def embolden(scores: Mapping[Point, str]) -> dict[Point, Cell]:
    """Sets the best partial-KV methods of each column in bold: by the printed digits, with ties, and without full."""
    best: dict[Point, float] = {}
    for point, text in scores.items():
        if point.method != "full":
            column = _column(point)
            best[column] = max(best.get(column, float(text)), float(text))
    return {point: Cell(text, float(text) == best.get(_column(point))) for point, text in scores.items()}


def _column(point: Point) -> Point:
    """What competing methods share. A full-attention point, which has no budget, shares it with none of them."""
    return replace(point, method="")
