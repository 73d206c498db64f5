"""Exact attention scores and those of feature maps, key by key, for one query head of one pack.

Shape letters: Q = queries, L = prefill tokens, D = head dimension, M = features.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor, nn

from residual_mass.core.accounting import attention_scores
from residual_mass.core.selection import exhaustive_topk, full_prefix, partition, retrieved_count
from residual_mass.core.settings import tokens_of
from residual_mass.diagnostics.packs import make_packs, visit_layers, with_place
from residual_mass.files import write_parquet
from residual_mass.model.loading import load_backbone
from residual_mass.model.phi_maps import MAPS_AT_FAULT, PhiMaps, require_one_file_each
from residual_mass.model.prefix import map_heads
from residual_mass.provenance import MANIFEST, Record
from residual_mass.study.specs import KernelsSpec

log = logging.getLogger(__name__)


def run(spec: KernelsSpec, assets: Path, phi: Sequence[Path], prompts: Path | None, out: Path) -> None:
    """The `kernels` stage: one Parquet row per (maps, query, mid-region key).

    Args:
        phi: files of the maps, in the order of `spec.maps`.
    """
    record = Record("kernels", spec, [assets / MANIFEST, *phi, prompts])
    require_one_file_each(phi, spec.maps)
    backbone = load_backbone(spec.backbone, assets)
    shape = backbone.shape
    if spec.layer >= shape.layers or spec.head >= shape.query_heads:
        raise ValueError(
            f"diagnostics.head: {spec.backbone.name} has {shape.layers} layers of {shape.query_heads} query heads, "
            f"there is no layer {spec.layer}, head {spec.head}; count from 0"
        )
    kv_head = spec.head * shape.kv_heads // shape.query_heads
    maps = []
    for named, path in zip(spec.maps, phi, strict=True):
        of_all = PhiMaps.load(path)
        of_all.require(shape, spec.backbone.model_id, spec.backbone.revision)
        query, key = _only(of_all.query[spec.layer], spec.head), _only(of_all.key[spec.layer], kv_head)
        maps.append((named.label, query.to(backbone.device), key.to(backbone.device)))
    (pack,) = make_packs(spec.corpus, backbone, spec.length, spec.queries, 1, spec.seed, assets, prompts)
    log.info("layer %d, head %d under %d sets of maps, on %s", spec.layer, spec.head, len(maps), backbone.device)
    frames: list[pd.DataFrame] = []

    def visit(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> None:
        if layer == spec.layer:
            frames.extend(_frames(spec, maps, queries[spec.head].float(), keys[kv_head].float(), scale))

    visit_layers(backbone, pack, tokens_of(spec.length), visit)
    frame = with_place(pd.concat(frames), spec.backbone, spec.corpus, spec.length)
    write_parquet(out, frame.astype({"maps": "category"}))
    record.write(out, device=backbone.device, identity=backbone.identity)


def _only(stacked: nn.Module, head: int) -> nn.Module:
    """Keeps the map of one head."""
    for name, value in list(stacked.named_parameters()):
        setattr(stacked, name, nn.Parameter(value[head : head + 1].clone(), requires_grad=False))
    return stacked


def _frames(
    spec: KernelsSpec, maps: Sequence[tuple[str, nn.Module, nn.Module]], queries: Tensor, keys: Tensor, scale: float
) -> list[pd.DataFrame]:
    """One frame for each label, phi_q and phi_k of `maps`; queries [Q, D], keys [L, D]."""
    length, count = len(keys), len(queries)
    mid = partition(full_prefix(length, keys.device), spec.anchors.sink, spec.anchors.tail).mid
    k = retrieved_count(spec.budget_percent, length, spec.anchors.sink + spec.anchors.tail)
    scores = attention_scores(queries, keys, scale)
    retrieved = exhaustive_topk(scores, mid, torch.full((count,), k, device=keys.device)).mask(length)
    positions = mid.nonzero().squeeze(-1)
    shared = {
        "layer": spec.layer,
        "head": spec.head,
        "query": torch.arange(count).repeat_interleave(len(positions)).numpy(),
        "position": positions.cpu().repeat(count).numpy(),
        "budget_percent": spec.budget_percent,
        "k": k,
        "retrieved": retrieved[:, mid].flatten().cpu().numpy(),
        "log_kernel": scores[:, mid].flatten().cpu().numpy(),
    }
    frames = []
    for label, query_map, key_map in maps:
        log_query, log_key = (
            map_heads(m, x[None, None])[0, 0] for m, x in ((query_map, queries), (key_map, keys[mid]))
        )
        log_phi = torch.stack([torch.logsumexp(row + log_key, dim=-1) for row in log_query])  # log <phi_q, phi_k>
        if not log_phi.isfinite().all():
            raise ValueError(f"maps {label}, layer {spec.layer}: scores are not finite; {MAPS_AT_FAULT}")
        frames.append(pd.DataFrame({"maps": label} | shared | {"log_phi": log_phi.flatten().cpu().numpy()}))
    return frames
