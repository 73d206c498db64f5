"""Comparison with the paper on the page: verdicts, and the changes by completion in both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path

from residual_mass.files import read_csv
from residual_mass.paper.comparison import by_cell
from residual_mass.paper.comparison.by_cell import AGREES, DIFFERS, NOT_COMPARABLE, NOT_RUN
from residual_mass.paper.readers import optional
from residual_mass.paper.table import Cell, Place, Table
from residual_mass.paper.tables.tally import by_family, changes, main_texts

COUNTED = {AGREES: "agree", DIFFERS: "differ", NOT_COMPARABLE: "not comparable", NOT_RUN: "not run"}
"""Words on the page for values by verdict."""
SWEEPS = ("natural_main", "ruler_sweep", "babilong_sweep", "stress_1pct")
"""Tables with one set of feature maps, which share some cells."""


@dataclass(frozen=True)
class Compared:
    """A published value, the study's in the same place (empty if there is none), and the verdict."""

    table: str
    place: Place
    published: str
    ours: str
    verdict: str
    reason: str

    @property
    def kind(self) -> str:
        """The verdict without its number."""
        return DIFFERS if self.verdict.startswith(DIFFERS) else self.verdict


@dataclass(frozen=True)
class Standing:
    """Counts of published values by table and verdict.

    Attributes:
        reasons: verdict, reason and number of values, the most frequent first.
    """

    by_table: dict[str, Counter[str]]
    reasons: list[tuple[str, str, int]]

    @property
    def all(self) -> Counter[str]:
        return sum(self.by_table.values(), Counter())


@dataclass(frozen=True)
class Change:
    """A cell's printed change from TopK to completion, and its position on the axis in percent from the left."""

    text: str
    at: str


@dataclass(frozen=True)
class Family:
    """Changes of a family of cells, in the paper and in the study."""

    title: str
    published: tuple[Change, ...]
    ours: tuple[Change, ...]


@dataclass(frozen=True)
class ChangesFigure:
    """All families on one axis from -`limit` to `limit`."""

    limit: str
    families: tuple[Family, ...]


def load_comparison(path: Path) -> list[Compared]:
    return [_compared(row) for row in read_csv(path, by_cell.COLUMNS, "comparison")]


def _compared(row: Mapping[str, str]) -> Compared:
    names = ("backbone", "benchmark", "task", "corpus", "length", "method", "quantity", "implementation")
    place = Place(
        **{name: row[name] for name in names},
        budget_percent=optional(row["budget_percent"]),
        maps=row["maps"] or None,
        batch=int(row["batch"]) if row["batch"] else None,
    )
    return Compared(row["table"], place, *(row[name] for name in ("published", "ours", "verdict", "reason")))


def standing(values: Iterable[Compared]) -> Standing:
    by_table: dict[str, Counter[str]] = {}
    reasons: Counter[tuple[str, str]] = Counter()
    for value in values:
        by_table.setdefault(value.table, Counter())[value.kind] += 1
        if value.reason:
            reasons[value.kind, value.reason] += 1
    return Standing(by_table, [(*key, count) for key, count in reasons.most_common()])


def sweep_cells(tables: Iterable[Table]) -> list[Cell]:
    """Returns the values of the sweeps, table by table."""
    by_label = {table.label: table.evaluated for table in tables}
    return [cell for label in SWEEPS for cell in by_label.get(label, ())]


def changes_figure(values: Sequence[Compared], tables: Sequence[Table]) -> ChangesFigure | None:
    """Places changes from TopK to completion, in the paper and in the study, on one axis; None if there are none."""
    theirs = {replace(value.place, maps=None): value.published for value in values if value.table in SWEEPS}
    published, ours = _changes(theirs), _changes(main_texts(sweep_cells(tables)))
    sizes = [abs(each) for found in (published, ours) for family in found.values() for each in family]
    if not sizes:
        return None
    limit = max(max(sizes), Decimal("0.01"))
    families = [
        Family(title, *(tuple(_change(each, limit) for each in found.get(title, ())) for found in (published, ours)))
        for title in dict.fromkeys([*published, *ours])
    ]
    return ChangesFigure(f"{limit:.3f}", tuple(families))


def _changes(texts: Mapping[Place, str]) -> dict[str, list[Decimal]]:
    """Returns changes by family of cells, in ascending order."""
    found = {family: sorted(changes(each)) for family, each in by_family(texts).items()}
    return {family: each for family, each in found.items() if each}


def _change(value: Decimal, limit: Decimal) -> Change:
    return Change(f"{value:+z.3f}", f"{50 + 47 * value / limit:.2f}")
