"""Errors of all methods on text: what the files say against the attention inputs of each pack."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from tests.conftest import TINY
from torch import Tensor

from residual_mass.core.settings import AnchorSpec, MapsSpec
from residual_mass.diagnostics import residual_errors
from residual_mass.diagnostics.packs import make_packs, visit_layers
from residual_mass.diagnostics.residual_errors import RESIDUAL_ERRORS, RESIDUAL_HEADS
from residual_mass.methods import Step, method_named
from residual_mass.methods.step_bytes import full_bytes, kept_bytes, step_bytes
from residual_mass.model.errors import ReadLayer
from residual_mass.model.loading import Backbone
from residual_mass.model.phi_maps import PhiMaps
from residual_mass.study.specs import ResidualErrorsSpec

LENGTH, QUERIES, PACKS = 90, 3, 3
LAYERS, HEADS, KV_HEADS, HEAD_DIM = 3, 4, 2, 16
METHODS = ("topk", "topk_phi", "topk_moments", "topk_moments_8")
BUDGETS = (10.0, 25.0, 100.0)
KS = (0, 3, 70)


def make_spec(**changes: object) -> ResidualErrorsSpec:
    base = ResidualErrorsSpec(
        study="test", backbone=TINY, corpora=("wiki",), length=str(LENGTH), methods=METHODS, budgets=BUDGETS,
        anchors=AnchorSpec(4, 16), maps=MapsSpec("512", 512), packs=PACKS, queries=QUERIES, seed=0,
        bootstrap_resamples=200, recipe=1,
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def measured(spec: ResidualErrorsSpec, folder: Path, phi: Path | None, out: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rows of the heads, and of the summary; both files lie in `out`."""
    heads, summary = out / "heads.parquet", out / "errors.csv"
    residual_errors.run(spec, folder, phi, heads, summary)
    return pd.read_parquet(heads), pd.read_csv(summary)


def test_heads_are_means_over_the_queries_of_each_pack(
    tiny_backbone: Backbone, folder: Path, phi: Path, tmp_path: Path
) -> None:
    heads, _ = measured(make_spec(), folder, phi, tmp_path)
    assert list(heads) == RESIDUAL_HEADS
    assert len(heads) == PACKS * LAYERS * HEADS * len(METHODS) * len(BUDGETS)
    maps, packs = (
        PhiMaps.load(phi).folded(),
        make_packs("wiki", tiny_backbone, str(LENGTH), QUERIES, PACKS, 0, folder, None),
    )
    checked = []

    def visit(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> None:
        read = ReadLayer(queries, keys, values, scale, BUDGETS, AnchorSpec(4, 16), maps[layer])
        of_layer = heads[(heads["pack"] == 1) & (heads["layer"] == layer)]
        for method in METHODS:
            for name, rows in read.errors(method).items():
                table = of_layer[of_layer["method"] == method].pivot(index="head", columns="k", values=name)
                rows = torch.where(rows.isfinite(), rows, torch.nan)
                assert list(table.columns) == list(KS)
                torch.testing.assert_close(
                    torch.tensor(table.to_numpy()), rows.nanmean(1), rtol=1e-4, atol=1e-6, equal_nan=True
                )
        for name, rows in read.facts().items():
            by_head = of_layer.groupby("head")[name]
            assert (by_head.nunique() == 1).all()
            assert by_head.first().to_list() == pytest.approx(rows.mean(1).tolist(), rel=1e-4)
        checked.append(layer)

    visit_layers(tiny_backbone, packs[1], LENGTH, visit)
    assert checked == [0, 1, 2]


def test_the_summary_is_what_the_heads_say(folder: Path, phi: Path, tmp_path: Path) -> None:
    heads, summary = measured(make_spec(corpora=("wiki", "wiki")), folder, phi, tmp_path)
    assert list(summary) == RESIDUAL_ERRORS and len(summary) == 2 * len(METHODS) * len(BUDGETS)
    assert set(summary["rows"]) == {PACKS * LAYERS * HEADS * QUERIES} and set(summary["heads"]) == {LAYERS * HEADS}
    heads = heads.iloc[: len(heads) // 2]  # the same text twice
    by_head = heads.groupby(["method", "k", "layer", "head"], observed=True)["error"].mean()
    for line in summary.iloc[: len(summary) // 2].itertuples():
        rows = heads[(heads["method"] == line.method) & (heads["k"] == line.k)]
        own, topk, of_phi = (by_head[method, line.k] for method in (line.method, "topk", "topk_phi"))
        assert line.error == pytest.approx(rows["error"].mean(), rel=1e-4)
        if line.k == KS[-1]:
            assert line.error < 1e-6
        else:
            assert line.over_topk == pytest.approx(own.mean() / topk.mean(), rel=1e-4)
            assert line.error_ci_low < line.error < line.error_ci_high
        if line.method == "topk":
            assert np.isnan(line.heads_below_topk) and np.isnan(line.log_z_error)
        else:
            assert line.heads_below_topk == pytest.approx((own < topk).mean(), abs=1e-6)
            gaps = rows[rows["log_z_rows"] > 0]
            if line.k == KS[-1]:
                assert gaps.empty and np.isnan(line.log_z_error)
            else:
                mean = np.average(gaps["log_z_error"], weights=gaps["log_z_rows"])
                assert line.log_z_error == pytest.approx(mean, abs=1e-5)
        if line.method == "topk_phi":
            assert np.isnan(line.heads_below_phi) and line.maps == 512 and len(line.phi_sha) == 64
        else:
            assert line.heads_below_phi == pytest.approx((own < of_phi).mean(), abs=1e-6)
        assert line.tokens_read == pytest.approx(rows["tokens_read"].mean(), rel=1e-5)
        assert line.recall == pytest.approx(rows["recall"].mean(), rel=1e-5, nan_ok=True)
        step = Step(LENGTH, HEAD_DIM, HEADS // KV_HEADS, 20, line.tokens_read - 20, features=8)
        read = step_bytes(method_named(line.method), step)
        assert (line.scan_bytes, line.row_bytes, line.summary_bytes) == pytest.approx(read, rel=1e-4)
        assert line.step_share == pytest.approx(read.total / full_bytes(step), rel=1e-4)
        kept = kept_bytes(method_named(line.method), step)
        assert line.kept_share == pytest.approx(kept.total / full_bytes(step), rel=1e-4)
        features = 4 * step.features * LENGTH if line.method == "topk_phi" else 0
        held = 1 + (line.state_bytes + features) / full_bytes(step)
        assert line.held_share == pytest.approx(held, rel=1e-4)
        assert line.state_share == pytest.approx(line.state_bytes / (2 * LENGTH * HEAD_DIM * 2), rel=1e-5)


def test_intervals_are_those_of_means_over_drawn_packs(folder: Path, phi: Path, tmp_path: Path) -> None:
    """Two of three packs are drawn, so the nine pairs are all there is."""
    heads, summary = measured(make_spec(bootstrap_resamples=20_000), folder, phi, tmp_path)
    of = {
        method: heads[(heads["method"] == method) & (heads["k"] == 3)].groupby("pack")["error"].mean().to_numpy()
        for method in METHODS
    }
    pairs = [[i, j] for i in range(PACKS) for j in range(PACKS)]
    for line in summary[summary["k"] == 3].itertuples():
        errors = sorted(of[line.method][pair].mean() for pair in pairs)
        assert (line.error_ci_low, line.error_ci_high) == pytest.approx((errors[0], errors[-1]), rel=1e-4)
        if line.method != "topk":
            ratios = sorted(of[line.method][pair].mean() / of["topk"][pair].mean() for pair in pairs)
            assert (line.over_topk_ci_low, line.over_topk_ci_high) == pytest.approx((ratios[0], ratios[-1]), rel=1e-4)


def test_a_single_pack_has_no_interval(folder: Path, tmp_path: Path) -> None:
    """Nor has it maps here, which no method needs."""
    spec = make_spec(methods=("topk", "topk_mean"), maps=None, packs=1)
    _, summary = measured(spec, folder, None, tmp_path)
    for name in ("error_ci_low", "over_topk_ci_high", "heads_below_phi", "maps", "phi_sha", "training_steps"):
        assert summary[name].isna().all()
    assert summary["error"].notna().all()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"methods": ("topk", "topk_best")}, "method 'topk_best' is unknown; the most similar are topk"),
        ({"length": "21"}, "length 21: 20 anchors leave fewer than two mid-region tokens; take a longer one"),
        ({"corpora": ("nothing",)}, "nothing"),
    ],
)
def test_bad_input_is_refused(
    changes: dict[str, object], problem: str, folder: Path, phi: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=problem):
        measured(make_spec(**changes), folder, phi, tmp_path / "out")
    assert not (tmp_path / "out").exists()
