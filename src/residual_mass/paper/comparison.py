"""The `comparison` stage: a verdict on every published cell, and what whole tables say in the paper and in a study.

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

import numpy as np
import pandas as pd

from residual_mass.benchmarks.catalogue import metric_of
from residual_mass.benchmarks.columns import decoding_settings
from residual_mass.core.settings import length_and_variant, tokens_of
from residual_mass.files import csv_text, write_text
from residual_mass.paper import published
from residual_mass.paper.cells import ALL_TASKS, LEFT_OUT, format_score, interval, numbers, read_frame
from residual_mass.paper.published import DRAWN_ANEW, EXAMPLES, MODELS
from residual_mass.paper.tables import RUNTIME, TABLES, find
from residual_mass.paper.titles import FAMILIES, benchmark_title
from residual_mass.provenance import Record
from residual_mass.study.specs import ComparisonSpec

Cell = Mapping[str, str]
Findings = dict[tuple[str, str], tuple[str, int | None]]
"""By family of cells and statement, what a table says in words or numbers, and its sign; None where it has none."""
PLACE = "table benchmark task corpus length method budget_percent maps implementation batch quantity".split()
"""Fields that a study's cell shares with the published one; with the backbone they tell cells apart."""
FACTS = "dtype device hardware processes steps low high".split()
"""Fields that not every table has."""
COLUMNS = (
    "table backbone benchmark task corpus length method budget_percent maps implementation batch quantity published "
    "published_bold ours ci_low ci_high n published_n verdict reason deviations study model_id weights source"
).split()
PICTURE = "table family statement published ours same_direction note".split()
COMPARED = [
    *(label for label in TABLES if label in published.labels() and label != "phi_param_count"),
    *(label for label in published.labels() if label.startswith(RUNTIME)),
]
"""Labels of the compared tables."""
AGREES, DIFFERS, NOT_COMPARABLE, NOT_RUN = "agrees", "differs", "not comparable", "not run"
"""First words of verdicts."""
PAPERS_VARIANTS = {variant for label in ("dphi_ablation", "loss_ablation") for variant in published.variants_of(label)}
"""Feature maps of the paper's ablations; those that a study adds have its own settings alone."""
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


def run(spec: ComparisonSpec, tables: list[Path], out: Path, picture: Path) -> None:
    """Writes one line per published cell to `out` and the larger picture to `picture`, from cells of a study's tables.

    Raises:
        ValueError: a file differs from its record; names it.
    """
    record = Record("comparison", spec, tables)
    ours, theirs = gathered(map(read_frame, tables)), the_papers()
    write_text(out, csv_text(COLUMNS, compared(theirs, ours, spec).to_dict("records")))
    write_text(picture, csv_text(PICTURE, whole_tables(theirs, ours, spec)))
    for path in (out, picture):
        record.write(path)


def settings_of(study: Mapping[str, Any]) -> dict[str, str]:
    """Those of SETTINGS that a nested configuration has, as text; the same text for 1 and 1.0."""
    found = {}
    for key in SETTINGS:
        value: Any = study
        for name in key.split("."):
            value = value.get(name, ...) if isinstance(value, Mapping) else ...
        if value is not ...:
            found[key] = _text(value)
    return found


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
    """Returns the cells of tables that have a value, and the family that they are counted under."""
    cells = pd.concat(tables, ignore_index=True)
    cells = cells.reindex(columns=list(dict.fromkeys([*cells, *PLACE, *FACTS]))).astype(object).fillna("")
    cells = cells[cells["value"] != ""]
    families = [family(cell) for cell in cells.to_dict("records")]
    return cells.assign(quantity=cells["quantity"].replace("", "score"), family=families)


def family(cell: Cell) -> str:
    """Returns the kind of task or text that a cell is counted under."""
    if cell["implementation"]:
        return f"{cell['implementation']}, batch {cell['batch']}"
    if cell["corpus"]:
        return "common words" if cell["corpus"] == "cwe" else "running text"
    if cell["benchmark"] == "longbench" and cell["task"] != ALL_TASKS:
        return FAMILIES[metric_of(cell["benchmark"], cell["task"])]
    return benchmark_title(cell["benchmark"])


# ---- every cell ------------------------------------------------------------------------------------------------------


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
    rows[["ci_low", "ci_high"]] = [_bounds(row) or ("", "") for row in records]
    points = {label: DEVIATIONS.get(label, LATENCIES) for label in COMPARED}
    deviations = rows["table"].map({label: " ".join(map(str, sorted(of))) for label, of in points.items()})
    examples = rows["benchmark"].map(EXAMPLES).map("{:g}".format, na_action="ignore").fillna("")
    return rows.assign(study=spec.study, published_n=examples, deviations=deviations)[COLUMNS]


def verdict(row: Cell, spec: ComparisonSpec) -> tuple[str, str]:
    """Verdict and reason on a published value, at the printed precision.

    Only values of the paper's backbones, under its protocol and from as many of the benchmark's own examples, are
    comparable, and only costs that were measured as in the paper.

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
    if _bounds(row) is None:
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
    value, ends = Decimal(ours["text"]), tuple(map(Decimal, _bounds(ours) or ()))
    lower, upper = ((value + factor * (end - value)).quantize(end) for end in ends)
    return lower, upper


def _bounds(cell: Cell) -> tuple[str, str] | None:
    """Returns the interval, formatted like the value; None without one."""
    return interval(cell) if cell["ci_low"] else interval(cell, "low", "high") if cell["low"] else None


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
    return {key: f"{key} is {each}, {paper[key]} in the paper" for key, each in given.items() if each != paper[key]}


def _matters(key: str, cell: Cell) -> bool:
    """Whether a value at this place depends on a setting."""
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


# ---- whole tables ----------------------------------------------------------------------------------------------------


def whole_tables(theirs: pd.DataFrame, ours: pd.DataFrame, spec: ComparisonSpec) -> Iterator[dict[str, str]]:
    """One row per statement: what the paper and the study find, and whether both have the same sign.

    Counts printed values without a test, so a direction can be chance; cells and backbones may differ.
    """
    for table in COMPARED:
        if table == "training_cost_64k":  # which has one number per backbone
            continue
        sides = [cells[(cells["table"] == table) & (cells["text"] != LEFT_OUT)] for cells in (theirs, ours)]
        sides = [cells.assign(number=cells["text"].map(Decimal).astype(object)) for cells in sides]
        ranked = table in ("dphi_ablation", "loss_ablation")
        found = _ranks(*sides) if ranked else [_findings(table, cells) for cells in sides]
        notes = {name: _note(of.to_dict("records"), spec) for name, of in sides[1].groupby("family")}
        for name, statement in dict.fromkeys([*found[0], *found[1]]):
            (paper, sign), (own, own_sign) = (each.get((name, statement), ("", None)) for each in found)
            same = "" if None in (sign, own_sign) else "yes" if sign == own_sign else "no"
            row = table, name, statement, paper, own, same, notes.get(name, "not run")
            yield dict(zip(PICTURE, row, strict=True))


def _note(cells: list[dict[str, str]], spec: ComparisonSpec) -> str:
    """Returns why values are not comparable one by one with the paper's; empty if they are."""
    reasons = list(dict.fromkeys(reason for cell in cells for reason in obstacles(cell)))
    if keys := {key for cell in cells for key in other_settings(cell, spec)}:
        reasons.append(f"{len(keys)} other {'setting' if len(keys) == 1 else 'settings'}")
    return "; ".join([*reasons, "directions only"] if reasons else [])


def _findings(table: str, cells: pd.DataFrame) -> Findings:
    """Returns what the cells of a table say, family by family."""
    found: Findings = {}
    if table == "exact_accounting":
        sub, nosub = (pairs(cells, name, "e_topk", "quantity") for name in ("e_sub", "e_nosub"))
        lowest = sub["lower"] & pairs(cells, "e_sub", "e_nosub", "quantity")["lower"]
        for name in cells["family"].unique():
            of = sub["family"] == name
            found[name, "rows in which TopK+phi has the lowest error of the three"] = _share(lowest[of])
            found[name, "rows in which NoSub has a lower error than TopK"] = _share(nosub["lower"][of])
    elif table == "cross_length_mismatch":
        of = pairs(cells, "topk_phi", "topk")
        trained = of["maps"].map(lambda maps: tokens_of(length_and_variant(maps)[0]))
        beyond = trained < of["length"].map(tokens_of)
        for (name, use), each in of.groupby(["family", np.where(beyond, "beyond", "within")]):
            found[name, f"cells below TopK, of those with maps used {use} their length"] = _share(each["lower"])
    elif table.startswith(RUNTIME):
        of = pairs(cells[cells["quantity"] == "per_step_ms"].assign(budget_percent=""), "topk_phi", "full")
        of = of.sort_values("length", key=lambda names: names.map(tokens_of))
        for name, each in of.groupby("family", sort=False):
            ratios = each["length"] + " " + (each["number"] / each["other"]).map("{:.2f}".format)
            found[name, "contexts at which a step of TopK+phi is shorter than one of Full"] = _share(each["lower"])
            found[name, "step of TopK+phi over one of Full, by context"] = ", ".join(ratios), None
    else:
        for other, title in (("topk", "TopK"), ("topk_phi_nosub", "NoSub")):
            of = pairs(cells, "topk_phi", other)
            for name, change in (of["number"] - of["other"]).groupby(of["family"], sort=False):
                above, below = (change > 0).sum(), (change < 0).sum()
                counts = f"{above} / {len(change) - above - below} / {below}"
                mean = f"{sum(change, Decimal()) / len(change):+z.3f}"
                found[name, f"cells with TopK+phi above / equal / below {title}"] = counts, _sign(above - below)
                found[name, f"mean change from {title} to TopK+phi"] = mean, _sign(Decimal(mean))
    return found


def pairs(cells: pd.DataFrame, one: str, other: str, by: str = "method") -> pd.DataFrame:
    """Returns the cells of `one`, with the number of `other` in the same place and whether that of `one` is lower."""
    where = ["family", "backbone", "benchmark", "task", "corpus", "length", "budget_percent"]
    ones, others = (cells[cells[by] == name] for name in (one, other))
    found = ones.merge(others[[*where, "number"]].rename(columns={"number": "other"}), on=where)
    return found.assign(lower=found["number"] < found["other"])


def _ranks(theirs: pd.DataFrame, ours: pd.DataFrame) -> tuple[Findings, Findings]:
    """Returns the rows of an ablation in order, and for each backbone the correlation with the paper's, over shared
    rows.
    """
    paper: Findings = {}
    own: Findings = {}
    several, order = ours["backbone"].nunique() > 1, "rows, best first"
    there = {name: scores for (_, name), scores in _scores(theirs)}
    for name, scores in there.items():
        paper[name, order] = _order(scores), None
    for (backbone, name), scores in _scores(ours):
        which = f" ({backbone})" if several else ""
        own[name, order + which] = _order(scores), None
        both = pd.concat([there.get(name, scores.iloc[:0]), scores], axis=1, join="inner").astype(float)
        if both.nunique().gt(1).all():
            from scipy.stats import kendalltau  # only here: it takes a second

            tau = float(kendalltau(both.iloc[:, 0], both.iloc[:, 1]).statistic)
            statement = f"rank correlation with the published order (tau-b, {len(both)} rows){which}"
            paper[name, statement] = "", 1
            own[name, statement] = f"{tau:+z.3f}", _sign(tau)
    return paper, own


def _scores(cells: pd.DataFrame) -> Iterable[tuple[tuple[str, str], pd.Series]]:
    """Scores by backbone and family, then by row, whose names do not depend on the maps' training length."""
    variants = cells["maps"].map(lambda maps: length_and_variant(maps)[1])
    rows = variants.where(variants != "", cells["method"].where(cells["maps"] == "", "ours"))
    return cells.set_index(rows).groupby(["backbone", "family"], sort=False)["number"]


def _order(scores: pd.Series) -> str:
    """Returns row names, best first: `a > b = c`."""
    return " > ".join(" = ".join(ties.index) for _, ties in list(scores.groupby(scores, sort=True))[::-1])


def _share(holds: pd.Series) -> tuple[str, int]:
    return f"{holds.sum()} of {len(holds)}", _sign(2 * holds.sum() - len(holds))


def _sign(value: Decimal | float) -> int:
    return int(value > 0) - int(value < 0)
