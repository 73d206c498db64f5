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
from residual_mass.paper.cells import format_score, interval, numbers, read_frame
from residual_mass.paper.published import DRAWN_ANEW, EXAMPLES, MODELS
from residual_mass.paper.tables import RUNTIME, TABLES, find
from residual_mass.provenance import Record
from residual_mass.spec.columns import decoding_settings
from residual_mass.spec.settings import length_and_variant
from residual_mass.spec.specs import ComparisonSpec

Cell = Mapping[str, str]
PLACE = "table benchmark task corpus length method budget_percent maps implementation batch quantity".split()
"""Fields that a study's cell shares with the published one; together with the backbone they are the key of a cell."""
FACTS = "dtype device hardware processes steps low high".split()
"""Fields that not every table has."""
COLUMNS = (
    "table backbone benchmark task corpus length method budget_percent maps implementation batch quantity published "
    "published_bold ours ci_low ci_high n published_n verdict reason deviations study model_id weights source"
).split()
COMPARED = [
    *(table.label for table in TABLES if table.label in published.labels() and table.label != "phi_param_count"),
    *(label for label in published.labels() if label.startswith(RUNTIME)),
]
"""Labels of the compared tables."""
AGREES, DIFFERS, NOT_COMPARABLE, NOT_RUN = "agrees", "differs", "not comparable", "not run"
"""First words of verdicts."""
PAPERS_VARIANTS = {variant for label in ("dphi_ablation", "loss_ablation") for variant in published.variants_of(label)}
"""Variants of feature maps in the paper's ablations; their settings are part of the paper's protocol."""
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
    "exact_accounting": MAPS | {14, 20},
    "training_cost_64k": {12, 16},
}
"""Numbers of the open points of docs/deviations.md that affect a table."""
SETTINGS = (
    "backbones.1b.dtype backbones.3b.dtype anchors.sink anchors.tail phi.corpora phi.steps phi.learning_rate "
    "phi.weight_decay phi.schedule phi.warmup_steps phi.sequences_per_step phi.queries_per_step phi.query_window "
    "phi.map.kind phi.map.d_emb phi.map.d_phi phi.map.init phi.objective.name phi.objective.tau "
    "phi.objective.lambda_kl phi.objective.lambda_top phi.objective.lambda_fp phi.objective.lambda_z "
    "phi.objective.band phi.objective.huber_delta phi.replay.pool phi.replay.reuse phi.curriculum truncate_to"
).split() + [
    f"benchmarks.{name}.{key}" for name in EXAMPLES for key in ("chat_template", "answer_margin", "budget_length")
]
"""Keys of a study that values depend on."""
SHAPE = ("phi.map.kind", "phi.map.d_emb", "phi.map.d_phi")
"""Settings of feature maps that affect latencies, which are measured with random weights."""
GPU, GPUS = "H200", "8"
"""Hardware of the paper: one such GPU for latencies, this number of them for training."""


def run(spec: ComparisonSpec, tables: list[Path], out: Path) -> None:
    """Writes one line per published cell, with the study's cell and a verdict.

    Raises:
        ValueError: a file differs from its record; names it.
    """
    record = Record("comparison", spec, tables)
    rows = compared(the_papers(), gathered(map(read_frame, tables)), spec)
    write_text(out, csv_text(COLUMNS, rows.to_dict("records")))
    record.write(out)


def settings_of(study: Mapping[str, Any]) -> dict[str, str]:
    """Returns the values of SETTINGS in a nested configuration as text, by key; 1 and 1.0 have the same text."""
    settings = {}
    for key in SETTINGS:
        value: Any = study
        for name in key.split("."):
            value = value.get(name, ...) if isinstance(value, Mapping) else ...
        if value is not ...:
            settings[key] = _text(value)
    return settings


def _text(value: Any) -> str:
    whole = isinstance(value, float) and value.is_integer()
    return value if isinstance(value, str) else json.dumps(int(value) if whole else value, sort_keys=True)


def the_papers() -> pd.DataFrame:
    """Returns all published cells that are compared."""
    cells = gathered(find(label).cells(*published.results(label)) for label in COMPARED)
    training = cells["table"] == "training_cost_64k"  # its times have a unit in print
    cells["text"] = cells["text"].mask(training, cells["value"])
    return cells[~training | (cells["quantity"] == "wall_clock_h")]


def gathered(tables: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """Returns the cells of tables that have a value; the range of a latency's repeats is its interval."""
    cells = pd.concat(tables, ignore_index=True)
    cells = cells.reindex(columns=list(dict.fromkeys([*cells, *PLACE, *FACTS]))).astype(object).fillna("")
    cells = cells[cells["value"] != ""]
    ends = {f"ci_{end}": cells[f"ci_{end}"].where(cells["ci_low"] != "", cells[end]) for end in ("low", "high")}
    return cells.assign(quantity=cells["quantity"].replace("", "score"), **ends)


def compared(theirs: pd.DataFrame, ours: pd.DataFrame, spec: ComparisonSpec) -> pd.DataFrame:
    """Returns the published cells with the study's in the same place, if of the same model, and a verdict on each."""
    same = ours["model_id"] == ours["backbone"].map(MODELS)
    others = ours[~same].assign(others=ours["backbone"] + " (" + ours["model_id"] + ")")
    others = others.groupby(PLACE, sort=False)["others"].agg(", ".join).reset_index()
    rows = theirs[[*PLACE, "backbone"]].assign(published=theirs["text"], published_bold=theirs["bold"].replace("", "0"))
    rows = rows.merge(ours[same], how="left", on=[*PLACE, "backbone"]).merge(others, how="left", on=PLACE)
    backbones = ours.groupby("table")["backbone"].agg(lambda names: ", ".join(names.unique()))
    rows = rows.assign(backbones=rows["table"].map(backbones)).fillna("")
    records = rows.to_dict("records")
    rows[["verdict", "reason"]] = [verdict(row, spec) for row in records]
    hours = numbers(rows["value"]).map(format_score)  # a training time has another unit in print
    rows["ours"] = rows["text"].mask((rows["quantity"] == "wall_clock_h") & (rows["text"] != ""), hours)
    rows[["ci_low", "ci_high"]] = [interval(row) if row["ci_low"] else ("", "") for row in records]
    points = {label: DEVIATIONS.get(label, LATENCIES) for label in COMPARED}
    deviations = rows["table"].map({label: " ".join(map(str, sorted(listed))) for label, listed in points.items()})
    examples = rows["benchmark"].map(EXAMPLES).map("{:g}".format, na_action="ignore").fillna("")
    return rows.assign(study=spec.study, published_n=examples, deviations=deviations)[COLUMNS]


def verdict(row: Cell, spec: ComparisonSpec) -> tuple[str, str]:
    """Returns verdict and reason on a published value, at the printed precision.

    A value is comparable if it is of the paper's backbone, under its protocol and from at least as many of the
    benchmark's own examples. A cost must be measured as in the paper.

    Args:
        row: the value as `published`, its place, the study's cell there of the same model (fields are empty where there
            is none), and names of the `others` in that place and of the `backbones` of the study's table.
    """
    if not row["model_id"]:
        if row["others"]:
            return NOT_COMPARABLE, f"other backbone: {row['others']}"
        if not row["backbones"]:
            return NOT_RUN, "the study leaves the table out"
        known = row["backbone"] in row["backbones"].split(", ")
        return NOT_RUN, "the study has no such cell" if known else f"the study's backbones are {row['backbones']}"
    if reasons := [*obstacles(row), *other_settings(row, spec).values()]:
        return NOT_COMPARABLE, "; ".join(reasons)
    if not row["ci_low"]:
        return NOT_COMPARABLE, "no interval"
    low, high = bounds_of_agreement(row)
    if low <= Decimal(row["published"]) <= high:
        return AGREES, ""
    return f"{DIFFERS} by {Decimal(row['text']) - Decimal(row['published']):+z.3f}", ""


def bounds_of_agreement(ours: Cell) -> tuple[Decimal, Decimal]:
    """Returns bounds within which a published value agrees: our 95 % interval or, for a latency, the range of its
    repeats.

    If the paper drew its own examples, its value has an independent sampling error. The variance of the difference is
    ours times 1 + n / n of the paper; with only our interval, 17 % of perfect replications would differ at equal n. So
    each side of the interval is scaled by the root of that factor.
    """
    benchmark = ours["benchmark"]
    factor = Decimal(math.sqrt(1 + int(ours["n"]) / EXAMPLES[benchmark]) if benchmark in DRAWN_ANEW else 1)
    value, ends = Decimal(ours["text"]), map(Decimal, interval(ours))
    lower, upper = ((value + factor * (end - value)).quantize(end) for end in ends)
    return lower, upper


def obstacles(cell: Cell) -> Iterator[str]:
    """Yields why backbone, examples or hardware make a value incomparable."""
    if cell["model_id"] not in MODELS.values():
        yield "other backbone"
    if cell["weights"] == "random":
        yield "random weights"
    if cell["benchmark"] in EXAMPLES and int(cell["n"]) < EXAMPLES[cell["benchmark"]]:
        yield "subsampled"
    yield from (f"{kind} data" for kind in cell["data"].split("+") if kind not in ("", "original"))
    if cell["implementation"] not in ("", "prototype"):
        yield f"other implementation: {cell['implementation']}"
    if cell["device"] and not cell["device"].endswith(GPU):
        yield f"other device: {cell['device']}"
    if cell["dtype"] not in ("", "bfloat16"):
        yield f"other precision: {cell['dtype']}"
    if cell["table"] == "training_cost_64k":
        if not cell["hardware"]:
            yield "unknown hardware"
        elif not cell["hardware"].endswith(GPU) or cell["processes"] != GPUS:
            yield f"other hardware: {cell['processes']} x {cell['hardware']}"


def other_settings(cell: Cell, spec: ComparisonSpec) -> dict[str, str]:
    """Returns the settings that differ from the paper's, by key: those recorded with the value, else the study's."""
    _, variant = length_and_variant(cell["maps"])
    paper = spec.paper | (spec.variants.get(variant, {}) if variant in PAPERS_VARIANTS else {})
    recorded = decoding_settings(cell["decoding"]) if cell["decoding"] else {}
    ours = spec.settings | spec.variants.get(variant, {})
    ours |= {
        name if name == "truncate_to" else f"benchmarks.{cell['benchmark']}.{name}": _text(value)
        for name, value in recorded.items()
    }
    if cell["steps"]:
        ours["phi.steps"] = cell["steps"]
    given = {key: ours.get(key, "unknown") for key in paper if _matters(key, cell)}
    return {key: f"{key} is {text}, {paper[key]} in the paper" for key, text in given.items() if text != paper[key]}


def _matters(key: str, cell: Cell) -> bool:
    """Whether the value of a cell depends on a setting."""
    latency, section = bool(cell["implementation"]), key.partition(".")[0]
    if section == "benchmarks":
        own = key.startswith(f"benchmarks.{cell['benchmark']}.")
        return own and (cell["method"] != "full" or not key.endswith(".budget_length"))
    if section == "truncate_to":
        return bool(cell["benchmark"])
    if section == "backbones":
        return key == f"backbones.{cell['backbone']}.dtype" and not latency  # latencies record their own
    if section == "anchors":
        return cell["method"] != "full" and cell["table"] != "training_cost_64k"
    if latency:
        return key in SHAPE and cell["method"].startswith("topk_phi")
    return cell["maps"] != "" and cell["quantity"] not in ("e_topk", "e_exact_nosub")
