"""How the values of a study's page stand beside the paper's, and which way completion moves them in both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from residual_mass.files import finite_field, only_value, read_csv
from residual_mass.paper.cells import LEFT_OUT, Point
from residual_mass.paper.comparison import by_cell, picture
from residual_mass.paper.comparison.by_cell import AGREES, DIFFERS, NOT_COMPARABLE, NOT_RUN
from residual_mass.paper.tables.tally import changes
from residual_mass.paper.titles import family_title

COUNTED = {AGREES: "agree", DIFFERS: "differ", NOT_COMPARABLE: "not comparable", NOT_RUN: "not run"}
"""What is said of the values with a verdict."""
SWEEPS = ("natural_main", "ruler_sweep", "babilong_sweep", "stress_1pct")
"""Tables of one set of feature maps, some of whose cells are the same."""
CLAIM_VERDICTS = ("holds", "undecided", "does not hold")
CLAIM_COLUMNS = (
    "study backbone statement shown_in corpus length k primary statistic estimate ci_low ci_high verdict".split()
)
REMEDY = "delete it and run the comparison stage again"

Row = dict[str, str]


@dataclass(frozen=True)
class Standing:
    """Published values by verdict: of every table, and why those that were not compared were not.

    Attributes:
        reasons: number of values by verdict and reason, the most frequent first.
    """

    by_table: dict[str, Counter[str]]
    reasons: list[tuple[str, str, int]]

    @property
    def all(self) -> Counter[str]:
        return sum(self.by_table.values(), Counter())


@dataclass(frozen=True)
class Change:
    """One cell's change from TopK to completion, in print, and where it lies on the axis (percent from the left)."""

    text: str
    at: str


@dataclass(frozen=True)
class Family:
    """Changes of a family of cells: those of the paper, and the study's."""

    title: str
    published: tuple[Change, ...]
    ours: tuple[Change, ...]


@dataclass(frozen=True)
class ChangesFigure:
    """All families on one axis, which ends at `limit` on either side."""

    limit: str
    families: tuple[Family, ...]


def load_comparison(path: Path, study: str) -> list[Row]:
    """Raises ValueError naming the file when it is missing, damaged or of another study."""
    rows = read_csv(path, by_cell.COLUMNS, "comparison")
    _check_study(rows, path, study, REMEDY)
    _check_words(rows, path, "verdict", COUNTED, REMEDY)
    return rows


def load_picture(path: Path) -> list[Row]:
    """Raises ValueError naming the file when it is missing or damaged."""
    rows = read_csv(path, picture.COLUMNS, "comparison")
    _check_words(rows, path, "same_direction", ("yes", "no", ""), REMEDY)
    return rows


def load_claims(path: Path, study: str) -> list[Row]:
    """Raises ValueError naming the file when it is missing, damaged or of another study."""
    remedy = "delete it and run the findings stage again"
    rows = read_csv(path, CLAIM_COLUMNS, "findings")
    _check_study(rows, path, study, remedy)
    _check_words(rows, path, "verdict", CLAIM_VERDICTS, remedy)
    return rows


def standing(rows: Iterable[Row]) -> Standing:
    by_table: dict[str, Counter[str]] = {}
    reasons: Counter[tuple[str, str]] = Counter()
    for row in rows:
        verdict = _kind(row["verdict"])
        by_table.setdefault(row["table"], Counter())[verdict] += 1
        if row["reason"]:
            reasons[verdict, row["reason"]] += 1
    return Standing(by_table, [(*key, count) for key, count in reasons.most_common()])


def changes_figure(rows: Sequence[Row], lines: Sequence[Row], where: Path) -> ChangesFigure | None:
    """Changes from TopK to completion in the paper's cells and in a study's own; None where neither has any.

    Args:
        rows: of the comparison, which holds the published values.
        lines: of the CSVs beside the study's tables.

    Raises:
        ValueError: a published value is not a number; names file and line.
    """
    for number, row in enumerate(rows, start=2):
        if row["table"] in SWEEPS:
            finite_field(row, "published", f"{where}:{number}", REMEDY)
    published = _changes(sweep_texts(rows, "published"))
    ours = _changes(sweep_texts(lines, "text"))
    sizes = [abs(each) for found in (published, ours) for family in found.values() for each in family]
    if not sizes:
        return None
    limit = max(max(sizes), Decimal("0.01"))
    families = [
        Family(title, *(tuple(_change(each, limit) for each in found.get(title, ())) for found in (published, ours)))
        for title in dict.fromkeys([*published, *ours])
    ]
    return ChangesFigure(f"{limit:.3f}", tuple(families))


def sweep_texts(rows: Iterable[Mapping[str, str]], column: str) -> dict[Point, str]:
    """Printed values of the sweeps. Their maps need no name, and a cell that two tables show counts once."""
    return {
        Point(
            benchmark=row["benchmark"],
            length=row["length"],
            backbone=row["backbone"],
            method=row["method"],
            budget_percent=float(row["budget_percent"]) if row["budget_percent"] else None,
            task=row["task"],
        ): row[column]
        for row in rows
        if row["table"] in SWEEPS and row[column] != LEFT_OUT.text
    }


def _changes(texts: Mapping[Point, str]) -> dict[str, list[Decimal]]:
    """By family of cells, in rising order."""
    families: dict[str, dict[Point, str]] = {}
    for point, text in texts.items():
        families.setdefault(family_title(point), {})[point] = text
    found = {family: sorted(changes(of_family)) for family, of_family in families.items()}
    return {family: each for family, each in found.items() if each}


def _change(value: Decimal, limit: Decimal) -> Change:
    return Change(f"{value:+z.3f}", f"{50 + 47 * value / limit:.2f}")


def _check_study(rows: Sequence[Row], path: Path, study: str, remedy: str) -> None:
    if (found := only_value(rows, "study", path, remedy)) != study:
        raise ValueError(f"{path}: is of study {found!r}, not of {study!r}; {remedy}")


def _check_words(rows: Sequence[Row], path: Path, name: str, known: Iterable[str], remedy: str) -> None:
    for number, row in enumerate(rows, start=2):
        if _kind(row[name]) not in known:
            raise ValueError(f"{path}:{number}: unknown {name} {row[name]!r}; {remedy}")


def _kind(verdict: str) -> str:
    """A verdict without the number that it may give."""
    return DIFFERS if verdict.startswith(f"{DIFFERS} by ") else verdict
