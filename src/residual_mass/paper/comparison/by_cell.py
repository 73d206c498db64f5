"""The `comparison` stage: a verdict on every published cell, and the larger picture.

Compares the score tables, `exact_accounting` and costs (latencies and training time), but not `phi_param_count`, which
is arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path

from residual_mass.files import csv_text, write_text
from residual_mass.paper import published
from residual_mass.paper.comparison.comparability import OTHER_BACKBONE, obstacles, other_settings
from residual_mass.paper.comparison.picture import COLUMNS as PICTURE_COLUMNS
from residual_mass.paper.comparison.picture import picture as picture_of
from residual_mass.paper.published import DRAWN_ANEW, EXAMPLES, MODELS
from residual_mass.paper.table import Cell, Interval, format_score, load_table
from residual_mass.paper.tables import accounting_table, parameter_table, runtime_table, training_cost_table
from residual_mass.paper.tables.layouts import LAYOUTS
from residual_mass.paper.tables.render import make_published
from residual_mass.paper.tables.training_cost_table import WALL_CLOCK
from residual_mass.provenance import Record
from residual_mass.study.specs import ComparisonSpec

COMPARED = (
    *(label for label in LAYOUTS if label in published.labels()),
    accounting_table.LABEL,
    training_cost_table.LABEL,
    *runtime_table.PUBLISHED,
)
"""Labels of the compared tables."""
COLUMNS = (
    "table backbone benchmark task corpus length method budget_percent maps implementation batch quantity published "
    "published_bold ours ci_low ci_high n published_n verdict reason deviations study model_id weights source"
).split()
AGREES, DIFFERS, NOT_COMPARABLE, NOT_RUN = "agrees", "differs", "not comparable", "not run"
"""First words of verdicts."""
MAPS = {5, 6, 7, 10, 11, 12, 16}
"""Open points of docs/deviations.md on training and using feature maps."""
RULER, BABILONG, LATENCIES = {1, 2, 15, 17}, {1, 2, 3, 15}, {1, 10, 11}
DEVIATIONS = {
    "natural_main": MAPS | {1, 2, 13},
    "stress_1pct": MAPS | RULER | BABILONG | {13},
    "ruler_sweep": MAPS | RULER,
    "babilong_sweep": MAPS | BABILONG | {13},
    "cross_length_mismatch": MAPS | RULER | {4, 18},
    "dphi_ablation": MAPS | RULER | BABILONG | {4},
    "loss_ablation": MAPS | RULER | BABILONG | {4, 9, 19},
    accounting_table.LABEL: MAPS | {14, 20},
    parameter_table.LABEL: {8},
    training_cost_table.LABEL: {12, 16},
}
"""Numbers of the open points of docs/deviations.md that affect a table."""


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison, its reason, and the study's value if there is one."""

    words: str
    reason: str = ""
    ours: Cell | None = None


def run(spec: ComparisonSpec, tables: list[Path], out: Path, picture: Path) -> None:
    """Writes one line per published cell to `out` and the larger picture to `picture`, from a study's saved tables.

    Raises:
        ValueError: a file differs from its record or belongs to another study; names it.
    """
    record = Record("comparison", spec, tables)
    values = {table.label: table.evaluated for table in (load_table(path, spec.study) for path in tables)}
    papers = {label: make_published(label).cells for label in COMPARED}
    texts = {label: {cell.place: cell.text for cell in cells} for label, cells in papers.items()}
    rows = (
        _row(label, cell, verdict_on(label, cell, values, spec), spec)
        for label, cells in papers.items()
        for cell in cells
    )
    write_text(picture, csv_text(PICTURE_COLUMNS, picture_of(texts, values, spec)))
    write_text(out, csv_text(COLUMNS, rows))
    for path in (out, picture):
        record.write(path)


def open_points(label: str) -> set[int]:
    """Returns the numbers of the open points of docs/deviations.md that affect a table; empty for a study's own."""
    return LATENCIES if runtime_table.is_label(label) else DEVIATIONS.get(label, set())


def verdict_on(label: str, cell: Cell, tables: Mapping[str, Sequence[Cell]], spec: ComparisonSpec) -> Verdict:
    """Compares a published cell of table `label` with the study's value in the same place, at the printed precision.

    Only values of the paper's backbones, under its protocol and from as many of the benchmark's own examples, are
    comparable, and only costs that were measured as in the paper.

    Args:
        tables: the study's values by the label of their table.
    """
    by_backbone = {
        value.place.backbone: value
        for value in tables.get(label, ())
        if replace(value.place, backbone=cell.place.backbone) == cell.place
    }
    ours = by_backbone.get(cell.place.backbone)
    if ours is None or ours.model_id != MODELS[cell.place.backbone]:
        return _without_the_backbone(cell, tables.get(label), ours, by_backbone)
    if reasons := [*obstacles(ours), *other_settings(ours, spec).values()]:
        return Verdict(NOT_COMPARABLE, "; ".join(reasons), ours)
    interval = ours.interval or ours.range
    if interval is None:
        return Verdict(NOT_COMPARABLE, "no interval", ours)
    low, high = bounds_of_agreement(ours, interval)
    if low <= Decimal(cell.text) <= high:
        return Verdict(AGREES, ours=ours)
    return Verdict(f"{DIFFERS} by {Decimal(printed(ours)) - Decimal(cell.text):+z.3f}", ours=ours)


def printed(cell: Cell) -> str:
    """Formats a value in the paper's unit and precision: training times in hours."""
    return format_score(cell.value or 0) if cell.place.quantity == WALL_CLOCK else cell.text


def bounds_of_agreement(ours: Cell, interval: Interval) -> tuple[Decimal, Decimal]:
    """Returns the bounds within which a published value agrees: our 95 % interval or, for a latency, the range of its
    repeats.

    If the paper drew its own examples, its value has an independent sampling error. The variance of the difference is
    ours times 1 + n / n of the paper; with only our interval, 17 % of perfect replications would differ at equal n. So
    each side of the interval is scaled by the root of that factor.
    """
    benchmark = ours.place.benchmark
    factor = Decimal(math.sqrt(1 + ours.n / EXAMPLES[benchmark]) if benchmark in DRAWN_ANEW else 1)
    value, ends = Decimal(ours.text), tuple(map(Decimal, _bounds(ours, interval)))
    lower, upper = ((value + factor * (end - value)).quantize(end) for end in ends)
    return lower, upper


def _bounds(cell: Cell, interval: Interval) -> tuple[str, str]:
    """Formats the bounds like the value."""
    return f"{interval.low:z.{cell.decimals}f}", f"{interval.high:z.{cell.decimals}f}"


def _without_the_backbone(
    cell: Cell, table: Sequence[Cell] | None, namesake: Cell | None, by_backbone: Mapping[str, Cell]
) -> Verdict:
    """Returns the verdict on a cell without a value of the paper's model; `namesake` is a value of another model under
    the same backbone name.
    """
    others = [namesake] if namesake else [value for name, value in by_backbone.items() if name not in MODELS]
    if others:
        named = ", ".join(f"{value.place.backbone} ({value.model_id})" for value in others)
        return Verdict(NOT_COMPARABLE, f"{OTHER_BACKBONE}: {named}")
    if table is None:
        return Verdict(NOT_RUN, "the study leaves the table out")
    backbones = dict.fromkeys(value.place.backbone for value in table)
    if cell.place.backbone not in backbones:
        return Verdict(NOT_RUN, f"the study's backbones are {', '.join(backbones)}")
    return Verdict(NOT_RUN, "the study has no such cell")


def _row(label: str, cell: Cell, verdict: Verdict, spec: ComparisonSpec) -> dict[str, str]:
    ours, examples = verdict.ours, EXAMPLES.get(cell.place.benchmark)
    row = {
        **{name: value for name, value in cell.fields.items() if name in COLUMNS[: COLUMNS.index("published")]},
        "table": label,
        "published": cell.text,
        "published_bold": str(int(cell.bold)),
        "published_n": str(examples or ""),
        "verdict": verdict.words,
        "reason": verdict.reason,
        "deviations": " ".join(map(str, sorted(open_points(label)))),
        "study": spec.study,
    }
    if ours:
        interval = ours.interval or ours.range
        low, high = _bounds(ours, interval) if interval else ("", "")
        row |= {"ours": printed(ours), "ci_low": low, "ci_high": high, "n": str(ours.n)}
        row |= {"model_id": ours.model_id, "weights": ours.weights, "source": ours.source}
    return row
