"""Reads a table back from its LaTeX."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple


class Printed(NamedTuple):
    """A cell as it is set."""

    text: str
    bold: bool = False
    mark: str = ""


LEFT_OUT = Printed("--")
Cells = dict[tuple[str, str, int], Printed]
"""Cells by title of the block (empty where there is none), title of the row and column; a cell over several columns is
in each.
"""
METHODS = ("Full", "Top-$K$", r"Top-$K{+}\phi$", r"Top-$K{+}\phi$ (NoSub)")
MARKS = {r"\rlap{$^\dagger$}": "above", r"\rlap{$^\ddagger$}": "below"}


def printed_cells(tex: str) -> Cells:
    body = tex.split(r"\midrule", 1)[1].split(r"\bottomrule")[0]
    cells: Cells = {}
    for block in body.split(r"\midrule"):
        title = re.search(r"\\multirow\{\d+\}\{\*\}\{(.*)\}", block)
        for line in block.splitlines():
            if line.endswith(r"\\"):
                fields = [field.strip() for field in line.removesuffix(r"\\").split("&")]
                if title:
                    assert fields.pop(0) == ""
                cells |= _row(title[1] if title else "", *fields)
    return cells


def printed_fields(tex: str) -> list[list[str]]:
    """Fields of every row of a table without blocks, in order."""
    body = tex.split(r"\midrule", 1)[1].split(r"\bottomrule")[0]
    return [line.removesuffix(r"\\").strip().split(" & ") for line in body.splitlines() if line.endswith(r"\\")]


def _row(block: str, title: str, *fields: str) -> Cells:
    cells: Cells = {}
    column = 0
    for field in fields:
        spanned = re.fullmatch(r"\\multicolumn\{(\d+)\}\{c\}\{(.*)\}", field)
        width, text = (int(spanned[1]), spanned[2]) if spanned else (1, field)
        cells |= {(block, title, column + i): _cell(text) for i in range(width)}
        column += width
    return cells


def _cell(text: str) -> Printed:
    mark = next((mark for mark in MARKS if text.endswith(mark)), "")
    text = text.removesuffix(mark)
    plain = re.sub(r"\\textbf\{(.*)\}", r"\1", text)
    return Printed(plain, plain != text, MARKS.get(mark, ""))


def caption_of(tex: str) -> str:
    return " ".join(tex.split(r"\caption{")[1].split(r"\label")[0].split())


def row_widths(tex: str) -> set[int]:
    """Columns that each row fills, and those that the tabular declares: one number in a sound table."""
    columns = re.search(r"\\begin\{tabular\}\{([lcr]+)\}", tex)
    assert columns is not None
    body = tex.split(r"\toprule")[1].split(r"\bottomrule")[0]
    lines = [line for line in body.splitlines() if line.endswith(r"\\")]
    assert len(lines) >= 3
    spans = [sum(int(width) - 1 for width in re.findall(r"\\multicolumn\{(\d+)\}", line)) for line in lines]
    joints = [len(re.findall(r"(?<!\\)&", line)) for line in lines]
    return {len(columns[1]), *(1 + joint + span for joint, span in zip(joints, spans, strict=True))}


def open_braces(tex: str) -> int:
    """Braces that are not closed."""
    plain = re.sub(r"\\[\\{}]", "", tex)
    return plain.count("{") - plain.count("}")


def without_comments(tex: str) -> str:
    """What LaTeX reads of a table."""
    return "\n".join(re.split(r"(?<!\\)%", line)[0] for line in tex.splitlines())


def pdflatex(folder: Path, tex: str) -> str:
    """What LaTeX says of a page of the paper's width with these tables, which it must accept."""
    head = "\\documentclass[10pt]{article}\\usepackage[textwidth=5.5in]{geometry}\\usepackage{booktabs,multirow}"
    (folder / "page.tex").write_text(f"{head}\\begin{{document}}{tex}\\end{{document}}", encoding="utf-8")
    command = ["pdflatex", "-halt-on-error", "-interaction=nonstopmode", "page.tex"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
    return done.stdout
