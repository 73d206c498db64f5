"""Score tables: the points a table shows, laid out as blocks of methods by groups of columns, and the LaTeX of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from residual_mass.files import write_text
from residual_mass.paper import published
from residual_mass.paper.captions import Caption, caption_of_published, caption_of_results, title_of
from residual_mass.paper.cells import LEFT_OUT, Cell, Point, embolden, format_score
from residual_mass.paper.latex import Latex, render
from residual_mass.paper.results import Result, load_result
from residual_mass.specs import METHODS, TableSpec

METHOD_TITLES = {
    "full": Latex("Full"),
    "topk": Latex("Top-$K$"),
    "topk_phi": Latex(r"Top-$K{+}\phi$"),
    "topk_phi_nosub": Latex(r"Top-$K{+}\phi$ (NoSub)"),
}


@dataclass(frozen=True)
class Slice:
    """One block of rows or one column: its title, and what it fixes of the points in it."""

    title: str
    fixed: dict[str, Any]


@dataclass(frozen=True)
class Layout:
    """Blocks of one row per method, by one group of columns per backbone."""

    backbones: tuple[str, ...]
    blocks: tuple[Slice, ...]
    columns: tuple[Slice, ...]
    budget_percent: float | None
    """The budget of the whole table, where the columns do not fix it."""

    def points(self, block: Slice, method: str, backbone: str) -> tuple[Point, ...]:
        """Points in a row of a group, one per column; a single one where the columns do not tell them apart."""
        fields = [{"budget_percent": self.budget_percent} | block.fixed | column.fixed for column in self.columns]
        if method == "full":
            fields = [each | {"budget_percent": None} for each in fields]
        return tuple(dict.fromkeys(Point(backbone=backbone, method=method, **each) for each in fields))

    def all_points(self) -> Iterator[Point]:
        """Every point of the table, block by block."""
        for block in self.blocks:
            for method in METHODS:
                for backbone in self.backbones:
                    yield from self.points(block, method, backbone)


@dataclass(frozen=True)
class Line:
    """One printed row: a method's cells, one tuple per backbone, each cell `span` columns wide."""

    title: Latex
    groups: tuple[tuple[Cell, ...], ...]
    span: int


def layout_of(spec: TableSpec) -> Layout:
    """Raises ValueError when the label is of no table that this module knows."""
    lengths = tuple(Slice(length, {"length": length}) for length in spec.lengths)
    if spec.label == "ruler_sweep":
        ruler = tuple(Slice(each.title, each.fixed | {"benchmark": "ruler"}) for each in lengths)
        budgets = tuple(Slice(f"{budget:g}%", {"budget_percent": budget}) for budget in spec.budgets)
        return Layout(spec.backbones, ruler, budgets, budget_percent=None)
    if spec.label == "stress_1pct":
        blocks = tuple(Slice(title_of(name), {"benchmark": name}) for name in ("ruler", "babilong"))
        middle = sorted(spec.budgets)[(len(spec.budgets) - 1) // 2]  # 1 % of the paper's four
        return Layout(spec.backbones, blocks, lengths, budget_percent=middle)
    raise ValueError(f"table {spec.label!r} is unknown; known are ruler_sweep, stress_1pct")


def run(spec: TableSpec, results: list[Path], template: Path, out: Path) -> None:
    """Writes table `spec.label` from the result CSVs of its study, of which it may show only some.

    Raises:
        ValueError: a cell of the study is missing, or a file is damaged or of another study; names cell and file.
    """
    layout = layout_of(spec)
    shown = [point for point in layout.all_points() if point.benchmark in spec.benchmarks]
    loaded = _by_place(spec, shown, results)
    scores = {point: _result_of(point, loaded).score(point) for point in shown}
    cells = embolden({point: format_score(score.value) for point, score in scores.items()})
    left_out = list(
        dict.fromkeys(point.benchmark for point in layout.all_points() if point.benchmark not in spec.benchmarks)
    )
    caption = caption_of_results(spec, list(loaded.values()), list(scores.values()), left_out)
    write_text(out, _render(template, spec, layout, cells, caption))


Place = tuple[str, str, str]


def _place(item: Point | Result) -> Place:
    return item.benchmark, item.backbone, item.length


def _by_place(spec: TableSpec, shown: list[Point], results: list[Path]) -> dict[Place, Result]:
    wanted = dict.fromkeys(_place(point) for point in shown)
    if not wanted:
        raise ValueError(
            f"table {spec.label}: study {spec.study} evaluates none of its benchmarks; leave the table out"
        )
    loaded: dict[Place, Result] = {}
    for path in results:
        result = load_result(path)
        if result.study != spec.study:
            raise ValueError(f"{path}: is of study {result.study!r}, table {spec.label} is of {spec.study!r}; rerun it")
        if _place(result) in loaded:
            raise ValueError(
                f"{path}: a second file for {' '.join(_place(result))}, beside {loaded[_place(result)].path}"
            )
        loaded[_place(result)] = result
    return {place: loaded[place] for place in wanted if place in loaded}


def _result_of(point: Point, loaded: Mapping[Place, Result]) -> Result:
    if _place(point) not in loaded:
        name = f"{point.benchmark}_{point.backbone}_{point.length}.csv"
        raise ValueError(f"no cell for {point}: {name} was not given; pass it to --results")
    return loaded[_place(point)]


def render_published(label: str, template: Path) -> str:
    """The table with the paper's values; bold is decided here, as for results, and not taken from the paper."""
    facts = published.load(label)
    points = [fact.point for fact in facts]
    spec = TableSpec(
        study="published",
        label=label,
        backbones=tuple(dict.fromkeys(point.backbone for point in points)),
        lengths=tuple(dict.fromkeys(point.length for point in points)),
        budgets=tuple(dict.fromkeys(point.budget_percent for point in points if point.budget_percent is not None)),
        benchmarks=tuple(dict.fromkeys(point.benchmark for point in points)),
    )
    cells = embolden({fact.point: fact.text for fact in facts})
    return _render(template, spec, layout_of(spec), cells, caption_of_published(spec))


def _render(template: Path, spec: TableSpec, layout: Layout, cells: Mapping[Point, Cell], caption: Caption) -> str:
    blocks = [(block.title, [_line(layout, block, method, cells) for method in METHODS]) for block in layout.blocks]
    return render(
        template,
        header=caption.header,
        notes=caption.notes,
        budget=None if layout.budget_percent is None else f"{layout.budget_percent:g}%",
        backbones=[caption.backbone_titles[backbone] for backbone in layout.backbones],
        columns=[column.title for column in layout.columns],
        blocks=blocks,
    )


def _line(layout: Layout, block: Slice, method: str, cells: Mapping[Point, Cell]) -> Line:
    rows = [layout.points(block, method, backbone) for backbone in layout.backbones]
    groups = tuple(tuple(cells.get(point, LEFT_OUT) for point in row) for row in rows)
    return Line(METHOD_TITLES[method], groups, span=len(layout.columns) // len(rows[0]))
