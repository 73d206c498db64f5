"""The table of methods that no other one beats in bytes and in distance: the Pareto front of what a decode step reads
and of the next token's KL divergence, beside exact top-K at the same budgets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from residual_mass.metrics import KL, SAME_TOP
from residual_mass.paper.front import on_front
from residual_mass.paper.marked import Marked, marked
from residual_mass.paper.readers.compared_files import Compared, place_of_errors
from residual_mass.paper.readers.residuals_file import ResidualRow
from residual_mass.paper.table import Block, Cell, Entry, Grid, Place, Row, Table
from residual_mass.paper.tables import captions
from residual_mass.paper.tables.layouts import Slice
from residual_mass.paper.tables.residual_cells import (
    ERROR,
    FROM_BOTH,
    SECONDS,
    STEPS,
    backbones,
    cost_cell,
    distance_cell,
    error_cell,
    load,
    opening_notes,
)
from residual_mass.paper.titles import corpus_title, method_title
from residual_mass.study.labels import DEPLOYABLE_TABLE as LABEL
from residual_mass.study.labels import ORACLES, TOPK
from residual_mass.study.specs import TableSpec

DISTANCE, TOP = KL.name, SAME_TOP.name
READ, SUMMARY = "step_share", "summary_bytes"
REFERENCE = Marked(r"$^{\circ}$")
"""Marks the title of a row that is beside the front."""
TITLES = (
    "Budget",
    "Read",
    Marked("KL,\nnats"),
    Marked("Top\ntoken"),
    "Error",
    Marked("State,\nbytes"),
    Marked("Training,\nsteps (time)"),
)
OF_STEP = ("k", "recall", "tokens_read", "scan_bytes", "row_bytes", SUMMARY, "packs")
COLUMNS = (
    *"table backbone corpus length method budget_percent maps quantity text bold value ci_low ci_high front".split(),
    *OF_STEP,
    "source",
    *FROM_BOTH,
)


@dataclass(frozen=True)
class _Line:
    """A method at a budget."""

    place: Place
    row: ResidualRow
    on_front: bool

    @property
    def share(self) -> float:
        """Of full attention's bytes."""
        return float(self.row.row[READ])


def make(spec: TableSpec, results: list[Path]) -> Table:
    """The table from residual-errors and fidelity CSVs, with training logs where there are any. A text or length that
    only one of the two kinds has is left out.

    Raises:
        ValueError: a file is of another study, or a backbone has nothing in both kinds of files; names it.
    """
    files = load(spec, results, (DISTANCE, TOP))
    blocks = {
        (backbone.fixed["backbone"], length, corpus): lines
        for backbone in backbones(spec, files)
        for length in spec.lengths
        for corpus in dict.fromkeys(place.corpus for place in files.rows)
        if (lines := _lines(files, backbone.fixed["backbone"], length, corpus))
    }
    for name in (name for name in spec.backbones if name not in {backbone for backbone, *_ in blocks}):
        raise ValueError(
            f"table {LABEL}: no method of backbone {name} has both errors and distances of the next token; run the "
            "fidelity stage with its texts and lengths"
        )
    shown = [line for lines in blocks.values() for line in lines]
    distances = [files.distances[replace(line.place, quantity=DISTANCE)] for line in shown]
    return Table(
        label=LABEL,
        study=spec.study,
        grids=tuple(_grids(files, backbones(spec, files), blocks)),
        columns=COLUMNS,
        header=tuple(captions.header_of_files(spec, (*(line.row for line in shown), *distances))),
        notes=tuple(_notes(spec, files, shown)),
    )


# ---- rows ------------------------------------------------------------------------------------------------------------


def _lines(files: Compared, backbone: str, length: str, corpus: str) -> list[_Line]:
    """The front by its bytes, then exact top-K at the front's budgets where it is not on it."""
    distances = {
        place_of_errors(place): row.value
        for place, row in files.distances.items()
        if (place.backbone, place.length, place.corpus, place.quantity) == (backbone, length, corpus, DISTANCE)
    }
    competing = [_Line(place, files.rows[place], True) for place in distances if place.method not in ORACLES]
    kept = on_front([(line.share, distances[line.place]) for line in competing])
    front = sorted((line for line, on in zip(competing, kept, strict=True) if on), key=lambda line: line.share)
    budgets = sorted({line.place.budget_percent or 0 for line in front})
    references = [Place(backbone, length, corpus=corpus, method=TOPK, budget_percent=budget) for budget in budgets]
    shown = {line.place for line in front}
    beside = [place for place in references if place in distances and place not in shown]
    return [*front, *(_Line(place, files.rows[place], False) for place in beside)]


def _grids(files: Compared, shown: Sequence[Slice], blocks: dict[tuple[str, str, str], list[_Line]]) -> Iterator[Grid]:
    """A grid per backbone and length, in blocks by corpus."""
    titles = {each.fixed["backbone"]: each.title for each in shown}
    for backbone, length in dict.fromkeys((backbone, length) for backbone, length, _ in blocks):
        yield Grid(
            heads=("Text", "Method"),
            columns=TITLES,
            blocks=tuple(
                Block(tuple(_rows(files, lines)), corpus_title(corpus))
                for (*where, corpus), lines in blocks.items()
                if where == [backbone, length]
            ),
            groups=(Marked(f"{marked(titles[backbone])}, {length}"),),
        )


def _rows(files: Compared, lines: Sequence[_Line]) -> Iterator[Row]:
    for number, line in enumerate(lines):
        title = method_title(line.place.method)
        follows_front = number > 0 and lines[number - 1].on_front and not line.on_front
        head = title if line.on_front else Marked(f"{title}{REFERENCE}")
        yield Row((head,), tuple(_entries(files, line)), rule=follows_front)


# ---- cells -----------------------------------------------------------------------------------------------------------


def _entries(files: Compared, line: _Line) -> Iterator[Entry]:
    place, row = line.place, line.row
    distances = (replace(place, quantity=quantity) for quantity in (DISTANCE, TOP))
    cells = [
        _step_cell(place, READ, row, f"{100 * line.share:.1f}%"),
        *(distance_cell(each, files.distances.get(each)) for each in distances),
        error_cell(place, ERROR, row),
        _step_cell(place, SUMMARY, row, f"{float(row.row[SUMMARY]):,.0f}"),
    ]
    training = [cost_cell(place, quantity, row, files.training(row)) for quantity in (STEPS, SECONDS)]
    yield Entry(f"{place.budget_percent:g}%")
    yield from (Entry(cell.text, (_with_facts(cell, line),)) for cell in cells)
    yield Entry(_trained(*training), tuple(_with_facts(cell, line) for cell in training))


def _step_cell(place: Place, quantity: str, row: ResidualRow, text: str) -> Cell:
    """What a step reads."""
    facts = row.row
    return Cell(
        place=replace(place, quantity=quantity, maps=row.maps),
        text=text,
        value=float(facts[quantity]),
        model_id=facts["model_id"],
        weights=facts["weights"],
        source=row.path.name,
        notes=(
            f"{facts['tokens_read']} tokens of a KV head; {facts['scan_bytes']} bytes to select, {facts['row_bytes']} "
            f"of exact rows, {facts[SUMMARY]} of the summary",
        ),
        row={name: facts[name] for name in FROM_BOTH} | {"value": facts[quantity]},
    )


def _with_facts(cell: Cell, line: _Line) -> Cell:
    """With what else its line of the CSV says of the step."""
    facts = {name: line.row.row[name] for name in OF_STEP} | {"front": str(int(line.on_front))}
    return replace(cell, row=cell.row | facts)


def _trained(steps: Cell, seconds: Cell) -> str:
    return steps.text if seconds.value is None else f"{steps.text} ({seconds.text})"


# ---- caption ---------------------------------------------------------------------------------------------------------


def _notes(spec: TableSpec, files: Compared, shown: Sequence[_Line]) -> Iterator[str]:
    yield from opening_notes(spec.study, (line.row for line in shown))
    compared = {(place.method, place.budget_percent) for place in files.distances if place.method not in ORACLES}
    yield f"Compared are {len({method for method, _ in compared})} methods, {len(compared)} with their budgets."
    sizes: dict[str, None] = {}
    for line in shown:
        distance = files.distances[replace(line.place, quantity=DISTANCE)].row
        text = f"{corpus_title(line.place.corpus)} {line.place.length}"
        sizes[f"{text}: {distance['documents']} documents and {line.row.row['packs']} packs"] = None
    yield f"Behind a distance and an error: {'; '.join(sizes)}."
