"""Published values beside a study's own: one row per cell, verdicts, the picture as a whole, refusals."""

from __future__ import annotations

import csv
import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from tests.records import recorded

from residual_mass.benchmarks.catalogue import tasks_of
from residual_mass.cli import main
from residual_mass.core.settings import to_json
from residual_mass.paper import published
from residual_mass.paper.comparison import comparability
from residual_mass.paper.comparison.by_cell import (
    COLUMNS,
    COMPARED,
    DEVIATIONS,
    bounds_of_agreement,
    open_points,
    run,
    verdict_on,
)
from residual_mass.paper.comparison.picture import tau_b
from residual_mass.paper.published.protocol import PROTOCOL, VARIANTS, text_of
from residual_mass.paper.table import Block, Cell, Entry, Grid, Interval, Place, Table
from residual_mass.paper.table import Row as Row_
from residual_mass.paper.tables import runtime_table
from residual_mass.paper.tables.render import make_published
from residual_mass.study.specs import ComparisonSpec

CELLS = {
    "natural_main": 104, "stress_1pct": 48, "ruler_sweep": 104, "babilong_sweep": 104, "cross_length_mismatch": 15,
    "dphi_ablation": 10, "loss_ablation": 14, "exact_accounting": 20, "training_cost_64k": 2, "runtime_1b": 24,
    "runtime_3b": 24,
}  # fmt: skip
COSTS = ("training_cost_64k", "runtime_1b", "runtime_3b")
MODELS = {"1b": "meta-llama/Llama-3.2-1B-Instruct", "3b": "meta-llama/Llama-3.2-3B-Instruct"}
EXAMPLES = {"ruler": 6500, "babilong": 4996, "longbench": 200}
QUANTITIES = {
    "topk": "e_topk", "topk_phi_nosub": "e_nosub", "topk_phi": "e_sub", "exact_nosub": "e_exact_nosub",
    "mean_log_z_error": "log_z_error",
}  # fmt: skip
ROOT = Path(__file__).parents[3]
SPEC = ComparisonSpec("paper", {key: text_of(value) for key, value in PROTOCOL.items()},
                      {label: {key: text_of(value) for key, value in changes.items()}
                       for label, changes in VARIANTS.items()})  # fmt: skip
"""A study under the paper's protocol."""
DECODING = {
    "ruler": "greedy; budgets of the nominal length; cut to 64k",
    "babilong": "greedy; budgets of the nominal length; cut to 64k",
    "longbench": "greedy; budgets of the real length; cut to 64k",
}

Row = dict[str, str]
Tables = dict[str, list[Row]]


# ---- a study whose values are the paper's ----------------------------------------------------------------------------


def score_row(label: str, point: Any, text: str) -> Row:
    maps = point.maps or ("64k" if point.method.startswith("topk_phi") else "")
    return {
        "table": label, "backbone": point.backbone, "benchmark": point.benchmark, "task": point.task,
        "length": point.length, "method": point.method, "maps": maps,
        "budget_percent": "" if point.budget_percent is None else f"{point.budget_percent:g}",
        "text": text, "bold": "0", **interval(text), "n": str(EXAMPLES[point.benchmark]), "data": "original",
        "decoding": DECODING[point.benchmark], "study": "paper", "model_id": MODELS[point.backbone],
        "weights": "pretrained", "source": f"{point.benchmark}_{point.backbone}_{point.length}.csv",
    }  # fmt: skip


def accounting_row(fact: Row) -> Row:
    quantity = QUANTITIES[fact["quantity"]]
    return {
        "table": "exact_accounting", "backbone": "1b", "corpus": fact["corpus"], "length": fact["length"],
        "k": fact["k"], "budget_percent": "1", "maps": "64k", "quantity": quantity, "text": fact["value"], "bold": "0",
        **interval(fact["value"]), **({"ci_low": "", "ci_high": ""} if quantity == "e_exact_nosub" else {}),
        "source": "accounting_1b.csv", "study": "paper", "model_id": MODELS["1b"], "weights": "pretrained",
        "packs": "16", "rows": "65536",
    }  # fmt: skip


def interval(text: str, half_width: float = 0.01) -> Row:
    value = float(text)
    return {"value": f"{value:.6f}", "ci_low": f"{value - half_width:.6f}", "ci_high": f"{value + half_width:.6f}"}


def latency_rows(fact: Row, **facts: str) -> list[Row]:
    """What a table of latencies prints of one measurement, as the paper took it, whose step is known to 0.5 ms."""
    backbone, step = fact["backbone"], float(fact["per_step_ms"])
    row = {
        "table": f"runtime_{backbone}", "backbone": backbone, "implementation": "prototype", "method": fact["method"],
        "length": fact["context"], "batch": "1", "budget_percent": "" if fact["method"] == "full" else "1",
        "k": "" if fact["method"] == "full" else fact["k"], "bold": "0", "repeats": "5", "source": "runtime_x.csv",
        "study": "paper", "model_id": MODELS[backbone], "revision": "r", "weights": "pretrained", "dtype": "bfloat16",
        "device": "NVIDIA H200", "bandwidth_gb_s": "4300.000",
    } | facts  # fmt: skip
    values = {
        "per_step_ms": {"text": fact["per_step_ms"], "low": f"{step - 0.5:.3f}", "high": f"{step + 0.5:.3f}"},
        "end_to_end_ms": {"text": fact["end_to_end_ms"]},
        "step_bytes": {"text": "2.500", "value": "2500000000"},
        "floor_ms": {"text": "0.58", "value": "0.581"},
        "over_floor": {"text": "9.00", "value": "9.000001"},
    }
    return [row | {"quantity": name, "value": cell["text"]} | cell for name, cell in values.items()]


def training_rows(fact: Row, **facts: str) -> list[Row]:
    row = {
        "table": "training_cost_64k", "backbone": fact["backbone"], "length": "64k", "maps": "64k", "bold": "0",
        "steps": "200000", "hardware": "NVIDIA H200", "processes": "8", "source": "training_x.csv", "study": "paper",
        "model_id": MODELS[fact["backbone"]], "weights": "pretrained",
    } | facts  # fmt: skip
    hours = fact["wall_clock_h"]
    values = [(name, "200k", "200000") for name in ("steps", "sequences", "teacher_passes")]
    values.append(("wall_clock_h", f"{hours}.0 h", f"{hours}.000000"))
    return [row | {"quantity": name, "text": text, "value": value} for name, text, value in values]


def papers_tables() -> Tables:
    tables = {
        label: [score_row(label, fact.place, fact.text) for fact in published.load(label)]
        for label in CELLS
        if label not in ("exact_accounting", *COSTS)
    }
    tables["exact_accounting"] = [accounting_row(fact) for fact in published.rows_of("exact_accounting")]
    return tables | {label: papers_costs(label) for label in COSTS}


def papers_costs(label: str) -> list[Row]:
    rows_of = training_rows if label == "training_cost_64k" else latency_rows
    return [row for fact in published.rows_of(label) for row in rows_of(fact)]


def cell(row: Row) -> Cell:
    """What a table holds of a value, from a line as in its CSV."""
    numbers = {
        name: float(row[name]) if row.get(name) else None for name in ("value", "ci_low", "ci_high", "low", "high")
    }
    place = {name: row[name] for name in ("backbone", "benchmark", "task", "corpus", "length", "method") if name in row}
    counts = [row[name] for name in ("n", "packs", "repeats") if name in row]
    conditions = ("implementation", "dtype", "device", "steps", "hardware", "processes")
    return Cell(
        place=Place(
            **place,
            budget_percent=float(row["budget_percent"]) if row.get("budget_percent") else None,
            maps=row.get("maps") or None,
            quantity=row.get("quantity", "score"),
            implementation=row.get("implementation", ""),
            batch=int(row["batch"]) if "batch" in row else None,
        ),
        text=row["text"],
        value=numbers["value"],
        interval=between(numbers["ci_low"], numbers["ci_high"]),
        range=between(numbers["low"], numbers["high"]),
        n=int(*counts or [1]),
        data=tuple(row["data"].split("+")) if "data" in row else (),
        decoding=row.get("decoding", ""),
        conditions={name: row[name] for name in conditions if name in row},
        model_id=row["model_id"],
        weights=row["weights"],
        source=row["source"],
    )


def between(low: float | None, high: float | None) -> Interval | None:
    return None if low is None or high is None else Interval(low, high)


def write(folder: Path, tables: Tables, study: str = "paper") -> list[Path]:
    paths = []
    for label, rows in tables.items():
        entries = (Entry(each.text, (each,)) for each in map(cell, rows))
        grid = Grid((), (), (Block((Row_((), tuple(entries)),)),))
        Table(label, study, (grid,)).save(path := folder / f"{label}.json")
        paths.append(recorded(path))
    return paths


def compare(folder: Path, tables: Tables, spec: ComparisonSpec = SPEC) -> tuple[list[Row], list[Row]]:
    """Rows of the comparison and of the picture."""
    out, picture = folder / "comparison.csv", folder / "comparison_picture.csv"
    run(spec, write(folder, tables, spec.study), out, picture)
    return read(out), read(picture)


def read(path: Path) -> list[Row]:
    with open(path, encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def find(rows: Iterable[Row], **fields: str) -> Row:
    (found,) = (row for row in rows if all(row[name] == value for name, value in fields.items()))
    return found


CELL = {
    "table": "ruler_sweep", "backbone": "1b", "length": "16k", "method": "topk_phi", "budget_percent": "1"
}  # fmt: skip
PUBLISHED_THERE = "0.617"


# ---- cell by cell ----------------------------------------------------------------------------------------------------


def test_every_published_cell_has_one_row(tmp_path: Path) -> None:
    rows, _ = compare(tmp_path, {"ruler_sweep": papers_tables()["ruler_sweep"]})
    assert Counter(row["table"] for row in rows) == CELLS and set(COMPARED) == set(CELLS)
    names = COLUMNS[: COLUMNS.index("published")]
    assert len({tuple(row[name] for name in names) for row in rows}) == len(rows) == 469
    for label in (label for label in CELLS if label not in COSTS):
        with open(Path(published.__file__).with_name(f"{label}.csv"), newline="") as stream:
            facts = [(row["value"], row["bold"]) for row in csv.DictReader(stream)]
        assert [(row["published"], row["published_bold"]) for row in rows if row["table"] == label] == facts
    assert {row["verdict"] for row in rows if row["table"] != "ruler_sweep"} == {"not run"}
    assert {row["reason"] for row in rows if row["table"] != "ruler_sweep"} == {"the study leaves the table out"}


def test_the_papers_own_values_agree_wherever_there_is_an_interval(tmp_path: Path) -> None:
    rows, _ = compare(tmp_path, papers_tables())
    counted = Counter((row["verdict"], row["reason"]) for row in rows)
    assert counted == {("agrees", ""): 439, ("not comparable", "no interval"): 30}
    for row in rows:
        hours = ".000" if row["quantity"] == "wall_clock_h" else ""
        assert row["ours"] == row["published"] + hours and row["study"] == "paper"
        assert row["model_id"] == MODELS[row["backbone"]] and row["source"]
        n = {"n": row["n"], "published_n": row["published_n"]}
        examples = str(EXAMPLES.get(row["benchmark"], ""))
        others = {"exact_accounting": "16", "training_cost_64k": "1"}
        assert n == {"n": examples or others.get(row["table"], "5"), "published_n": examples}


OTHER = "org/Other-LM"


@pytest.mark.parametrize(
    ("changes", "verdict", "reason", "ours"),
    [
        (interval("0.622"), "agrees", "", "0.622"),
        (interval("0.631"), "agrees", "", "0.631"),  # 0.010 times the root of 2
        (interval("0.632"), "differs by +0.015", "", "0.632"),
        (interval("0.603"), "agrees", "", "0.603"),
        (interval("0.602"), "differs by -0.015", "", "0.602"),
        (interval("0.634") | {"n": "13000"}, "agrees", "", "0.634"),  # the root of 3
        (interval("0.635") | {"n": "13000"}, "differs by +0.018", "", "0.635"),
        ({"n": "6499"}, "not comparable", "subsampled", "0.617"),
        ({"n": "6501"}, "agrees", "", "0.617"),
        ({"weights": "random"}, "not comparable", "random weights", "0.617"),
        ({"data": "simulated"}, "not comparable", "simulated data", "0.617"),
        ({"data": "original+stand-in"}, "not comparable", "stand-in data", "0.617"),
        (
            {"decoding": "greedy; up to 16 tokens past the references; budgets of the nominal length; cut to 64k"},
            "not comparable",
            "benchmarks.ruler.answer_margin is 16, null in the paper",
            "0.617",
        ),
        ({"decoding": f"greedy; stops when settled; {DECODING['ruler'][8:]}"}, "agrees", "", "0.617"),
        (
            {"n": "39", "weights": "random", "data": "simulated"},
            "not comparable",
            "random weights; subsampled; simulated data",
            "0.617",
        ),
        ({"model_id": OTHER}, "not comparable", f"other backbone: 1b ({OTHER})", ""),
        ({"model_id": MODELS["3b"]}, "not comparable", f"other backbone: 1b ({MODELS['3b']})", ""),
        ({"text": "--", "value": "", "ci_low": "", "ci_high": ""}, "not run", "the study has no such cell", ""),
        ({"maps": "16k"}, "not run", "the study has no such cell", ""),
        ({"budget_percent": "1.5"}, "not run", "the study has no such cell", ""),
    ],
)
def test_the_verdict_on_a_cell(tmp_path: Path, changes: Row, verdict: str, reason: str, ours: str) -> None:
    tables = papers_tables()
    text = {"text": f"{float(changes['value']):.3f}"} if changes.get("value") else {}
    find(tables["ruler_sweep"], **CELL).update(text | changes)
    rows, _ = compare(tmp_path, tables)
    row = find(rows, **CELL)
    assert row["published"] == PUBLISHED_THERE
    assert (row["verdict"], row["reason"], row["ours"]) == (verdict, reason, ours)
    lacking = {name for name in ("ci_low", "ci_high", "n", "model_id", "weights", "source") if not row[name]}
    assert not lacking if ours else len(lacking) == 6
    assert Counter(each["verdict"] for each in rows if each != row) == {"agrees": 438, "not comparable": 30}


def test_the_same_cells_of_another_backbone_are_not_comparable(tmp_path: Path) -> None:
    tables = papers_tables()
    del tables["runtime_3b"]  # has one backbone
    for rows in tables.values():
        rows[:] = [row | {"backbone": "tiny", "model_id": OTHER} for row in rows if row["backbone"] == "1b"]
    rows, _ = compare(tmp_path, tables)
    assert {(row["verdict"], row["reason"], row["ours"]) for row in rows if row["table"] in tables} == {
        ("not comparable", f"other backbone: tiny ({OTHER})", "")
    }


def test_a_study_of_one_of_the_papers_backbones_has_not_run_the_other(tmp_path: Path) -> None:
    tables = papers_tables()
    del tables["runtime_3b"]
    for rows in tables.values():
        rows[:] = [row for row in rows if row["backbone"] == "1b"]
    rows, _ = compare(tmp_path, tables)
    for row in rows:
        if row["backbone"] == "3b":
            reason = "the study's backbones are 1b" if row["table"] in tables else "the study leaves the table out"
            assert (row["verdict"], row["reason"]) == ("not run", reason)
        else:
            assert float(row["ours"]) == float(row["published"])


@pytest.mark.parametrize("seed", range(3))
def test_verdicts_are_those_of_a_slow_recomputation(tmp_path: Path, seed: int) -> None:
    """In whole thousandths, the unit in which values are printed."""
    generator = random.Random(seed)
    tables = {label: rows for label, rows in papers_tables().items() if label not in COSTS}
    expected: dict[tuple[str, ...], str] = {}
    names = "table backbone task corpus length method budget_percent maps quantity".split()
    for row in itertools.chain(*tables.values()):
        theirs = round(1000 * float(row["text"]))
        ours = theirs + generator.randint(-30, 30)
        low, high = ours - generator.randint(0, 20), ours + generator.randint(0, 20)
        row.update(text=f"{ours / 1000:z.3f}", value=f"{ours / 1000:.6f}")
        row.update(ci_low=f"{low / 1000:.6f}", ci_high=f"{high / 1000:.6f}")
        obstacles = {"weights": "random"}, {"n": "3"}, {"data": "simulated"}
        obstacle = generator.choice([{}, {}, *obstacles])
        if "n" not in row:
            obstacle = {name: value for name, value in obstacle.items() if name == "weights"}
        row.update(obstacle)
        low_end, high_end = ends_of_agreement(row, ours, low, high)
        verdict = "agrees" if low_end <= theirs <= high_end else f"differs by {(ours - theirs) / 1000:+.3f}"
        defaults = {"task": "", "corpus": "", "method": "", "quantity": "score"}
        key = tuple((defaults | row)[name] for name in names) + (row.get("benchmark", ""),)
        expected[key] = "not comparable" if obstacle else verdict
    rows, _ = compare(tmp_path, tables)
    rows = [row for row in rows if row["table"] in tables]
    found = {tuple(row[name] for name in names) + (row["benchmark"],): row["verdict"] for row in rows}
    assert found == expected and len(set(found.values())) > 20


OTHER_SETTINGS = {
    key: "bfloat32" if key.startswith("backbones.") else "7.5" for key in PROTOCOL
} | {"phi.corpora": '["sotu"]', "phi.curriculum": '{"length": "512", "share": 0.5}'}  # fmt: skip


def depends(label: str, place: Place, key: str) -> bool:
    """Whether the paper's value in this place can depend on a setting: spelled out by table and method."""
    if key.startswith("backbones."):
        return key == f"backbones.{place.backbone}.dtype" and not label.startswith("runtime")
    if key.startswith("anchors."):
        return place.method != "full" and label != "training_cost_64k"
    if label.startswith("runtime"):
        return "phi" in place.method and key in ("phi.map.kind", "phi.map.d_emb", "phi.map.d_phi")
    if label == "exact_accounting":
        return place.quantity in ("e_sub", "e_nosub", "log_z_error")
    _, _, variant = (place.maps or "").partition("-")
    return ("phi" in place.method or label == "training_cost_64k") and key not in VARIANTS.get(variant, {})


OF_SETTINGS = ("stress_1pct", "dphi_ablation", "loss_ablation", "exact_accounting", "runtime_1b", "training_cost_64k")
"""Tables that between them have every kind of value."""


@pytest.fixture(scope="module")
def papers_values() -> dict[str, list[Cell]]:
    return {label: [*map(cell, rows)] for label, rows in papers_tables().items() if label in OF_SETTINGS}


@pytest.mark.parametrize("key", PROTOCOL)
def test_what_another_setting_changes_is_not_comparable(papers_values: dict[str, list[Cell]], key: str) -> None:
    other = OTHER_SETTINGS[key]
    reason = f"{key} is {other}, {SPEC.settings[key]} in the paper"
    spec = replace(SPEC, settings=SPEC.settings | {key: other})
    counted = Counter()
    published_cells = [(label, cell) for label in OF_SETTINGS for cell in make_published(label).cells]
    for label, fact in published_cells:
        found = verdict_on(label, fact, papers_values, spec)
        told_by_itself = key == "phi.steps" and label == "training_cost_64k"
        changed = depends(label, fact.place, key) and not told_by_itself
        no_interval = fact.place.quantity in ("e_exact_nosub", "end_to_end_ms", "wall_clock_h")
        unchanged = ("not comparable", "no interval") if no_interval else ("agrees", "")
        assert (found.words, found.reason) == (("not comparable", reason) if changed else unchanged), fact
        counted[changed] += 1
    assert min(counted.values()) > 5


@pytest.mark.parametrize(
    ("benchmark", "words", "reason"),
    [
        ("ruler", "greedy; chat template; budgets of the nominal length; cut to 64k", "chat_template is true, false"),
        ("babilong", "greedy; budgets of the real length; cut to 64k", "budget_length is real, nominal"),
        ("longbench", "greedy; budgets of the nominal length; cut to 64k", "budget_length is nominal, real"),
        ("longbench", "greedy; budgets of the real length; cut to 16k", "truncate_to is 16k, 64k"),
        ("ruler", "greedy", "budget_length is unknown, nominal"),
    ],
)
def test_texts_that_were_generated_otherwise_are_not_comparable(
    tmp_path: Path, benchmark: str, words: str, reason: str
) -> None:
    tables = papers_tables()
    label = {"ruler": "ruler_sweep", "babilong": "babilong_sweep", "longbench": "natural_main"}[benchmark]
    for row in tables[label]:
        row.update(decoding=words)
    rows, _ = compare(tmp_path, tables)
    name = reason.partition(" ")[0]
    key = name if name == "truncate_to" else f"benchmarks.{benchmark}.{name}"
    for row in (row for row in rows if row["table"] == label):
        whole = "budget_length" in reason and row["method"] == "full"  # has no budget
        expected = f"{key}{reason.removeprefix(name)} in the paper"
        assert (expected in row["reason"].split("; ")) == (not whole), row
    assert {row["verdict"] for row in rows if row["table"] == "cross_length_mismatch"} == {"agrees"}


def test_a_variant_counts_by_what_it_changes(tmp_path: Path) -> None:
    """The paper's maps of 32 features agree, those of a variant that calls 48 so do not, and nothing else changes."""
    spec = replace(SPEC, variants=SPEC.variants | {"dphi_32": {"phi.map.d_phi": "48"}})
    rows, _ = compare(tmp_path, {"dphi_ablation": papers_tables()["dphi_ablation"]}, spec)
    found = {(row["maps"], row["verdict"], row["reason"]) for row in rows if row["table"] == "dphi_ablation"}
    assert found == {
        ("", "agrees", ""), ("4k", "agrees", ""), ("4k-dphi_128", "agrees", ""),
        ("4k-dphi_32", "not comparable", "phi.map.d_phi is 48, 32 in the paper"),
    }  # fmt: skip


def test_settings_that_are_not_told_keep_values_from_being_compared(tmp_path: Path) -> None:
    rows, _ = compare(tmp_path, {"ruler_sweep": papers_tables()["ruler_sweep"]}, ComparisonSpec("paper", {}))
    row = find(rows, **CELL)
    assert row["verdict"] == "not comparable" and "phi.steps is unknown, 200000 in the paper" in row["reason"]


@pytest.mark.parametrize(("ours", "widened"), [(6500, 0.95), (13000, 0.95), (6500 * 4, 0.95)])
def test_a_perfect_replication_agrees_in_95_of_100_cases(ours: int, widened: float) -> None:
    """Both values drawn around one true score, with the standard errors of their numbers of examples. The interval
    alone would hold 2 Phi(1.96 / sqrt(1 + n / n of the paper)) - 1 of them: 83 % at equal n.
    """
    generator, normal = np.random.default_rng(0), NormalDist()
    score, draws = 0.6, 6_000
    deviation = math.sqrt(score * (1 - score))
    theirs, own = (generator.normal(score, deviation / math.sqrt(n), draws) for n in (6500, ours))
    half = 1.96 * deviation / math.sqrt(ours)
    agreed = held = 0
    place = Place("1b", "4k", "ruler", "all", method="topk", budget_percent=1)
    for mean, value in zip(theirs, own, strict=True):
        low, high = f"{value - half:.6f}", f"{value + half:.6f}"
        bounds = bounds_of_agreement(Cell(place, f"{value:.6f}", value, n=ours), Interval(value - half, value + half))
        agreed += bounds[0] <= Decimal(f"{mean:.6f}") <= bounds[1]
        held += float(low) <= mean <= float(high)
    alone = 2 * normal.cdf(1.96 / math.sqrt(1 + ours / 6500)) - 1
    assert alone == pytest.approx(0.834, abs=5e-4) or ours > 6500
    assert held / draws == pytest.approx(alone, abs=0.015) and agreed / draws == pytest.approx(widened, abs=0.01)


@pytest.mark.parametrize("benchmark", ["babilong", "longbench"])
def test_on_the_same_examples_as_the_papers_the_interval_is_not_widened(benchmark: str) -> None:
    place = Place("1b", "64k", benchmark, "all", method="topk", budget_percent=1)
    bounds = bounds_of_agreement(Cell(place, "0.500", 0.5, n=200), Interval(0.48, 0.53))
    assert bounds == (Decimal("0.480"), Decimal("0.530"))


def ends_of_agreement(row: Row, ours: int, low: int, high: int) -> tuple[int, int]:
    """The interval, of RULER longer by the root of 2: as many examples as the paper drew."""
    factor = math.sqrt(2) if row.get("benchmark") == "ruler" else 1
    return ours - round(factor * (ours - low)), ours + round(factor * (high - ours))


def test_a_latency_of_our_own_that_is_outside_the_papers_differs(tmp_path: Path) -> None:
    tables = {"runtime_1b": papers_costs("runtime_1b")}
    step = find(tables["runtime_1b"], length="16k", method="topk_phi", quantity="per_step_ms")
    step.update(text="80.41", value="80.412", low="79.900", high="84.404")
    rows, _ = compare(tmp_path, tables)
    row = find(rows, table="runtime_1b", length="16k", method="topk_phi", quantity="per_step_ms")
    assert row["published"] == "84.41" and row["implementation"] == "prototype" and row["batch"] == "1"
    assert (row["verdict"], row["ci_low"], row["ci_high"]) == ("differs by -4.000", "79.90", "84.40")
    step.update(high="84.405001")  # which is printed as 84.41
    rows, _ = compare(tmp_path, tables)
    row = find(rows, table="runtime_1b", length="16k", method="topk_phi", quantity="per_step_ms")
    assert row["verdict"] == "agrees"


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"device": "NVIDIA H100 80GB HBM3"}, "other device: NVIDIA H100 80GB HBM3"),
        ({"device": "Some CPU, 2 threads"}, "other device: Some CPU, 2 threads"),
        ({"dtype": "float32"}, "other precision: float32"),
        ({"weights": "random"}, "random weights"),
        ({"weights": "random", "device": "CPU"}, "random weights; other device: CPU"),
        ({"model_id": OTHER}, f"other backbone: 1b ({OTHER})"),
    ],
)
def test_a_latency_of_anything_else_never_agrees(tmp_path: Path, facts: Row, reason: str) -> None:
    tables = {"runtime_1b": papers_costs("runtime_1b")}
    for row in tables["runtime_1b"]:
        row.update(facts)
    rows, _ = compare(tmp_path, tables)
    latencies = [row for row in rows if row["table"] == "runtime_1b"]
    assert {(row["verdict"], row["reason"]) for row in latencies} == {("not comparable", reason)}
    assert all((row["ours"] == row["published"]) == (facts.get("model_id") != OTHER) for row in latencies)


def test_a_latency_is_compared_with_that_of_the_same_implementation_and_batch_size(tmp_path: Path) -> None:
    tables = {"runtime_1b": papers_costs("runtime_1b")}
    facts = published.rows_of("runtime_1b")
    changed = {name: "9999.00" for name in ("per_step_ms", "end_to_end_ms")}
    others = [{"implementation": "fused"}, {"implementation": "fused", "batch": "8"}, {"batch": "8"}]
    more = [row for fact in facts for other in others for row in latency_rows(fact | changed, **other)]
    expected, _ = compare(tmp_path, tables)
    for rows in (more + tables["runtime_1b"], tables["runtime_1b"] + more):
        found, _ = compare(tmp_path, tables | {"runtime_1b": rows})
        assert found == expected
    found, _ = compare(tmp_path, tables | {"runtime_1b": more})
    latencies = {(row["verdict"], row["reason"]) for row in found if row["table"] == "runtime_1b"}
    assert latencies == {("not run", "the study has no such cell")}


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({}, "no interval"),
        ({"steps": "100000"}, "phi.steps is 100000, 200000 in the paper"),
        ({"processes": "1"}, "other hardware: 1 x NVIDIA H200"),
        ({"hardware": "CPU, 2 cores"}, "other hardware: 8 x CPU, 2 cores"),
        ({"hardware": "", "processes": ""}, "unknown hardware"),
        ({"weights": "random", "steps": "3"}, "random weights; phi.steps is 3, 200000 in the paper"),
    ],
)
def test_one_training_time_is_never_said_to_agree(tmp_path: Path, facts: Row, reason: str) -> None:
    tables = {"training_cost_64k": papers_costs("training_cost_64k")}
    for row in tables["training_cost_64k"]:
        row.update(facts)
    rows, _ = compare(tmp_path, tables)
    trainings = [row for row in rows if row["table"] == "training_cost_64k"]
    assert [(row["backbone"], row["published"], row["ours"]) for row in trainings] == [
        ("1b", "19", "19.000"), ("3b", "35", "35.000")
    ]  # fmt: skip
    assert {(row["verdict"], row["reason"]) for row in trainings} == {("not comparable", reason)}


def test_what_the_paper_measured_with_is_what_its_tables_and_captions_say() -> None:
    assert {(row["steps"], row["hardware"]) for row in published.rows_of("training_cost_64k")} == {
        (str(PROTOCOL["phi.steps"]), f"{comparability.GPUS}x{comparability.GPU}")
    }
    assert f"One {comparability.GPU}, bfloat16" in runtime_table.RUNTIME_CONDITIONS


def test_deviations_are_open_points_of_the_document() -> None:
    document = (ROOT / "docs" / "deviations.md").read_text(encoding="utf-8")
    points = document.split("## Open points of the paper")[1].split("\n## ")[0]
    numbers = {int(number) for number in re.findall(r"^\| (\d+) \|", points, re.MULTILINE)}
    shown = {*CELLS, "phi_param_count"}
    assert set(DEVIATIONS) | set(runtime_table.PUBLISHED) == shown
    for label in (*shown, "runtime_smol"):
        assert open_points(label) and open_points(label) <= numbers, label
    assert open_points("phi_param_count") == {8} and open_points("sizes") == set()


def test_deviations_are_listed_in_order(tmp_path: Path) -> None:
    rows, _ = compare(tmp_path, papers_tables())
    assert {row["deviations"] for row in rows if row["table"] == "exact_accounting"} == {"5 6 7 10 11 12 14 16 20"}


def test_the_papers_numbers_of_examples() -> None:
    assert published.EXAMPLES == EXAMPLES
    assert EXAMPLES["ruler"] == 500 * len(tasks_of("ruler", 65536))


# ---- the picture -----------------------------------------------------------------------------------------------------


def pictured(rows: Iterable[Row]) -> dict[tuple[str, str, str], tuple[str, str, str]]:
    return {
        (row["table"], row["family"], row["statement"]): (row["published"], row["ours"], row["same_direction"])
        for row in rows
    }


ABOVE = "cells with TopK+phi above / equal / below"
BELOW = "cells below TopK, of those with maps used"
SHORTER = "contexts at which a step of TopK+phi is shorter than one of Full"


def test_the_picture_of_the_papers_own_values(tmp_path: Path) -> None:
    _, rows = compare(tmp_path, papers_tables())
    found = pictured(rows)
    for key, text in {
        ("ruler_sweep", "RULER", f"{ABOVE} TopK"): "30 / 1 / 1",
        ("babilong_sweep", "BABILong", f"{ABOVE} TopK"): "27 / 2 / 3",
        ("natural_main", "Summarisation", f"{ABOVE} TopK"): "13 / 1 / 2",
        ("natural_main", "Question answering", f"{ABOVE} TopK"): "6 / 2 / 8",
        ("natural_main", "Summarisation", "mean change from TopK to TopK+phi"): "+0.006",
        ("cross_length_mismatch", "RULER", f"{BELOW} beyond their length"): "3 of 3",
        ("cross_length_mismatch", "RULER", f"{BELOW} within their length"): "0 of 6",
        ("exact_accounting", "running text", "rows in which NoSub has a lower error than TopK"): "2 of 2",
        ("exact_accounting", "common words", "rows in which NoSub has a lower error than TopK"): "0 of 2",
        ("runtime_1b", "prototype, batch 1", SHORTER): "0 of 3",
    }.items():
        assert found[key] == (text, text, "yes"), key
    order = "full > aux_only > ours > topk > kl_only > lolcats_loss > hedgehog_map"
    assert found["loss_ablation", "RULER", "rows, best first"] == (order, order, "")
    ratios = "4k 12.14, 16k 11.88, 64k 8.43"
    assert found["runtime_3b", "prototype, batch 1", "step of TopK+phi over one of Full, by context"] == (
        ratios, ratios, ""
    )  # fmt: skip
    tau = "rank correlation with the published order (tau-b, 7 rows)"
    assert found["loss_ablation", "RULER", tau] == ("", "+1.000", "yes")
    assert {row["note"] for row in rows} == {""}
    directed = [row for row in rows if not row["statement"].endswith(("best first", "by context"))]
    assert {row["same_direction"] for row in directed} == {"yes"}


def small_study(seed: int) -> Tables:
    """Random values of another backbone at 1k and 2k, with a variant of the maps that the paper lacks."""
    generator = random.Random(seed)
    constant = {
        "backbone": "smol", "study": "mini", "model_id": "org/Small-LM", "weights": "pretrained", "n": "8",
        "data": "original", "source": "x.csv", "bold": "0",
    }  # fmt: skip

    def row(label: str, **fields: str) -> Row:
        text = f"{generator.randint(0, 12) / 20:.3f}"  # coarse, so that there are ties
        decoding = DECODING[fields["benchmark"]]
        return constant | {"table": label, "text": text, "decoding": decoding, **interval(text)} | fields

    sweep = [("full", "", ""), *itertools.product(("topk", "topk_phi", "topk_phi_nosub"), ("2", "4"), ("",))]
    tables: Tables = {
        label: [
            row(label, benchmark=benchmark, task=task, length=length, method=method, budget_percent=budget,
                maps="2k" if "phi" in method else "")
            for task in tasks
            for length in lengths
            for method, budget, _ in sweep
        ]
        for label, benchmark, tasks, lengths in (
            ("ruler_sweep", "ruler", ["all"], ["1k", "2k"]),
            ("natural_main", "longbench", tasks_of("longbench", 65536), ["2k"]),
        )
    }  # fmt: skip
    variants = {
        "cross_length_mismatch": [("512", "1k", "2k"), [("ruler", "512"), ("ruler", "1k"), ("ruler", "2k")]],
        "loss_ablation": [
            ("1k", "1k-kl_only", "1k-aux_only", "1k-residual_loss", "1k-hedgehog_map"),
            [("ruler", "1k"), ("babilong", "1k")],
        ],
    }
    for label, (maps, places) in variants.items():
        arms = [("full", "", ""), ("topk", "4", ""), *(("topk_phi", "4", name) for name in maps)]
        tables[label] = [
            row(label, benchmark=benchmark, task="all", length=length, method=method, budget_percent=budget, maps=name)
            for method, budget, name in arms
            for benchmark, length in places
        ]
    accounting = {name: value for name, value in constant.items() if name not in ("n", "data")}
    tables["exact_accounting"] = [
        accounting
        | {"table": "exact_accounting", "corpus": corpus, "length": length, "k": "21", "budget_percent": "4",
           "maps": "2k", "quantity": quantity, "packs": "3", "rows": "9",
           "text": (text := f"{generator.randint(1, 8) / 20:.3f}"), **interval(text)}
        for corpus in ("wiki", "cwe")
        for length in ("1k", "2k")
        for quantity in QUANTITIES.values()
    ]  # fmt: skip
    return tables


@pytest.mark.parametrize("seed", range(3))
def test_the_picture_of_latencies_is_that_of_a_slow_recomputation(tmp_path: Path, seed: int) -> None:
    generator = random.Random(seed)
    settings = [("prototype", "1"), ("fused", "1"), ("fused", "8")]
    steps = {
        (setting, fact["context"], fact["method"]): generator.randint(100, 900)
        for fact in published.rows_of("runtime_1b")
        for setting in settings
    }
    rows = []
    for fact in published.rows_of("runtime_1b"):
        for setting in settings:
            step = steps[setting, fact["context"], fact["method"]]
            changed = {"per_step_ms": f"{step / 100:.2f}"}
            rows += latency_rows(fact | changed, implementation=setting[0], batch=setting[1], device="Other GPU")
    generator.shuffle(rows)
    _, picture = compare(tmp_path, {"runtime_1b": rows})
    expected = {}
    for implementation, batch in settings:
        shorter, ratios = 0, []
        for context in ("4k", "16k", "64k"):
            phi, full = (steps[(implementation, batch), context, method] for method in ("topk_phi", "full"))
            shorter += phi < full
            ratios.append(f"{context} {Decimal(phi) / full:.2f}")
        family = f"{implementation}, batch {batch}"
        direction = ("yes" if shorter <= 1 else "no") if implementation == "prototype" else ""
        expected[family, SHORTER] = (f"{shorter} of 3", direction)
        expected[family, "step of TopK+phi over one of Full, by context"] = (", ".join(ratios), "")
    found = {(row["family"], row["statement"]): row for row in picture if row["ours"]}
    assert {key: (row["ours"], row["same_direction"]) for key, row in found.items()} == expected
    notes = {row["family"]: row["note"] for row in found.values()}
    device = "other device: Other GPU; directions only"
    assert notes == {
        "prototype, batch 1": device,
        **dict.fromkeys(("fused, batch 1", "fused, batch 8"), f"other implementation: fused; {device}"),
    }


@pytest.mark.parametrize("seed", range(8))
def test_the_picture_is_that_of_a_slow_recomputation(tmp_path: Path, seed: int) -> None:
    tables = small_study(seed)
    comparison, rows = compare(tmp_path, tables, replace(SPEC, study="mini"))
    assert {row["verdict"] for row in comparison} == {"not run"}
    ours = {key: value[1] for key, value in pictured(rows).items() if value[1]}
    assert ours == {**slow_changes(tables), **slow_mismatch(tables), **slow_accounting(tables), **slow_ranks(tables)}
    notes = {(row["table"], row["note"]) for row in rows if row["ours"]}
    scores = "other backbone; subsampled; directions only"
    assert notes == {
        (label, "other backbone; directions only" if label == "exact_accounting" else scores) for label in tables
    }
    assert {row["note"] for row in rows if row["table"] not in tables} == {"not run"}


def thousandths(row: Row) -> int:
    return round(1000 * float(row["text"]))


def slow_changes(tables: Tables) -> dict[tuple[str, str, str], str]:
    found = {}
    families = {"all": "RULER"} | {
        f"longbench_{task}": family
        for task, family in {
            "gov_report": "Summarisation", "qmsum": "Summarisation", "musique": "Question answering",
            "hotpotqa": "Question answering",
        }.items()
    }  # fmt: skip
    for label in ("ruler_sweep", "natural_main"):
        for other, name in (("topk", "TopK"), ("topk_phi_nosub", "NoSub")):
            changes: dict[str, list[int]] = {}
            for row in tables[label]:
                for partner in tables[label]:
                    same = all(row[key] == partner[key] for key in ("task", "length", "budget_percent"))
                    if row["method"] == "topk_phi" and partner["method"] == other and same:
                        changes.setdefault(families[row["task"]], []).append(thousandths(row) - thousandths(partner))
            for family, each in changes.items():
                above, equal = sum(c > 0 for c in each), sum(c == 0 for c in each)
                found[label, family, f"{ABOVE} {name}"] = f"{above} / {equal} / {len(each) - above - equal}"
                mean = f"{Decimal(sum(each)) / len(each) / 1000:+z.3f}"
                found[label, family, f"mean change from {name} to TopK+phi"] = mean
    return found


def slow_mismatch(tables: Tables) -> dict[tuple[str, str, str], str]:
    tokens = {"512": 512, "1k": 1024, "2k": 2048}
    counts = {"beyond": [0, 0], "within": [0, 0]}
    rows = tables["cross_length_mismatch"]
    for row in (row for row in rows if row["maps"]):
        topk = find(rows, method="topk", length=row["length"])
        use = counts["beyond" if tokens[row["maps"]] < tokens[row["length"]] else "within"]
        use[0] += thousandths(row) < thousandths(topk)
        use[1] += 1
    return {
        ("cross_length_mismatch", "RULER", f"{BELOW} {use} their length"): f"{below} of {cells}"
        for use, (below, cells) in counts.items()
    }


def slow_accounting(tables: Tables) -> dict[tuple[str, str, str], str]:
    found = {}
    for corpus, family in (("wiki", "running text"), ("cwe", "common words")):
        lowest = nosub_below = 0
        for length in ("1k", "2k"):
            topk, nosub, sub = (
                thousandths(find(tables["exact_accounting"], corpus=corpus, length=length, quantity=name))
                for name in ("e_topk", "e_nosub", "e_sub")
            )
            lowest += sub < topk and sub < nosub
            nosub_below += nosub < topk
        table = "exact_accounting"
        found[table, family, "rows in which TopK+phi has the lowest error of the three"] = f"{lowest} of 2"
        found[table, family, "rows in which NoSub has a lower error than TopK"] = f"{nosub_below} of 2"
    return found


def slow_ranks(tables: Tables) -> dict[tuple[str, str, str], str]:
    found = {}
    names = {"1k": "ours", "1k-kl_only": "kl_only", "1k-aux_only": "aux_only", "1k-hedgehog_map": "hedgehog_map"}
    with open(Path(published.__file__).with_name("loss_ablation.csv"), newline="") as stream:
        facts = {(row["benchmark"], row["variant"]): row["value"] for row in csv.DictReader(stream)}
    for benchmark, family in (("ruler", "RULER"), ("babilong", "BABILong")):
        rows = [row for row in tables["loss_ablation"] if row["benchmark"] == benchmark]
        scores = {(row["maps"] or row["method"]).removeprefix("1k-"): thousandths(row) for row in rows}
        scores["ours"] = scores.pop("1k")
        by_score: dict[int, list[str]] = {}
        for row in rows:
            name = "ours" if row["maps"] == "1k" else (row["maps"] or row["method"]).removeprefix("1k-")
            by_score.setdefault(thousandths(row), []).append(name)
        order = " > ".join(" = ".join(by_score[score]) for score in sorted(by_score, reverse=True))
        found["loss_ablation", family, "rows, best first"] = order
        shared = ["full", "topk", *names.values()]
        tau = slow_tau([float(facts[benchmark, name]) for name in shared], [scores[name] for name in shared])
        assert tau is not None
        statement = f"rank correlation with the published order (tau-b, {len(shared)} rows)"
        found["loss_ablation", family, statement] = f"{tau:+z.3f}"
    return found


def slow_tau(first: list[float], second: list[float]) -> float | None:
    """(C - D) / sqrt((pairs - ties in the one) (pairs - ties in the other)), with ties counted from groups."""
    concordant = discordant = 0
    for i in range(len(first)):
        for j in range(i):
            product = (first[i] - first[j]) * (second[i] - second[j])
            concordant += product > 0
            discordant += product < 0
    pairs = len(first) * (len(first) - 1) // 2
    ties = [sum(n * (n - 1) // 2 for n in Counter(values).values()) for values in (first, second)]
    size = math.sqrt((pairs - ties[0]) * (pairs - ties[1]))
    return (concordant - discordant) / size if size else None


def decimals(values: Iterable[float]) -> list[Decimal]:
    return [Decimal(f"{value:.3f}") for value in values]


def test_tau_b_with_ties() -> None:
    generator = random.Random(0)
    for size in range(9):
        for _ in range(40):
            first = [generator.randint(0, 4) / 10 for _ in range(size)]
            second = [generator.randint(0, 4) / 10 for _ in range(size)]
            expected = slow_tau(first, second)
            found = tau_b(decimals(first), decimals(second))
            assert found is None if expected is None else found == pytest.approx(expected, abs=1e-12)


def test_tau_b_by_hand() -> None:
    up = decimals([0.1, 0.2, 0.3, 0.4])
    assert tau_b(up, up) == 1 and tau_b(up, up[::-1]) == -1
    assert tau_b(decimals([0.1, 0.2, 0.2]), decimals([0.1, 0.2, 0.3])) == pytest.approx(2 / math.sqrt(6))
    assert tau_b(up, decimals([0.5] * 4)) is None and tau_b([], []) is None


def test_ablations_on_several_backbones_are_ranked_apart(tmp_path: Path) -> None:
    rows = papers_tables()["loss_ablation"]
    reverse = [row | {"backbone": "3b", "model_id": MODELS["3b"]} for row in rows]
    for row in reverse:
        text = f"{1 - float(row['text']):.3f}"
        row.update(interval(text), text=text)
    _, picture = compare(tmp_path, {"loss_ablation": rows + reverse})
    found = pictured(picture)
    statement = "rank correlation with the published order (tau-b, 7 rows)"
    assert found["loss_ablation", "RULER", f"{statement} (1b)"] == ("", "+1.000", "yes")
    assert found["loss_ablation", "RULER", f"{statement} (3b)"] == ("", "-1.000", "no")


# ---- files -----------------------------------------------------------------------------------------------------------


def test_bytes_are_the_same_whatever_the_order_of_files(tmp_path: Path) -> None:
    paths = write(tmp_path, papers_tables())
    written = []
    for folder, files in (("a", paths), ("b", paths[::-1])):
        out, picture = tmp_path / folder / "c.csv", tmp_path / folder / "p.csv"
        spec = ["--spec", to_json(SPEC)]
        main(["comparison", *spec, "--tables", *map(str, files), "--out", str(out), "--picture", str(picture)])
        written.append((out.read_bytes(), picture.read_bytes()))
    assert written[0] == written[1] and b"\r" not in written[0][0]


def test_a_table_that_is_not_what_was_recorded_or_another_studys_is_refused(tmp_path: Path) -> None:
    out, picture = tmp_path / "c.csv", tmp_path / "p.csv"
    (path,) = write(tmp_path, {"ruler_sweep": papers_tables()["ruler_sweep"]})
    with pytest.raises(ValueError, match=f"^{path}: is of study 'paper', not of 'mini'; pass tables of one study$"):
        run(replace(SPEC, study="mini"), [path], out, picture)
    path.write_text(path.read_text().replace("0.803", "0.903"))
    with pytest.raises(ValueError, match=f"^{path}: is not what ruler_sweep.json.meta.json recorded: "):
        run(SPEC, [path], out, picture)
    assert not out.exists() and not picture.exists()
