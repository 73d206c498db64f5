"""Renders tables as LaTeX by Jinja templates, in which every expression is escaped except mathematics between dollars.
Compiles a document to a PDF, the same bytes every time, with the installed LaTeX.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from operator import itemgetter
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from residual_mass.files import atomic_write

Cell = dict[str, Any]
Field = list[Cell]
"""The cells that share a field of a printed table."""
WITH_BACKSLASH = {character: "\\" + character for character in "&%$#_{}"}
WITH_A_NAME = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    '"': "{''}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
}
ESCAPES = str.maketrans(WITH_BACKSLASH | WITH_A_NAME)
"""LaTeX that prints a character that has a meaning there."""
LATEX_MARKS = {"": "", "above": r"\rlap{$^\dagger$}", "below": r"\rlap{$^\ddagger$}"}
"""Marks without a width, so that digits stay aligned."""


class Latex(str):
    """Text that is LaTeX already."""


def escape(value: object) -> Latex:
    """Returns LaTeX that prints `value` on one line; mathematics between dollars stays as it is."""
    if isinstance(value, Latex):
        return value
    pieces = re.split(r"(\$[^$]*\$)", one_line(value))
    escaped = []
    for piece in pieces:
        is_mathematics = len(piece) > 1 and piece.startswith("$")
        escaped.append(piece if is_mathematics else piece.translate(ESCAPES))
    return Latex("".join(escaped))


def one_line(text: object) -> str:
    """Replaces control characters and runs of white space by single spaces."""
    without_control = re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", " ", str(text))
    return " ".join(without_control.split())


def stacked(title: str, align: str) -> Latex:
    """Returns a title; several lines are stacked and aligned by `align` ("l" or "c")."""
    lines = [escape(line) for line in title.split("\n")]
    if len(lines) == 1:
        return lines[0]
    stack = r"\\".join(lines)
    return Latex(rf"\shortstack[{align}]{{{stack}}}")


def printed_field(field: Field) -> tuple[str, bool, str]:
    """Returns the text of a field, whether it is bold, and its mark; a field of several cells has neither."""
    cell = field[0]
    text = cell["printed"] or cell["text"]
    if len(field) > 1:
        return text, False, ""
    return text, cell["bold"], cell["mark"]


def field_latex(field: Field) -> Latex:
    text, bold, mark = printed_field(field)
    shown = rf"\textbf{{{escape(text)}}}" if bold else escape(text)
    return Latex(shown + LATEX_MARKS[mark])


def grids(cells: pd.DataFrame) -> list[dict[str, Any]]:
    """Nests the cells for templates: grids of blocks of rows of fields, in the order of the cells."""
    nested = []
    for title, of_grid in itertools.groupby(cells.to_dict("records"), key=itemgetter("grid")):
        grid = list(of_grid)
        titles = dict.fromkeys(cell["column"] for cell in grid)
        columns = [title for title in titles if title]
        groups = list(dict.fromkeys(cell["group"] for cell in grid))
        by_block = itertools.groupby(grid, key=itemgetter("block"))
        blocks = [{"title": name, "rows": _rows_of_fields(rows)} for name, rows in by_block]
        nested.append({"title": title, "columns": columns, "groups": groups, "blocks": blocks})
    return nested


def _rows_of_fields(cells: Iterable[Cell]) -> list[dict[str, Any]]:
    """Returns rows; a row ends where the title changes, or where a field repeats that is not the latest one."""
    rows: list[dict[str, Any]] = []
    title: str | None = None
    fields: dict[tuple[str, str], Field] = {}
    for cell in cells:
        place = (cell["group"], cell["column"])
        repeats = place in fields and place != next(reversed(fields))
        if cell["row"] != title or repeats:
            title = cell["row"]
            fields = {}
            rows.append({"heads": title.split(" | "), "own": cell["own"], "fields": fields})
        fields.setdefault(place, []).append(cell)
    return rows


def render(template: Path, **context: Any) -> str:
    """Fills `template`: `<< expression >>`, `<% statement %>`, `<# remark #>`.

    Filters: `stacked` stacks the lines of a title; `comment` prints text for a LaTeX comment, on one line and not
    escaped; `printed` prints a field.

    Raises:
        ValueError: the template is missing or malformed, or uses a name that it was not given.
    """
    return fill(_latex(template, escape), template, lambda loaded: loaded.render(context))


def block(template: Path, name: str, context: dict[str, Any]) -> str:
    """Returns a block of a template on one line and not escaped; empty if there is none of that name. Raises ValueError
    as `render` does.
    """

    def write(loaded: jinja2.Template) -> str:
        if name not in loaded.blocks:
            return ""
        pieces = loaded.blocks[name](loaded.new_context(context))
        return "".join(pieces)

    return one_line(fill(_latex(template, str), template, write))


def _latex(template: Path, finalize: Callable[[object], str]) -> jinja2.Environment:
    latex = environment(
        template, finalize=finalize, block_start_string="<%", block_end_string="%>", variable_start_string="<<",
        variable_end_string=">>", comment_start_string="<#", comment_end_string="#>",
    )  # fmt: skip
    latex.filters |= {"stacked": stacked, "printed": field_latex, "comment": lambda value: Latex(one_line(value))}
    return latex


def environment(template: Path, **options: Any) -> jinja2.Environment:
    """Returns an environment that loads templates from the folder of `template` and refuses unknown names."""
    return jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined,
        loader=jinja2.FileSystemLoader(template.parent), **options,
    )  # fmt: skip


def fill(environment: jinja2.Environment, template: Path, write: Callable[[jinja2.Template], str]) -> str:
    """Writes a template. Raises ValueError naming it when it is missing, malformed or uses an unknown name."""
    try:
        return write(environment.get_template(template.name))
    except jinja2.TemplateError as error:
        raise ValueError(f"{template}: {error}; correct it, or restore it from the repository") from None


# ---- PDF -------------------------------------------------------------------------------------------------------------

PROGRAMS = {
    "pdflatex": (2, "-no-shell-escape -interaction=nonstopmode -halt-on-error -output-directory"),
    "tectonic": (1, "--untrusted --outdir"),
}
"""Programs in order of preference: the number of runs until all page numbers are known, and the arguments before the
output folder.
"""
TEX_ENVIRONMENT = {"SOURCE_DATE_EPOCH": "0", "FORCE_SOURCE_DATE": "1", "max_print_line": "1000"}
"""Makes the PDF reproducible, and keeps TeX from breaking messages into lines of 79 characters."""


def run_pdf(document: Path, out: Path) -> None:
    """Compiles `document` in its folder, without leaving auxiliary files; if LaTeX fails, its messages go to stderr.

    Raises:
        ValueError: no LaTeX is installed, or it fails; says how.
    """
    lacking = pdf_problems()
    if lacking:
        raise ValueError(*lacking)
    program = _program()
    passes, arguments = PROGRAMS[program]
    with tempfile.TemporaryDirectory() as folder:
        command = [program, *arguments.split(), folder, document.name]
        for _ in range(passes):
            done = subprocess.run(
                command,
                cwd=document.parent,
                env=os.environ | TEX_ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                check=False,
            )
            if done.returncode:
                print(done.stdout, file=sys.stderr)
                # TeX marks its errors with an exclamation mark; tectonic says so in words.
                errors = [line for line in done.stdout.splitlines() if line.startswith(("!", "error:"))]
                reason = errors[0] if errors else "it does not say why"
                raise ValueError(f"{document}: {program} fails: {reason}")
        with atomic_write(out) as temporary:
            shutil.copyfile(Path(folder, document.with_suffix(".pdf").name), temporary)


def pdf_problems() -> list[str]:
    """Returns what this machine lacks to make a PDF, in one line with its remedy; empty where it has a LaTeX."""
    lacking = f"no LaTeX on PATH ({' or '.join(PROGRAMS)}); install one, on Debian `apt install texlive-latex-extra`"
    return [] if _program() else [lacking]


def _program() -> str:
    return next((program for program in PROGRAMS if shutil.which(program)), "")
