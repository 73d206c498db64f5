"""The runtime stage on a tiny backbone, and its account of bytes against counts made by hand."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from tests.conftest import TINY

from residual_mass.backbones.loading import Backbone
from residual_mass.backbones.phi_maps import PhiMaps
from residual_mass.runtime import measure
from residual_mass.runtime.traffic import copy_bandwidth, state_bytes, step_traffic
from residual_mass.specs import METHODS, AnchorSpec, MapSpec, RuntimeSpec

ANCHORS = AnchorSpec(4, 16)
SPEC = RuntimeSpec(
    study="test", backbone=TINY, contexts=("128", "256"), batches=(1, 2), budget=20.0, anchors=ANCHORS,
    map=MapSpec(d_emb=24, d_phi=8), repeats=2, seed=0, recipe=1,
)  # fmt: skip


@pytest.fixture(scope="module")
def rows(tiny_assets: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    out = tmp_path_factory.mktemp("runtime") / "runtime_tiny.csv"
    measure.run(SPEC, tiny_assets, out)
    meta = json.loads(out.with_name(f"{out.name}.meta.json").read_text())
    assert "threads" in meta["device"]
    with open(out, encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def test_every_setting_has_a_row(rows: list[dict[str, str]]) -> None:
    places = {(r["implementation"], r["method"], r["context"], r["batch"]) for r in rows}
    assert len(places) == len(rows) == 2 * len(METHODS) * 2 * 2
    assert {r["k"] for r in rows if r["context"] == "256" and r["method"] != "full"} == {"32"}
    assert {(r["k"], r["budget_percent"]) for r in rows if r["method"] == "full"} == {("", "")}
    assert {r["phi_weights"] for r in rows if "phi" in r["method"]} == {"random"}


def test_numbers_hang_together(rows: list[dict[str, str]]) -> None:
    for row in rows:
        low, step, high = (float(row[f"per_step_{name}ms"]) for name in ("low_", "", "high_"))
        assert 0 < low <= step <= high
        expected = float(row["prefill_ms"]) + measure.STEPS * step
        assert float(row["end_to_end_ms"]) == pytest.approx(expected, abs=0.05)
        floor = int(row["step_bytes"]) / float(row["bandwidth_gb_s"]) / 1e6
        assert float(row["floor_ms"]) == pytest.approx(floor, rel=1e-2, abs=1e-3)
        assert row["peak_memory_mib"] == ""


def test_both_implementations_decode_the_same(rows: list[dict[str, str]]) -> None:
    assert {row["tokens_as_prototype"] for row in rows} == {"1.000"}


def test_a_context_beyond_the_backbone_is_refused(tiny_assets: Path, tmp_path: Path) -> None:
    spec = RuntimeSpec(**{**SPEC.__dict__, "contexts": ("2k",)})
    with pytest.raises(ValueError, match=r"runtime.contexts: 2k and 31 steps do not fit into the context of tiny"):
        measure.run(spec, tiny_assets, tmp_path / "out.csv")
    assert not list(tmp_path.iterdir())


def traffic_of(backbone: Backbone, implementation: str, method: str, k: int = 30) -> dict[str, int]:
    phi = PhiMaps(backbone.shape, MapSpec(d_emb=24, d_phi=8))
    traffic = step_traffic(
        backbone.model, phi, implementation, method, batch=2, length=1000, k=k, anchors=ANCHORS, generated=15
    )
    return {**traffic.__dict__, "total": traffic.total}


def test_bytes_of_the_tiny_backbone_counted_by_hand(tiny_backbone: Backbone) -> None:
    """3 layers, 4 query and 2 KV heads of width 16, float32; maps of inner width 24 and 8 features."""
    weights = sum(p.numel() for p in tiny_backbone.model.parameters()) * 4 - 258 * 64 * 4  # the table is not read whole
    whole = 2 * 3 * 2 * 1015 * 16 * 4
    full = traffic_of(tiny_backbone, "fused", "full")
    assert full == {
        "weights": weights, "keys": whole, "values": whole, "features": 0, "maps": 0, "state": 0, "concatenation": 0,
        "total": weights + 2 * whole,
    }  # fmt: skip
    topk = traffic_of(tiny_backbone, "fused", "topk")
    assert topk["values"] == 2 * 3 * 4 * (30 + 20 + 15) * 16 * 4
    assert topk["total"] == weights + whole + topk["values"]
    phi = traffic_of(tiny_backbone, "fused", "topk_phi")
    state = 3 * 2 * 8 * 17 * 4
    assert phi["state"] == 2 * state
    assert phi["features"] == 2 * 3 * 4 * 30 * 8 * 4
    assert phi["maps"] == 3 * 4 * (16 * 8 + 24 * 8 + 16 * 24 + 24 + 8) * 4
    nosub = traffic_of(tiny_backbone, "fused", "topk_phi_nosub")
    assert phi["total"] - nosub["total"] == phi["features"]
    ours = traffic_of(tiny_backbone, "prototype", "topk_phi")
    per_head = 16 * 24 + 24 + 2 * (24 * 24 + 24) + 24 * 8 + 8 + 1
    assert ours["maps"] == 3 * (4 + 2) * per_head * 4
    assert ours["features"] == 2 * 3 * 4 * 30 * 16 * 4  # keys of retrieved tokens, to be mapped again
    assert ours["state"] == 2 * state + 2 * 2 * 2 * state  # S_R of two query heads a KV head, written and read
    assert ours["concatenation"] == 4 * whole


def test_a_wide_support_reads_no_more_than_all_values(tiny_backbone: Backbone) -> None:
    assert (
        traffic_of(tiny_backbone, "fused", "topk", k=980)["values"]
        == traffic_of(tiny_backbone, "fused", "full")["values"]
    )


def test_the_summary_of_llama_1b_in_bfloat16_is_what_the_paper_says() -> None:
    """1.03 MiB over 16 layers with 8 KV heads, 64 features and head dimension 64."""
    from residual_mass.backbones.phi_maps import HeadShape

    assert state_bytes(HeadShape(16, 32, 8, 64), 64, 2) / 2**20 == pytest.approx(1.03, abs=0.02)


def test_bandwidth_is_that_of_a_copy() -> None:
    assert 1e8 < copy_bandwidth(torch.device("cpu"), rounds=2) < 1e13
