"""Jinja templates that write LaTeX: every expression is escaped, unless Python marked it as LaTeX."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2

from residual_mass.paper.marked import Marked, marked, one_line, parts, to_html
from residual_mass.paper.templating import block, fill

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


class Latex(str):
    """Text that is LaTeX already."""


def escape(value: object) -> Latex:
    """`value` as LaTeX that prints it on one line, mathematics of marked text included."""
    if isinstance(value, Latex):
        return value
    return Latex("".join(f"${part}$" if math else _escaped(part) for part, math in parts(marked(value))))


def _escaped(text: str) -> str:
    return "".join(ESCAPES.get(character, character) for character in text)


def _stacked(title: str, align: str) -> Latex:
    """A title of one or more lines, which `align` ("l" or "c") sets below each other."""
    lines = [escape(Marked(line)) for line in marked(title).split("\n")]
    if len(lines) == 1:
        return lines[0]
    stack = r"\\".join(lines)
    return Latex(rf"\shortstack[{align}]{{{stack}}}")


def render(template: Path, **context: Any) -> str:
    """Fills `template`: `<< expression >>`, `<% statement %>`, `<# remark #>`.

    Filters: `stacked` sets the lines of a title below each other; `comment` prints text for a LaTeX comment, on one
    line and not escaped.

    Raises:
        ValueError: the template is missing, malformed, or asks for a name that it was not given.
    """
    return fill(_environment(template, escape), template, context)


def caption_of(template: Path, **context: Any) -> Marked:
    """The block `caption` of a template, filled in as marked text.

    Raises:
        ValueError: as `render`; the caption is not plain text with mathematics between dollars.
    """
    caption = Marked(one_line(block(_environment(template, marked), template, "caption", context)))
    try:
        to_html(caption)
    except ValueError as error:
        raise ValueError(f"{template}: {error}") from None
    return caption


def _environment(template: Path, finalize: Callable[[object], str]) -> jinja2.Environment:
    environment = jinja2.Environment(
        block_start_string="<%", block_end_string="%>",
        variable_start_string="<<", variable_end_string=">>",
        comment_start_string="<#", comment_end_string="#>",
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined, finalize=finalize, autoescape=False,
        loader=jinja2.FileSystemLoader(template.parent),
    )  # fmt: skip
    environment.filters |= {"stacked": _stacked, "comment": lambda value: Latex(one_line(value))}
    return environment
