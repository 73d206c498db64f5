"""A study as one page for a browser, complete in itself: what was run, what came out, and where it comes from."""

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

from residual_mass import __version__
from residual_mass.files import read_text, write_text
from residual_mass.paper.cells import LEFT_OUT
from residual_mass.paper.comparison.by_cell import deviations_of
from residual_mass.paper.document import figure_caption
from residual_mass.paper.readers.accounting_file import METHODS
from residual_mass.paper.report.findings import errors_of, gains_of
from residual_mass.paper.report.latex_html import to_html
from residual_mass.paper.report.origins import provenance
from residual_mass.paper.report.tables import PageTable, load_page_table, place_of
from residual_mass.paper.report.verdicts import (
    COUNTED,
    changes_figure,
    load_claims,
    load_comparison,
    load_picture,
    standing,
)
from residual_mass.paper.tables.captions import KIND_NOTES, model_warnings
from residual_mass.paper.templating import RESTORE, fill
from residual_mass.paper.titles import METHOD_TITLES, task_title
from residual_mass.provenance import Record
from residual_mass.study.specs import ReportSpec

LARGEST = 8_000_000
"""Bytes of all figures together; they grow by a third in the page."""
SIGNATURE, END = b"\x89PNG\r\n\x1a\n", b"IEND\xaeB`\x82"

Row = dict[str, str]


@dataclass(frozen=True)
class ReportFiles:
    """What a page shows, and `sources`, which it only names.

    Attributes:
        tables, cells: LaTeX and CSV of every table, in one order.
        comparison, picture: where the study has a table that the paper's values can be compared with.
        deviations: docs/deviations.md.
    """

    tables: Sequence[Path]
    cells: Sequence[Path]
    figures: Sequence[Path]
    comparison: Path | None
    picture: Path | None
    claims: Sequence[Path]
    sources: Sequence[Path]
    deviations: Path

    def shown(self) -> Iterator[Path]:
        """What the page shows of paper_tables/."""
        compared = filter(None, (self.comparison, self.picture))
        yield from itertools.chain(self.tables, self.cells, self.figures, compared)


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
    """What is behind the scores of a task at a length."""

    task: str
    length: str
    count: str
    data: str
    decoding: str


@dataclass(frozen=True)
class Deviations:
    """Rows of docs/deviations.md: open points of the paper by number, and where a study differs from it on purpose."""

    open_points: dict[int, tuple[Markup, ...]]
    of_study: tuple[tuple[Markup, ...], ...]


def run(spec: ReportSpec, files: ReportFiles, template: Path, out: Path) -> None:
    """Writes the page.

    Raises:
        ValueError: there is neither a table nor a figure, the figures are too large, or a file is missing, damaged or
            of another study; names the file.
    """
    if not files.tables and not files.figures:
        raise ValueError(f"study {spec.study}: no table and no figure; give one")
    record = Record(
        "report", spec, [*files.claims, *files.sources], sources=[*files.shown(), files.deviations, template]
    )
    compared = load_comparison(files.comparison, spec.study) if files.comparison else []
    tables = list(_tables(spec, files, compared))
    claims = [row for path in files.claims for row in load_claims(path, spec.study)]
    lines = [line for table in tables for line in table.lines]
    page = _render(
        template,
        spec=spec,
        version=__version__,
        warnings=list(model_warnings((backbone.model_id, backbone.weights) for backbone in spec.backbones)),
        kinds=KIND_NOTES,
        gains=gains_of(lines),
        errors=errors_of(lines),
        error_methods=list(METHODS.values()),
        examples=list(_examples(lines)),
        standing=standing(compared),
        verdicts=COUNTED,
        changes=changes_figure(compared, lines, files.comparison) if files.comparison else None,
        methods={name: to_html(title) for name, title in METHOD_TITLES.items()},
        picture=load_picture(files.picture) if files.picture else [],
        claims=claims,
        claimed=Counter(row["verdict"] for row in claims if row["primary"] == "1"),
        tables=tables,
        figures=list(_figures(spec, files.figures)),
        deviations=load_deviations(files.deviations, spec.study, _open_points(tables)),
        provenance=provenance([*files.shown(), *files.claims, *files.sources]),
    )
    write_text(out, page)
    record.write(out)


def load_deviations(path: Path, study: str, numbers: Iterable[int]) -> Deviations:
    """The open points with these numbers, and what is said of the study.

    Raises:
        ValueError: the file is missing, or has no row for a number.
    """
    text = read_text(path, RESTORE)
    points = {int(row[0]): row for row in _markdown_rows(text) if row[0].isdecimal()}
    wanted = sorted(set(numbers))
    if missing := [number for number in wanted if number not in points]:
        raise ValueError(f"{path}: has no open point {missing[0]}, which its tables name; add its row")
    _, _, of_study = text.partition(f"## The `{study}` study\n")
    rows = list(_markdown_rows(of_study.partition("\n## ")[0]))
    return Deviations({number: tuple(map(_markdown, points[number][1:])) for number in wanted},
                      tuple(tuple(map(_markdown, row)) for row in rows[1:]))  # fmt: skip


def _tables(spec: ReportSpec, files: ReportFiles, compared: Iterable[Row]) -> Iterator[PageTable]:
    if [path.stem for path in files.tables] != [path.stem for path in files.cells]:
        raise ValueError("tables and cells are not of the same tables in the same order; give both alike")
    by_place = {place_of(row): row for row in compared}
    for tex, cells in zip(files.tables, files.cells, strict=True):
        yield load_page_table(tex, cells, spec.study, by_place)


def _figures(spec: ReportSpec, paths: Sequence[Path]) -> Iterator[PageFigure]:
    total = 0
    for path in paths:
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise ValueError(f"{path}: no such file; run the figure stage") from None
        except OSError as error:
            raise ValueError(f"{path}: cannot be read ({error.strerror}); run the figure stage") from None
        if not content.startswith(SIGNATURE) or not content.endswith(END):
            raise ValueError(f"{path}: not a PNG file, or cut short; delete it and run the figure stage again")
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


def _examples(lines: Iterable[Row]) -> Iterator[Examples]:
    """Once per task and length, or more often where backbones or tables differ."""
    found = dict.fromkeys(
        Examples(task_title(line["benchmark"], line["task"]), line["length"], line["n"], line["data"], line["decoding"])
        for line in lines
        if line.get("benchmark") and line["text"] != LEFT_OUT.text
    )
    yield from found


def _open_points(tables: Iterable[PageTable]) -> set[int]:
    """Numbers of the open points that touch the tables shown."""
    return {number for table in tables for number in deviations_of(table.label)}


def _markdown_rows(text: str) -> Iterator[list[str]]:
    """Cells of the rows of tables, heads included."""
    for line in re.findall(r"^\|(.*)\|$", text, re.MULTILINE):
        if not re.fullmatch(r"[-:| ]+", line):
            yield [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)]


def _markdown(text: str) -> Markup:
    """Code between backticks stays code, links become their text: they lead nowhere from the page."""
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
    return fill(environment, template, context)
