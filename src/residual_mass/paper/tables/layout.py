"""The registry of tables, and common parts of their layout: backbones, budgets, lengths, methods and maps."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from residual_mass.metrics import budget_text, written_budget
from residual_mass.paper import published
from residual_mass.paper.cells import COMMON, PLACEMENT, cross_join, layout_part
from residual_mass.paper.frames import typed
from residual_mass.paper.titles import OWN_ROW, method_title, text_title
from residual_mass.spec.labels import PAPER_METHODS
from residual_mass.spec.settings import length_and_variant
from residual_mass.spec.specs import ReportSpec, TableSpec

Rows = Mapping[str, pd.DataFrame]
"""Result rows by stage, as `results.load_results` reads them."""


@dataclass(frozen=True)
class Table:
    """A registered table.

    Attributes:
        of: part of a study that it shows, from which `study.tables` takes files, backbones, lengths and budgets.
        heads: titles of the columns before the values, that of the blocks first where they have a column.
        keys: columns that identify a cell; they begin the CSV.
        extra: further columns of the CSV.
        benchmarks: benchmarks whose scores it shows.
        digits: format of the floats in the CSV, that of the stage whose numbers it shows.
    """

    label: str
    make: Callable[[Rows, TableSpec], pd.DataFrame]
    of: str
    heads: tuple[str, ...]
    keys: str
    extra: str = ""
    benchmarks: tuple[str, ...] = ()
    digits: str = ".6g"

    def cells(self, rows: Rows, show: TableSpec) -> pd.DataFrame:
        """Returns the cells of a study's table, typed, with the columns of its CSV.

        Raises:
            ValueError: a cell that the study evaluates has no result.
        """
        cells = self.make(rows, show).assign(table=show.label)
        key = ["table", *self.keys.split()]
        return typed(cells, [*key, *COMMON, *self.extra.split(), *PLACEMENT])


TABLES: list[Table] = []
RUNTIME_PREFIX = "runtime_"
"""Prefix of the labels of latency tables; the backbone follows."""


def table(label: str, **facts: Any) -> Callable[[Callable[..., pd.DataFrame]], Callable[..., pd.DataFrame]]:
    """Registers a table under a label; `facts` are fields of `Table`."""

    def register(make: Callable[..., pd.DataFrame]) -> Callable[..., pd.DataFrame]:
        TABLES.append(Table(label, make, **facts))
        return make

    return register


def find(label: str) -> Table:
    """Returns the table of a label. Raises ValueError when there is none, or there are two."""
    of_runtime = re.fullmatch(rf"{RUNTIME_PREFIX}[a-z0-9][a-z0-9._-]*", label)
    name = RUNTIME_PREFIX if of_runtime else label
    found = [entry for entry in TABLES if entry.label == name]
    if not found:
        known = ", ".join(each.label for each in TABLES)
        raise ValueError(f"table {label!r} is unknown; known are {known}<backbone>")
    if len(found) > 1:
        modules = " and ".join(entry.make.__module__ for entry in found)
        raise ValueError(f"table {label!r} is registered in {modules}; give one of them another label")
    return found[0]


# ---- parts -----------------------------------------------------------------------------------------------------------


def backbones(show: TableSpec) -> pd.DataFrame:
    titles = [show.backbone_titles[name] for name in show.backbones]
    return layout_part("group", titles, backbone=show.backbones)


def backbones_by_text(show: TableSpec, corpora: Iterable[str]) -> pd.DataFrame:
    """Returns a group of columns per backbone and text."""
    groups = cross_join(backbones(show), layout_part("corpus", dict.fromkeys(corpora)))
    texts = groups["corpus"].map(text_title)
    return groups.assign(group=groups["group"] + "\n" + texts)


def budgets(show: TableSpec) -> pd.DataFrame:
    percents = [written_budget(budget) for budget in show.budgets]
    return layout_part("column", map(budget_title, percents), budget_percent=percents)


def budget_title(percent: float) -> str:
    """Returns the title of a column of a budget, such as "0.5%"."""
    return f"{budget_text(percent)}%"


def middle_budget(show: TableSpec | ReportSpec) -> float:
    """Returns the budget in the middle, the lower one of two."""
    ordered = sorted(map(written_budget, show.budgets))
    return ordered[(len(ordered) - 1) // 2]


def lengths(show: TableSpec, layout: str = "column") -> pd.DataFrame:
    return layout_part(layout, show.lengths, length=show.lengths)


def method_rows(show: TableSpec) -> pd.DataFrame:
    """Returns the paper's methods, then the study's own."""
    own = dict.fromkeys(PAPER_METHODS, False)
    own |= dict.fromkeys(show.own_methods, True)
    titles = [method_title(name) + OWN_ROW * own[name] for name in own]
    return layout_part("row", titles, method=own, own=own.values())


def map_rows(show: TableSpec, title: Callable[[str], str]) -> pd.DataFrame:
    """Returns full attention and top-K, a row per feature maps (the paper's first), then the study's own methods."""
    own = dict.fromkeys(show.maps, False)
    if show.label in published.labels():
        theirs = published.variants_of(show.label)
        own = {maps: length_and_variant(maps)[1] not in theirs for maps in show.maps}
    names = sorted(show.maps, key=own.__getitem__)
    titles = [title(name) + OWN_ROW * own[name] for name in names]
    maps = layout_part("row", titles, maps=names, own=[own[name] for name in names])
    maps = maps.assign(method="topk_phi")
    methods = method_rows(show).assign(maps="")
    without_maps = methods[:2]
    of_the_study = methods[len(PAPER_METHODS) :]
    return pd.concat([without_maps, maps, of_the_study], ignore_index=True).astype({"own": bool})
