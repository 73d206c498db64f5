"""Tables as LaTeX by Jinja templates: every expression is escaped but for mathematics between dollars."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from residual_mass.files import read_text

RESTORE = "restore it from the repository"
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
    """`value` as LaTeX that prints it on one line, mathematics between dollars as it is."""
    if isinstance(value, Latex):
        return value
    pieces = re.split(r"(\$[^$]*\$)", one_line(value))
    return Latex("".join(piece if piece[:1] == "$" != piece else _escaped(piece) for piece in pieces))


def _escaped(text: str) -> str:
    return "".join(ESCAPES.get(character, character) for character in text)


def one_line(text: object) -> str:
    """Control characters and runs of white space as single spaces."""
    return " ".join(re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", " ", str(text)).split())


def stacked(title: str, align: str) -> Latex:
    """A title of one or more lines, which `align` ("l" or "c") sets below each other."""
    lines = [escape(line) for line in title.split("\n")]
    stack = r"\\".join(lines)
    return lines[0] if len(lines) == 1 else Latex(rf"\shortstack[{align}]{{{stack}}}")


def printed(field: dict[str, Any]) -> Latex:
    """A field as LaTeX; in bold and marked as its one cell is."""
    text = escape(field["text"])
    return Latex((rf"\textbf{{{text}}}" if field["bold"] else text) + MARKS[field["mark"]])


def grids(cells: pd.DataFrame) -> list[dict[str, Any]]:
    """The cells as templates walk them: grids of blocks of rows of fields, in the order of the cells."""
    found = []
    for title, of in itertools.groupby(cells.to_dict("records"), key=lambda cell: cell["grid"]):
        of = list(of)
        columns = [name for name in dict.fromkeys(cell["column"] for cell in of) if name]
        blocks = [
            {"title": block, "rows": list(_rows(list(rows), len(columns)))}
            for block, rows in itertools.groupby(of, key=lambda cell: cell["block"])
        ]
        groups = list(dict.fromkeys(cell["group"] for cell in of))
        found.append({"title": title, "columns": columns, "groups": groups, "blocks": blocks})
    return found


def _rows(cells: list[dict[str, str]], columns: int) -> Iterator[dict[str, Any]]:
    """Rows; one ends where another title follows, or a field comes back that is not the last."""
    row: dict[str, Any] | None = None
    own = False
    for cell in cells:
        place = cell["group"], cell["column"]
        if (
            row is None
            or row["row"] != cell["row"]
            or (place in row["fields"] and place != next(reversed(row["fields"])))
        ):
            if row is not None:
                yield row
            rule = bool(cell["own"]) and not own and row is not None
            row = {"row": cell["row"], "heads": cell["row"].split(" | "), "rule": rule, "fields": {}}
            own = bool(cell["own"])
        several = place in row["fields"]
        field = {"text": cell["printed"] or cell["text"], "span": 1 if cell["column"] else columns, "cells": [cell]}
        field |= {"bold": cell["bold"], "mark": cell["mark"]}
        if several:
            field = row["fields"][place] | {"bold": "", "mark": "", "cells": [*row["fields"][place]["cells"], cell]}
        row["fields"][place] = field
    if row is not None:
        yield row


def render(template: Path, **context: Any) -> str:
    """Fills `template`: `<< expression >>`, `<% statement %>`, `<# remark #>`.

    Filters: `stacked` sets the lines of a title below each other; `comment` prints text for a LaTeX comment, on one
    line and not escaped; `printed` sets a field.

    Raises:
        ValueError: the template is missing, malformed, or asks for a name that it was not given.
    """
    return _filled(template, escape, lambda found: found.render(context))


def block(template: Path, name: str, context: dict[str, Any]) -> str:
    """One block of a template, not escaped and on one line; errors as for `render`."""
    return one_line(_filled(template, str, lambda found: "".join(found.blocks[name](found.new_context(context)))))


def _filled(template: Path, finalize: Callable[[object], str], write: Callable[[jinja2.Template], str]) -> str:
    environment = jinja2.Environment(
        block_start_string="<%", block_end_string="%>",
        variable_start_string="<<", variable_end_string=">>",
        comment_start_string="<#", comment_end_string="#>",
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined, finalize=finalize, autoescape=False,
        loader=jinja2.FileSystemLoader(template.parent),
    )  # fmt: skip
    environment.filters |= {"stacked": stacked, "printed": printed, "comment": lambda value: Latex(one_line(value))}
    return fill(environment, template, write)


def fill(environment: jinja2.Environment, template: Path, write: Callable[[jinja2.Template], str]) -> str:
    """Raises ValueError naming the template when it is missing, cut short, malformed or asks for an unknown name."""
    text = read_text(template, RESTORE)
    marks = (environment.variable_start_string, environment.block_start_string)
    if not text.endswith("\n") or not any(mark in text for mark in marks):
        raise ValueError(f"{template}: cut short, or no template; {RESTORE}")
    try:
        return write(environment.get_template(template.name))
    except KeyError as error:
        raise ValueError(f"{template}: has no block {error}; add it, or {RESTORE}") from None
    except jinja2.TemplateError as error:
        raise ValueError(f"{template}: {error}; correct it, or {RESTORE}") from None
