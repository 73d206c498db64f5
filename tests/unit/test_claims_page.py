"""docs/paper.md repeats the verdicts of the measured page, claim by claim."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
VERDICTS = ("holds", "undecided", "does not hold")


def rows(page: str, heads: str) -> list[list[str]]:
    """Cells of the table with these heads."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    table = text[text.index(heads) :].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def found(cells: list[str]) -> str:
    """Verdicts of settings in words, the most frequent first."""
    counts = Counter(cell.partition(":")[0] for cell in cells if cell)
    parts = [(verdict, counts[verdict]) for verdict in VERDICTS if counts[verdict]]
    if len(parts) == 1 and len(cells) > 1:
        return f"{parts[0][0]} in {'all' if parts[0][1] == 4 else 'both'}"
    return ", ".join(f"{verdict} in {count}" for verdict, count in parts) if len(cells) > 1 else parts[0][0]


def line_of(statement: str, cells: list[str]) -> list[str]:
    number = next(cell for cell in cells if cell).partition(": ")[2]
    shown = number.replace(", ", " to ").replace("[", "(").replace("]", ")")
    return [statement, found(cells), f"[{shown}](measured/mini_cpu.md#errors-of-attention-heads)"]


def test_every_statement_is_on_the_page_with_its_verdicts_and_its_number() -> None:
    measured = rows("measured/mini_cpu.md", "| statement | Wikipedia 2k |") + rows(
        "measured/mini_cpu.md", "| statement | verdict |"
    )
    told = rows("paper.md", "| the paper says | found | number |")
    expected = [line_of(statement, cells) for statement, *cells in measured]
    assert told[: len(expected)] == expected
    for _, verdict, link in told[len(expected) :]:
        assert verdict in VERDICTS and re.fullmatch(r"\[.+\]\(measured/mini_cpu\.md#[a-z-]+\)", link)
