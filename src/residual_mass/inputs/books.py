"""Books of Project Gutenberg, cut out of files that hold several, with headers and licences."""

from __future__ import annotations

import re

BEGINS = re.compile(r"\*\*\* ?START OF TH(E|IS) PROJECT GUTENBERG", re.IGNORECASE)
IS_OVER = re.compile(
    r"The Project Gutenberg eBook of|End of (the )?Project Gutenberg|\*\*\* ?END OF TH(E|IS) PROJECT GUTENBERG",
    re.IGNORECASE,
)
"""Lines around the text of a book."""


def books_of(text: str) -> list[list[str]]:
    """Returns the paragraphs of each book in a file, without Project Gutenberg's own text."""
    books: list[list[str]] = [[]]
    inside = True  # the first book may have lost its header
    for line in text.splitlines():
        if BEGINS.match(line):
            inside = True
            books.append([])
        elif IS_OVER.match(line):
            inside = False
        elif inside:
            books[-1].append(line)
    return [re.split(r"\n\s*\n", "\n".join(lines).strip()) for lines in books if any(lines)]
