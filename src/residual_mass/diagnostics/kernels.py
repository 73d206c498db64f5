"""Exact attention scores and those of feature maps, key by key, for one query head of one pack.

Shape letters: Q = queries, L = prefill tokens, D = head dimension, M = features.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from residual_mass.core.accounting import attention_scores
from residual_mass.core.selection import exhaustive_topk, full_prefix, partition
from residual_mass.decode.prefix import map_heads
from residual_mass.diagnostics.packs import ks_of, make_packs, tidy, visit_layers, with_place
from residual_mass.files import write_parquet
from residual_mass.model.loading import load_backbone
from residual_mass.model.phi_maps import MAPS_AT_FAULT, PhiMaps, files_by_label
from residual_mass.provenance import Record
from residual_mass.spec.paths import MANIFEST
from residual_mass.spec.settings import tokens_of
from residual_mass.spec.specs import KernelsSpec

log = logging.getLogger(__name__)


def run(spec: KernelsSpec, assets: Path, phi: Sequence[Path], prompts: Path | None, out: Path) -> None:
    """The `kernels` stage: one Parquet row per (maps, query, mid-region key).

    Args:
        phi: files of the maps, in the order of `spec.maps`.
    """
    record = Record("kernels", spec, [assets / MANIFEST, *phi, prompts])
    files = files_by_label(phi, spec.maps)
    backbone = load_backbone(spec.backbone, assets)
    shape = backbone.shape
    if spec.layer >= shape.layers or spec.head >= shape.query_heads:
        sizes = f"{shape.layers} layers of {shape.query_heads} query heads"
        absent = f"there is no layer {spec.layer}, head {spec.head}; count from 0"
        raise ValueError(f"diagnostics.head: {spec.backbone.name} has {sizes}, {absent}")
    maps = {label: PhiMaps.load(path, backbone.device) for label, path in files.items()}
    for phi_maps in maps.values():
        phi_maps.require(shape, spec.backbone.model_id, spec.backbone.revision)
    (pack,) = make_packs(spec.corpus, backbone, spec.length, spec.queries, 1, spec.seed, assets, prompts)
    log.info("layer %d, head %d under %d sets of maps, on %s", spec.layer, spec.head, len(maps), backbone.device)
    frames: list[pd.DataFrame] = []

    def visit(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> None:
        if layer != spec.layer:
            return
        for label, phi_maps in maps.items():
            frame = _frame(spec, label, phi_maps, queries, keys, scale)
            frames.append(frame)

    visit_layers(backbone, pack, tokens_of(spec.length), visit)
    frame = with_place(pd.concat(frames), spec.backbone, spec.corpus, spec.length)
    write_parquet(out, frame.astype({"maps": "category"}))
    record.write(out, device=backbone.device, identity=backbone.identity)


def _frame(spec: KernelsSpec, label: str, maps: PhiMaps, queries: Tensor, keys: Tensor, scale: float) -> pd.DataFrame:
    """Returns the rows of a set of maps; queries [Hq, Q, D], keys [Hkv, L, D] of the layer."""
    length = keys.shape[1]
    kv_head = spec.head * len(keys) // len(queries)
    prefix = full_prefix(length, keys.device)
    mid = partition(prefix, spec.anchors.sink, spec.anchors.tail).mid
    (k,) = ks_of((spec.budget_percent,), spec.length, spec.anchors)
    scores = attention_scores(queries[spec.head], keys[kv_head], scale)
    ks = torch.full((len(scores),), k, device=keys.device)
    retrieved = exhaustive_topk(scores, mid, ks).mask(length)
    # Features are logarithms: log <phi_q, phi_k> is the logsumexp over M of their sums, here one query at a time.
    log_query = map_heads(maps.query[spec.layer], queries[None])[0, spec.head]  # [Q, M]
    log_key = map_heads(maps.key[spec.layer], keys[None])[0, kv_head, mid]  # [mid, M]
    log_phi = torch.stack([torch.logsumexp(row + log_key, dim=-1) for row in log_query])
    if not log_phi.isfinite().all():
        raise ValueError(f"maps {label}, layer {spec.layer}: scores are not finite; {MAPS_AT_FAULT}")
    columns = {"retrieved": retrieved[:, mid], "log_kernel": scores[:, mid], "log_phi": log_phi}
    positions = {"position": mid.nonzero().squeeze(-1).tolist()}
    constant = {"maps": label, "layer": spec.layer, "head": spec.head}
    constant |= {"budget_percent": spec.budget_percent, "k": k}
    return tidy(columns, ("query",), positions, **constant)
