"""The diagnostics' measures of attention rows, against sums over tokens in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import pytest
import torch
from reference import ReferenceRow, log_features

from residual_mass.diagnostics.errors import ReadLayer
from residual_mass.model.phi_maps import HeadShape, PhiMaps
from residual_mass.spec.settings import AnchorSpec, MapSpec

REZERO, HEDGEHOG = MapSpec(d_emb=20, d_phi=8), MapSpec("hedgehog", d_phi=8)
LENGTH, QUERIES, DIM, SCALE = 96, 2, 16, 0.25
ANCHORS = AnchorSpec(4, 16)
MID = LENGTH - 20
ESTIMATED = ("e_sub", "log_z_hat", "residual_share_hat")
"""What rests on the difference of two sums of features."""
UNSURE = (3e-7, 3e-6)
"""Shares of the mid-region's estimated mass at which rounding decides whether the residual is dropped."""
HELD = 1e-2
"""Below this share tolerances grow in proportion, as the rounding of the two sums counts for more."""
Compared = dict[tuple[int, str], list[tuple[float, float, float]]]


def compare(
    seed: int = 0,
    map_spec: MapSpec = REZERO,
    dtype: torch.dtype = torch.float32,
    anchors: AnchorSpec = ANCHORS,
    ks: Sequence[int] = (0, 1, 12, 40, MID),
    heads: int = 4,
    kv_heads: int = 2,
    spread: float = 3.0,
) -> Compared:
    """Measured value, reference and tolerance of every row, by K and quantity; the tolerance is NaN where rounding
    decides a tie or whether a residual is dropped.
    """
    torch.manual_seed(seed)
    maps = PhiMaps(HeadShape(layers=1, query_heads=heads, kv_heads=kv_heads, head_dim=DIM), map_spec)
    for name, value in maps.named_parameters():
        if name.endswith("alpha"):  # zero at the start, which would hide the block behind it
            value.data.normal_()
    queries = (torch.randn(heads, QUERIES, DIM) * spread).to(dtype).float()
    keys, values = (torch.randn(kv_heads, LENGTH, DIM).to(dtype).float() for _ in range(2))
    always = min(LENGTH, anchors.sink + anchors.tail)
    budgets = [min(100.0, 100 * (k + always - 0.5) / LENGTH) for k in ks]  # rounded up to K
    with torch.no_grad():
        measured = ReadLayer(queries, keys, values, SCALE, budgets, anchors, maps.folded()[0]).accounting()
    found: Compared = {}
    for head in range(heads):
        kv_head = head // (heads // kv_heads)
        key, value = keys[kv_head].double().numpy(), values[kv_head].double().numpy()
        log_keys = log_features(maps.key[0], map_spec.kind, kv_head, key)
        for number in range(QUERIES):
            query = queries[head, number].double().numpy()
            log_query = log_features(maps.query[0], map_spec.kind, head, query[None])[0]
            row = ReferenceRow.of(query, key, value, SCALE, anchors, log_query, log_keys)
            for place, k in enumerate(ks):
                for name, reference in row.at(k).items():
                    triple = float(measured[name][head, number, place]), reference, tolerance(row, k, name, reference)
                    found.setdefault((k, name), []).append(triple)
    return found


def tolerance(row: ReferenceRow, k: int, name: str, reference: float) -> float:
    share = row.share_left(k)
    if row.near_tie(k) or (name in ESTIMATED and UNSURE[0] < share < UNSURE[1]):
        return math.nan
    size = abs(reference) if math.isfinite(reference) else 1.0
    allowed = 1e-5 + 1e-6 * size if name.startswith("log_z") else 1e-5 * max(1.0, size)
    return allowed * max(1, HELD / share) if name in ESTIMATED and share >= UNSURE[1] else allowed


def require_agreement(found: Compared) -> None:
    """Requires nearly all values to be judged, and these to agree."""
    triples = [triple for each in found.values() for triple in each]
    judged = [triple for triple in triples if not math.isnan(triple[2])]
    assert len(judged) > 0.9 * len(triples)
    for (k, name), each in found.items():
        for value, reference, allowed in each:
            if not math.isnan(allowed):
                same = value == reference or (math.isnan(value) and math.isnan(reference))
                assert same or abs(value - reference) <= allowed, (k, name, value, reference)


@pytest.mark.parametrize(
    "change",
    [
        *({"seed": n, "map_spec": maps, "dtype": dtype} for n, (maps, dtype) in
          enumerate(product((REZERO, HEDGEHOG), (torch.float32, torch.bfloat16)))),
        {"spread": 60.0},  # one score dominates
        *({"anchors": AnchorSpec(*anchors), "ks": (0, 7, 40), "heads": heads, "kv_heads": kv_heads} for anchors, heads,
          kv_heads in (((3, 5), 6, 2), ((0, 9), 3, 3), ((3, 5), 4, 1))),
    ],
    ids=str,
)  # fmt: skip
def test_they_agree(change: dict[str, object]) -> None:
    """Also with nothing and everything retrieved."""
    require_agreement(compare(**change))


@pytest.mark.parametrize("anchors", [AnchorSpec(40, 56), AnchorSpec(40, 55), AnchorSpec(200, 200), AnchorSpec(0, 0)])
def test_a_mid_region_of_no_token_of_one_and_of_all(anchors: AnchorSpec) -> None:
    found = compare(anchors=anchors, ks=(0, 1, 5) if anchors.sink else (1, 5))
    require_agreement(found)
    assert all(math.isnan(value) == (anchors.sink > 0) for value, *_ in found[1, "h_mid"])
