"""A study's own findings at the top of its page: distances from full attention, gains of completion over TopK, turned
answers, errors of attention outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from residual_mass.paper.readers.accounting_file import METHODS
from residual_mass.paper.report.verdicts import sweep_cells
from residual_mass.paper.table import Cell, Gain, Mark, Table, format_score
from residual_mass.paper.tables import accounting_table, fidelity_table
from residual_mass.paper.tables.tally import Tally, main_texts, tally, tally_by_family
from residual_mass.paper.titles import corpus_title, task_title


@dataclass(frozen=True)
class Bounded:
    """A printed number with its 95 % interval; `mark` says on which side of 0 it is by more than chance, and `better`
    whether that is the better side.
    """

    text: str
    low: str
    high: str
    mark: Mark = ""
    better: bool = False


@dataclass(frozen=True)
class Distance:
    """What completion changes of a metric of fidelity: a tally of printed values against TopK, and how many of the
    changes are more than chance, for the better and for the worse.
    """

    title: str
    tally: Tally
    better: int
    worse: int


@dataclass(frozen=True)
class GainRow:
    """Gains of a benchmark or task at a length, by budget; `undecided` if full attention itself is at the floor."""

    backbone: str
    task: str
    length: str
    undecided: bool
    gains: tuple[Bounded | None, ...]


@dataclass(frozen=True)
class Gains:
    """Gains of completion over TopK at the same budget, and tallies of printed values by family."""

    budgets: tuple[float, ...]
    rows: tuple[GainRow, ...]
    families: dict[str, Tally]

    @property
    def tested(self) -> int:
        return sum(gain is not None for row in self.rows for gain in row.gains)

    def marked(self, mark: str) -> int:
        return sum(gain.mark == mark for row in self.rows for gain in row.gains if gain)


@dataclass(frozen=True)
class Turned:
    """Answers that a method turns relative to full attention, at a budget."""

    budget: float
    right_to_wrong: str
    wrong_to_right: str


@dataclass(frozen=True)
class TurnedRow:
    """Turned answers of a benchmark at a length by method and budget, out of so many."""

    backbone: str
    task: str
    length: str
    answers: int
    methods: dict[str, list[Turned]]

    @property
    def budgets(self) -> list[str]:
        return [f"{turned.budget:g}" for turned in next(iter(self.methods.values()))]


@dataclass(frozen=True)
class ErrorRow:
    """Mean errors of attention outputs on a text by method, and completion's change of TopK's error in percent."""

    backbone: str
    corpus: str
    length: str
    k: str
    errors: tuple[Bounded, ...]
    change: str


def collect_gains(tables: Sequence[Table]) -> Gains:
    """Collects gains in the sweeps; a cell of two tables counts once."""
    cells = sweep_cells(tables)
    low = {_task(cell) for cell in cells if cell.place.method == "full" and "floor" in cell.flags}
    found: dict[tuple[str, str, str, str], dict[float, Bounded]] = {}
    for cell in cells:
        budget = cell.place.budget_percent
        if cell.place.method == "topk_phi" and cell.gain and budget is not None:
            found.setdefault(_task(cell), {}).setdefault(budget, _bounded(cell, cell.gain))
    budgets = sorted({budget for gains in found.values() for budget in gains})
    rows = tuple(
        GainRow(where[0], task_title(where[1], where[2]), where[3], where in low, tuple(map(gains.get, budgets)))
        for where, gains in found.items()
    )
    return Gains(tuple(budgets), rows, tally_by_family(main_texts(cells)) if rows else {})


def collect_distances(tables: Sequence[Table]) -> list[Distance]:
    """Collects what the tables of fidelity say of completion with the study's main maps, metric by metric."""
    shown = [(table, fidelity_table.KINDS[table.label]) for table in tables if table.label in fidelity_table.KINDS]
    found = []
    for table, kind in shown:
        main = next(cell.place.maps for cell in table.evaluated if cell.place.method == "topk_phi")
        for metric in kind.metrics:
            cells = [
                cell for cell in table.evaluated if cell.place.metric == metric and cell.place.maps in (None, main)
            ]
            marked = [cell.gain.value for cell in cells if cell.place.method == "topk_phi" and cell.gain and cell.mark]
            better = sum(metric.better(gain, 0) for gain in marked)
            if counted := tally(main_texts(cells)):
                found.append(Distance(f"{metric.title}, {kind.title}", counted, better, len(marked) - better))
    return found


def collect_turned(tables: Sequence[Table]) -> list[TurnedRow]:
    """Collects turned answers in the sweeps, of benchmarks with right and wrong answers."""
    rows: dict[tuple[str, str, str, str], TurnedRow] = {}
    cells = {cell.place: cell for cell in sweep_cells(tables) if cell.row.get("right_to_wrong")}
    for cell in sorted(cells.values(), key=lambda cell: cell.place.budget_percent or 0):
        where = backbone, benchmark, task, length = _task(cell)
        row = rows.setdefault(where, TurnedRow(backbone, task_title(benchmark, task), length, cell.n, {}))
        counts = (cell.row[name] for name in ("right_to_wrong", "wrong_to_right"))
        row.methods.setdefault(cell.place.method, []).append(Turned(cell.place.budget_percent or 0, *counts))
    return list(rows.values())


def collect_errors(tables: Sequence[Table]) -> list[ErrorRow]:
    """Collects the rows of the table of accounting errors."""
    cells = [cell for table in tables if table.label == accounting_table.LABEL for cell in table.evaluated]
    found: dict[tuple[str, str, str, str], dict[str, Cell]] = {}
    for cell in cells:
        where = cell.place.backbone, cell.place.corpus, cell.place.length, cell.fields["k"]
        found.setdefault(where, {})[cell.place.quantity] = cell
    return [_errors(where, quantities) for where, quantities in found.items()]


def _errors(where: tuple[str, str, str, str], quantities: Mapping[str, Cell]) -> ErrorRow:
    backbone, corpus, length, k = where
    topk, completed = (quantities[name].value or 0 for name in ("e_topk", "e_sub"))
    errors = tuple(_error(quantities[name]) for name in METHODS)
    change = f"{100 * (completed / topk - 1):+z.0f}".replace("-", "−") if topk else ""
    return ErrorRow(backbone, corpus_title(corpus), length, k, errors, change)


def _error(cell: Cell) -> Bounded:
    interval = cell.interval
    assert interval is not None, "every error of a method has an interval"
    return Bounded(cell.text, format_score(interval.low), format_score(interval.high))


def _bounded(cell: Cell, gain: Gain) -> Bounded:
    numbers = (f"{number:+z.3f}" for number in (gain.value, gain.interval.low, gain.interval.high))
    return Bounded(*numbers, cell.mark, cell.place.metric.better(gain.value, 0))


def _task(cell: Cell) -> tuple[str, str, str, str]:
    return cell.place.backbone, cell.place.benchmark, cell.place.task, cell.place.length
