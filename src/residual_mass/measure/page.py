"""The answer on one self-contained HTML page, of the same words, rows and picture as its other files."""

from __future__ import annotations

from base64 import b64encode

import jinja2

from residual_mass.measure.answer import Answer
from residual_mass.measure.distances import Measured


def page(measured: Measured, answer: Answer, tables: dict[str, list[list[str]]], picture: bytes) -> str:
    """Renders the page.

    Args:
        tables: cells by text, a head first, with a mark before recommended rows.
        picture: a PNG.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("residual_mass.measure", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template("page.html.j2").render(
        title=f"{measured.title} tokens",
        tokens=measured.args.tokens,
        answer=answer,
        tables=tables,
        picture=b64encode(picture).decode(),
    )
