"""Tables of scores: a layout filled in with results, or with the paper's own values."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from residual_mass.benchmarks.catalogue import Data
from residual_mass.paper import published
from residual_mass.paper.marked import Marked, marked
from residual_mass.paper.published import MAIN_MAPS, model_title
from residual_mass.paper.readers.results import Result, Score, load_results
from residual_mass.paper.table import (
    LEFT_OUT,
    Block,
    Cell,
    Entry,
    Gain,
    Grid,
    Place,
    Row,
    Table,
    best_printed,
)
from residual_mass.paper.table import format_score as printed
from residual_mass.paper.tables import captions, notes
from residual_mass.paper.tables.gains import corrected, fields_of, gain_of, mark_of
from residual_mass.paper.tables.layouts import PUBLISHED, Layout, Slice, evaluated, layout_of
from residual_mass.paper.titles import backbone_title
from residual_mass.study.specs import TableSpec

KINDS: tuple[str, ...] = typing.get_args(Data)
"""Where examples come from, in the order in which titles name it."""
FROM_ROW = (
    "value stderr ci_low ci_high n original_value gain gain_ci_low gain_ci_high gain_p gain_p_holm mde full_gap "
    "full_gap_p right_to_wrong wrong_to_right flags data cut_share decoding study model_id revision phi_sha "
    "prompts_sha weights"
).split()
COLUMNS = (*"table backbone benchmark task length method budget_percent maps text bold".split(), *FROM_ROW, "source")


@dataclass(frozen=True)
class Content:
    """A layout with a cell for each of its places; `scores` are those that the study evaluated."""

    layout: Layout
    cells: dict[Place, Cell]
    scores: dict[Place, Score]

    @property
    def texts(self) -> dict[Place, str]:
        """The printed values."""
        return {place: cell.text for place, cell in self.cells.items() if cell.text != LEFT_OUT}


def make(spec: TableSpec, results: list[Path]) -> Table:
    """Table `spec.label` from the result CSVs of its study, of which it may show only some.

    Raises:
        ValueError: a cell of the study is missing, or a file is of another study; names cell and file.
    """
    layout = layout_of(spec)
    shown = [place for place in layout.all_places() if evaluated(place, spec)]
    if not shown:
        raise ValueError(
            f"table {spec.label}: study {spec.study} evaluates none of its benchmarks; leave the table out"
        )
    loaded = _loaded(spec, shown, results)
    scores = {place: _result_of(place, loaded, results).score(place) for place in shown}
    content = Content(layout, _measured_cells(layout, scores), scores)
    used = list(loaded.values())
    models = {result.backbone: result.model_id for result in used}
    return _table(
        spec,
        content,
        header=captions.header(spec, used),
        notes=captions.notes(spec, used, content),
        backbones=[backbone_title(spec, name, models[name]) for name in layout.backbones],
    )


def make_published(label: str) -> Table:
    """The table with the paper's values; bold is decided here, as for results, and not taken from the paper."""
    facts = published.load(label)
    places = [fact.place for fact in facts]
    spec = TableSpec(
        study=PUBLISHED,
        label=label,
        backbones=tuple(dict.fromkeys(place.backbone for place in places)),
        lengths=tuple(dict.fromkeys(place.length for place in places)),
        budgets=tuple(dict.fromkeys(place.budget_percent for place in places if place.budget_percent is not None)),
        benchmarks=tuple(dict.fromkeys(place.benchmark for place in places)),
        maps=tuple(dict.fromkeys(place.maps for place in places if place.maps is not None)),
    )
    layout = layout_of(spec)
    texts = {fact.place: fact.text for fact in facts}
    bold = _bold(layout, texts, undecided=set())
    cells = {place: Cell(_with_maps(place), text, bold=place in bold) for place, text in texts.items()}
    content = Content(layout, cells, {})
    header = [captions.header_of_published(label)]
    notes = [captions.OF_THE_PAPER, *captions.tallies(content.texts)]
    return _table(spec, content, header, notes, [model_title(name) for name in layout.backbones])


def _with_maps(place: Place) -> Place:
    """Feature maps that the paper does not name are its main ones."""
    return replace(place, maps=MAIN_MAPS) if place.maps is None and place.method.startswith("topk_phi") else place


def best_of_columns(texts: Mapping[Place, str]) -> set[Place]:
    """The best partial-KV places of each column: by the printed digits, with ties, and without full attention."""
    columns: dict[Place, dict[Place, str]] = {}
    for place, text in texts.items():
        if place.method != "full":
            columns.setdefault(replace(place, method="", maps=None), {})[place] = text
    return {place for column, competing in columns.items() for place in best_printed(competing, column.metric)}


def _loaded(spec: TableSpec, shown: Iterable[Place], paths: list[Path]) -> dict[tuple[str, str, str], Result]:
    """The results that the table shows, in its order."""
    found: dict[tuple[str, str, str], Result] = {}
    for result in (result for path in paths for result in load_results(path)):
        if result.study != spec.study:
            raise ValueError(
                f"{result.path}: is of study {result.study!r}, table {spec.label} of {spec.study!r}; give its own"
            )
        if found.setdefault(captions.where(result), result) is not result:
            raise ValueError(f"{result.path}: has {' '.join(captions.where(result))}, as has another file; give one")
    return {where: found[where] for where in dict.fromkeys(map(captions.where, shown)) if where in found}


def _result_of(place: Place, loaded: Mapping[tuple[str, str, str], Result], paths: list[Path]) -> Result:
    if (where := captions.where(place)) not in loaded:
        given = ", ".join(path.name for path in paths)
        raise ValueError(f"no cell for {place}: {' '.join(where)} is in none of {given}; pass its file to --results")
    return loaded[where]


def _measured_cells(layout: Layout, scores: Mapping[Place, Score]) -> dict[Place, Cell]:
    tested = {place: score.gain_p for place, score in scores.items() if score.gain_p is not None}
    p_holm = corrected(tested)
    texts = {place: printed(score.value) for place, score in scores.items()}
    bold = _bold(layout, texts, _undecided(scores))
    return {
        place: _cell(place, scores[place], gain_of(scores[place].row, p_holm.get(place)), place in bold)
        if place in scores
        else Cell(place, LEFT_OUT)
        for place in layout.all_places()
    }


def _bold(layout: Layout, texts: Mapping[Place, str], undecided: set[Place]) -> set[Place]:
    """The best of the paper's rows in each column."""
    out = layout.own_places() | undecided
    return best_of_columns({place: text for place, text in texts.items() if place not in out}) if layout.bold else set()


def _undecided(scores: Mapping[Place, Score]) -> set[Place]:
    """Places that win nothing: those at the floor, and all where full attention itself is there."""
    at_floor = {place for place, score in scores.items() if "floor" in score.flags}
    full = {_task_of(place) for place in at_floor if place.method == "full"}
    return at_floor | {place for place in scores if _task_of(place) in full}


def _task_of(place: Place) -> tuple[str, str, str, str]:
    return place.backbone, place.benchmark, place.task, place.length


def _cell(place: Place, score: Score, gain: Gain | None, bold: bool) -> Cell:
    return Cell(
        place=replace(place, maps=score.maps),
        text=printed(score.value),
        value=score.value,
        interval=score.interval,
        n=score.examples,
        counted="examples",
        bold=bold,
        mark=mark_of(gain),
        gain=gain,
        flags=score.flags,
        data=score.data,
        decoding=score.row["decoding"],
        model_id=score.row["model_id"],
        weights=score.row["weights"],
        source=score.source.name,
        notes=tuple(notes.on_score(score, place.metric, gain)),
        row={name: score.row[name] for name in FROM_ROW if name in score.row} | fields_of(gain),
    )


def _table(
    spec: TableSpec, content: Content, header: Iterable[str], notes: Iterable[str], backbones: list[str]
) -> Table:
    layout = content.layout
    titled = len(layout.heads) > 1
    grid = Grid(
        heads=layout.heads,
        columns=tuple(marked(column.title) if titled else _title(column, content) for column in layout.columns),
        blocks=tuple(Block(_rows(block, content), _title(block, content)) for block in layout.blocks),
        groups=tuple(backbones),
    )
    lengths = ", ".join(dict.fromkeys(place.length for place in layout.all_places()))
    budget = "" if layout.budget_percent is None else f"{layout.budget_percent:g}%"
    return Table(
        label=spec.label,
        study=spec.study,
        grids=(grid,),
        columns=COLUMNS,
        header=tuple(header),
        notes=tuple(notes),
        facts={"budget": budget, "lengths": lengths},
    )


def _rows(block: Slice, content: Content) -> tuple[Row, ...]:
    layout, rows = content.layout, []
    first_own = next((row for row in layout.rows if row.own), None)
    for row in layout.rows:
        groups = [layout.places(block, row, backbone) for backbone in layout.backbones]
        span = len(layout.columns) // len(groups[0])
        cells = [content.cells[place] for group in groups for place in group]
        entries = (Entry(cell.text, (cell,), span) for cell in cells)
        rows.append(Row((row.title,), tuple(entries), rule=row is first_own))
    return tuple(rows)


def _title(part: Slice, content: Content) -> Marked:
    """A title that names data other than the benchmark's own, on a second line so that columns stay narrow."""
    found = {
        kind
        for place, score in content.scores.items()
        if all(getattr(place, name) == value for name, value in part.fixed.items())
        for kind in score.data
    }
    if not part.title or found <= {"original"}:
        return marked(part.title)
    return Marked(f"{marked(part.title)}\n({' + '.join(kind for kind in KINDS if kind in found)})")
