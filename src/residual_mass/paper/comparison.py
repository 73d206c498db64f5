"""The `comparison` stage: a verdict on every published cell.

Compares the score tables, `exact_accounting` and costs (latencies and training time), but not `phi_param_count`, which
is arithmetic.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas as pd

from residual_mass.files import csv_text, write_text
from residual_mass.paper import published
from residual_mass.paper.cells import with_empty_texts
from residual_mass.paper.digits import format_score, interval
from residual_mass.paper.frames import field_texts, read_frame, typed
from residual_mass.paper.latex import Cell
from residual_mass.paper.published import DRAWN_ANEW, EXAMPLES, MODELS
from residual_mass.paper.tables import RUNTIME_PREFIX, TABLES, find
from residual_mass.provenance import Record
from residual_mass.spec.columns import decoding_settings
from residual_mass.spec.settings import length_and_variant
from residual_mass.spec.specs import ComparisonSpec

CELL_PLACE = "table benchmark task corpus length method budget_percent maps implementation batch quantity".split()
"""Fields that a study's cell shares with the published one; together with the backbone they are the key of a cell."""
TABLE_FACTS = "dtype device hardware processes steps low high".split()
"""Fields that not every table has."""
VERDICT_COLUMNS = (
    "table backbone benchmark task corpus length method budget_percent maps implementation batch quantity published "
    "published_bold ours ci_low ci_high n published_n verdict reason deviations study model_id weights source"
).split()
PUBLISHED_TABLES = [table.label for table in TABLES if table.label in published.labels()]
PUBLISHED_RUNTIMES = [label for label in published.labels() if label.startswith(RUNTIME_PREFIX)]
COMPARED_TABLES = [label for label in PUBLISHED_TABLES if label != "phi_param_count"] + PUBLISHED_RUNTIMES
"""Labels of the compared tables."""
AGREES = "agrees"
DIFFERS = "differs"
NOT_COMPARABLE = "not comparable"
NOT_RUN = "not run"
"""First words of verdicts."""
PAPERS_VARIANTS = published.variants_of("dphi_ablation") | published.variants_of("loss_ablation")
"""Variants of feature maps in the paper's ablations; their settings are part of the paper's protocol."""
MAPS_POINTS = {5, 6, 7, 10, 11, 12, 16}
"""Open points of docs/deviations.md on training and using feature maps."""
RULER_POINTS = {1, 2, 15, 17}
BABILONG_POINTS = {1, 2, 3, 15}
LATENCY_POINTS = {1, 10, 11}
DEVIATIONS = {
    "natural_main": MAPS_POINTS | {1, 2, 13},
    "stress_1pct": MAPS_POINTS | RULER_POINTS | BABILONG_POINTS | {13},
    "ruler_sweep": MAPS_POINTS | RULER_POINTS,
    "babilong_sweep": MAPS_POINTS | BABILONG_POINTS | {13},
    "cross_length_mismatch": MAPS_POINTS | RULER_POINTS | {4, 18},
    "dphi_ablation": MAPS_POINTS | RULER_POINTS | BABILONG_POINTS | {4},
    "loss_ablation": MAPS_POINTS | RULER_POINTS | BABILONG_POINTS | {4, 9, 19},
    "exact_accounting": MAPS_POINTS | {14, 20},
    "training_cost_64k": {12, 16},
}
"""Numbers of the open points of docs/deviations.md that affect a table."""
PROMPT_SETTINGS = ("chat_template", "answer_margin", "budget_length")
COMPARED_SETTINGS = (
    "backbones.1b.dtype backbones.3b.dtype anchors.sink anchors.tail phi.corpora phi.steps phi.learning_rate "
    "phi.weight_decay phi.schedule phi.warmup_steps phi.sequences_per_step phi.queries_per_step phi.query_window "
    "phi.map.kind phi.map.d_emb phi.map.d_phi phi.map.init phi.objective.name phi.objective.tau "
    "phi.objective.lambda_kl phi.objective.lambda_top phi.objective.lambda_fp phi.objective.lambda_z "
    "phi.objective.band phi.objective.huber_delta phi.replay.pool phi.replay.reuse truncate_to"
).split()
COMPARED_SETTINGS += [f"benchmarks.{name}.{key}" for name in EXAMPLES for key in PROMPT_SETTINGS]
"""Keys of a study that values depend on."""
MAP_SHAPE = ("phi.map.kind", "phi.map.d_emb", "phi.map.d_phi")
"""Settings of feature maps that affect latencies, which are measured with random weights."""
GPU = "H200"
GPUS = 8
"""Hardware of the paper: one such GPU for latencies, this number of them for training."""


def run(spec: ComparisonSpec, tables: list[Path], out: Path) -> None:
    """Writes one line per published cell, with the study's cell and a verdict.

    Raises:
        ValueError: a file differs from its record; names it.
    """
    record = Record("comparison", spec, tables)
    ours = concat_cells(map(read_frame, tables))
    rows = with_verdicts(published_cells(), ours, spec)
    write_text(out, csv_text(VERDICT_COLUMNS, rows.to_dict("records")))
    record.write(out)


def settings_of(study: Mapping[str, Any]) -> dict[str, str]:
    """Returns the values of COMPARED_SETTINGS in a nested configuration as text, by key; 1 and 1.0 have the same."""
    settings = {}
    for key in COMPARED_SETTINGS:
        value: Any = study
        for name in key.split("."):
            value = value.get(name, ...) if isinstance(value, Mapping) else ...
        if value is not ...:
            settings[key] = _text(value)
    return settings


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return json.dumps(value, sort_keys=True)


def published_cells() -> pd.DataFrame:
    """Returns all published cells that are compared."""
    tables = []
    for label in COMPARED_TABLES:
        rows, spec = published.results(label)
        tables.append(find(label).cells(rows, spec))
    cells = concat_cells(tables)
    training = cells["table"] == "training_cost_64k"
    hours = cells["value"].map("{:g}".format)  # these times have a unit in print
    cells["text"] = cells["text"].mask(training, hours)
    return cells[~training | (cells["quantity"] == "wall_clock_h")]


def concat_cells(tables: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """Returns the cells of tables that have a value; the range of a latency's repeats is its interval."""
    cells = pd.concat(tables, ignore_index=True)
    cells = typed(cells, dict.fromkeys([*cells, *CELL_PLACE, *TABLE_FACTS]))
    cells = cells[cells["value"].notna()]
    unknown = cells["ci_low"].isna()
    low = cells["ci_low"].mask(unknown, cells["low"])
    high = cells["ci_high"].mask(unknown, cells["high"])
    quantity = cells["quantity"].replace("", "score")
    return cells.assign(quantity=quantity, ci_low=low, ci_high=high)


def with_verdicts(theirs: pd.DataFrame, ours: pd.DataFrame, spec: ComparisonSpec) -> pd.DataFrame:
    """Returns the published cells with the study's in the same place, if of the same model, and a verdict on each: the
    fields of the result as text.
    """
    rows = _side_by_side(theirs, ours)
    records = rows.to_dict("records")
    verdicts = [verdict(row, spec) for row in records]
    intervals = [interval(row) if pd.notna(row["ci_low"]) else ("", "") for row in records]
    words, reasons = zip(*verdicts, strict=True)
    lows, highs = zip(*intervals, strict=True)
    hours = rows["value"].map(format_score, na_action="ignore")  # a training time has another unit in print
    measured_hours = (rows["quantity"] == "wall_clock_h") & (rows["text"] != "")
    published_n = rows["benchmark"].map(EXAMPLES).map("{:.0f}".format, na_action="ignore")
    fields = field_texts(rows, "g")
    fields = fields.assign(verdict=words, reason=reasons, ci_low=lows, ci_high=highs, study=spec.study)
    fields["ours"] = rows["text"].mask(measured_hours, hours)
    fields["published_n"] = published_n.fillna("")
    fields["deviations"] = rows["table"].map(_deviations_of)
    return fields[VERDICT_COLUMNS]


def _side_by_side(theirs: pd.DataFrame, ours: pd.DataFrame) -> pd.DataFrame:
    """Returns the published cells with the study's of the same model in the same place, names of its other models there
    as `others`, and of the backbones of its table.
    """
    same = ours["model_id"] == ours["backbone"].map(MODELS)
    others = ours[~same]
    others = others.assign(others=others["backbone"] + " (" + others["model_id"] + ")")
    others = others.groupby(CELL_PLACE, sort=False, dropna=False)["others"].agg(", ".join).reset_index()
    rows = theirs[[*CELL_PLACE, "backbone"]].assign(published=theirs["text"])
    rows["published_bold"] = theirs["bold"].map({True: "1", False: "0"})
    rows = rows.merge(ours[same], how="left", on=[*CELL_PLACE, "backbone"])
    rows = rows.merge(others, how="left", on=CELL_PLACE)
    backbones = ours.groupby("table")["backbone"].agg(lambda names: ", ".join(names.unique()))
    return with_empty_texts(rows.assign(backbones=rows["table"].map(backbones)))


def _deviations_of(label: str) -> str:
    """Returns the numbers of the open points that affect a table."""
    return " ".join(map(str, sorted(DEVIATIONS.get(label, LATENCY_POINTS))))


def verdict(row: Cell, spec: ComparisonSpec) -> tuple[str, str]:
    """Returns verdict and reason on a published value, at the printed precision.

    A value is comparable if it is of the paper's backbone, under its protocol and from at least as many of the
    benchmark's own examples. A cost must be measured as in the paper.

    Args:
        row: the value as `published`, its place, the study's cell there of the same model (fields are unknown where
            there is none), and names of the `others` in that place and of the `backbones` of the study's table.
    """
    if not row["model_id"]:
        return _without_cell(row)
    reasons = [*obstacles(row), *other_settings(row, spec).values()]
    if reasons:
        return NOT_COMPARABLE, "; ".join(reasons)
    if pd.isna(row["ci_low"]):
        return NOT_COMPARABLE, "no interval"
    low, high = bounds_of_agreement(row)
    theirs = Decimal(row["published"])
    if low <= theirs <= high:
        return AGREES, ""
    difference = Decimal(row["text"]) - theirs
    return f"{DIFFERS} by {difference:+z.3f}", ""


def _without_cell(row: Cell) -> tuple[str, str]:
    """Returns verdict and reason where the study has no cell of the same model."""
    if row["others"]:
        return NOT_COMPARABLE, f"other backbone: {row['others']}"
    if not row["backbones"]:
        return NOT_RUN, "the study leaves the table out"
    if row["backbone"] in row["backbones"].split(", "):
        return NOT_RUN, "the study has no such cell"
    return NOT_RUN, f"the study's backbones are {row['backbones']}"


def bounds_of_agreement(ours: Cell) -> tuple[Decimal, Decimal]:
    """Returns bounds within which a published value agrees: our 95 % interval or, for a latency, the range of its
    repeats.

    If the paper drew its own examples, its value has an independent sampling error. The variance of the difference is
    ours times 1 + n / n of the paper; with only our interval, 17 % of perfect replications would differ at equal n. So
    each side of the interval is scaled by the root of that factor.
    """
    benchmark = ours["benchmark"]
    factor = Decimal(1)
    if benchmark in DRAWN_ANEW:
        factor = Decimal(math.sqrt(1 + ours["n"] / EXAMPLES[benchmark]))
    value = Decimal(ours["text"])
    low, high = map(Decimal, interval(ours))
    lower = (value + factor * (low - value)).quantize(low)
    upper = (value + factor * (high - value)).quantize(high)
    return lower, upper


def obstacles(cell: Cell) -> Iterator[str]:
    """Yields why backbone, examples or hardware make a value incomparable."""
    benchmark = cell["benchmark"]
    if cell["model_id"] not in MODELS.values():
        yield "other backbone"
    if cell["weights"] == "random":
        yield "random weights"
    if benchmark in EXAMPLES and cell["n"] < EXAMPLES[benchmark]:
        yield "subsampled"
    for kind in cell["data"].split("+"):
        if kind not in ("", "original"):
            yield f"{kind} data"
    if cell["implementation"] not in ("", "prototype"):
        yield f"other implementation: {cell['implementation']}"
    if cell["device"] and not cell["device"].endswith(GPU):
        yield f"other device: {cell['device']}"
    if cell["dtype"] not in ("", "bfloat16"):
        yield f"other precision: {cell['dtype']}"
    if cell["table"] == "training_cost_64k":
        hardware = cell["hardware"]
        if not hardware:
            yield "unknown hardware"
        elif not hardware.endswith(GPU) or cell["processes"] != GPUS:
            yield f"other hardware: {cell['processes']} x {hardware}"


def other_settings(cell: Cell, spec: ComparisonSpec) -> dict[str, str]:
    """Returns the settings that differ from the paper's, by key: those recorded with the value, else the study's."""
    _, variant = length_and_variant(cell["maps"])
    paper = spec.paper
    if variant in PAPERS_VARIANTS:
        paper = paper | spec.variants.get(variant, {})
    ours = spec.settings | spec.variants.get(variant, {}) | _recorded_settings(cell)
    differing = {}
    for key, wanted in paper.items():
        found = ours.get(key, "unknown")
        if found != wanted and _matters(key, cell):
            differing[key] = f"{key} is {found}, {wanted} in the paper"
    return differing


def _recorded_settings(cell: Cell) -> dict[str, str]:
    """Returns the settings that a value was measured with, by their key in a study."""
    recorded = {}
    decoding = decoding_settings(cell["decoding"]) if cell["decoding"] else {}
    for name, value in decoding.items():
        key = name if name == "truncate_to" else f"benchmarks.{cell['benchmark']}.{name}"
        recorded[key] = _text(value)
    if pd.notna(cell["steps"]):
        recorded["phi.steps"] = str(cell["steps"])
    return recorded


def _matters(key: str, cell: Cell) -> bool:
    """Whether the value of a cell depends on a setting."""
    method = cell["method"]
    is_latency = bool(cell["implementation"])
    section = key.partition(".")[0]
    if section == "benchmarks":
        of_benchmark = key.startswith(f"benchmarks.{cell['benchmark']}.")
        return of_benchmark and (method != "full" or not key.endswith(".budget_length"))
    if section == "truncate_to":
        return bool(cell["benchmark"])
    if section == "backbones":
        return key == f"backbones.{cell['backbone']}.dtype" and not is_latency  # latencies record their own
    if section == "anchors":
        return method != "full" and cell["table"] != "training_cost_64k"
    if is_latency:
        return key in MAP_SHAPE and method.startswith("topk_phi")
    return cell["maps"] != "" and cell["quantity"] not in ("e_topk", "e_exact_nosub")
