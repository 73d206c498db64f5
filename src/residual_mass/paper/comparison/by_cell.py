"""What a study computed beside what the paper prints: every published cell with a verdict, and the larger picture.

Compared are the score tables, `exact_accounting`, and what the method costs: latencies and the time of training. The
table `phi_param_count`, which is arithmetic, is not part of this; only an open point touches it.
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
"""Labels of the tables that are compared."""
COLUMNS = (
    "table backbone benchmark task corpus length method budget_percent maps implementation batch quantity published "
    "published_bold ours ci_low ci_high n published_n verdict reason deviations study model_id weights source"
).split()
AGREES, DIFFERS, NOT_COMPARABLE, NOT_RUN = "agrees", "differs", "not comparable", "not run"
"""How verdicts begin."""
OF_MAPS = {5, 6, 7, 10, 11, 12, 16}
"""Open points of docs/deviations.md on training and using feature maps."""
OF_RULER, OF_BABILONG, OF_LATENCIES = {1, 2, 15, 17}, {1, 2, 3, 15}, {1, 10, 11}
DEVIATIONS = {
    "natural_main": OF_MAPS | {1, 2, 13},
    "stress_1pct": OF_MAPS | OF_RULER | OF_BABILONG | {13},
    "ruler_sweep": OF_MAPS | OF_RULER,
    "babilong_sweep": OF_MAPS | OF_BABILONG | {13},
    "cross_length_mismatch": OF_MAPS | OF_RULER | {4, 18},
    "dphi_ablation": OF_MAPS | OF_RULER | OF_BABILONG | {4},
    "loss_ablation": OF_MAPS | OF_RULER | OF_BABILONG | {4, 9, 19},
    accounting_table.LABEL: OF_MAPS | {14, 20},
    parameter_table.LABEL: {8},
    training_cost_table.LABEL: {12, 16},
}
"""Numbers of the open points of docs/deviations.md that touch a table."""

Tables = Mapping[str, Sequence[Cell]]
"""The values of a study by the label of their table."""


@dataclass(frozen=True)
class Verdict:
    """What a comparison says, why, and the value that it is about, if the study has it."""

    words: str
    reason: str = ""
    ours: Cell | None = None


def run(spec: ComparisonSpec, tables: list[Path], out: Path, picture: Path) -> None:
    """Writes to `out` one line per published cell, and to `picture` what the tables say as a whole, from the saved
    tables of a study.

    Raises:
        ValueError: a file is not what was recorded, or of another study; names it.
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


def deviations_of(label: str) -> set[int]:
    """Numbers of the open points of docs/deviations.md that touch a table; none touches one of a study's own."""
    return OF_LATENCIES if runtime_table.is_label(label) else DEVIATIONS.get(label, set())


def verdict_on(label: str, cell: Cell, tables: Tables, spec: ComparisonSpec) -> Verdict:
    """Whether the study's value in the same place of table `label` agrees with the published cell at the printed
    precision.

    Only values of the paper's backbones under its protocol, from as many of the benchmark's own examples, are compared,
    and of costs those that were measured as the paper's were.
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
    """A value in the unit and at the precision that the paper prints: times of training in hours."""
    return format_score(cell.value or 0) if cell.place.quantity == WALL_CLOCK else cell.text


def bounds_of_agreement(ours: Cell, interval: Interval) -> tuple[Decimal, Decimal]:
    """Between which the published value agrees: our 95 % interval, of a latency the range of its repeats.

    Where the paper drew examples of its own, its value has a sampling error as ours has, independent of it. Of two such
    values the difference has the variance of ours times 1 + n / n of the paper; with the interval alone, 17 % of
    perfect replications would differ at equal n. So each side of it is longer by the root of that factor.
    """
    benchmark = ours.place.benchmark
    factor = Decimal(math.sqrt(1 + ours.n / EXAMPLES[benchmark]) if benchmark in DRAWN_ANEW else 1)
    value, ends = Decimal(ours.text), tuple(map(Decimal, _bounds(ours, interval)))
    lower, upper = ((value + factor * (end - value)).quantize(end) for end in ends)
    return lower, upper


def _bounds(cell: Cell, interval: Interval) -> tuple[str, str]:
    """Printed like the value."""
    return f"{interval.low:z.{cell.decimals}f}", f"{interval.high:z.{cell.decimals}f}"


def _without_the_backbone(
    cell: Cell, table: Sequence[Cell] | None, namesake: Cell | None, by_backbone: Mapping[str, Cell]
) -> Verdict:
    """The verdict on a cell that the study has on other backbones at most, one of which may bear the paper's name."""
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
        "deviations": " ".join(map(str, sorted(deviations_of(label)))),
        "study": spec.study,
    }
    if ours:
        interval = ours.interval or ours.range
        low, high = _bounds(ours, interval) if interval else ("", "")
        row |= {"ours": printed(ours), "ci_low": low, "ci_high": high, "n": str(ours.n)}
        row |= {"model_id": ours.model_id, "weights": ours.weights, "source": ours.source}
    return row
