"""What a table says cell by cell: the print of every point and the row of the result file behind it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from residual_mass.files import csv_text
from residual_mass.holm import holm
from residual_mass.paper.cells import LEFT_OUT, Cell, Point, best_of_columns, format_score
from residual_mass.paper.readers.results import KINDS, Score
from residual_mass.paper.tables.layouts import Layout, Slice

ALPHA = 0.05
"""Chance of any false mark in a table."""
FROM_ROW = (
    "value stderr ci_low ci_high n original_value gain gain_ci_low gain_ci_high gain_p gain_p_holm mde full_gap "
    "full_gap_p flags data cut_share decoding study model_id revision phi_sha prompts_sha weights"
).split()
COLUMNS = [
    *"table backbone benchmark task length method budget_percent maps text bold".split(), *FROM_ROW, "source",
]  # fmt: skip


@dataclass(frozen=True)
class Content:
    """Cells of a table in its order.

    Attributes:
        cells: every point of the layout.
        scores: the points that were evaluated here, each with the row of its file.
        adjusted: p-values of the gains over top-k, corrected for all those of the table.
    """

    layout: Layout
    cells: dict[Point, Cell]
    scores: dict[Point, Score]
    adjusted: dict[Point, float]

    @property
    def texts(self) -> dict[Point, str]:
        """The printed values."""
        return {point: cell.text for point, cell in self.cells.items() if cell is not LEFT_OUT}

    def kinds(self, part: Slice) -> tuple[str, ...]:
        """Where the examples of a block or column come from."""
        found = {
            kind
            for point, score in self.scores.items()
            if all(getattr(point, name) == value for name, value in part.fixed.items())
            for kind in score.data
        }
        return tuple(kind for kind in KINDS if kind in found)


def content_of_texts(layout: Layout, texts: Mapping[Point, str]) -> Content:
    """Content of values that are known in print alone."""
    return Content(layout, _cells(layout, texts, {}, set()), {}, {})


def content_of_scores(layout: Layout, scores: Mapping[Point, Score]) -> Content:
    compared = {point: score.gain_p for point, score in scores.items() if score.gain_p is not None}
    adjusted = dict(zip(compared, holm(list(compared.values())), strict=True))
    gains = {point: _gain(scores[point], p) for point, p in adjusted.items()}
    texts = {point: format_score(score.value) for point, score in scores.items()}
    return Content(layout, _cells(layout, texts, gains, _undecided(scores)), dict(scores), adjusted)


Gain = Literal["", "above", "below"]


def _gain(score: Score, adjusted_p: float) -> Gain:
    if adjusted_p >= ALPHA or not score.gain:
        return ""
    return "above" if score.gain > 0 else "below"


def _undecided(scores: Mapping[Point, Score]) -> set[Point]:
    """Points that win nothing: those at the floor, and all where full attention itself is there."""
    at_floor = {point for point, score in scores.items() if "floor" in score.flags}
    full = {_task_of(point) for point in at_floor if point.method == "full"}
    return at_floor | {point for point in scores if _task_of(point) in full}


def _task_of(point: Point) -> tuple[str, str, str, str]:
    return point.backbone, point.benchmark, point.task, point.length


def _cells(
    layout: Layout, texts: Mapping[Point, str], gains: Mapping[Point, Gain], undecided: set[Point]
) -> dict[Point, Cell]:
    """Bold are the best of the paper's rows in a column."""
    out = layout.own_points() | undecided
    best = best_of_columns({point: text for point, text in texts.items() if point not in out}) if layout.bold else set()
    return {
        point: Cell(texts[point], point in best, gains.get(point, "")) if point in texts else LEFT_OUT
        for point in layout.all_points()
    }


def cells_csv(table: str, content: Content) -> str:
    """One line per printed cell: what it shows, its uncertainty, and what it comes from."""
    return csv_text(COLUMNS, _lines(table, content))


def _lines(table: str, content: Content) -> Iterable[dict[str, str]]:
    for point, cell in content.cells.items():
        line = {
            "table": table,
            "backbone": point.backbone,
            "benchmark": point.benchmark,
            "task": point.task,
            "length": point.length,
            "method": point.method,
            "budget_percent": "" if point.budget_percent is None else f"{point.budget_percent:g}",
            "maps": point.maps or "",
            "text": cell.text,
            "bold": str(int(cell.bold)),
        }
        if score := content.scores.get(point):
            line |= {name: score.row[name] for name in ("maps", *FROM_ROW) if name in score.row}
            line["source"] = score.source.name
        if point in content.adjusted:
            line["gain_p_holm"] = f"{content.adjusted[point]:.6f}"
        yield line
