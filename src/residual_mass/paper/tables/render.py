"""Tables: from result CSVs, or the paper's own values, to LaTeX and a CSV of every cell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from residual_mass.files import write_text
from residual_mass.paper import published
from residual_mass.paper.cells import Cell, Point
from residual_mass.paper.latex import Latex, escape, render
from residual_mass.paper.readers.results import Result, load_results
from residual_mass.paper.tables import accounting_table, parameter_table, runtime_table, training_cost_table
from residual_mass.paper.tables.captions import Caption, caption_of_published, caption_of_results, place_of
from residual_mass.paper.tables.content import Content, cells_csv, content_of_scores, content_of_texts
from residual_mass.paper.tables.layouts import LAYOUTS, PUBLISHED, Slice, evaluated, layout_of
from residual_mass.study.specs import TableSpec

Place = tuple[str, str, str]


@dataclass(frozen=True)
class Line:
    """One printed row: its cells, one tuple per backbone, each cell `span` columns wide; `rule`: a line above it."""

    title: str
    groups: tuple[tuple[Cell, ...], ...]
    span: int
    rule: bool


def run(spec: TableSpec, results: list[Path], template: Path, out: Path, cells: Path) -> None:
    """Writes table `spec.label` from the result CSVs of its study, of which it may show only some, and to `cells` one
    CSV line per printed cell with its interval, its tests and what it comes from.

    Raises:
        ValueError: the label is unknown, a cell of the study is missing, or a file is damaged or of another study;
            names cell and file.
    """
    if spec.label == accounting_table.LABEL:
        return accounting_table.run(spec, results, template, out, cells)
    if spec.label == parameter_table.LABEL:
        return parameter_table.run(spec, results, template, out, cells)
    if spec.label == training_cost_table.LABEL:
        return training_cost_table.run(spec, results, template, out, cells)
    if runtime_table.is_label(spec.label):
        return runtime_table.run(spec, results, template, out, cells)
    if spec.label not in LAYOUTS:
        others = (accounting_table.LABEL, parameter_table.LABEL, training_cost_table.LABEL, "runtime_<backbone>")
        known = ", ".join([*LAYOUTS, *others])
        raise ValueError(f"table {spec.label!r} is unknown; known are {known}")
    layout = layout_of(spec)
    shown = dict.fromkeys(point for point in layout.all_points() if evaluated(point, spec))
    if not shown:
        raise ValueError(
            f"table {spec.label}: study {spec.study} evaluates none of its benchmarks; leave the table out"
        )
    loaded = _by_place(spec, shown, results)
    content = content_of_scores(layout, {point: _result_of(point, loaded, results).score(point) for point in shown})
    table = _render(template, content, caption_of_results(spec, list(loaded.values()), content))
    write_text(cells, cells_csv(spec.label, content))
    write_text(out, table)


def run_published(label: str, template: Path, out: Path) -> None:
    """Writes table `label` with the paper's values. Raises ValueError when the paper has no such table."""
    write_text(out, render_published(label, template))


def render_published(label: str, template: Path) -> str:
    """The table with the paper's values; bold is decided here, as for results, and not taken from the paper."""
    if label == accounting_table.LABEL:
        return accounting_table.render_published(template)
    if label == parameter_table.LABEL:
        return parameter_table.render_published(template)
    if label == training_cost_table.LABEL:
        return training_cost_table.render_published(template)
    if label in runtime_table.PUBLISHED:
        return runtime_table.render_published(label, template)
    facts = published.load(label)
    points = [fact.point for fact in facts]
    spec = TableSpec(
        study=PUBLISHED,
        label=label,
        backbones=tuple(dict.fromkeys(point.backbone for point in points)),
        lengths=tuple(dict.fromkeys(point.length for point in points)),
        budgets=tuple(dict.fromkeys(point.budget_percent for point in points if point.budget_percent is not None)),
        benchmarks=tuple(dict.fromkeys(point.benchmark for point in points)),
        maps=tuple(dict.fromkeys(point.maps for point in points if point.maps is not None)),
    )
    content = content_of_texts(layout_of(spec), {fact.point: fact.text for fact in facts})
    return _render(template, content, caption_of_published(spec, content))


def _by_place(spec: TableSpec, shown: Mapping[Point, None], results: list[Path]) -> dict[Place, Result]:
    """The results that the table shows, in its order."""
    loaded: dict[Place, Result] = {}
    for path in results:
        for result in load_results(path):
            place = place_of(result)
            if result.study != spec.study:
                raise ValueError(
                    f"{path}: is of study {result.study!r}, table {spec.label} is of {spec.study!r}; rerun it"
                )
            if place in loaded:
                raise ValueError(f"{path}: a second file for {' '.join(place)}, beside {loaded[place].path}; give one")
            loaded[place] = result
    return {place: loaded[place] for place in dict.fromkeys(map(place_of, shown)) if place in loaded}


def _result_of(point: Point, loaded: Mapping[Place, Result], results: list[Path]) -> Result:
    if place_of(point) not in loaded:
        given = ", ".join(path.name for path in results)
        raise ValueError(
            f"no cell for {point}: {' '.join(place_of(point))} is in none of {given}; "
            "pass its file to --results, or score it again where a file was cut short"
        )
    return loaded[place_of(point)]


def _render(template: Path, content: Content, caption: Caption) -> str:
    layout = content.layout
    return render(
        template,
        header=caption.header,
        notes=caption.notes,
        budget=None if layout.budget_percent is None else f"{layout.budget_percent:g}%",
        lengths=", ".join(dict.fromkeys(point.length for point in layout.all_points())),
        backbones=[caption.backbone_titles[backbone] for backbone in layout.backbones],
        titled=layout.titled,
        columns=[column.title if layout.titled else _title(column, content, "c") for column in layout.columns],
        blocks=[(_title(block, content, "l"), _lines(block, content)) for block in layout.blocks],
    )


def _title(part: Slice, content: Content, align: Literal["l", "c"]) -> Latex:
    """A title that owns up to data that are not the benchmark's own, on a second line so that columns stay narrow."""
    kinds = content.kinds(part)
    if not part.title or set(kinds) <= {"original"}:
        return escape(part.title)
    return Latex(rf"\shortstack[{align}]{{{escape(part.title)}\\({escape(' + '.join(kinds))})}}")


def _lines(block: Slice, content: Content) -> list[Line]:
    layout, lines = content.layout, []
    first_own = next((row for row in layout.rows if row.own), None)
    for row in layout.rows:
        points = [layout.points(block, row, backbone) for backbone in layout.backbones]
        groups = tuple(tuple(content.cells[point] for point in group) for group in points)
        lines.append(Line(row.title, groups, span=len(layout.columns) // len(points[0]), rule=row is first_own))
    return lines
