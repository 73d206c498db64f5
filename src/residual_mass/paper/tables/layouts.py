"""What each score table shows: blocks of rows by groups of columns, and the place of every cell."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from residual_mass.benchmarks.catalogue import BENCHMARKS, too_long
from residual_mass.core.settings import length_and_variant, tokens_of
from residual_mass.paper import published
from residual_mass.paper.marked import Marked
from residual_mass.paper.table import ALL_TASKS, Place
from residual_mass.paper.titles import (
    OURS,
    OWN_ROW,
    benchmark_title,
    method_title,
    trained_at_title,
    variant_title,
    width_title,
)
from residual_mass.study.labels import METHODS, PUBLISHED
from residual_mass.study.specs import TableSpec

PUBLISHED_D_PHI = 64
"""Feature dimension of the paper's own maps, which its table of dimensions names."""


@dataclass(frozen=True)
class Slice:
    """A block, a row or a column: its title, and the fields of a Place that it fixes.

    Attributes:
        own: of a row, whether the paper's table lacks it; such rows come last and are never bold.
    """

    title: str
    fixed: dict[str, Any]
    own: bool = False


@dataclass(frozen=True)
class Layout:
    """Blocks of rows by one group of columns per backbone.

    Attributes:
        heads: titles of the columns before the values: that of the blocks' titles, where they have any, and that of the
            rows.
        blocks: a table that is not divided has one, without a title.
        budget_percent: the budget of the whole table, where the columns do not fix it.
        bold: whether the best of a column is set in bold.
    """

    heads: tuple[str, ...]
    backbones: tuple[str, ...]
    blocks: tuple[Slice, ...]
    rows: tuple[Slice, ...]
    columns: tuple[Slice, ...]
    budget_percent: float | None = None
    bold: bool = True

    def places(self, block: Slice, row: Slice, backbone: str) -> tuple[Place, ...]:
        """Places in a row of a group, one per column; a single one where the columns do not tell them apart."""
        table = {"backbone": backbone, "budget_percent": self.budget_percent, "task": ALL_TASKS}
        merged = (table | block.fixed | column.fixed | row.fixed for column in self.columns)
        return tuple(dict.fromkeys(Place(**fields) for fields in merged))

    def all_places(self) -> tuple[Place, ...]:
        """Every place of the table, block by block."""
        return self._places_of(self.rows)

    def own_places(self) -> set[Place]:
        """Places in rows that the paper's table lacks."""
        return set(self._places_of(row for row in self.rows if row.own))

    def _places_of(self, rows: Iterable[Slice]) -> tuple[Place, ...]:
        each = itertools.product(self.blocks, rows, self.backbones)
        return tuple(dict.fromkeys(place for where in each for place in self.places(*where)))


@dataclass(frozen=True)
class ScoreTable:
    """How a score table is laid out, and the benchmarks whose results it shows; none where it compares maps."""

    layout: Callable[[TableSpec], Layout]
    benchmarks: tuple[str, ...] = ()


def layout_of(spec: TableSpec) -> Layout:
    """The layout of a score table. Raises ValueError when the spec does not fit it."""
    return LAYOUTS[spec.label].layout(spec)


def evaluated(place: Place, spec: TableSpec) -> bool:
    """Whether the study has this cell: its benchmark at the length, and a task that fits into it."""
    return (
        place.benchmark in spec.benchmarks
        and place.length in spec.lengths_of.get(place.benchmark, spec.lengths)
        and place.task not in too_long(place.benchmark, tokens_of(place.length))
    )


def _sweep(benchmark: str) -> Callable[[TableSpec], Layout]:
    """Lengths by budgets."""

    def layout(spec: TableSpec) -> Layout:
        blocks = tuple(Slice(length, {"length": length, "benchmark": benchmark}) for length in spec.lengths)
        return Layout(("Length", "Method"), spec.backbones, blocks, _method_rows(spec), _budget_columns(spec))

    return layout


def _natural_main(spec: TableSpec) -> Layout:
    """LongBench's tasks by budgets."""
    place = {"benchmark": "longbench", "length": _only(spec, "lengths")}
    blocks = tuple(Slice(task.title, place | {"task": task.name}) for task in BENCHMARKS["longbench"])
    return Layout(("Task", "Method"), spec.backbones, blocks, _method_rows(spec), _budget_columns(spec))


def _stress_1pct(spec: TableSpec) -> Layout:
    """Benchmarks by lengths, at the middle one of the budgets: 1 % of the paper's four."""
    blocks = tuple(Slice(benchmark_title(name), {"benchmark": name}) for name in ("ruler", "babilong"))
    middle = sorted(spec.budgets)[(len(spec.budgets) - 1) // 2]
    return Layout(("Benchmark", "Method"), spec.backbones, blocks, _method_rows(spec), _length_columns(spec), middle)


def _cross_length_mismatch(spec: TableSpec) -> Layout:
    """Lengths that maps were trained at by lengths that they are used at. The paper sets nothing in bold here: the rows
    do not compete.
    """
    rows = _maps_rows(spec, trained_at_title)
    block = Slice("", {"benchmark": "ruler"})
    budget = _only(spec, "budgets")
    return Layout(("Method",), spec.backbones, (block,), rows, _length_columns(spec), budget, bold=False)


def _ablation(spec: TableSpec) -> Layout:
    """Variants of the maps by benchmarks."""
    length = _only(spec, "lengths")
    names = ("ruler", "babilong")
    columns = tuple(Slice(f"{benchmark_title(name)} {length}", {"benchmark": name}) for name in names)
    names_width = spec.study == PUBLISHED and spec.label == "dphi_ablation"
    rows = _maps_rows(spec, _published_width_title if names_width else variant_title)
    block = Slice("", {"length": length})
    return Layout(("Feature maps",), spec.backbones, (block,), rows, columns, _only(spec, "budgets"))


def _published_width_title(maps: str) -> Marked:
    title = variant_title(maps)
    return Marked(f"{OURS} ({width_title(PUBLISHED_D_PHI)})") if title == OURS else title


LAYOUTS = {
    "natural_main": ScoreTable(_natural_main, ("longbench",)),
    "stress_1pct": ScoreTable(_stress_1pct, ("ruler", "babilong")),
    "ruler_sweep": ScoreTable(_sweep("ruler"), ("ruler",)),
    "babilong_sweep": ScoreTable(_sweep("babilong"), ("babilong",)),
    "cross_length_mismatch": ScoreTable(_cross_length_mismatch),
    "dphi_ablation": ScoreTable(_ablation),
    "loss_ablation": ScoreTable(_ablation),
}
"""By the table's label."""


def _method_rows(spec: TableSpec) -> tuple[Slice, ...]:
    return tuple(Slice(method_title(method), _fixed_by(method)) for method in METHODS) + _own_rows(spec)


def _own_rows(spec: TableSpec) -> tuple[Slice, ...]:
    """The study's methods that the paper lacks."""
    return tuple(Slice(Marked(method_title(name) + OWN_ROW), {"method": name}, own=True) for name in spec.own_methods)


def _maps_rows(spec: TableSpec, title_of: Callable[[str], Marked]) -> tuple[Slice, ...]:
    """The two baselines, a row per feature maps (those of the paper's table first), then our methods."""
    if not spec.maps:
        raise ValueError(f"table {spec.label}: maps is empty; list the labels of the feature maps to compare")
    baselines = tuple(Slice(method_title(method), _fixed_by(method)) for method in ("full", "topk"))
    theirs = published.variants_of(spec.label) if spec.label in published.labels() else None
    rows = [(maps, theirs is not None and length_and_variant(maps)[1] not in theirs) for maps in spec.maps]
    of_maps = tuple(
        Slice(Marked(title_of(maps) + OWN_ROW * own), {"method": "topk_phi", "maps": maps}, own)
        for maps, own in sorted(rows, key=lambda row: row[1])
    )
    return baselines + of_maps + _own_rows(spec)


def _fixed_by(method: str) -> dict[str, Any]:
    """Full attention has no budget, whatever the column."""
    return {"method": method, "budget_percent": None} if method == "full" else {"method": method}


def _budget_columns(spec: TableSpec) -> tuple[Slice, ...]:
    return tuple(Slice(f"{budget:g}%", {"budget_percent": budget}) for budget in spec.budgets)


def _length_columns(spec: TableSpec) -> tuple[Slice, ...]:
    return tuple(Slice(length, {"length": length}) for length in spec.lengths)


def _only(spec: TableSpec, field: str) -> Any:
    """The single value of a field of which the table shows one."""
    values = getattr(spec, field)
    if len(values) != 1:
        raise ValueError(f"table {spec.label}: {field} has {len(values)} values, but the table shows one; give one")
    return values[0]
