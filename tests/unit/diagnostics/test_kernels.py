"""Kernels of one head against queries and keys of the same pack, key by key in float64."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
import pytest
import torch
from tests.conftest import TINY
from tests.unit.diagnostics.conftest import with_groups_of_three
from tests.unit.diagnostics.test_capture import LENGTH, QUERIES, eager_attention

from residual_mass.core.settings import AnchorSpec, MapsSpec
from residual_mass.diagnostics import kernels
from residual_mass.model.loading import Backbone
from residual_mass.model.phi_maps import PhiMaps
from residual_mass.study.specs import KernelsSpec
from residual_mass.texts.corpora import held_out_corpus
from residual_mass.training.teacher import record_traces

LAYER, HEAD = 1, 3


def make_kernels(**changes: object) -> KernelsSpec:
    fields: dict[str, object] = {
        "study": "test", "backbone": TINY, "corpus": "wiki", "length": str(LENGTH), "budget_percent": 40.0,
        "anchors": AnchorSpec(4, 16), "maps": (MapsSpec("512", 512), MapsSpec("64-hedgehog", 64)),
        "layer": LAYER, "head": HEAD, "queries": QUERIES, "seed": 0, "recipe": 1,
    }  # fmt: skip
    return KernelsSpec(**(fields | changes))  # type: ignore[arg-type]


@pytest.fixture
def maps(phi: Path, hedgehog: Path) -> list[Path]:
    return [phi, hedgehog]


def test_rows_equal_a_recomputation_key_by_key(
    tiny_backbone: Backbone, folder: Path, maps: list[Path], tmp_path: Path
) -> None:
    kernels.run(make_kernels(), folder, maps, None, tmp_path / "kernels.parquet")
    table = pd.read_parquet(tmp_path / "kernels.parquet")
    assert len(table) == 2 * QUERIES * (LENGTH - 20) and set(table.k) == {16}
    ids = held_out_corpus("wiki", tiny_backbone.tokenizer, LENGTH + QUERIES, 0, folder).sequence(0)
    trace = record_traces(tiny_backbone, ids, torch.arange(LENGTH, LENGTH + QUERIES), lambda trace: trace)[LAYER]
    keys = trace.keys[HEAD // 2].double()
    for number, query in enumerate(trace.queries[HEAD].double()):
        scores = (keys @ query * trace.scale).tolist()
        mid = range(4, LENGTH - 16)
        top = sorted(mid, key=lambda j: -scores[j])[:16]
        for label, file in zip(("512", "64-hedgehog"), maps, strict=True):
            of_maps = PhiMaps.load(file).double()
            log_query = of_maps.query[LAYER](query.expand(4, 1, -1))[HEAD, 0]
            log_key = of_maps.key[LAYER](keys.expand(2, *keys.shape))[HEAD // 2]
            rows = table[(table.maps == label) & (table["query"] == number)].set_index("position")
            assert sorted(rows.index) == list(mid)
            for j in mid:
                log_phi = math.log(sum(math.exp(x) for x in (log_query + log_key[j]).tolist()))
                assert rows.log_kernel[j] == pytest.approx(scores[j], abs=1e-5)
                assert rows.log_phi[j] == pytest.approx(log_phi, abs=1e-4)
                assert rows.retrieved[j] == (j in top)


def test_heads_read_the_keys_of_their_own_group(folder: Path, tmp_path: Path) -> None:
    """Heads 0, 1, 2 those of KV head 0 and 3, 4, 5 those of KV head 1. Between 3 and 5 anchors."""
    backbone, phi = with_groups_of_three(folder, tmp_path)
    ids = held_out_corpus("wiki", backbone.tokenizer, LENGTH + QUERIES, 0, folder).sequence(0)
    (weights,), mid = eager_attention(backbone.model, ids), slice(3, LENGTH - 5)
    (trace,) = record_traces(backbone, ids, torch.arange(LENGTH, LENGTH + QUERIES), lambda trace: trace)
    of_maps = PhiMaps.load(phi)
    log_query, log_key = of_maps.query[0](trace.queries), of_maps.key[0](trace.keys)
    for head, kv_head in enumerate((0, 0, 0, 1, 1, 1)):
        spec = make_kernels(maps=(MapsSpec("512", 512),), anchors=AnchorSpec(3, 5), layer=0, head=head)
        kernels.run(spec, folder, [phi], None, tmp_path / "kernels.parquet")
        table = pd.read_parquet(tmp_path / "kernels.parquet")
        assert set(table.k) == {28}
        for query, rows in table.groupby("query"):
            assert rows.position.tolist() == list(range(LENGTH))[mid]
            of_model = weights[head, LENGTH + query, mid]
            kernel = torch.tensor(rows.log_kernel.to_numpy()).softmax(-1)
            torch.testing.assert_close(kernel, of_model / of_model.sum(), rtol=1e-3, atol=1e-6)
            log_phi = torch.logsumexp(log_query[head, query] + log_key[kv_head, mid], -1)
            torch.testing.assert_close(torch.tensor(rows.log_phi.to_numpy()), log_phi, rtol=1e-4, atol=1e-4)
            best = rows.log_kernel.nlargest(28).index
            assert rows.retrieved[rows.retrieved].index.sort_values().equals(best.sort_values())


def test_a_head_that_is_not_there_is_refused(folder: Path, maps: list[Path], tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"diagnostics\.head: .* has 3 layers of 4 query heads, there is no layer 1, head 4"
    ):
        kernels.run(make_kernels(head=4), folder, maps, None, tmp_path / "kernels.parquet")
    with pytest.raises(ValueError, match="--phi has 1 files, but spec.maps names 2 maps"):
        kernels.run(make_kernels(), folder, maps[:1], None, tmp_path / "kernels.parquet")
    assert not (tmp_path / "kernels.parquet").exists()
