"""The table of residual estimators: errors of attention outputs and of the residual's mass, the distance of the next
token, and what a method keeps and costs. One grid per quantity, methods by budgets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from residual_mass.metrics import KL
from residual_mass.paper.marked import Marked, marked
from residual_mass.paper.readers.compared_files import Compared
from residual_mass.paper.readers.residuals_file import ResidualRow
from residual_mass.paper.table import Block, Cell, Entry, Grid, Place, Row, Table
from residual_mass.paper.tables import captions
from residual_mass.paper.tables.layouts import Slice
from residual_mass.paper.tables.residual_cells import (
    COSTS,
    ERROR,
    FROM_BOTH,
    LOG_Z,
    OF_ERRORS,
    backbones,
    cost_cell,
    distance_cell,
    error_cell,
    load,
    opening_notes,
)
from residual_mass.paper.tables.score_table import best_of_columns
from residual_mass.paper.titles import corpus_title, method_title
from residual_mass.study.labels import ORACLES
from residual_mass.study.labels import RESIDUAL_TABLE as LABEL
from residual_mass.study.specs import TableSpec

DISTANCE = KL.name
GRIDS = {
    ERROR: "Relative error of attention outputs",
    LOG_Z: Marked("Error of the residual's log mass, nats"),
    DISTANCE: Marked(marked("KL(Full || method) of the next token, nats")),
}
COST_TITLES = ("State, bytes", "of cache", "Steps", "Training")
COLUMNS = (
    *"table backbone corpus length method budget_percent maps quantity text bold value ci_low ci_high".split(),
    *OF_ERRORS,
    "source",
    *FROM_BOTH,
)


@dataclass(frozen=True)
class _Measured:
    """What a table shows of its files.

    Attributes:
        files: the errors, with the KL divergences of the same methods.
    """

    spec: TableSpec
    files: Compared

    @property
    def rows(self) -> dict[Place, ResidualRow]:
        return self.files.rows

    @cached_property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(place.method for place in self.rows))

    @property
    def backbones(self) -> list[Slice]:
        return backbones(self.spec, self.files)

    @property
    def groups(self) -> list[Slice]:
        """Of columns: backbones, each on every corpus."""
        corpora = dict.fromkeys(place.corpus for place in self.rows)
        return [
            Slice(Marked(f"{marked(each.title)}\n{marked(corpus_title(corpus))}"), each.fixed | {"corpus": corpus})
            for each in self.backbones
            for corpus in corpora
        ]

    def places(self, length: str, method: str, group: Slice) -> list[Place]:
        """A row within a group: one place per budget."""
        place = Place(length=length, method=method, **group.fixed)
        return [replace(place, budget_percent=budget) for budget in self.spec.budgets]

    @property
    def all_places(self) -> list[Place]:
        return [
            place
            for length in self.spec.lengths
            for method in self.methods
            for group in self.groups
            for place in self.places(length, method, group)
        ]


def make(spec: TableSpec, results: list[Path]) -> Table:
    """The table from the summaries of its backbones and lengths, with what fidelity CSVs and training logs among the
    results say of the same methods.

    Raises:
        ValueError: a cell is missing, or a file is of another study; names it.
    """
    files = load(spec, results, (DISTANCE,))
    measured = _Measured(spec, files)
    for place in (place for place in measured.all_places if place not in measured.rows):
        raise ValueError(f"no cell for {place} in the files of --results; rerun the residual-errors stage with it")
    shown = [quantity for quantity in GRIDS if quantity != DISTANCE or files.distances]
    cells = {quantity: _cells(measured, quantity) for quantity in shown}
    grids = [_grid(measured, GRIDS[quantity], cells[quantity]) for quantity in shown]
    return Table(
        label=LABEL,
        study=spec.study,
        grids=(*grids, _cost_grid(measured)),
        columns=COLUMNS,
        header=tuple(captions.header_of_files(spec, (*files.rows.values(), *files.distances.values()))),
        notes=tuple(_notes(measured, cells)),
    )


# ---- cells at budgets ------------------------------------------------------------------------------------------------


def _cells(measured: _Measured, quantity: str) -> dict[Place, Cell]:
    """The cells of a grid, by their places without the quantity."""
    made = {place: _cell(measured, place, quantity) for place in measured.all_places}
    if quantity == LOG_Z:
        return made
    competing = {cell.place: cell.text for cell in made.values() if cell.value is not None}
    competing = {place: text for place, text in competing.items() if place.method not in ORACLES}
    bold = best_of_columns(competing)
    return {place: replace(cell, bold=cell.place in bold) for place, cell in made.items()}


def _cell(measured: _Measured, place: Place, quantity: str) -> Cell:
    if quantity != DISTANCE:
        return error_cell(place, quantity, measured.rows[place])
    place = replace(place, quantity=quantity)
    return distance_cell(place, measured.files.distances.get(place))


def _grid(measured: _Measured, title: str, cells: Mapping[Place, Cell]) -> Grid:
    def row(length: str, method: str) -> Row:
        found = [cells[place] for group in measured.groups for place in measured.places(length, method, group)]
        return Row((method_title(method),), tuple(map(_entry, found)))

    return Grid(
        heads=("Length", "Method"),
        columns=tuple(f"{budget:g}%" for budget in measured.spec.budgets),
        blocks=tuple(
            Block(tuple(row(length, method) for method in measured.methods), length) for length in measured.spec.lengths
        ),
        groups=tuple(group.title for group in measured.groups),
        title=title,
    )


def _entry(cell: Cell) -> Entry:
    """A negative value has a minus, which is mathematics."""
    return Entry(Marked(f"${cell.text}$") if (cell.value or 0) < 0 else cell.text, (cell,))


# ---- costs -----------------------------------------------------------------------------------------------------------


def _cost_grid(measured: _Measured) -> Grid:
    """What a method keeps of a prompt per KV head and layer, and what its maps took; the same at every budget."""

    def row(length: str, method: str) -> Row:
        of_backbones = [_costs(measured, length, method, name) for name in measured.spec.backbones]
        return Row(
            (method_title(method),), tuple(Entry(cell.text, (cell,)) for cells in of_backbones for cell in cells)
        )

    return Grid(
        heads=("Length", "Method"),
        columns=COST_TITLES,
        blocks=tuple(
            Block(tuple(row(length, method) for method in measured.methods), length) for length in measured.spec.lengths
        ),
        groups=tuple(each.title for each in measured.backbones),
        title="State per KV head and layer, and training",
    )


def _costs(measured: _Measured, length: str, method: str, backbone: str) -> list[Cell]:
    found = next(
        row for place, row in measured.rows.items()
        if (place.length, place.method, place.backbone) == (length, method, backbone)
    )  # fmt: skip
    place = Place(backbone, length, method=method)
    return [cost_cell(place, quantity, found, measured.files.training(found)) for quantity in COSTS]


# ---- caption ---------------------------------------------------------------------------------------------------------


def _notes(measured: _Measured, cells: Mapping[str, Mapping[Place, Cell]]) -> Iterator[str]:
    rows = list(measured.rows.values())
    yield from opening_notes(measured.spec.study, rows)
    yield f"Behind an error: {'; '.join(_sizes(rows))}."
    widths = [cell.interval.high - cell.interval.low for cell in cells[ERROR].values() if cell.interval]
    if widths:
        yield f"Largest half-width of a 95% bootstrap interval over packs: {max(widths) / 2:.3f} of an error."
    if any(cell.value is None for cell in cells[LOG_Z].values()):
        yield "A method that adds nothing has no log mass, and a dash stands for what was not measured."


def _sizes(rows: Sequence[ResidualRow]) -> Iterator[str]:
    """Once per size, with the texts that have it."""
    holders: dict[str, dict[str, None]] = {}
    for row in rows:
        size = f"{row.row['rows']} attention rows of {row.row['heads']} heads in {row.row['packs']} packs"
        holders.setdefault(size, {})[f"{corpus_title(row.row['corpus'])} {row.row['length']}"] = None
    for size, texts in holders.items():
        yield f"{size} ({', '.join(texts)})"
