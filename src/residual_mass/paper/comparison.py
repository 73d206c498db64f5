"""The `comparison` stage: a verdict on every published cell, and what whole tables say in the paper and in a study.

Compares the score tables, `exact_accounting` and costs (latencies and training time), but not `phi_param_count`, which
is arithmetic.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas as pd

from residual_mass.benchmarks.catalogue import metric_of
from residual_mass.benchmarks.decoding import decoding_settings
from residual_mass.core.settings import length_and_variant, tokens_of
from residual_mass.files import csv_text, write_text
from residual_mass.metrics import Metric
from residual_mass.paper import published
from residual_mass.paper.cells import ALL_TASKS, LEFT_OUT, format_score, read_frame
from residual_mass.paper.published import DRAWN_ANEW, EXAMPLES, MODELS
from residual_mass.paper.tables import RUNTIME, TABLES, find
from residual_mass.paper.titles import FAMILIES, benchmark_title
from residual_mass.provenance import Record
from residual_mass.study.specs import ComparisonSpec

Cell = Mapping[str, str]
Finding = tuple[str, int | None]
"""What a table says in words or numbers, and its sign; None where it has none."""
Findings = dict[tuple[str, str], Finding]
"""By family of cells and statement."""
PLACE = "table benchmark task corpus length method budget_percent maps implementation batch quantity".split()
"""Fields that a study's cell shares with the published one; with the backbone they tell cells apart."""
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
TRAINING = ("steps", "wall_clock_h")
GPU, GPUS = "H200", "8"
"""Hardware of the paper: one such GPU for latencies, this number of them for training."""


def run(spec: ComparisonSpec, tables: list[Path], out: Path, picture: Path) -> None:
    """Writes one line per published cell to `out` and the larger picture to `picture`, from cells of a study's tables.

    Raises:
        ValueError: a file differs from its record; names it.
    """
    record = Record("comparison", spec, tables)
    ours = {path.stem: places(read_frame(path)) for path in tables}
    theirs = {label: published_cells(label) for label in COMPARED}
    rows = (row for label, cells in theirs.items() for row in compared(cells, ours.get(label), spec))
    write_text(out, csv_text(COLUMNS, rows))
    write_text(picture, csv_text(PICTURE, whole_tables(theirs, ours, spec)))
    for path in (out, picture):
        record.write(path)


def settings_of(study: Mapping[str, Any]) -> dict[str, str]:
    """Those of SETTINGS that a nested configuration has, as text; the same text for 1 and 1.0."""

    def at(value: Any, path: list[str]) -> Any:
        for name in path:
            value = value.get(name, ...) if isinstance(value, Mapping) else ...
        return value

    found = {key: at(study, key.split(".")) for key in SETTINGS}
    return {key: _text(value) for key, value in found.items() if value is not ...}


def _text(value: Any) -> str:
    whole = isinstance(value, float) and value.is_integer()
    return value if isinstance(value, str) else json.dumps(int(value) if whole else value, sort_keys=True)


def published_cells(label: str) -> pd.DataFrame:
    cells = places(find(label).cells(*published.results(label)))
    if label == "training_cost_64k":  # its times have a unit in print
        cells = cells[cells["quantity"] == "wall_clock_h"].assign(text=cells["value"])
    return cells


def places(cells: pd.DataFrame) -> pd.DataFrame:
    """Cells with a value and all fields of PLACE."""
    cells = cells[cells["value"] != ""]
    missing = [
        name
        for name in (*PLACE, "dtype", "device", "hardware", "processes", "steps", "low", "high")
        if name not in cells
    ]
    return cells.assign(**dict.fromkeys(missing, "")).assign(
        quantity=cells.get("quantity", pd.Series("score", cells.index))
    )


# ---- every cell ------------------------------------------------------------------------------------------------------


def compared(theirs: pd.DataFrame, ours: pd.DataFrame | None, spec: ComparisonSpec) -> Iterator[dict[str, str]]:
    """A line of the CSV for each published cell."""
    by_place: dict[tuple[str, ...], dict[str, Cell]] = {}
    for cell in [] if ours is None else ours.to_dict("records"):
        by_place.setdefault(tuple(cell[name] for name in PLACE), {})[cell["backbone"]] = cell
    backbones = None if ours is None else list(dict.fromkeys(ours["backbone"]))
    for cell in theirs.to_dict("records"):
        there = by_place.get(tuple(cell[name] for name in PLACE), {})
        words, reason = verdict(cell, there, backbones, spec)
        row = {name: cell.get(name, "") for name in COLUMNS} | dict.fromkeys(COLUMNS[13:], "")
        row |= {
            "published": cell["text"],
            "published_bold": str(int(cell["bold"] == "1")),
            "verdict": words,
            "reason": reason,
        }
        row |= {"published_n": str(EXAMPLES.get(cell["benchmark"], "")), "study": spec.study}
        row["deviations"] = " ".join(
            map(str, sorted(LATENCIES if cell["table"].startswith(RUNTIME) else DEVIATIONS[cell["table"]]))
        )
        found = there.get(cell["backbone"])
        if found and not reason.startswith("other backbone: "):
            low, high = _bounds(found) or ("", "")
            row |= {"ours": printed(found), "ci_low": low, "ci_high": high}
            row |= {name: found[name] for name in ("n", "model_id", "weights", "source")}
        yield row


def verdict(
    cell: Cell, there: Mapping[str, Cell], backbones: Iterable[str] | None, spec: ComparisonSpec
) -> tuple[str, str]:
    """Verdict and reason on a published cell, at the printed precision.

    Only values of the paper's backbones, under its protocol and from as many of the benchmark's own examples, are
    comparable, and only costs that were measured as in the paper.

    Args:
        there: the study's cells in the same place, by backbone.
        backbones: of the study's table; None where it has no such table.
    """
    ours = there.get(cell["backbone"])
    if ours is None or ours["model_id"] != MODELS[cell["backbone"]]:
        others = [ours] if ours else [value for name, value in there.items() if name not in MODELS]
        if others:
            named = ", ".join(f"{one['backbone']} ({one['model_id']})" for one in others)
            return NOT_COMPARABLE, f"other backbone: {named}"
        if backbones is None:
            return NOT_RUN, "the study leaves the table out"
        known = cell["backbone"] in backbones
        return NOT_RUN, "the study has no such cell" if known else f"the study's backbones are {', '.join(backbones)}"
    if reasons := [*obstacles(ours), *other_settings(ours, spec).values()]:
        return NOT_COMPARABLE, "; ".join(reasons)
    if _bounds(ours) is None:
        return NOT_COMPARABLE, "no interval"
    low, high = bounds_of_agreement(ours)
    if low <= Decimal(cell["text"]) <= high:
        return AGREES, ""
    return f"{DIFFERS} by {Decimal(printed(ours)) - Decimal(cell['text']):+z.3f}", ""


def printed(cell: Cell) -> str:
    """A value in the paper's unit and precision: training times in hours."""
    return format_score(float(cell["value"])) if cell["quantity"] == "wall_clock_h" else cell["text"]


def bounds_of_agreement(ours: Cell) -> tuple[Decimal, Decimal]:
    """Bounds within which a published value agrees: our 95 % interval or, for a latency, the range of its repeats.

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
    """The interval, formatted like the value; None without one."""
    low, high = cell["ci_low"] or cell["low"], cell["ci_high"] or cell["high"]
    decimals = len(cell["text"].partition(".")[2])
    return (f"{float(low):z.{decimals}f}", f"{float(high):z.{decimals}f}") if low else None


def obstacles(cell: Cell) -> Iterator[str]:
    """Why backbone, examples or hardware make a value incomparable."""
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
    """The settings that differ from the paper's, by key: those recorded with the value, else the study's."""
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


def whole_tables(
    theirs: Mapping[str, pd.DataFrame], ours: Mapping[str, pd.DataFrame], spec: ComparisonSpec
) -> Iterator[dict[str, str]]:
    """One row per statement: what the paper and the study find, and whether both have the same sign.

    Counts printed values without a test, so a direction can be chance; cells and backbones may differ.
    """
    for table, cells in theirs.items():
        values = ours.get(table)
        values = (cells.iloc[:0] if values is None else values).pipe(lambda all_of: all_of[all_of["text"] != LEFT_OUT])
        notes = _notes(values.to_dict("records"), spec)
        if table in ("dphi_ablation", "loss_ablation"):
            paper, own = _ranks(cells.to_dict("records"), values.to_dict("records"))
        else:
            paper, own = (_findings(table, each.to_dict("records")) for each in (cells, values))
        for family, statement in dict.fromkeys([*paper, *own]):
            pair = paper.get((family, statement)), own.get((family, statement))
            signs = [each[1] if each else None for each in pair]
            same = "" if None in signs else "yes" if signs[0] == signs[1] else "no"
            yield {
                "table": table, "family": family, "statement": statement, "published": pair[0][0] if pair[0] else "",
                "ours": pair[1][0] if pair[1] else "", "same_direction": same, "note": notes.get(family, "not run"),
            }  # fmt: skip


def metric_of_cell(cell: Cell) -> Metric:
    return metric_of(cell["benchmark"], None if cell["task"] == ALL_TASKS else cell["task"])


def family(cell: Cell) -> str:
    """The kind of task or text that a cell is counted under."""
    if cell["implementation"]:
        return f"{cell['implementation']}, batch {cell['batch']}"
    if cell["corpus"]:
        return "common words" if cell["corpus"] == "cwe" else "running text"
    if cell["benchmark"] == "longbench" and cell["task"] != ALL_TASKS:
        return FAMILIES[metric_of_cell(cell)]
    return benchmark_title(cell["benchmark"])


def changes(cells: Iterable[Cell], other: str = "topk") -> dict[str, list[Decimal]]:
    """Printed differences from the method `other` to completion, by family of cells."""
    where = ("backbone", "benchmark", "task", "length", "budget_percent")
    texts = {(cell["method"], *(cell[name] for name in where)): cell["text"] for cell in cells}
    found: dict[str, list[Decimal]] = {}
    for cell in cells:
        partner = texts.get((other, *(cell[name] for name in where)))
        if cell["method"] == "topk_phi" and partner is not None:
            found.setdefault(family(cell), []).append(Decimal(cell["text"]) - Decimal(partner))
    return found


def _findings(table: str, cells: list[Cell]) -> Findings:
    if table == "exact_accounting":
        return _accounting(cells)
    if table.startswith(RUNTIME):
        return _latencies(cells)
    if table == "training_cost_64k":
        return {}  # one number per backbone
    if table == "cross_length_mismatch":
        return _mismatch(cells)
    counts = {
        (method, name): each for method in ("topk", "topk_phi_nosub") for name, each in changes(cells, method).items()
    }
    found: Findings = {}
    for (method, name), each in counts.items():
        title = {"topk": "TopK", "topk_phi_nosub": "NoSub"}[method]
        wins, losses = sum(change > 0 for change in each), sum(change < 0 for change in each)
        mean = f"{sum(each, Decimal()) / len(each):+z.3f}"
        sides = f"{wins} / {len(each) - wins - losses} / {losses}"
        found[name, f"cells with TopK+phi above / equal / below {title}"] = sides, _sign(wins - losses)
        found[name, f"mean change from {title} to TopK+phi"] = mean, _sign(Decimal(mean))
    return found


def _mismatch(cells: list[Cell]) -> Findings:
    """Maps, at lengths that they were trained for and at longer ones, against TopK at the same length."""
    topk = {(cell["backbone"], cell["length"]): cell["text"] for cell in cells if cell["method"] == "topk"}
    worse: dict[tuple[str, str], list[bool]] = {}
    for cell in (cell for cell in cells if cell["method"] == "topk_phi"):
        trained, _ = length_and_variant(cell["maps"])
        use = "beyond" if tokens_of(trained) < tokens_of(cell["length"]) else "within"
        statement = f"cells below TopK, of those with maps used {use} their length"
        lower = Decimal(cell["text"]) < Decimal(topk[cell["backbone"], cell["length"]])
        worse.setdefault((family(cell), statement), []).append(lower)
    return {key: _share(each) for key, each in sorted(worse.items())}


def _accounting(cells: list[Cell]) -> Findings:
    """The errors of each row, a corpus at a length."""
    found: dict[tuple[str, str], list[bool]] = {}
    place = ("backbone", "corpus", "length", "budget_percent", "maps")
    for _, row in itertools.groupby(cells, key=lambda cell: [cell[name] for name in place]):
        row = list(row)
        topk, nosub, sub = (
            next(Decimal(cell["text"]) for cell in row if cell["quantity"] == name)
            for name in ("e_topk", "e_nosub", "e_sub")
        )
        kind = family(row[0])
        lowest = kind, "rows in which TopK+phi has the lowest error of the three"
        found.setdefault(lowest, []).append(sub < min(topk, nosub))
        found.setdefault((kind, "rows in which NoSub has a lower error than TopK"), []).append(nosub < topk)
    return {key: _share(each) for key, each in found.items()}


def _latencies(cells: list[Cell]) -> Findings:
    """Decode steps of TopK+phi against those of full attention, by sign and ratio."""
    rows: dict[tuple[str, str], dict[str, Decimal]] = {}
    for cell in (cell for cell in cells if cell["quantity"] == "per_step_ms"):
        rows.setdefault((family(cell), cell["length"]), {})[cell["method"]] = Decimal(cell["text"])
    both = {where: steps for where, steps in rows.items() if {"topk_phi", "full"} <= steps.keys()}
    ordered = sorted(both, key=lambda where: tokens_of(where[1]))
    found: Findings = {}
    for name in dict.fromkeys(name for name, _ in ordered):
        steps = [(length, both[name, length]) for each, length in ordered if each == name]
        shorter = [each["topk_phi"] < each["full"] for _, each in steps]
        ratios = ", ".join(f"{length} {each['topk_phi'] / each['full']:.2f}" for length, each in steps)
        found[name, "contexts at which a step of TopK+phi is shorter than one of Full"] = _share(shorter)
        found[name, "step of TopK+phi over one of Full, by context"] = ratios, None
    return found


def _ranks(theirs: list[Cell], ours: list[Cell]) -> tuple[Findings, Findings]:
    """The rows of an ablation in order, and for each backbone the correlation with the paper's, over shared rows."""
    paper: Findings = {}
    own: Findings = {}
    several, order = len({cell["backbone"] for cell in ours}) > 1, "rows, best first"
    published_scores = {name: scores for (_, name), scores in _scores(theirs).items()}
    for name, scores in published_scores.items():
        paper[name, order] = _order(scores), None
    for (backbone, name), scores in _scores(ours).items():
        which = f" ({backbone})" if several else ""
        own[name, order + which] = _order(scores), None
        shared = [row for row in published_scores.get(name, {}) if row in scores]
        tau = tau_b([published_scores[name][row] for row in shared], [scores[row] for row in shared])
        if tau is not None:
            statement = f"rank correlation with the published order (tau-b, {len(shared)} rows){which}"
            paper[name, statement] = "", 1
            own[name, statement] = f"{tau:+z.3f}", _sign(tau)
    return paper, own


def tau_b(first: list[Decimal], second: list[Decimal]) -> float | None:
    """Kendall's rank correlation of two series of equal length, corrected for ties; None if one is constant."""
    if len(set(first)) < 2 or len(set(second)) < 2:
        return None
    from scipy.stats import kendalltau  # only here: it takes a second

    return float(kendalltau([float(each) for each in first], [float(each) for each in second]).statistic)


def _scores(cells: list[Cell]) -> dict[tuple[str, str], dict[str, Decimal]]:
    """Scores by backbone and family, then by row, whose names do not depend on the maps' training length."""
    scores: dict[tuple[str, str], dict[str, Decimal]] = {}
    for cell in cells:
        _, variant = length_and_variant(cell["maps"])
        row = variant or ("ours" if cell["maps"] else cell["method"])
        scores.setdefault((cell["backbone"], family(cell)), {})[row] = Decimal(cell["text"])
    return scores


def _order(scores: Mapping[str, Decimal]) -> str:
    """Row names, best first: `a > b = c`."""
    ranked = itertools.groupby(sorted(scores, key=lambda row: -scores[row]), key=lambda row: scores[row])
    return " > ".join(" = ".join(rows) for _, rows in ranked)


def _notes(cells: list[Cell], spec: ComparisonSpec) -> dict[str, str]:
    """Why a family's values are not comparable one by one with the paper's; empty if they are."""
    found: dict[str, dict[str, None]] = {}
    settings: dict[str, set[str]] = {}
    for cell in cells:
        found.setdefault(family(cell), {}).update(dict.fromkeys(obstacles(cell)))
        settings.setdefault(family(cell), set()).update(other_settings(cell, spec))
    for name, keys in settings.items():
        if keys:
            found[name][f"{len(keys)} other {'setting' if len(keys) == 1 else 'settings'}"] = None
    return {name: "; ".join([*reasons, "directions only"] if reasons else []) for name, reasons in found.items()}


def _share(holds: list[bool]) -> Finding:
    return f"{sum(holds)} of {len(holds)}", _sign(2 * sum(holds) - len(holds))


def _sign(value: Decimal | float) -> int:
    return (value > 0) - (value < 0)
