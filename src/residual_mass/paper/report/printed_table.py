"""Rendered tables read back from their LaTeX: caption and cells, for pages that show them otherwise."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from residual_mass.files import read_text
from residual_mass.paper.report.latex_html import argument

SPAN = re.compile(r"\\multi(?P<what>column|row)\{(?P<size>\d+)\}\{[^{}]*\}(?=\{)")
RULE = re.compile(r"\\(?:toprule|bottomrule|cmidrule(?:\([lr]*\))?\{[^{}]*\}|addlinespace(?:\[[^\]]*\])?)")
REMEDY = "delete it and run the table stage again"


@dataclass(frozen=True)
class PrintedCell:
    """LaTeX of one cell, its first column, counted from 0, and how many columns and rows it takes."""

    latex: str
    column: int
    columns: int
    rows: int


Row = tuple[PrintedCell, ...]


@dataclass(frozen=True)
class Grid:
    """One tabular: rows of its head, and rows of its body by the rules between them."""

    head: tuple[Row, ...]
    blocks: tuple[tuple[Row, ...], ...]


@dataclass(frozen=True)
class PrintedTable:
    """What a table's file prints."""

    path: Path
    caption: str
    grids: tuple[Grid, ...]


def load_printed(path: Path) -> PrintedTable:
    """Raises ValueError naming the file when it is missing or not a table of one of the templates."""
    tex = re.sub(r"(?<!\\)%.*", "", read_text(path, "run the table stage"))
    captions = [match.end() - 1 for match in re.finditer(r"\\caption\{", tex)]
    bodies = re.findall(r"\\begin\{tabular\}\{[^{}]*\}(.*?)\\end\{tabular\}", tex, re.DOTALL)
    if len(captions) != 1 or not bodies:
        raise ValueError(f"{path}: {len(captions)} captions and {len(bodies)} tabulars, not one and some; {REMEDY}")
    try:
        return PrintedTable(path, argument(tex, captions[0]), tuple(map(_grid, bodies)))
    except ValueError as error:
        raise ValueError(f"{path}: {error}; {REMEDY}") from None


def _grid(body: str) -> Grid:
    head, *blocks = RULE.sub("", body).split(r"\midrule")
    if not blocks:
        raise ValueError("a tabular has no head")
    return Grid(tuple(_rows(head)), tuple(tuple(_rows(block)) for block in blocks))


def _rows(block: str) -> Iterator[Row]:
    """Rows of a block; places that a cell above reaches down to are left out, as in HTML."""
    covered: dict[int, int] = {}
    for line in _split(block, r"\\"):
        cells, column = [], 0
        for text in _split(line, "&"):
            cell = _cell(text, column)
            if covered.get(column, 0) == 0:
                cells.append(cell)
                covered[column] = cell.rows
            column += cell.columns
        covered = {place: below - 1 for place, below in covered.items()}
        yield tuple(cells)


def _split(text: str, separator: str) -> Iterator[str]:
    """Parts outside braces; blanks at the end make none."""
    depth = start = 0
    for match in re.finditer(r"\\\\|\\.|[{}&]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if match[0] == separator and depth == 0:
            yield text[start : match.start()].strip()
            start = match.end()
    if separator == "&" or text[start:].strip():
        yield text[start:].strip()


def _cell(text: str, column: int) -> PrintedCell:
    sizes = {"column": 1, "row": 1}
    while span := SPAN.match(text):
        sizes[span["what"]] = int(span["size"])
        text = argument(text, span.end())
    return PrintedCell(text, column, sizes["column"], sizes["row"])
