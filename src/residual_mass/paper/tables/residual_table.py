"""The table of residual estimators: errors of attention outputs and of the residual's mass, the distance of the next
token, and what a method keeps and costs. One grid per quantity, methods by budgets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from residual_mass.benchmarks.columns import FOLLOWING, OWN
from residual_mass.files import read_json
from residual_mass.metrics import KL, RELATIVE_ERROR
from residual_mass.paper.marked import Marked, marked
from residual_mass.paper.readers.fidelity_file import FidelityRow, load_fidelity
from residual_mass.paper.readers.residuals_file import ResidualRow, load_residuals
from residual_mass.paper.readers.training_log import read_log
from residual_mass.paper.table import (
    ALL_TASKS,
    LEFT_OUT,
    Block,
    Cell,
    Entry,
    Grid,
    Interval,
    Place,
    Row,
    Table,
    format_score,
    format_value,
)
from residual_mass.paper.tables import captions
from residual_mass.paper.tables import notes as note
from residual_mass.paper.tables.layouts import Slice
from residual_mass.paper.tables.score_table import best_of_columns
from residual_mass.paper.titles import METHOD_TITLES, backbone_title, corpus_title
from residual_mass.provenance import beside
from residual_mass.study.labels import RESIDUAL_TABLE as LABEL
from residual_mass.study.specs import TableSpec

ERROR, LOG_Z, DISTANCE = RELATIVE_ERROR.name, "log_z_error", KL.name
STATE, SHARE, STEPS, SECONDS = COSTS = ("state_bytes", "state_share", "training_steps", "training_seconds")
IN_FILE = {ERROR: "error", LOG_Z: LOG_Z}
"""Quantities at a budget, by their columns in the files of the stage."""
GRIDS = {
    ERROR: "Relative error of attention outputs",
    LOG_Z: Marked("Error of the residual's log mass, nats"),
    DISTANCE: Marked(marked("KL(Full || method) of the next token, nats")),
}
COST_TITLES = ("State, bytes", "of cache", "Steps", "Training")
ORACLES = ("topk_exact_mass",)
"""Methods that use scores of tokens that they do not read; they do not compete for bold type."""
COLUMNS = tuple(
    "table backbone corpus length method budget_percent maps quantity text bold value ci_low ci_high k over_topk "
    "over_topk_ci_low over_topk_ci_high heads_below_topk heads_below_phi packs heads rows source study model_id "
    "revision weights phi_sha".split()
)
FROM_ROW = (
    "k over_topk over_topk_ci_low over_topk_ci_high heads_below_topk heads_below_phi packs heads rows study model_id "
    "revision weights phi_sha"
).split()
FROM_BOTH = ("study", "model_id", "revision", "weights", "phi_sha")


@dataclass(frozen=True)
class _Training:
    """The log of a finished training."""

    path: Path
    seconds: float


@dataclass(frozen=True)
class _Measured:
    """What a table shows of its files.

    Attributes:
        rows: by backbone, corpus, length, method and budget.
        distances: of the next token, by the same places.
        trainings: by backbone and label of the maps.
    """

    spec: TableSpec
    rows: dict[Place, ResidualRow]
    distances: dict[Place, FidelityRow]
    trainings: dict[tuple[str, str], _Training]

    @cached_property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(place.method for place in self.rows))

    @property
    def backbones(self) -> list[Slice]:
        model_ids = {place.backbone: row.row["model_id"] for place, row in self.rows.items()}
        return [
            Slice(backbone_title(self.spec, name, model_ids[name]), {"backbone": name}) for name in self.spec.backbones
        ]

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
    measured = _measured(spec, results)
    for place in (place for place in measured.all_places if place not in measured.rows):
        raise ValueError(f"no cell for {place} in the files of --results; rerun the residual-errors stage with it")
    shown = [quantity for quantity in GRIDS if quantity != DISTANCE or measured.distances]
    cells = {quantity: _cells(measured, quantity) for quantity in shown}
    grids = [_grid(measured, GRIDS[quantity], cells[quantity]) for quantity in shown]
    return Table(
        label=LABEL,
        study=spec.study,
        grids=(*grids, _cost_grid(measured)),
        columns=COLUMNS,
        header=tuple(captions.header_of_files(measured.spec, (*measured.rows.values(), *measured.distances.values()))),
        notes=tuple(_notes(measured, cells)),
    )


# ---- files -----------------------------------------------------------------------------------------------------------


def _measured(spec: TableSpec, results: Iterable[Path]) -> _Measured:
    rows: dict[Place, ResidualRow] = {}
    distances: list[FidelityRow] = []
    trainings: dict[tuple[str, str], _Training] = {}
    for path in results:
        made = read_json(beside(path))
        if made["stage"] == "train":
            trainings[made["spec"]["backbone"]["name"], made["spec"]["length"]] = _training(path)
        elif made["stage"] == "fidelity":
            distances += filter(_is_shown, load_fidelity(path))
        else:
            rows |= {_place(row): row for row in load_residuals(path)}
    for row in (*rows.values(), *distances):
        if row.row["study"] != spec.study:
            study = row.row["study"]
            raise ValueError(f"{row.path}: is of study {study!r}, table {LABEL} of {spec.study!r}; give its own")
    for name in (name for name in spec.backbones if name not in {place.backbone for place in rows}):
        raise ValueError(f"table {LABEL}: no file shows backbone {name}; pass its files to --results")
    maps = {place: row.row["maps"] for place, row in rows.items()}
    of_rows = {place: row for row in distances if maps.get(place := _place_of_distance(row)) == (row.maps or "")}
    return _Measured(spec, rows, of_rows, trainings)


def _training(path: Path) -> _Training:
    clock = {int(row["step"]): float(row["seconds"]) for row in read_log(path)}
    return _Training(path, clock[max(clock)])


def _place(row: ResidualRow) -> Place:
    names = ("backbone", "corpus", "length", "method")
    return Place(**{name: row.row[name] for name in names}, budget_percent=row.budget)


def _is_shown(row: FidelityRow) -> bool:
    facts = row.row
    wanted = FOLLOWING, OWN, ALL_TASKS, DISTANCE
    return (facts["continuation"], facts["state"], facts["task"], facts["metric"]) == wanted


def _place_of_distance(row: FidelityRow) -> Place:
    facts = row.row
    return Place(facts["backbone"], facts["length"], corpus=facts["text"], method=facts["method"],
                 budget_percent=row.budget)  # fmt: skip


# ---- cells at budgets ------------------------------------------------------------------------------------------------


def _cells(measured: _Measured, quantity: str) -> dict[Place, Cell]:
    """The cells of a grid, by their places without the quantity."""
    made = {
        place: _distance(place, measured.distances.get(place)) if quantity == DISTANCE
        else _error(place, quantity, measured.rows[place])
        for place in measured.all_places
    }  # fmt: skip
    if quantity == LOG_Z:
        return made
    competing = {cell.place: cell.text for cell in made.values() if cell.value is not None}
    competing = {place: text for place, text in competing.items() if place.method not in ORACLES}
    bold = best_of_columns(competing)
    return {place: replace(cell, bold=cell.place in bold) for place, cell in made.items()}


def _error(place: Place, quantity: str, row: ResidualRow) -> Cell:
    facts, column = row.row, IN_FILE[quantity]
    value, interval = row.value(column), row.interval(column)
    text = format_value(value, RELATIVE_ERROR) if quantity == ERROR else format_score(value or 0)
    return Cell(
        place=replace(place, quantity=quantity, maps=facts["maps"] or None),
        text=LEFT_OUT if value is None else text,
        value=value,
        interval=interval,
        n=int(facts["packs"]),
        counted="packs",
        model_id=facts["model_id"],
        weights=facts["weights"],
        source=row.path.name,
        notes=tuple(_notes_on_error(row, quantity)),
        row={name: facts[name] for name in FROM_ROW} | _bounds(interval) | {"value": facts[column]},
    )


def _bounds(interval: Interval | None) -> dict[str, str]:
    return {} if interval is None else {"ci_low": f"{interval.low:.6g}", "ci_high": f"{interval.high:.6g}"}


def _notes_on_error(row: ResidualRow, quantity: str) -> Iterator[str]:
    facts = row.row
    if interval := row.interval(IN_FILE[quantity]):
        yield note.within(interval, lambda value: format_value(value, RELATIVE_ERROR))
    yield f"{facts['packs']} packs, {facts['rows']} attention rows"
    if quantity == ERROR and facts["heads_below_topk"]:
        yield f"{facts['over_topk']} of TopK's error, below it on {float(facts['heads_below_topk']):.1%} of heads"
    if facts["maps"]:
        yield note.feature_maps(facts["maps"], facts["phi_sha"])
    yield f"k {facts['k']}"
    yield from note.exactly(facts[IN_FILE[quantity]], row.path.name)


def _distance(place: Place, row: FidelityRow | None) -> Cell:
    place = replace(place, quantity=DISTANCE)
    if row is None:
        return Cell(place, LEFT_OUT)
    facts = row.row
    sizes = f"{facts['documents']} documents, {facts['tokens']} tokens"
    return Cell(
        place=replace(place, maps=row.maps),
        text=format_value(row.value, KL),
        value=row.value,
        interval=row.interval,
        n=int(facts["documents"]),
        counted="documents",
        model_id=facts["model_id"],
        weights=facts["weights"],
        source=row.path.name,
        notes=(sizes, *note.exactly(facts["value"], row.path.name)),
        row={name: facts[name] for name in FROM_BOTH} | _bounds(row.interval) | {"value": facts["value"]},
    )


def _grid(measured: _Measured, title: str, cells: Mapping[Place, Cell]) -> Grid:
    def row(length: str, method: str) -> Row:
        found = [cells[place] for group in measured.groups for place in measured.places(length, method, group)]
        return Row((_method_title(method),), tuple(map(_entry, found)))

    return Grid(
        heads=("Length", "Method"),
        columns=tuple(f"{budget:g}%" for budget in measured.spec.budgets),
        blocks=tuple(
            Block(tuple(row(length, method) for method in measured.methods), length) for length in measured.spec.lengths
        ),
        groups=tuple(group.title for group in measured.groups),
        title=title,
    )


def _method_title(method: str) -> Marked | str:
    return METHOD_TITLES.get(method, marked(method))


def _entry(cell: Cell) -> Entry:
    """A negative value has a minus, which is mathematics."""
    return Entry(Marked(f"${cell.text}$") if (cell.value or 0) < 0 else cell.text, (cell,))


# ---- costs -----------------------------------------------------------------------------------------------------------


def _cost_grid(measured: _Measured) -> Grid:
    """What a method keeps of a prompt per KV head and layer, and what its maps took; the same at every budget."""

    def row(length: str, method: str) -> Row:
        of_backbones = [_costs(measured, length, method, name) for name in measured.spec.backbones]
        return Row(
            (_method_title(method),), tuple(Entry(cell.text, (cell,)) for cells in of_backbones for cell in cells)
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
    facts = found.row
    training = measured.trainings.get((backbone, facts["maps"]))
    values = {name: found.value(name) for name in (STATE, SHARE, STEPS)}
    values |= {SECONDS: training.seconds if training else None}
    about = {column: facts[column] for column in FROM_BOTH}
    return [
        Cell(
            place=Place(backbone, length, method=method, maps=facts["maps"] or None, quantity=name),
            text=_cost_text(name, value) if value is not None else LEFT_OUT if facts["maps"] else "none",
            value=value,
            model_id=facts["model_id"],
            weights=facts["weights"],
            source=training.path.name if training and name == SECONDS else found.path.name,
            row=about | {"value": "" if value is None else f"{value:.6g}"},
        )
        for name, value in values.items()
    ]


def _cost_text(quantity: str, value: float) -> str:
    if quantity == SHARE:
        return f"{100 * value:.1f}%"
    if quantity == SECONDS:
        return f"{value:,.0f} s" if value < 7200 else f"{value / 3600:.1f} h"
    return f"{value:,.0f}"


# ---- caption ---------------------------------------------------------------------------------------------------------


def _notes(measured: _Measured, cells: Mapping[str, Mapping[Place, Cell]]) -> Iterator[str]:
    rows = list(measured.rows.values())
    models = {row.row["model_id"]: row.row["weights"] for row in rows}
    maps = dict.fromkeys(row.row["maps"] for row in rows if row.row["maps"])
    yield f"Study {measured.spec.study}, backbone {', '.join(models)}, feature maps {', '.join(maps) or 'none'}."
    yield from captions.random_weights(models.items())
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
