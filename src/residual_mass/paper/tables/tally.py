"""How often residual completion beats another method, counted as a reader of the printed table would count."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal

from residual_mass.metrics import Metric
from residual_mass.paper.table import Cell, Place
from residual_mass.paper.titles import family_title

Texts = Mapping[Place, str]
"""Printed values. Of scores, places that name their maps are variants, which do not stand for the method."""


@dataclass(frozen=True)
class Tally:
    """Cells in which top-k with completion is better than, equal to and worse than another method, the mean change,
    and one of the metrics that changed, which all have one direction.
    """

    wins: int
    ties: int
    losses: int
    mean_change: Decimal
    metric: Metric

    @property
    def cells(self) -> int:
        return self.wins + self.ties + self.losses


def main_texts(cells: Iterable[Cell]) -> dict[Place, str]:
    """The scores of tables that have one set of feature maps, which therefore need no name."""
    return {replace(cell.place, maps=None): cell.text for cell in cells if cell.value is not None}


def tally(texts: Texts, other: str = "topk") -> Tally | None:
    """Counts at the printed precision, over the cells of a family that the method `other` has, too; None when there is
    none.
    """
    found = list(changes(texts, other))
    if not found:
        return None
    metric = next(iter(texts)).metric
    good = [metric.goodness(change) for change in found]
    wins, losses = sum(each > 0 for each in good), sum(each < 0 for each in good)
    return Tally(wins, len(found) - wins - losses, losses, sum(found, Decimal()) / len(found), metric)


def tally_by_family(texts: Texts, other: str = "topk") -> dict[str, Tally]:
    """One tally per benchmark, or per family of LongBench's tasks, in the table's order."""
    tallies = {family: tally(each, other) for family, each in by_family(texts).items()}
    return {family: each for family, each in tallies.items() if each is not None}


def by_family(texts: Texts) -> dict[str, dict[Place, str]]:
    families: dict[str, dict[Place, str]] = {}
    for place, text in texts.items():
        families.setdefault(family_title(place), {})[place] = text
    return families


def changes(texts: Texts, other: str = "topk") -> Iterator[Decimal]:
    """Printed differences from the method `other` to completion."""
    for place, text in texts.items():
        partner = replace(place, method=other)
        if place.method == "topk_phi" and partner in texts:
            yield Decimal(text) - Decimal(texts[partner])
