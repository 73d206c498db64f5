"""Comparison with the paper: a verdict on every published cell."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from samples import FACTS, made, study_rows, written

from residual_mass.paper import comparison, published
from residual_mass.paper.frames import typed
from residual_mass.spec.specs import ComparisonSpec

MODEL = published.MODELS["1b"]
CELL = ["length", "method", "budget_percent"]
PROTOCOL = dict.fromkeys(comparison.COMPARED_SETTINGS, "x") | {"truncate_to": "64k"}
PROTOCOL |= {key: "nominal" for key in PROTOCOL if key.endswith(".budget_length")}
PROTOCOL |= {key: "false" for key in PROTOCOL if key.endswith(".chat_template")}
PROTOCOL |= {key: "null" for key in PROTOCOL if key.endswith(".answer_margin")}
SPEC = ComparisonSpec("paper", PROTOCOL, PROTOCOL)
UNKNOWN = pd.DataFrame([{}]).pipe(typed, (*comparison.VERDICT_COLUMNS, *comparison.TABLE_FACTS, "data", "others"))
PLACE = UNKNOWN.to_dict("records")[0]
PLACE |= {"table": "ruler_sweep", "benchmark": "ruler", "task": "all", "length": "4k", "method": "topk_phi",
          "budget_percent": 1.0, "backbone": "1b", "quantity": "score", "backbones": "1b"}  # fmt: skip
OURS = PLACE | FACTS | {"text": "0.700", "model_id": MODEL, "maps": "64k", "ci_low": 0.69, "ci_high": 0.71}


@pytest.mark.parametrize(
    ("published_text", "changes", "verdict"),
    [
        ("0.700", {}, "agrees"),
        ("0.714", {}, "agrees"),  # the paper's own sampling error widens an interval of equal n by the root of 2
        ("0.715", {}, "differs by -0.015"),
        ("0.686", {}, "agrees"),
        ("0.685", {}, "differs by +0.015"),
        ("0.711", {"benchmark": "babilong"}, "differs by -0.011"),  # a fixed set of examples has none
        ("0.710", {"benchmark": "babilong"}, "agrees"),
        ("0.700", {"n": 6499}, "not comparable: subsampled"),
        ("0.700", {"data": "simulated+original"}, "not comparable: simulated data"),
        ("0.700", {"weights": "random"}, "not comparable: random weights"),
        ("0.700", {"ci_low": math.nan, "ci_high": math.nan}, "not comparable: no interval"),
        ("0.700", {"device": "CPU"}, "not comparable: other device: CPU"),
        ("0.700", {"dtype": "float32"}, "not comparable: other precision: float32"),
        ("0.700", {"implementation": "fused"}, "not comparable: other implementation: fused"),
        ("0.700", {"decoding": "greedy; chat template; budgets of the nominal length; cut to 64k"},
         "not comparable: benchmarks.ruler.chat_template is true, false in the paper"),
        ("0.700", {"decoding": "greedy; budgets of the real length; cut to 32k"},
         "not comparable: truncate_to is 32k, 64k in the paper; "
         "benchmarks.ruler.budget_length is real, nominal in the paper"),
        ("19", {"table": "training_cost_64k", "quantity": "wall_clock_h", "hardware": "NVIDIA H200", "processes": 4,
                "benchmark": "", "value": 20.0}, "not comparable: other hardware: 4 x NVIDIA H200"),
    ],
)  # fmt: skip
def test_a_verdict(published_text: str, changes: dict[str, Any], verdict: str) -> None:
    words, reason = comparison.verdict(OURS | {"published": published_text} | changes, SPEC)
    assert ": ".join(filter(None, (words, reason))) == verdict


@pytest.mark.parametrize(
    ("backbones", "reason"),
    [
        ("", "the study leaves the table out"),
        ("1b", "the study has no such cell"),
        ("3b", "the study's backbones are 3b"),
    ],
)
def test_what_was_not_run(backbones: str, reason: str) -> None:
    assert comparison.verdict(PLACE | {"published": "0.700", "backbones": backbones}, SPEC) == ("not run", reason)
    other = PLACE | {"published": "0.700", "others": "smol (org/Small), tiny (org/Tiny)"}
    assert comparison.verdict(other, SPEC) == ("not comparable", "other backbone: smol (org/Small), tiny (org/Tiny)")


@pytest.mark.parametrize(
    ("key", "cell", "matters"),
    [
        ("phi.steps", {}, True), ("phi.steps", {"maps": ""}, False), ("phi.steps", {"quantity": "e_topk"}, False),
        ("anchors.sink", {"method": "full"}, False), ("backbones.3b.dtype", {}, False),
        ("backbones.1b.dtype", {}, True),
        ("phi.map.d_phi", {"implementation": "prototype"}, True), ("phi.steps", {"implementation": "prototype"}, False),
        ("benchmarks.babilong.chat_template", {}, False), ("benchmarks.ruler.budget_length", {"method": "full"}, False),
        ("truncate_to", {"benchmark": ""}, False),
    ],
)  # fmt: skip
def test_a_setting_counts_where_the_value_depends_on_it(key: str, cell: dict[str, str], matters: bool) -> None:
    found = comparison.other_settings(OURS | cell, ComparisonSpec("paper", PROTOCOL | {key: "y"}, PROTOCOL))
    assert (key in found) == matters


def compare(folder: Path, *tables: Path) -> list[dict[str, str]]:
    comparison.run(SPEC, list(tables), out := folder / "comparison.csv")
    return list(csv.DictReader(out.read_text().splitlines()))


def test_the_papers_own_values_agree_with_themselves(tmp_path: Path) -> None:
    labels = ["ruler_sweep", "cross_length_mismatch", "dphi_ablation", "stress_1pct"]
    rows = compare(tmp_path, *(written(tmp_path, made(label, *study_rows(label))) for label in labels))
    for row in rows:
        expected = ("agrees", row["published"]) if row["table"] in labels else ("not run", "")
        assert (row["verdict"], row["ours"]) == expected
    assert len(rows) == len(comparison.published_cells())
    assert {row["quantity"] for row in rows if row["table"] == "ruler_sweep"} == {"score"}


def test_another_backbone_is_named_and_has_no_values(tmp_path: Path) -> None:
    rows, spec = study_rows(model_id="org/Other", backbone="smol")
    spec = replace(spec, backbones=("smol",), backbone_titles={"smol": "Small"})
    rows = compare(tmp_path, written(tmp_path, made("ruler_sweep", rows.drop_duplicates(CELL), spec)))
    assert {row["reason"] for row in rows if row["table"] == "ruler_sweep"} == {"other backbone: smol (org/Other)"}
    assert not any(row["ours"] or row["source"] for row in rows)
