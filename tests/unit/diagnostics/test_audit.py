"""The audit agrees with what capture measures, and says so when a captured number is wrong."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from tests.conftest import TINY
from tests.records import record
from torch import Tensor

from residual_mass.backbones.measured import layer_measures
from residual_mass.backbones.phi_maps import HeadShape, PhiMaps, read_safetensors, write_safetensors
from residual_mass.core.settings import AnchorSpec, MapSpec, MapsSpec
from residual_mass.diagnostics import audit, capture
from residual_mass.diagnostics.audit import JUDGED, ROUNDED
from residual_mass.study.specs import AuditSpec, CaptureSpec

SHAPE = HeadShape(layers=2, query_heads=4, kv_heads=2, head_dim=16)
REZERO, HEDGEHOG = MapSpec(d_emb=20, d_phi=8), MapSpec("hedgehog", d_phi=8)
LENGTH, QUERIES, SCALE = 96, 2, 0.25
ANCHORS = AnchorSpec(4, 16)
KS = (0, 1, 12, 40, 76, 90)  # the mid-region has 76 tokens
SPEC = AuditSpec(ANCHORS, error_tolerance=1e-5, log_mass_tolerance=1e-5, recipe=1)
INDEX = ["pack", "layer", "head", "query", "k"]


class Captured:
    """Random attention rows in the files that the capture stage writes; every row is stored."""

    def __init__(
        self,
        folder: Path,
        seed: int = 0,
        map_spec: MapSpec = REZERO,
        dtype: torch.dtype = torch.float32,
        anchors: AnchorSpec = ANCHORS,
        ks: Sequence[int] = (1, 12),
        shape: HeadShape = SHAPE,
    ) -> None:
        torch.manual_seed(seed)
        self.folder, self.dtype, self.anchors, self.ks = folder, dtype, anchors, ks
        self.phi, self.rows, self.heads = (folder / name for name in ("phi", "rows", "heads"))
        self.out = folder / "audit.csv"
        maps = PhiMaps(shape, map_spec)
        for name, value in maps.named_parameters():
            if name.endswith("alpha"):  # zero at the start, which would hide the block behind it
                value.data.normal_()
        maps.save(self.phi)
        self.maps = PhiMaps.load(self.phi)
        self.inputs = [
            (torch.randn(heads, QUERIES, 16) * 3, torch.randn(kv_heads, LENGTH, 16), torch.randn(kv_heads, LENGTH, 16))
            for heads, kv_heads in [(shape.query_heads, shape.kv_heads)] * 2
        ]

    def write(self) -> pd.DataFrame:
        """Measures the inputs, one layer each, and writes the files."""
        tensors: dict[str, Tensor] = {}
        stored, frames = [], []
        for layer, inputs in enumerate(self.inputs):
            queries, keys, values = (x.to(self.dtype) for x in inputs)
            measures = layer_measures(
                self.maps, layer, queries.float(), keys.float(), values.float(), SCALE, self.ks, self.anchors
            )
            for head in range(len(queries)):
                kv_head = head // (len(queries) // len(keys))
                for query in range(QUERIES):
                    parts = {"query": queries[head, query], "keys": keys[kv_head], "values": values[kv_head]}
                    tensors |= {f"{len(stored)}.{name}": value.clone() for name, value in parts.items()}
                    place = {"pack": 3, "layer": layer, "head": head, "query": query}
                    stored.append(place | {"kv_head": kv_head})
                    measured = {name: value[head, query].numpy() for name, value in measures.items()}
                    frames.append(pd.DataFrame({**place, "k": self.ks, **measured}))
        facts = {"backbone": "tiny", "corpus": "wiki", "length": str(LENGTH), "phi_sha": self.maps.sha256}
        frame = pd.concat(frames, ignore_index=True).assign(**facts).sample(frac=1, random_state=1)
        frame.to_parquet(self.heads, index=False)
        self.write_rows(tensors, {"scale": SCALE, "rows": stored})
        return frame

    def write_rows(self, tensors: dict[str, Tensor], facts: object) -> None:
        write_safetensors(self.rows, tensors, {"residual_mass_rows": json.dumps(facts)})

    def read_rows(self) -> tuple[dict[str, Tensor], dict]:
        header, tensors = read_safetensors(self.rows)
        return tensors, json.loads(header["residual_mass_rows"])

    def audit(self, spec: AuditSpec = SPEC) -> pd.DataFrame:
        """Of the files as they are now."""
        record(self.rows, self.heads, self.phi)
        audit.run(spec, self.rows, self.heads, self.phi, self.out)
        return pd.read_csv(self.out)

    def refusal(self, spec: AuditSpec = SPEC) -> str:
        with pytest.raises(ValueError) as caught:
            self.audit(spec)
        assert not self.out.exists() and "\n" not in str(caught.value)
        return str(caught.value)


def changed(frame: pd.DataFrame, path: Path, name: str, value: float, **row: int) -> tuple[int, ...]:
    """Writes the frame with one value replaced, of the row named or of a random one; returns its index."""
    chosen = frame.query(" and ".join(f"{key} == {number}" for key, number in row.items())) if row else frame
    label = chosen.sample(1, random_state=len(name)).index[0]
    frame = frame.copy()
    frame.loc[label, name] = np.float32(value)
    frame.to_parquet(path, index=False)
    return tuple(frame.loc[label, INDEX])


# ---- agreement -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("map_spec", [REZERO, HEDGEHOG], ids=["rezero", "hedgehog"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_captured_rows_agree_with_their_recomputation(
    tmp_path: Path, seed: int, map_spec: MapSpec, dtype: torch.dtype
) -> None:
    captured = Captured(tmp_path, seed, map_spec, dtype, ks=KS)
    frame = captured.write()
    lines = captured.audit()
    assert (
        list(lines)
        == (
            "backbone corpus length pack layer head query k quantity captured reference difference tolerance near_tie"
        ).split()
    )
    assert len(lines) == 2 * 4 * QUERIES * len(KS) * len(JUDGED + ROUNDED)
    assert set(lines.quantity) == {*JUDGED, *ROUNDED} and set(lines.k) == set(KS)
    assert {tuple(x) for x in lines[["backbone", "corpus", "length", "pack"]].values} == {("tiny", "wiki", LENGTH, 3)}
    judged = lines[lines.tolerance.notna()]
    assert judged.difference.max() < 1e-5 and len(judged) > 0.9 * len(lines) * len(JUDGED) / len(JUDGED + ROUNDED)
    assert not set(judged.quantity) & set(ROUNDED)
    # Rounded sums may be neighbours: one part in 256, of summaries that hold several times the residual's mass.
    rounded = lines[lines.quantity.isin(ROUNDED) & (lines.k < 40)]
    assert rounded.difference.max() < 0.05
    originals = frame.set_index(INDEX)
    for line in judged.sample(50, random_state=seed).itertuples():
        original = originals.loc[(line.pack, line.layer, line.head, line.query, line.k), line.quantity]
        assert line.captured == pytest.approx(original, rel=1e-7, nan_ok=True)


def test_bfloat16_summaries_are_rounded_as_in_capture(tmp_path: Path) -> None:
    """Most sums round alike in float32 and float64, so most differences are as small as those of exact summaries."""
    captured = Captured(tmp_path)
    captured.write()
    lines = captured.audit().set_index([*INDEX, "quantity"])
    for name in ROUNDED:
        of_name = lines.xs(name, level="quantity")
        exact = lines.xs(name.removesuffix("_bf16"), level="quantity")
        assert (of_name.difference < 1e-5).mean() > 0.5
        assert (of_name.reference - exact.reference).abs().max() > 1e-4  # and the rounding itself is there


def test_nothing_and_everything_retrieved(tmp_path: Path) -> None:
    captured = Captured(tmp_path, ks=(0, 76, 90))
    captured.write()
    lines = captured.audit()
    for k in (76, 90):
        values = lines[lines.k == k].set_index("quantity")
        for name in ("log_z_hat", "log_z_true"):
            assert (values.loc[name, ["captured", "reference"]] == -math.inf).all(axis=None)
            assert (values.loc[name, "difference"] == 0).all() and values.loc[name, "tolerance"].notna().all()
        for name in ("residual_share_hat", "residual_share", "e_exact_sub", "e_topk", "e_sub"):
            assert values.loc[name, "reference"].max() < 1e-12
        assert values.loc["c_mid", "reference"].min() == pytest.approx(1)
    nothing = lines[lines.k == 0].set_index([*INDEX, "quantity"]).reference.unstack()
    assert (nothing.c_mid == 0).all()
    assert np.allclose(nothing.e_sub, nothing.e_nosub, rtol=0, atol=1e-12)
    assert nothing.e_exact_nosub.max() < 1e-12


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (3, 3), (4, 1)], ids=["groups of 3", "of 1", "of 4"])
@pytest.mark.parametrize("anchors", [AnchorSpec(3, 5), AnchorSpec(0, 9)], ids=["3 + 5", "0 + 9"])
def test_other_groups_of_heads_and_other_anchors(
    tmp_path: Path, anchors: AnchorSpec, heads: int, kv_heads: int
) -> None:
    shape = HeadShape(layers=2, query_heads=heads, kv_heads=kv_heads, head_dim=16)
    captured = Captured(tmp_path, anchors=anchors, ks=(0, 7, 40), shape=shape)
    captured.write()
    lines = captured.audit(AuditSpec(anchors, 1e-5, 1e-5, 1))
    assert len(lines) == 2 * heads * QUERIES * 3 * len(JUDGED + ROUNDED)
    judged = lines[lines.tolerance.notna()]
    assert judged.difference.max() < 1e-5 and set(judged["head"]) == set(range(heads))


@pytest.mark.parametrize("anchors", [AnchorSpec(40, 56), AnchorSpec(40, 55), AnchorSpec(200, 200), AnchorSpec(0, 0)])
def test_a_mid_region_of_no_token_of_one_and_of_all(tmp_path: Path, anchors: AnchorSpec) -> None:
    captured = Captured(tmp_path, anchors=anchors, ks=(0, 1, 5))
    frame = captured.write()
    assert frame.h_mid.isna().all() == (anchors.sink > 0)
    lines = captured.audit(AuditSpec(anchors, 1e-5, 1e-5, 1))
    assert lines[lines.tolerance.notna()].difference.max() < 1e-5
    assert lines[lines.quantity == "h_mid"].tolerance.notna().any()


def test_rows_of_capture_itself_pass(folder: Path, phi: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    heads, mass, rows, out = (tmp_path / name for name in ("heads.parquet", "mass.parquet", "rows", "audit.csv"))
    spec = CaptureSpec(
        study="test", backbone=TINY, corpus="wiki", length="90", budgets=(25.0, 40.0), anchors=ANCHORS,
        maps=MapsSpec("512", 512), packs=2, queries=3, audited=9, seed=0, recipe=1,
    )  # fmt: skip
    capture.run(spec, folder, phi, None, heads, mass, rows)
    caplog.set_level(logging.INFO)
    audit.run(SPEC, rows, heads, phi, out)
    lines = pd.read_csv(out)
    assert len(lines) == 9 * 2 * len(JUDGED + ROUNDED) and set(lines.pack) == {0, 1} and set(lines.k) == {3, 16}
    for name in JUDGED:
        largest = lines[(lines.quantity == name) & lines.tolerance.notna()].difference.max()
        (told,) = re.findall(rf" {name}: largest difference (\S+), ", caplog.text)
        assert float(told) == pytest.approx(largest, rel=6e-3)  # three digits of it, where the file has four


# ---- what is found ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "error"),
    [*((name, (-1) ** number * 1e-3) for number, name in enumerate(JUDGED)), ("e_sub", math.nan), ("h_mid", math.inf)],
)
def test_one_wrong_value_is_found_and_named(tmp_path: Path, name: str, error: float) -> None:
    captured = Captured(tmp_path)
    frame = captured.write()
    row = {"pack": 3, "layer": 1, "head": 2, "query": 0, "k": 12}
    right = frame.query("layer == 1 and head == 2 and query == 0 and k == 12")[name].iloc[0]
    changed(frame, captured.heads, name, right + error, **row)
    message = captured.refusal()
    assert message.startswith(
        f"the capture disagrees with its float64 recomputation in 1 of {len(frame) * 14} values, most in {name} of "
        f"pack 3, layer 1, head 2, query 0 at K = 12: {np.float32(right + error):.9g} in {captured.heads}, "
    )
    assert "tolerance 1e-05; " in message


def test_the_worst_of_several_is_named(tmp_path: Path) -> None:
    captured = Captured(tmp_path)
    frame = captured.write()
    frame["e_sub"] += 1e-3 * (frame["layer"] + 1)
    frame.loc[(frame["layer"] == 0) & (frame["k"] == 1), "log_z_true"] += 0.5
    frame.to_parquet(captured.heads, index=False)
    message = captured.refusal()
    assert "most in log_z_true of pack 3, layer 0, head" in message and "at K = 1:" in message
    assert message == captured.refusal(AuditSpec(ANCHORS, 1e-5, 1e-5, 2))
    assert "most in e_sub of pack 3, layer 1" in captured.refusal(AuditSpec(ANCHORS, 1e-5, 1, 1))


@pytest.mark.parametrize(("error_tolerance", "log_tolerance"), [(1e-2, 1e-5), (1e-5, 1e-2)])
def test_errors_and_logs_have_tolerances_of_their_own(
    tmp_path: Path, error_tolerance: float, log_tolerance: float
) -> None:
    captured = Captured(tmp_path)
    frame = captured.write()
    name = "e_nosub" if error_tolerance > log_tolerance else "log_z_hat"
    row = {"layer": 0, "head": 0, "query": 0, "k": 1}
    right = frame.query("layer == 0 and head == 0 and query == 0 and k == 1")[name].iloc[0]
    changed(frame, captured.heads, name, right + 1e-3, **row)
    lines = captured.audit(AuditSpec(ANCHORS, error_tolerance, log_tolerance, 1))
    assert lines[lines.quantity == name].difference.max() == pytest.approx(1e-3, rel=1e-2)
    captured.out.unlink()
    assert f"most in {name} of" in captured.refusal()


def test_a_finite_mass_where_nothing_is_left_is_found(tmp_path: Path) -> None:
    captured = Captured(tmp_path, ks=(12, 76))
    frame = captured.write()
    row = changed(frame, captured.heads, "log_z_hat", -12.5, k=76)
    assert f"log_z_hat of pack 3, layer {row[1]}, head {row[2]}, query {row[3]} at K = 76: -12.5" in captured.refusal()


def test_other_inputs_and_another_scale_are_found(tmp_path: Path) -> None:
    captured = Captured(tmp_path)
    captured.write()
    tensors, facts = captured.read_rows()
    captured.write_rows(tensors, facts | {"scale": SCALE * 1.001})
    assert "disagrees" in captured.refusal()
    captured.write_rows(tensors | {"5.values": tensors["5.values"] * 1.01 + 0.01}, facts)
    assert "of pack 3, layer 0, head 2, query 1 at" in captured.refusal()
    captured.write_rows(tensors, facts)
    captured.audit()


@pytest.mark.parametrize("name", ROUNDED)
def test_what_comes_from_bfloat16_is_shown_and_not_judged(tmp_path: Path, name: str) -> None:
    captured = Captured(tmp_path)
    frame = captured.write()
    changed(frame, captured.heads, name, 70.0, k=1)
    lines = captured.audit()
    assert lines[lines.quantity == name].difference.max() > 5
    assert lines[lines.quantity.isin(ROUNDED)].tolerance.isna().all()


# ---- what cannot be judged -------------------------------------------------------------------------------------------


def with_near_tie(captured: Captured, gap: float) -> None:
    """Makes the scores of query 0 of head 1 in layer 0 fall by `gap` from its 12th to its 13th token."""
    queries, keys, _ = captured.inputs[0]
    query = queries[1, 0]
    mid = SCALE * keys[0, 4:80] @ query
    order = mid.argsort(descending=True) + 4
    last, first = order[11], order[12]
    # Apart in a direction that the score does not see, so that the order of the two matters.
    across = torch.randn(16)
    across -= (across @ query) / (query @ query) * query
    keys[0, first] = keys[0, last] - gap * query / (SCALE * query @ query) + across


@pytest.mark.parametrize(("gap", "near"), [(0.0, True), (2e-6, True), (1e-3, False)])
def test_a_row_with_a_near_tie_is_not_judged_at_that_k(tmp_path: Path, gap: float, near: bool) -> None:
    captured = Captured(tmp_path, ks=(12, 40))
    with_near_tie(captured, gap)
    frame = captured.write()
    lines = captured.audit()
    here = (lines["layer"] == 0) & (lines["head"] == 1) & (lines["query"] == 0)
    assert set(lines[here & (lines.k == 12)].near_tie) == {int(near)}
    assert lines[here & (lines.k == 12)].tolerance.isna().all() == near
    assert lines[here & (lines.k != 12) & lines.quantity.isin(JUDGED)].tolerance.notna().all()
    captured.out.unlink()
    row = {"layer": 0, "head": 1, "query": 0}
    changed(frame, captured.heads, "c_mid", 0.001, **row, k=12)
    if near:
        assert (captured.audit().difference > 0.01).any()
        captured.out.unlink()
    else:
        assert "c_mid of pack 3, layer 0, head 1, query 0 at K = 12" in captured.refusal()
    changed(frame, captured.heads, "c_mid", 0.001, **row, k=40)
    assert "c_mid of pack 3, layer 0, head 1, query 0 at K = 40" in captured.refusal()


def set_share_left(captured: Captured, share: float) -> None:
    """Stretches one key until the other tokens have `share` of the mid-region's estimated mass, for query 0 of head 0
    in layer 0; that key also has the highest score.
    """
    queries, keys, _ = captured.inputs[0]
    query, token = queries[0, 0], 30
    direction = query / query.norm()
    (w_query, b_query), (w_key, b_key) = ((m.weight[0].double(), m.bias[0].double()) for m in (
        captured.maps.query[0], captured.maps.key[0]
    ))  # fmt: skip
    z = query.double() @ w_query + b_query

    def share_with(length: float) -> float:
        keys[0, token] = direction * length
        w = keys[0, 4:80].double() @ w_key + b_key
        masses = torch.cat((z + w, -z - w), dim=-1).exp().sum(-1)
        return ((masses.sum() - masses[token - 4]) / masses.sum()).item()

    low, high = 5.0, 500.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if share_with(middle) > share else (low, middle)
    assert share_with(high) == pytest.approx(share, rel=0.1)


ESTIMATED = {"e_sub", "log_z_hat", "residual_share_hat"}


@pytest.mark.parametrize(
    ("share", "growth"), [(0.3, 1), (1e-3, 10), (1e-4, 100), (1e-5, 1000), (1.5e-6, None), (6e-7, None), (1e-8, 1)]
)
def test_tolerances_grow_with_what_a_subtraction_cancels(tmp_path: Path, share: float, growth: float | None) -> None:
    """The retrieved token has all but `share` of the estimated mass: what is left is the difference of two sums that
    agree in most of their digits, and nothing at all below 1e-6.
    """
    captured = Captured(tmp_path, map_spec=HEDGEHOG, ks=(1,))
    set_share_left(captured, share)
    frame = captured.write()
    row = {"layer": 0, "head": 0, "query": 0}
    lines = captured.audit(AuditSpec(ANCHORS, 1e-5, 1e-4, 1))
    lines = lines.query("layer == 0 and head == 0 and query == 0").set_index("quantity")
    for name in JUDGED:
        tolerance = 1e-4 if name.startswith("log_z") else 1e-5
        if name in ESTIMATED:
            tolerance = math.nan if growth is None else tolerance * growth
        assert lines.tolerance[name] == pytest.approx(tolerance, rel=0.1, nan_ok=True)
    assert lines.near_tie.sum() == 0
    assert (lines.reference["log_z_hat"] == -math.inf) == (share < 1e-6)
    captured.out.unlink()
    wrong = lines.reference["log_z_hat"] + 2e-4 * (growth or 1)
    changed(frame, captured.heads, "log_z_hat", wrong if math.isfinite(wrong) else -3.0, **row)
    if growth is None:
        captured.audit()
    else:
        assert "most in log_z_hat of pack 3, layer 0, head 0" in captured.refusal(AuditSpec(ANCHORS, 1e-5, 1e-4, 1))


# ---- files -----------------------------------------------------------------------------------------------------------


def test_edited_files_are_named(tmp_path: Path) -> None:
    captured = Captured(tmp_path)
    captured.write()
    captured.audit()
    captured.out.unlink()
    for path in (captured.heads, captured.rows, captured.phi):
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(ValueError, match=f"^{path}: is not what {path.name}.meta.json recorded: .*; delete it and"):
            audit.run(SPEC, captured.rows, captured.heads, captured.phi, captured.out)
        path.write_bytes(whole)
    assert not captured.out.exists()


def test_other_feature_maps_are_refused(tmp_path: Path) -> None:
    captured = Captured(tmp_path)
    captured.write()
    PhiMaps(SHAPE, REZERO).save(captured.phi)
    assert captured.refusal() == (
        f"{captured.heads}: was captured with other feature maps than {captured.phi}; run the capture stage again"
    )
