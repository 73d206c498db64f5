"""Kernels of one head against the model's own attention weights and maps in float64, key by key."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
import pytest
import torch
from tests.conftest import TINY
from tests.unit.diagnostics.conftest import random_maps, with_groups_of_three
from tests.unit.diagnostics.test_capture import LENGTH, QUERIES, eager_attention

from residual_mass.diagnostics import kernels
from residual_mass.model.phi_maps import PhiMaps
from residual_mass.spec.settings import AnchorSpec, MapSpec, MapsSpec
from residual_mass.spec.specs import KernelsSpec
from residual_mass.texts.corpora import held_out_corpus
from residual_mass.training.teacher import record_traces

ANCHORS, MID = AnchorSpec(3, 5), range(3, LENGTH - 5)


def kernels_of(folder: Path, maps: list[Path], out: Path, **changes: int) -> pd.DataFrame:
    spec = KernelsSpec(
        study="test", backbone=TINY, corpus="wiki", length=str(LENGTH), budget_percent=40.0, anchors=ANCHORS,
        maps=(MapsSpec("512", 512), MapsSpec("64-hedgehog", 64)), queries=QUERIES, seed=0, recipe=1,
        **{"layer": 0, "head": 0, **changes},
    )  # fmt: skip
    kernels.run(spec, folder, maps, None, out)
    return pd.read_parquet(out)


def test_rows_equal_a_recomputation_key_by_key(folder: Path, tmp_path: Path) -> None:
    """Query heads 0, 1, 2 read the keys of KV head 0 and 3, 4, 5 those of KV head 1."""
    backbone, phi = with_groups_of_three(folder, tmp_path)
    maps = [phi, random_maps(backbone, tmp_path, MapSpec("hedgehog", d_phi=8), length=64)]
    ids = held_out_corpus("wiki", backbone.tokenizer, LENGTH + QUERIES, 0, folder).sequence(0)
    (weights,) = eager_attention(backbone.model, ids)
    (trace,) = record_traces(backbone, ids, torch.arange(LENGTH, LENGTH + QUERIES), lambda trace: trace)
    loaded = {label: PhiMaps.load(path).double() for label, path in zip(("512", "64-hedgehog"), maps, strict=True)}
    features = {
        label: (each.query[0](trace.queries.double()), each.key[0](trace.keys.double()))
        for label, each in loaded.items()
    }
    for head, kv_head in enumerate((0, 0, 0, 1, 1, 1)):
        table = kernels_of(folder, maps, tmp_path / "kernels.parquet", head=head)
        assert len(table) == 2 * QUERIES * len(MID) and set(table.k) == {28}
        for (label, query), rows in table.groupby(["maps", "query"], observed=True):
            log_query, log_key = features[label][0][head, query], features[label][1][kv_head]
            scores = {j: math.log(weights[head, LENGTH + query, j]) for j in MID}
            top = sorted(MID, key=lambda j: -scores[j])[:28]
            assert rows.position.tolist() == list(MID) and rows.position[rows.retrieved].tolist() == sorted(top)
            shift = rows.log_kernel.iloc[0] - scores[MID[0]]  # weights are normalised
            for row in rows.itertuples():
                assert row.log_kernel == pytest.approx(scores[row.position] + shift, abs=1e-3)
                log_phi = math.log(sum(math.exp(x) for x in (log_query + log_key[row.position]).tolist()))
                assert row.log_phi == pytest.approx(log_phi, abs=1e-4)


def test_a_head_that_is_not_there_is_refused(folder: Path, phi: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"diagnostics\.head: .* has 3 layers of 4 query heads, there is no layer 1, head 4"
    ):
        kernels_of(folder, [phi, phi], tmp_path / "kernels.parquet", layer=1, head=4)
    with pytest.raises(ValueError, match="--phi has 1 files, but spec.maps names 2 maps"):
        kernels_of(folder, [phi], tmp_path / "kernels.parquet")
    assert not (tmp_path / "kernels.parquet").exists()
