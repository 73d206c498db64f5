"""The registry of tables, and common parts of their layout: backbones, budgets, lengths, methods and maps."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from residual_mass.paper import published
from residual_mass.paper.cells import COMMON, SHAPE, cross, part
from residual_mass.paper.titles import OWN_ROW, method_title, text_title
from residual_mass.spec.labels import METHODS
from residual_mass.spec.settings import length_and_variant
from residual_mass.spec.specs import TableSpec

Rows = Mapping[str, pd.DataFrame]
"""Result rows by stage, as `cells.load` reads them."""


@dataclass(frozen=True)
class Table:
    """A registered table.

    Attributes:
        of: part of a study that it shows, from which `study.tables` takes files, backbones, lengths and budgets.
        heads: titles of the columns before the values, that of the blocks first where they have a column.
        keys: columns that identify a cell; they begin the CSV.
        extra: further columns of the CSV.
        benchmarks: benchmarks whose scores it shows.
    """

    label: str
    make: Callable[[Rows, TableSpec], pd.DataFrame]
    of: str
    heads: tuple[str, ...]
    keys: str
    extra: str = ""
    benchmarks: tuple[str, ...] = ()

    def cells(self, rows: Rows, show: TableSpec) -> pd.DataFrame:
        """Returns the cells of a study's table as strings, with the columns of its CSV; unknown fields are empty.

        Raises:
            ValueError: a cell that the study evaluates has no result.
        """
        cells = self.make(rows, show).assign(table=show.label)
        flags = {name: cells[name].map({True: "1"}) for name in ("bold", "own") if name in cells}
        columns = ["table", *self.keys.split(), *COMMON, *self.extra.split(), *SHAPE]
        return cells.assign(**flags).reindex(columns=columns).astype(object).fillna("").astype(str)


TABLES: list[Table] = []
RUNTIME = "runtime_"
"""Prefix of the labels of latency tables; the backbone follows."""


def table(label: str, **facts: Any) -> Callable[[Callable[..., pd.DataFrame]], Callable[..., pd.DataFrame]]:
    """Registers a table under a label; `facts` are fields of `Table`."""

    def register(make: Callable[..., pd.DataFrame]) -> Callable[..., pd.DataFrame]:
        TABLES.append(Table(label, make, **facts))
        return make

    return register


def find(label: str) -> Table:
    """Returns the table of a label. Raises ValueError when there is none, or there are two."""
    name = RUNTIME if re.fullmatch(rf"{RUNTIME}[a-z0-9][a-z0-9._-]*", label) else label
    found = [entry for entry in TABLES if entry.label == name]
    if not found:
        raise ValueError(f"table {label!r} is unknown; known are {', '.join(each.label for each in TABLES)}<backbone>")
    if len(found) > 1:
        modules = " and ".join(entry.make.__module__ for entry in found)
        raise ValueError(f"table {label!r} is registered in {modules}; give one of them another label")
    return found[0]


# ---- parts -----------------------------------------------------------------------------------------------------------


def backbones(show: TableSpec) -> pd.DataFrame:
    return part("group", (show.backbone_titles[name] for name in show.backbones), backbone=show.backbones)


def backbones_by_text(show: TableSpec, corpora: Iterable[str]) -> pd.DataFrame:
    """Returns a group of columns per backbone and text."""
    groups = cross(backbones(show), part("corpus", dict.fromkeys(corpora)))
    return groups.assign(group=groups["group"] + "\n" + groups["corpus"].map(text_title))


def budgets(show: TableSpec) -> pd.DataFrame:
    names = [f"{budget:g}" for budget in show.budgets]
    return part("column", (f"{name}%" for name in names), budget_percent=names)


def middle_budget(show: TableSpec) -> str:
    return f"{sorted(show.budgets)[(len(show.budgets) - 1) // 2]:g}"


def lengths(show: TableSpec, layout: str = "column") -> pd.DataFrame:
    return part(layout, show.lengths, length=show.lengths)


def method_rows(show: TableSpec) -> pd.DataFrame:
    """Returns the paper's methods, then the study's own."""
    own = dict.fromkeys(METHODS, False) | dict.fromkeys(show.own_methods, True)
    titles = [method_title(name) + OWN_ROW * own[name] for name in own]
    return part("row", titles, method=own).assign(own=list(own.values()))


def map_rows(show: TableSpec, title: Callable[[str], str]) -> pd.DataFrame:
    """Returns full attention and top-K, a row per feature maps (the paper's first), then the study's own methods."""
    theirs = published.variants_of(show.label) if show.label in published.labels() else None
    own = {maps: theirs is not None and length_and_variant(maps)[1] not in theirs for maps in show.maps}
    names = sorted(show.maps, key=own.__getitem__)
    maps = part("row", (title(name) + OWN_ROW * own[name] for name in names), maps=names)
    maps = maps.assign(method="topk_phi", own=[own[name] for name in names])
    methods = method_rows(show).assign(maps="")
    return pd.concat([methods[:2], maps, methods[len(METHODS) :]], ignore_index=True)
