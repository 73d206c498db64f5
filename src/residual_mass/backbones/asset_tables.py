"""Markdown tables made of the encyclopaedia's paragraphs in the assets: people, films, albums and places.

A paragraph that is written in the usual form of its kind becomes one row. Names, dates and numbers are real ones, and
no row is in two tables.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass

MONTH = "(?:January|February|March|April|May|June|July|August|September|October|November|December)"
DATE = rf"(?:\d{{1,2}} )?{MONTH}(?: \d{{1,2}},)? \d{{4}}"
NAME = r"(?:[A-Z][\w'-]+|[A-Z]\.)"
NAMES = rf"{NAME}(?:,? (?:and |de |van |von )?{NAME})*"
WORDS = r"(?:[^.,()]|, |\.\w)+"
"""What stands before a full stop, which is not in an abbreviation."""
PLACE = "(?:city|town|village|township|community|place|municipality|borough|suburb|district)"


@dataclass(frozen=True)
class Table:
    """One kind of table.

    Attributes:
        columns: the headings.
        row: matches the paragraphs that make a row, with a group for each column; a group without a match is an empty
            cell.
    """

    columns: tuple[str, ...]
    row: re.Pattern[str]

    @property
    def head(self) -> str:
        return f"{_line(self.columns)}\n{_line(['---'] * len(self.columns))}"

    def rows(self, paragraphs: Sequence[str]) -> list[str]:
        """Returns the lines below the head, without repeated ones.

        Args:
            paragraphs: texts that begin with a line for the title.
        """
        found = filter(None, map(self.row.match, paragraphs))
        return list(dict.fromkeys(_line(list(map(_cell, each.groups()))) for each in found))


def _cell(text: str | None) -> str:
    return html.unescape(text or "").strip(" ,").replace("|", "/")


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


TABLES = (
    Table(
        ("Name", "Born", "Died", "Known as"),
        # Titles without digits, as those with a year are events from one date to another.
        re.compile(rf"(\D+)\n[^(]{{,80}}\([^()]*?({DATE})(?:[^()]*?({DATE}))?[^()]*\) (?:is|was) an? ([^.,;()]+)"),
    ),
    Table(
        ("Film", "Year", "Kind", "Director", "Cast"),
        re.compile(
            rf"(.+)\n.*? is an? (\d{{4}}) ([^.]*?film)\b.*? directed by ({NAMES})(?:.*?\b(?:starring|stars) ({NAMES}))?"
        ),
    ),
    Table(
        ("Album", "Kind", "Artist", "Released", "Label"),
        re.compile(
            rf"(.+)\n.*? is (?:the|an?) ([^.\"]*?album)\b[^.\"]*? by ({WORDS}).*?\breleased\b[^.]*?({DATE}|\d{{4}})"
            rf"(?:[^.]*? ({NAMES} Records))?"
        ),
    ),
    Table(
        ("Place", "Kind", "In", "Population"),
        re.compile(
            rf"(.+)\n.*? is an? ([\w -]*{PLACE}) (?:located )?in ({WORDS}).*?"
            r"\bpopulation\b[^.]*?(\d{1,3}(?:,\d{3})+)"
        ),
    ),
)
