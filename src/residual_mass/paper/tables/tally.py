"""How often residual completion beats another method, counted as a reader of the printed table would count."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal

from residual_mass.paper.cells import Point
from residual_mass.paper.titles import family_title


@dataclass(frozen=True)
class Tally:
    """Cells in which top-k with completion is above, equal to and below another method, and the mean change of the
    score.
    """

    wins: int
    ties: int
    losses: int
    mean_change: Decimal

    @property
    def cells(self) -> int:
        return self.wins + self.ties + self.losses


def tally(texts: Mapping[Point, str], other: str = "topk") -> Tally | None:
    """Counts over the cells with one of the method `other` beside them, at the printed precision; None when there is
    none.
    """
    found = list(changes(texts, other))
    if not found:
        return None
    wins, losses = sum(change > 0 for change in found), sum(change < 0 for change in found)
    return Tally(wins, len(found) - wins - losses, losses, sum(found, Decimal()) / len(found))


def tally_by_family(texts: Mapping[Point, str], other: str = "topk") -> dict[str, Tally]:
    """One tally per benchmark, or per family of LongBench's tasks, in the table's order."""
    families: dict[str, dict[Point, str]] = {}
    for point, text in texts.items():
        families.setdefault(family_title(point), {})[point] = text
    counted = {family: tally(of_family, other) for family, of_family in families.items()}
    return {family: each for family, each in counted.items() if each is not None}


def changes(texts: Mapping[Point, str], other: str = "topk") -> Iterable[Decimal]:
    """Printed differences. A point that names its maps has no partner: variants do not stand for the method."""
    for point, text in texts.items():
        partner = replace(point, method=other)
        if point.method == "topk_phi" and partner in texts:
            yield Decimal(text) - Decimal(texts[partner])
