"""Capture against the model's own attention and against per-row recomputation in float64."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest
import torch
from tests.conftest import TINY
from tests.unit.diagnostics.conftest import with_groups_of_three
from torch import Tensor
from transformers import PreTrainedModel

from residual_mass.diagnostics import capture
from residual_mass.model.loading import Backbone
from residual_mass.spec.settings import AnchorSpec, MapsSpec
from residual_mass.spec.specs import CaptureSpec
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


def assert_rows(table: pd.DataFrame, weights: Sequence[Tensor], anchors: AnchorSpec) -> None:
    """Rows against full attention weights of transformers' eager attention, not of our scores."""
    mid = slice(anchors.sink, LENGTH - anchors.tail)
    for row in table.itertuples():
        p = weights[row.layer][row.head, LENGTH + row.query, :LENGTH].double()
        p = p / p.sum()
        within = p[mid] / p[mid].sum()
        chosen = within.topk(row.k).values.sum().item()
        entropy = -(within * within.log()).sum().item() / math.log(len(within))
        assert row.h_mid == pytest.approx(entropy, rel=1e-3) and row.c_mid == pytest.approx(chosen, rel=1e-3)
        assert row.residual_share == pytest.approx((1 - chosen) * p[mid].sum().item(), rel=2e-3)


def test_rows_equal_a_recomputation_from_the_models_own_attention_weights(
    tiny_backbone: Backbone, folder: Path, phi: Path, tmp_path: Path
) -> None:
    table = captured(make_spec(), folder, phi, tmp_path)
    assert len(table) == 2 * 3 * 4 * QUERIES * 2  # packs, layers, heads, queries, budgets
    assert sorted(table.k.unique()) == [3, 16] and table.e_exact_sub.max() < 1e-6
    corpus = held_out_corpus("wiki", tiny_backbone.tokenizer, LENGTH + QUERIES, 0, folder)
    for pack, rows in table.groupby("pack"):
        assert_rows(rows, eager_attention(tiny_backbone.model, corpus.sequence(pack)), AnchorSpec(4, 16))


def test_groups_of_three_heads_and_other_anchors(folder: Path, tmp_path: Path) -> None:
    """Three heads read one KV head, and a prefix of 90 has 82 tokens between 3 and 5."""
    backbone, phi = with_groups_of_three(folder, tmp_path)
    table = captured(make_spec(packs=1, budgets=(40.0,), anchors=AnchorSpec(3, 5)), folder, phi, tmp_path)
    assert len(table) == 6 * QUERIES and set(table.k) == {28}
    corpus = held_out_corpus("wiki", backbone.tokenizer, LENGTH + QUERIES, 0, folder)
    assert_rows(table, eager_attention(backbone.model, corpus.sequence(0)), AnchorSpec(3, 5))


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
    for (layer, head), rows in mass.groupby(["layer", "head"]):
        p = weights[layer][head, LENGTH:, 4 : LENGTH - 16].double().sort(descending=True).values
        curve = (p.cumsum(-1) / p.sum(-1, keepdim=True)).mean(0)
        assert rows.c_mid.to_list() == pytest.approx([curve[k - 1].item() for k in ks], rel=1e-3)


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


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"length": "21"}, "length 21: 20 anchors leave fewer than two mid-region tokens"),
        ({"corpus": "cwe"}, "corpus cwe consists of RULER's prompts; pass their manifest to --prompts"),
    ],
)
def test_bad_input_is_refused(changes: dict[str, str], problem: str, folder: Path, phi: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=problem):
        captured(make_spec(**changes), folder, phi, tmp_path)
