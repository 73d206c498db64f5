"""Capture against the model's own attention and against per-row recomputation in float64."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pandas as pd
import pytest
import torch
from tests.conftest import TINY
from tests.unit.diagnostics.conftest import with_groups_of_three
from torch import Tensor
from transformers import PreTrainedModel

from residual_mass.core.settings import AnchorSpec, MapsSpec
from residual_mass.diagnostics import capture
from residual_mass.model.loading import Backbone
from residual_mass.study.specs import CaptureSpec
from residual_mass.texts.corpora import held_out_corpus

LENGTH, QUERIES = 90, 3


def make_spec(**changes: object) -> CaptureSpec:
    base = CaptureSpec(
        study="test", backbone=TINY, corpus="wiki", length=str(LENGTH), budgets=(25.0, 40.0), anchors=AnchorSpec(4, 16),
        maps=MapsSpec("512", 512), packs=2, queries=QUERIES, seed=0,
        recipe=1,
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def captured(spec: CaptureSpec, folder: Path, phi: Path, out: Path) -> pd.DataFrame:
    """Rows of the heads; all three files lie in `out`."""
    files = [out / name for name in ("heads.parquet", "mass.parquet")]
    capture.run(spec, folder, phi, None, *files)
    return pd.read_parquet(files[0])


def eager_attention(model: PreTrainedModel, ids: list[int]) -> tuple[Tensor, ...]:
    """transformers' own attention weights, one [heads, queries, keys] per layer: neither our hook nor our scores."""
    model.set_attn_implementation("eager")
    try:
        return tuple(of_layer[0] for of_layer in model(torch.tensor([ids]), output_attentions=True).attentions)
    finally:
        model.set_attn_implementation("sdpa")


def test_rows_equal_a_recomputation_from_the_models_own_attention_weights(
    tiny_backbone: Backbone, folder: Path, phi: Path, tmp_path: Path
) -> None:
    """Full attention weights come from transformers' eager attention, not from our scores."""
    table = captured(make_spec(), folder, phi, tmp_path)
    assert len(table) == 2 * 3 * 4 * QUERIES * 2  # packs, layers, heads, queries, budgets
    assert sorted(table.k.unique()) == [3, 16]
    assert table.e_exact_sub.max() < 1e-6

    corpus = held_out_corpus("wiki", tiny_backbone.tokenizer, LENGTH + QUERIES, 0, folder)
    weights = eager_attention(tiny_backbone.model, corpus.sequence(1))
    for layer, head, query in [(0, 0, 0), (1, 3, 2), (2, 1, 1)]:
        p = weights[layer][head, LENGTH + query, :LENGTH].double()
        p = p / p.sum()
        mid = p[4 : LENGTH - 16] / p[4 : LENGTH - 16].sum()
        entropy = -(mid * mid.log()).sum() / torch.tensor(float(LENGTH - 20)).log()
        chosen = mid.topk(16).values.sum()
        row = table.query("pack == 1 and layer == @layer and head == @head and query == @query and k == 16").iloc[0]
        assert row.h_mid == pytest.approx(entropy.item(), rel=1e-3)
        assert row.c_mid == pytest.approx(chosen.item(), rel=1e-3)
        residual_share = (1 - chosen) * p[4 : LENGTH - 16].sum()
        assert row.residual_share == pytest.approx(residual_share.item(), rel=2e-3)


def test_groups_of_three_heads_and_other_anchors(folder: Path, tmp_path: Path) -> None:
    """As above, for every head; three heads read one KV head, and a prefix of 90 has 82 tokens between 3 and 5."""
    backbone, phi = with_groups_of_three(folder, tmp_path)
    table = captured(make_spec(packs=1, budgets=(40.0,), anchors=AnchorSpec(3, 5)), folder, phi, tmp_path)
    assert len(table) == 6 * QUERIES and set(table.k) == {28}
    corpus = held_out_corpus("wiki", backbone.tokenizer, LENGTH + QUERIES, 0, folder)
    (weights,) = eager_attention(backbone.model, corpus.sequence(0))
    for row in table.itertuples():
        p = weights[row.head, LENGTH + row.query, :LENGTH].double()
        mid = p[3 : LENGTH - 5] / p[3 : LENGTH - 5].sum()
        chosen = mid.topk(28).values.sum()
        assert row.h_mid == pytest.approx(-(mid * mid.log()).sum().item() / math.log(82), rel=1e-3)
        assert row.c_mid == pytest.approx(chosen.item(), rel=1e-3)
        left = ((1 - chosen) * p[3 : LENGTH - 5].sum() / p.sum()).item()
        assert row.residual_share == pytest.approx(left, rel=2e-3)


def test_mass_curves_are_sorted_sums_of_the_models_own_attention_weights(
    tiny_backbone: Backbone, folder: Path, phi: Path, tmp_path: Path
) -> None:
    captured(make_spec(packs=1), folder, phi, tmp_path)
    mass = pd.read_parquet(tmp_path / "mass.parquet")
    ks = capture.round_ks(LENGTH - 20)
    assert ks == [1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70] and len(mass) == 3 * 4 * len(ks)
    assert mass.c_mid[mass.k == 70].to_list() == pytest.approx([1.0] * 12, abs=1e-6)
    corpus = held_out_corpus("wiki", tiny_backbone.tokenizer, LENGTH + QUERIES, 0, folder)
    weights = eager_attention(tiny_backbone.model, corpus.sequence(0))
    for layer, head in [(0, 1), (2, 3)]:
        recovered = []
        for query in range(QUERIES):
            p = sorted(weights[layer][head, LENGTH + query, 4 : LENGTH - 16].double().tolist(), reverse=True)
            recovered.append([sum(p[:k]) / sum(p) for k in ks])
        expected = [sum(of_k) / QUERIES for of_k in zip(*recovered, strict=True)]
        found = mass.query("layer == @layer and head == @head").sort_values("k").c_mid
        assert found.to_list() == pytest.approx(expected, rel=1e-3)


def test_a_budget_within_the_anchors_and_one_of_everything(folder: Path, phi: Path, tmp_path: Path) -> None:
    table = captured(make_spec(packs=1, budgets=(10.0, 100.0)), folder, phi, tmp_path)
    nothing, everything = table[table.k == 0], table[table.k == LENGTH - 20]
    assert len(nothing) == len(everything) == len(table) // 2
    assert (nothing.c_mid == 0).all()
    assert nothing.e_sub.to_list() == pytest.approx(nothing.e_nosub.to_list(), abs=1e-5)  # of sums in another order
    assert (everything.e_topk < 1e-6).all() and (everything.e_sub < 1e-6).all()
    assert (everything.log_z_true == -math.inf).all() and not everything.clamped.any()


def test_maps_trained_shorter_are_refused_unless_asked_for(folder: Path, phi: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="allow_extrapolation"):
        captured(make_spec(maps=MapsSpec("64", 64)), folder, phi, tmp_path)
    assert not list(tmp_path.glob("*.parquet"))
    captured(make_spec(maps=MapsSpec("64", 64), allow_extrapolation=True, packs=1), folder, phi, tmp_path)
    assert (tmp_path / "heads.parquet").exists()


def test_a_text_within_the_anchors_is_refused(folder: Path, phi: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="length 21: 20 anchors leave fewer than two mid-region tokens"):
        captured(make_spec(length="21"), folder, phi, tmp_path)


def test_cwe_without_prompts_is_refused(folder: Path, phi: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="corpus cwe is made of RULER's prompts; pass their manifest to --prompts"):
        captured(make_spec(corpus="cwe"), folder, phi, tmp_path)
