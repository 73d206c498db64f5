"""Jinja templates that write LaTeX: every expression is escaped, unless Python marked it as LaTeX."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jinja2

from residual_mass.paper.cells import Cell
from residual_mass.paper.templating import fill

ESCAPES = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': "{''}",
    **{character: "\\" + character for character in "&%$#_{}"},
}
MARKS = {"": "", "above": r"\rlap{$^\dagger$}", "below": r"\rlap{$^\ddagger$}"}
"""Without a width of their own, so that digits stay aligned."""


class Latex(str):
    """Text that is LaTeX already."""


def escape(value: object) -> Latex:
    """`value` as LaTeX that prints it on one line: special characters escaped, control characters turned to spaces."""
    if isinstance(value, Latex):
        return value
    return Latex("".join(ESCAPES.get(character, character) for character in _one_line(value)))


def _one_line(value: object) -> str:
    return " ".join(re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", " ", str(value)).split())


def _cell(cell: Cell) -> Latex:
    text = escape(cell.text)
    return Latex((rf"\textbf{{{text}}}" if cell.bold else text) + MARKS[cell.gain])


def render(template: Path, **context: Any) -> str:
    """Fills `template`: `<< expression >>`, `<% statement %>`, `<# remark #>`.

    Filters: `cell` prints a Cell; `comment` prints text for a LaTeX comment, on one line and not escaped.

    Raises:
        ValueError: the template is missing, malformed, or asks for a name that it was not given.
    """
    environment = jinja2.Environment(
        block_start_string="<%", block_end_string="%>",
        variable_start_string="<<", variable_end_string=">>",
        comment_start_string="<#", comment_end_string="#>",
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined, finalize=escape, autoescape=False,
        loader=jinja2.FileSystemLoader(template.parent),
    )  # fmt: skip
    environment.filters |= {"cell": _cell, "comment": lambda value: Latex(_one_line(value))}
    return fill(environment, template, context)
