"""Text with a little mathematics: one source for LaTeX and HTML."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

from latex2mathml.converter import convert
from markupsafe import Markup

PART = re.compile(r"\$(?P<mathematics>[^$]*)\$|\\(?P<escaped>[^A-Za-z0-9])|(?P<plain>[^$\\]+)", re.DOTALL)


class Marked(str):
    r"""Text in which `$...$` is mathematics as LaTeX writes it; a backslash makes a special character plain (`\$`), and
    a line break is one.
    """


def marked(text: object) -> Marked:
    """Marks plain text; what is marked already stays as it is."""
    if isinstance(text, Marked):
        return text
    return Marked(re.sub(r"([\\$])", r"\\\1", one_line(text)))


def one_line(text: object) -> str:
    """Control characters and runs of white space as single spaces."""
    return " ".join(re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", " ", str(text)).split())


def parts(text: Marked) -> Iterator[tuple[str, bool]]:
    """The pieces of a text, each with whether it is mathematics.

    Raises:
        ValueError: the text has a dollar without its counterpart, or a LaTeX command outside of mathematics.
    """
    at = 0
    while at < len(text):
        part = PART.match(text, at)
        if part is None:
            raise ValueError(f"{text[at : at + 30]!r}: captions are plain text with mathematics between dollars")
        at = part.end()
        yield part[part.lastgroup or 0], part.lastgroup == "mathematics"


def to_html(text: str) -> Markup:
    """Text as HTML, mathematics as MathML."""
    return Markup("").join(_mathml(part) if math else _escaped(part) for part, math in parts(marked(text)))


@functools.cache
def _mathml(latex: str) -> Markup:
    """A number is set as the text around it, with a minus for the hyphen."""
    if re.fullmatch(r"[+-]?[0-9.]+", latex):
        return Markup(latex.replace("-", "−"))
    return Markup(convert(latex, xmlns="").replace(' xmlns=""', ""))  # HTML needs no namespace


def _escaped(text: str) -> Markup:
    return Markup("<br>").join(text.split("\n"))
