"""Errors of all methods on text: the files, against the attention inputs of each pack."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from tests.conftest import TINY
from torch import Tensor

from residual_mass.diagnostics import residual_errors
from residual_mass.diagnostics.errors import ReadLayer
from residual_mass.diagnostics.packs import make_packs, visit_layers
from residual_mass.diagnostics.residual_errors import RESIDUAL_ERROR_COLUMNS, RESIDUAL_HEAD_COLUMNS
from residual_mass.methods import Step, method_named
from residual_mass.methods.step_bytes import full_bytes, kept_bytes, step_bytes
from residual_mass.model.loading import Backbone
from residual_mass.model.phi_maps import PhiMaps
from residual_mass.spec.settings import AnchorSpec, MapsSpec
from residual_mass.spec.specs import ResidualErrorsSpec

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
    assert list(heads) == RESIDUAL_HEAD_COLUMNS
    assert len(heads) == PACKS * LAYERS * HEADS * len(METHODS) * len(BUDGETS)
    maps = PhiMaps.load(phi).folded()
    packs = make_packs("wiki", tiny_backbone, str(LENGTH), QUERIES, PACKS, 0, folder, None)
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
    """Two of three packs are drawn, so the nine pairs are all that intervals are over."""
    heads, summary = measured(make_spec(bootstrap_resamples=20_000), folder, phi, tmp_path)
    assert list(summary) == RESIDUAL_ERROR_COLUMNS and len(summary) == len(METHODS) * len(BUDGETS)
    assert set(summary["rows"]) == {PACKS * LAYERS * HEADS * QUERIES} and set(summary["heads"]) == {LAYERS * HEADS}
    by_head = heads.groupby(["method", "k", "layer", "head"], observed=True)["error"].mean()
    by_pack = heads.groupby(["method", "k", "pack"], observed=True)["error"].mean()
    pairs = [[i, j] for i in range(PACKS) for j in range(PACKS)]
    for line in summary.itertuples():
        rows = heads[(heads["method"] == line.method) & (heads["k"] == line.k)]
        own, topk, of_phi = (by_head[method, line.k] for method in (line.method, "topk", "topk_phi"))
        for name in ("error", "tokens_read", "recall"):
            assert getattr(line, name) == pytest.approx(rows[name].mean(), rel=1e-4, nan_ok=True)
        compared = [(own < topk).mean(), (own < of_phi).mean()]
        compared = [
            np.nan if line.method == other else share
            for other, share in zip(("topk", "topk_phi"), compared, strict=True)
        ]
        assert [line.heads_below_topk, line.heads_below_phi] == pytest.approx(compared, abs=1e-6, nan_ok=True)
        gaps = rows[rows["log_z_rows"] > 0]
        assert gaps.empty == (line.method == "topk" or line.k == KS[-1])
        mean = np.nan if gaps.empty else np.average(gaps["log_z_error"], weights=gaps["log_z_rows"])
        assert line.log_z_error == pytest.approx(mean, abs=1e-5, nan_ok=True)
        if line.k == KS[-1]:
            assert line.error < 1e-6
        else:
            packs, of_topk = by_pack[line.method, line.k].to_numpy(), by_pack["topk", line.k].to_numpy()
            errors = sorted(packs[pair].mean() for pair in pairs)
            assert (line.error_ci_low, line.error_ci_high) == pytest.approx((errors[0], errors[-1]), rel=1e-4)
            assert line.over_topk == pytest.approx(packs.mean() / of_topk.mean(), rel=1e-4)
            if line.method != "topk":
                ratios = sorted(packs[pair].mean() / of_topk[pair].mean() for pair in pairs)
                ends = line.over_topk_ci_low, line.over_topk_ci_high
                assert ends == pytest.approx((ratios[0], ratios[-1]), rel=1e-4)
        assert_bytes(line)
    of_phi = summary.set_index("method").loc["topk_phi"]
    assert set(of_phi["maps"]) == {512} and set(of_phi["phi_sha"].str.len()) == {64}


def assert_bytes(line: Any) -> None:
    """Those of the methods' formulas at the tokens that were read; states as they are held, in units of the cache."""
    rule = method_named(line.method)
    step = Step(LENGTH, HEAD_DIM, HEADS // KV_HEADS, 20, line.tokens_read - 20, features=8)
    read, kept, full = step_bytes(rule, step), kept_bytes(rule, step), full_bytes(step)
    assert (line.scan_bytes, line.row_bytes, line.summary_bytes) == pytest.approx(read, rel=1e-4)
    assert line.state_bytes == step_bytes(rule, step._replace(retrieved=0)).summary
    features = 4 * step.features * LENGTH if line.method == "topk_phi" else 0
    held, state = 1 + (line.state_bytes + features) / full, line.state_bytes / full
    shares = (line.step_share, line.kept_share, line.held_share, line.state_share)
    assert shares == pytest.approx((read.total / full, kept.total / full, held, state), rel=1e-4)


def test_a_single_pack_has_no_interval(folder: Path, tmp_path: Path) -> None:
    """Nor has it maps here, which no method needs."""
    spec = make_spec(methods=("topk", "topk_mean"), maps=None, packs=1, corpora=("wiki", "pydoc"))
    heads, summary = measured(spec, folder, None, tmp_path)
    assert len(heads) == 2 * LAYERS * HEADS * 2 * len(BUDGETS) and set(heads["corpus"]) == {"wiki", "pydoc"}
    assert summary["corpus"].tolist() == ["wiki"] * 6 + ["pydoc"] * 6
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
