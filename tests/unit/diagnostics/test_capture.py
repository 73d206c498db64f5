"""Capture against the model's own attention and against per-row recomputation in float64."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pandas as pd
import pytest
import torch
from tests.conftest import TINY

from residual_mass.backbones.loading import Backbone
from residual_mass.diagnostics import capture
from residual_mass.specs import AnchorSpec, CaptureSpec, MapsSpec

LENGTH, QUERIES = 90, 3


def make_spec(**changes: object) -> CaptureSpec:
    base = CaptureSpec(
        study="test", backbone=TINY, corpus="wiki", length=str(LENGTH), budgets=(25.0, 40.0), anchors=AnchorSpec(4, 16),
        maps=MapsSpec("512", 512), packs=2, queries=QUERIES, seed=0, recipe=1,
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def test_rows_equal_a_recomputation_from_the_models_own_attention_weights(
    tiny_backbone: Backbone, folder: Path, phi: Path, tmp_path: Path
) -> None:
    """Full attention weights come from transformers' eager attention, not from our scores."""
    spec = make_spec()
    capture.run(spec, folder, phi, tmp_path / "heads.parquet")
    table = pd.read_parquet(tmp_path / "heads.parquet")
    assert len(table) == 2 * 3 * 4 * QUERIES * 2  # packs, layers, heads, queries, budgets
    assert sorted(table.k.unique()) == [3, 16]
    assert table.e_exact_sub.max() < 1e-6

    corpus = capture.held_out_corpus("wiki", tiny_backbone.tokenizer, LENGTH + QUERIES, 0, folder)
    ids = torch.tensor([corpus.sequence(1)])
    model = tiny_backbone.model
    model.set_attn_implementation("eager")
    try:
        weights = model(ids, output_attentions=True).attentions
    finally:
        model.set_attn_implementation("sdpa")
    for layer, head, query in [(0, 0, 0), (1, 3, 2), (2, 1, 1)]:
        p = weights[layer][0, head, LENGTH + query, :LENGTH].double()
        p = p / p.sum()
        mid = p[4 : LENGTH - 16] / p[4 : LENGTH - 16].sum()
        entropy = -(mid * mid.log()).sum() / torch.tensor(float(LENGTH - 20)).log()
        chosen = mid.topk(16).values.sum()
        row = table.query("pack == 1 and layer == @layer and head == @head and query == @query and k == 16").iloc[0]
        assert row.h_mid == pytest.approx(entropy.item(), rel=1e-3)
        assert row.c_mid == pytest.approx(chosen.item(), rel=1e-3)
        residual_share = (1 - chosen) * p[4 : LENGTH - 16].sum()
        assert row.residual_share == pytest.approx(residual_share.item(), rel=2e-3)


def test_bytes_repeat(folder: Path, phi: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        capture.run(make_spec(packs=1), folder, phi, tmp_path / f"{name}.parquet")
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()


def test_maps_trained_shorter_are_refused_unless_asked_for(folder: Path, phi: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="allow_extrapolation"):
        capture.run(make_spec(maps=MapsSpec("64", 64)), folder, phi, tmp_path / "heads.parquet")
    assert not (tmp_path / "heads.parquet").exists()
    spec = make_spec(maps=MapsSpec("64", 64), allow_extrapolation=True, packs=1)
    capture.run(spec, folder, phi, tmp_path / "heads.parquet")
    assert (tmp_path / "heads.parquet").exists()
