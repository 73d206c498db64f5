"""The `report` stage: a study on one self-contained HTML page, with its settings, results and provenance."""

from __future__ import annotations

import base64
import itertools
import re
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from residual_mass import __version__, statements
from residual_mass.files import read_csv, read_text, write_text
from residual_mass.paper.comparison import picture
from residual_mass.paper.comparison.by_cell import open_points
from residual_mass.paper.document import figure_caption
from residual_mass.paper.marked import to_html
from residual_mass.paper.readers.accounting_file import METHODS
from residual_mass.paper.report.entries import PageTable
from residual_mass.paper.report.findings import collect_distances, collect_errors, collect_gains, collect_turned
from residual_mass.paper.report.origins import provenance
from residual_mass.paper.report.verdicts import COUNTED, Compared, changes_figure, load_comparison, standing
from residual_mass.paper.table import SCORE, Table, load_table
from residual_mass.paper.tables.captions import KIND_NOTES, model_warnings
from residual_mass.paper.templating import RESTORE, fill
from residual_mass.paper.titles import METHOD_TITLES, task_title
from residual_mass.provenance import Record
from residual_mass.study.specs import ReportSpec

LARGEST = 8_000_000
"""Most bytes of all figures together, which grow by a third in the page."""


@dataclass(frozen=True)
class ReportFiles:
    """Files that a page shows, and `sources`, which it only lists.

    Attributes:
        tables: saved tables.
        comparison, picture: None if the study has no table that the paper has values for.
        deviations: docs/deviations.md.
    """

    tables: Sequence[Path]
    figures: Sequence[Path]
    comparison: Path | None
    picture: Path | None
    claims: Sequence[Path]
    sources: Sequence[Path]
    deviations: Path

    def recorded(self) -> list[Path]:
        """Returns the outputs of other stages."""
        compared = [path for path in (self.comparison, self.picture) if path]
        return [*self.tables, *self.figures, *compared, *self.claims, *self.sources]


@dataclass(frozen=True)
class PageFigure:
    """A figure as a data URI, with its size in pixels."""

    label: str
    caption: Markup
    image: str
    width: int
    height: int


@dataclass(frozen=True)
class Examples:
    """Examples behind the scores of a task at a length."""

    task: str
    length: str
    count: int
    data: str
    decoding: str


@dataclass(frozen=True)
class Deviations:
    """Rows of docs/deviations.md: open points of the paper by number, and intended differences of a study."""

    open_points: dict[int, tuple[Markup, ...]]
    of_study: tuple[tuple[Markup, ...], ...]


def run(spec: ReportSpec, *files: Any) -> None:
    """Runs the stage with its files in the order of its flags."""
    *shown, template, out = files
    write_page(spec, ReportFiles(*shown), template, out)


def write_page(spec: ReportSpec, files: ReportFiles, template: Path, out: Path) -> None:
    """Writes the page.

    Raises:
        ValueError: there is neither a table nor a figure, the figures are too large, or a file differs from its record
            or belongs to another study; names the file.
    """
    if not files.tables and not files.figures:
        raise ValueError(f"study {spec.study}: no table and no figure; give one")
    record = Record("report", spec, files.recorded(), sources=[files.deviations, template])
    compared = load_comparison(files.comparison) if files.comparison else []
    tables = [load_table(path, spec.study) for path in files.tables]
    claims = [row for path in files.claims for row in read_csv(path, statements.COLUMNS, "findings")]
    page = _render(
        template,
        spec=spec,
        version=__version__,
        warnings=list(model_warnings((backbone.model_id, backbone.weights) for backbone in spec.backbones)),
        kinds=KIND_NOTES,
        distances=collect_distances(tables),
        gains=collect_gains(tables),
        turned=collect_turned(tables),
        errors=collect_errors(tables),
        error_methods=list(METHODS.values()),
        examples=list(_examples(tables)),
        standing=standing(compared),
        verdicts=COUNTED,
        changes=changes_figure(compared, tables) if compared else None,
        methods={name: to_html(title) for name, title in METHOD_TITLES.items()},
        picture=read_csv(files.picture, picture.COLUMNS, "comparison") if files.picture else [],
        claims=claims,
        claimed=Counter(row["verdict"] for row in claims if row["primary"] == "1"),
        tables=[_page_table(table, compared) for table in tables],
        figures=list(_figures(spec, files.figures)),
        deviations=load_deviations(
            files.deviations, spec.study, {number for table in tables for number in open_points(table.label)}
        ),
        provenance=provenance(files.recorded()),
    )
    write_text(out, page)
    record.write(out)


def load_deviations(path: Path, study: str, numbers: Iterable[int]) -> Deviations:
    """Reads the open points with these numbers, and the study's differences.

    Raises:
        ValueError: the file is missing, or has no row for a number.
    """
    text = read_text(path, RESTORE)
    points = {int(row[0]): row for row in _markdown_rows(text) if row[0].isdecimal()}
    wanted = sorted(set(numbers))
    if missing := [number for number in wanted if number not in points]:
        raise ValueError(f"{path}: has no open point {missing[0]}, which its tables name; add its row")
    _, _, section = text.partition(f"## The `{study}` study\n")
    rows = list(_markdown_rows(section.partition("\n## ")[0]))
    return Deviations(
        {number: tuple(map(_markdown, points[number][1:])) for number in wanted},
        tuple(tuple(map(_markdown, row)) for row in rows[1:]),
    )


def _page_table(table: Table, compared: Iterable[Compared]) -> PageTable:
    return PageTable(table, {value.place: value for value in compared if value.table == table.label and value.ours})


def _figures(spec: ReportSpec, paths: Sequence[Path]) -> Iterator[PageFigure]:
    total = 0
    for path in paths:
        content = path.read_bytes()
        total += len(content)
        if total > LARGEST:
            raise ValueError(
                f"{path}: the figures up to this one have {total / 1e6:.1f} MB, and the page has room for "
                f"{LARGEST / 1e6:g} MB; show fewer of them"
            )
        width, height = struct.unpack(">II", content[16:24])
        image = f"data:image/png;base64,{base64.b64encode(content).decode()}"
        caption = to_html(figure_caption(path.stem, spec.figure_titles))
        yield PageFigure(path.stem, caption, image, width, height)


def _examples(tables: Iterable[Table]) -> Iterator[Examples]:
    """Yields examples once per task and length, or more often if backbones or tables differ."""
    cells = (cell for table in tables for cell in table.evaluated if cell.place.quantity == SCORE)
    yield from dict.fromkeys(
        Examples(
            task=task_title(cell.place.benchmark, cell.place.task),
            length=cell.place.length,
            count=cell.n,
            data="+".join(cell.data),
            decoding=cell.decoding,
        )
        for cell in cells
    )


def _markdown_rows(text: str) -> Iterator[list[str]]:
    """Yields the cells of each table row, including headers."""
    for line in re.findall(r"^\|(.*)\|$", text, re.MULTILINE):
        if not re.fullmatch(r"[-:| ]+", line):
            yield [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)]


def _markdown(text: str) -> Markup:
    """Converts code between backticks, and replaces links, which do not work from the page, by their text."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    parts = [
        Markup("<code>{}</code>").format(part) if code else escape(part)
        for code, part in zip(itertools.cycle((False, True)), text.split("`"), strict=False)
    ]
    return Markup("").join(parts)


def _render(template: Path, **context: Any) -> str:
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined, autoescape=True, loader=jinja2.FileSystemLoader(template.parent),
    )  # fmt: skip
    environment.filters["html"] = to_html
    return fill(environment, template, context)
