"""The tables of fidelity: how far every method is from full attention, token by token, on held-out text and on answers
to the prompts of benchmarks. One grid per metric, methods by budgets.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from residual_mass.benchmarks.columns import FOLLOWING, GOLD, GREEDY, OWN
from residual_mass.metrics import FIRST, KEPT, KL, LOG_PPL_RATIO, NLL, SAME_TOP, Metric
from residual_mass.paper.marked import Marked, marked
from residual_mass.paper.readers.fidelity_file import FidelityRow, load_fidelity
from residual_mass.paper.table import (
    ALL_TASKS,
    LEFT_OUT,
    Block,
    Cell,
    Entry,
    Gain,
    Grid,
    Place,
    Row,
    Table,
    format_value,
)
from residual_mass.paper.tables import captions
from residual_mass.paper.tables import notes as note
from residual_mass.paper.tables.gains import corrected, fields_of, gain_of, mark_of
from residual_mass.paper.tables.layouts import Slice
from residual_mass.paper.tables.score_table import best_of_columns
from residual_mass.paper.tables.tally import tally
from residual_mass.paper.titles import (
    TOPK,
    backbone_title,
    benchmark_title,
    corpus_title,
    method_title,
    trained_at_title,
)
from residual_mass.study.labels import FIDELITY_ANSWERS, FIDELITY_TABLE, METHODS
from residual_mass.study.specs import TableSpec

OF_FULL = (NLL, FIRST)
"""What full attention has a value of, too; the other metrics are distances from it."""
FROM_ROW = (
    "value stderr ci_low ci_high gain gain_ci_low gain_ci_high gain_p documents tokens k_mean study model_id revision "
    "phi_sha weights"
).split()
COLUMNS = (
    *"table backbone benchmark task corpus length method budget_percent maps quantity text bold".split(),
    *FROM_ROW,
    *"gain_p_holm source".split(),
)


@dataclass(frozen=True)
class Kind:
    """One of the tables.

    Attributes:
        title: in running text.
        metrics: each with the continuation that it is measured on.
        text: the field of a Place that names a text.
        counted: what a value is the mean over.
    """

    title: str
    metrics: Mapping[Metric, str]
    text: Literal["corpus", "benchmark"]
    counted: str


KINDS = {
    FIDELITY_TABLE: Kind(
        "held-out text", dict.fromkeys((KL, SAME_TOP, LOG_PPL_RATIO), FOLLOWING), "corpus", "documents"
    ),
    FIDELITY_ANSWERS: Kind("given answers", {NLL: GOLD, FIRST: GOLD, KEPT: GREEDY}, "benchmark", "examples"),
}


@dataclass(frozen=True)
class _Measured:
    """What a table shows of its files.

    Attributes:
        rows: by place, in which the study's main maps have no name.
    """

    spec: TableSpec
    kind: Kind
    rows: dict[Place, FidelityRow]

    @property
    def model_ids(self) -> dict[str, str]:
        """By backbone."""
        return {place.backbone: row.row["model_id"] for place, row in self.rows.items()}

    @property
    def blocks(self) -> list[Slice]:
        """Lengths, or benchmarks at their lengths."""
        if self.kind.text == "corpus":
            return [Slice(length, {"length": length}) for length in self.spec.lengths]
        return [
            Slice(f"{benchmark_title(name)} {length}", {"benchmark": name, "length": length, "task": ALL_TASKS})
            for name in self.spec.benchmarks
            for length in self.spec.lengths_of.get(name, self.spec.lengths)
        ]

    @property
    def groups(self) -> list[Slice]:
        """Of columns: backbones, each on every corpus."""
        titles = {name: backbone_title(self.spec, name, self.model_ids[name]) for name in self.spec.backbones}
        backbones = [Slice(title, {"backbone": name}) for name, title in titles.items()]
        corpora = [corpus for corpus in dict.fromkeys(place.corpus for place in self.rows) if corpus]
        return [
            Slice(Marked(f"{marked(each.title)}\n{marked(corpus_title(corpus))}"), each.fixed | {"corpus": corpus})
            for each in backbones
            for corpus in corpora
        ] or backbones

    def lines(self, metric: Metric) -> list[Slice]:
        """The rows of a block: the paper's methods, then what else was measured."""
        methods = [(method, None) for method in METHODS]
        arms = dict.fromkeys([*methods, *((place.method, place.maps) for place in self.rows)])
        return [
            Slice(trained_at_title(maps) if maps else method_title(method),
                  {"method": method, "maps": maps})
            for method, maps in arms
            if method != "full" or metric in OF_FULL
        ]  # fmt: skip

    def places(self, metric: Metric, block: Slice, line: Slice, group: Slice) -> list[Place]:
        """A row within a group: one place per budget; full attention has none."""
        place = Place(**block.fixed, **line.fixed, **group.fixed, quantity=metric.name)
        budgets = self.spec.budgets if place.method != "full" else (None,)
        return [replace(place, budget_percent=budget) for budget in budgets]

    def all_places(self, metric: Metric) -> list[Place]:
        each = itertools.product(self.blocks, self.lines(metric), self.groups)
        return [place for where in each for place in self.places(metric, *where)]

    def has(self, place: Place) -> bool:
        """Whether the study measures this cell: maps of other lengths and own methods may be of some backbones only."""
        if place.method in METHODS and place.maps is None:
            return True
        arm = place.backbone, place.method, place.maps
        return any((each.backbone, each.method, each.maps) == arm for each in self.rows)


def make(spec: TableSpec, results: list[Path]) -> Table:
    """Table `spec.label` from the fidelity CSVs of its backbones and lengths.

    Raises:
        ValueError: a cell of the study is missing, a file is of another study, or two files have one cell; names it.
    """
    kind = KINDS[spec.label]
    measured = _Measured(spec, kind, _rows(spec, kind, results))
    for name in (name for name in spec.backbones if name not in measured.model_ids):
        raise ValueError(f"table {spec.label}: no file shows backbone {name}; pass its files to --results")
    cells = {place: cell for metric in kind.metrics for place, cell in _cells(measured, metric).items()}
    return Table(
        label=spec.label,
        study=spec.study,
        grids=tuple(_grid(measured, metric, cells) for metric in kind.metrics),
        columns=COLUMNS,
        header=tuple(captions.header_of_files(measured.spec, measured.rows.values())),
        notes=tuple(_notes(measured, cells)),
    )


def _rows(spec: TableSpec, kind: Kind, results: Iterable[Path]) -> dict[Place, FidelityRow]:
    """The rows that the table may show."""
    continuations = {metric.name: continuation for metric, continuation in kind.metrics.items()}
    found: dict[Place, FidelityRow] = {}
    for row in (row for path in results for row in load_fidelity(path)):
        facts = row.row
        if facts["study"] != spec.study:
            raise ValueError(
                f"{row.path}: is of study {facts['study']!r}, table {spec.label} of {spec.study!r}; give its own"
            )
        wanted = OWN, ALL_TASKS, continuations.get(facts["metric"])
        if (facts["state"], facts["task"], facts["continuation"]) == wanted:
            place = _place(spec, kind, row)
            if found.setdefault(place, row) is not row:
                raise ValueError(f"{row.path}: has {place}, as has {found[place].path}; give one")
    return found


def _place(spec: TableSpec, kind: Kind, row: FidelityRow) -> Place:
    facts = row.row
    text = {"corpus": facts["text"]} if kind.text == "corpus" else {"benchmark": facts["text"], "task": ALL_TASKS}
    return Place(
        backbone=facts["backbone"],
        length=facts["length"],
        method=facts["method"],
        budget_percent=row.budget,
        maps=None if row.maps in spec.maps[:1] else row.maps,
        quantity=facts["metric"],
        **text,
    )


def _cells(measured: _Measured, metric: Metric) -> dict[Place, Cell]:
    """The cells of a grid, whose gains are corrected together."""
    shown = {place: measured.rows.get(place) for place in measured.all_places(metric)}
    for place in (place for place, row in shown.items() if row is None and measured.has(place)):
        raise ValueError(f"no cell for {place} in the files of --results; rerun the force and fidelity stages with it")
    rows = {place: row for place, row in shown.items() if row is not None}
    p_holm = corrected({place: float(row.row["gain_p"]) for place, row in rows.items() if row.row["gain_p"]})
    bold = best_of_columns({place: format_value(row.value, metric) for place, row in rows.items()})
    return {
        place: _cell(measured, place, row, gain_of(row.row, p_holm.get(place)), place in bold)
        if row
        else Cell(place, LEFT_OUT)
        for place, row in shown.items()
    }


def _cell(measured: _Measured, place: Place, row: FidelityRow, gain: Gain | None, bold: bool) -> Cell:
    facts = row.row
    return Cell(
        place=replace(place, maps=row.maps),
        text=format_value(row.value, place.metric),
        value=row.value,
        interval=row.interval,
        n=int(facts["documents"]),
        counted=measured.kind.counted,
        bold=bold,
        mark=mark_of(gain),
        gain=gain,
        model_id=facts["model_id"],
        weights=facts["weights"],
        source=row.path.name,
        notes=tuple(_notes_on(measured.kind, place.metric, row, gain)),
        row={name: facts[name] for name in FROM_ROW} | fields_of(gain),
    )


def _notes_on(kind: Kind, metric: Metric, row: FidelityRow, gain: Gain | None) -> Iterator[str]:
    facts = row.row
    if row.interval:
        yield note.within(row.interval, partial(format_value, metric=metric))
    yield f"{facts['documents']} {kind.counted}, {facts['tokens']} tokens"
    if gain:
        yield note.difference(gain, partial(format_value, metric=metric, sign="+"))
    if row.maps:
        yield note.feature_maps(row.maps, facts["phi_sha"])
    if row.budget is not None:
        yield f"mean k {facts['k_mean']}"
    yield from note.exactly(facts["value"], row.path.name)


def _grid(measured: _Measured, metric: Metric, cells: Mapping[Place, Cell]) -> Grid:
    def row(block: Slice, line: Slice) -> Row:
        found = [[cells[place] for place in measured.places(metric, block, line, group)] for group in measured.groups]
        spans = len(measured.spec.budgets) // len(found[0])
        return Row((line.title,), tuple(_entry(cell, spans) for group in found for cell in group))

    lines = measured.lines(metric)
    return Grid(
        heads=("Length" if measured.kind.text == "corpus" else "Prompts", "Method"),
        columns=tuple(f"{budget:g}%" for budget in measured.spec.budgets),
        blocks=tuple(Block(tuple(row(block, line) for line in lines), block.title) for block in measured.blocks),
        groups=tuple(group.title for group in measured.groups),
        title=", ".join(filter(None, (_title(metric), metric.unit))),
    )


def _title(metric: Metric) -> str:
    return metric.title[0].upper() + metric.title[1:]


def _entry(cell: Cell, span: int) -> Entry:
    """A negative value has a minus, which is mathematics."""
    negative = cell.value is not None and cell.text.startswith("-")
    return Entry(Marked(f"${cell.text}$") if negative else cell.text, (cell,), span)


def _notes(measured: _Measured, cells: Mapping[Place, Cell]) -> Iterator[str]:
    kind, spec, shown = measured.kind, measured.spec, [cell for cell in cells.values() if cell.value is not None]
    models = {cell.model_id: cell.weights for cell in shown}
    yield f"Study {spec.study}, backbone {', '.join(models)}, feature maps {spec.maps[0]}."
    yield from captions.random_weights(models.items())
    yield f"Behind a value: {'; '.join(_sizes(shown))}."
    for metric in kind.metrics:
        found = " ".join(_findings(metric, {place: cell for place, cell in cells.items() if place.metric == metric}))
        yield Marked(f"{marked(_title(metric))}: {found}")
    if alone := dict.fromkeys(_text(cell.place) for cell in shown if cell.interval is None):
        yield f"Without intervals and tests, for a text or a task has one document only: {', '.join(alone)}."
    if absent := dict.fromkeys(place.backbone for place, cell in cells.items() if cell.value is None):
        yield f"A dash stands for what the study does not measure with {', '.join(absent)}."


def _sizes(cells: Iterable[Cell]) -> Iterator[str]:
    """Once per size, with the texts that have it."""
    holders: dict[str, dict[str, None]] = {}
    for cell in cells:
        size = f"{cell.n} {cell.counted if cell.n > 1 else cell.counted.removesuffix('s')}"
        holders.setdefault(size, {})[_text(cell.place)] = None
    for size, texts in holders.items():
        yield f"{size} ({', '.join(texts)})"


def _text(place: Place) -> str:
    title = corpus_title(place.corpus) if place.corpus else benchmark_title(place.benchmark)
    return f"{title} {place.length}"


def _findings(metric: Metric, cells: Mapping[Place, Cell]) -> Iterator[Marked]:
    """How often completion is better than top-k, what the tests say, and how wide the intervals are."""
    if counted := tally({place: cell.text for place, cell in cells.items() if cell.value is not None}):
        yield captions.tallied(counted)
    if marks := [cell.mark for cell in cells.values() if cell.gain]:
        yield Marked(
            f"Of {len(marks)} paired comparisons with {TOPK} at the same budget, {captions.survivors(marks, 'these')}."
        )
    widths = [(cell.interval.high - cell.interval.low) / 2 for cell in cells.values() if cell.interval]
    if widths:
        over = next(cell.counted for cell in cells.values() if cell.interval)
        width = f"{format_value(max(widths), metric)} {metric.unit}".rstrip()
        yield Marked(f"Largest half-width of a 95% interval over {over}: {width}.")
