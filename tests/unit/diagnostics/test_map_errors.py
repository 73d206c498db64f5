"""Errors of several maps against the rows that `capture` writes for each of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from tests.conftest import TINY
from tests.records import record
from tests.unit.diagnostics.test_capture import LENGTH, QUERIES, captured, make_spec

from residual_mass.backbones.phi_maps import PhiMaps
from residual_mass.core.settings import AnchorSpec, MapsSpec
from residual_mass.diagnostics import map_errors
from residual_mass.study.specs import MapErrorsSpec


@pytest.fixture
def spec() -> MapErrorsSpec:
    maps = (MapsSpec("512", 512), MapsSpec("64-hedgehog", 64))
    return MapErrorsSpec(
        backbone=TINY, corpus="wiki", length=str(LENGTH), budgets=(25.0, 40.0), anchors=AnchorSpec(4, 16), maps=maps,
        packs=2, queries=QUERIES, seed=0, recipe=1,
    )  # fmt: skip


def test_means_are_those_of_the_captured_rows(
    spec: MapErrorsSpec,
    folder: Path,
    phi: Path,
    hedgehog: Path,
    tmp_path: Path,
) -> None:
    out = tmp_path / "errors.csv"
    map_errors.run(spec, folder, [phi, hedgehog], out)
    table = pd.read_csv(out)
    assert list(table.maps) == ["512", "512", "64-hedgehog", "64-hedgehog"] and list(table.k) == [3, 16, 3, 16]
    assert set(table.trained_length) == {512, 64} and set(table.rows) == {2 * 3 * 4 * QUERIES}
    for file, of_maps in ((phi, table[table.maps == "512"]), (hedgehog, table[table.maps != "512"])):
        captured(make_spec(), folder, file, tmp_path)
        for _, line in of_maps.iterrows():
            rows = pd.read_parquet(tmp_path / "heads.parquet").query("k == @line.k")
            for name in ("e_topk", "e_sub", "e_nosub"):
                assert line[name] == pytest.approx(rows[name].mean(), abs=2e-6)
            gaps = (rows.log_z_hat - rows.log_z_true).replace([np.inf, -np.inf], np.nan)
            assert line.log_z_error == pytest.approx(gaps.mean(), abs=1e-5)
            assert line.clamped_share == pytest.approx(rows.clamped.mean(), abs=1e-6)
            gains = (rows.e_topk - rows.e_sub).groupby([rows.layer, rows["head"]]).mean()
            assert line.heads_below_topk == pytest.approx((gains > 0).mean(), abs=1e-6)


def test_rows_whose_residual_was_dropped_are_counted(
    spec: MapErrorsSpec, folder: Path, phi: Path, tmp_path: Path
) -> None:
    """Of maps so sharp that the retrieved tokens hold all of their mass in some rows."""
    maps = PhiMaps.load(phi)
    with torch.no_grad():
        for parameter in maps.key.parameters():
            parameter *= 10
    maps.save(sharp := tmp_path / "sharp.safetensors")
    record(sharp)
    map_errors.run(spec, folder, [phi, sharp], tmp_path / "errors.csv")
    captured(make_spec(), folder, sharp, tmp_path)
    table = pd.read_csv(tmp_path / "errors.csv").set_index(["maps", "k"])
    rows = pd.read_parquet(tmp_path / "heads.parquet")
    for k in (3, 16):
        share = rows[rows.k == k].clamped.mean()
        assert 0 < share < 1 and table.clamped_share["64-hedgehog", k] == pytest.approx(share, abs=1e-6)


def test_files_must_match_the_spec(spec: MapErrorsSpec, folder: Path, phi: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--phi has 1 files, but spec.maps names 2 maps"):
        map_errors.run(spec, folder, [phi], tmp_path / "errors.csv")
