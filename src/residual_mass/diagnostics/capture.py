"""Per-head, per-query accounting quantities on packs of held-out text.

Each pack is an L-token prefill followed by teacher-forced decode queries; the measured prefix is the prefill, so the
visible mid-region is the whole of M. One layer's keys and values are alive at a time.

Shape letters: Hq / Hkv = query / KV heads, G = Hq / Hkv, Q = queries per pack, L = prefill tokens, D = head dimension.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor, nn
from tqdm import tqdm

from residual_mass.backbones.corpora import held_out_corpus
from residual_mass.backbones.hook import attention_hook, exact_attention
from residual_mass.backbones.loading import Backbone, load_backbone
from residual_mass.backbones.measured import layer_measures
from residual_mass.backbones.phi_maps import PhiMaps
from residual_mass.core.support import retrieved_count
from residual_mass.files import replacing, write_meta
from residual_mass.specs import CaptureSpec, tokens_of

log = logging.getLogger(__name__)


def run(spec: CaptureSpec, assets: Path, phi: Path, out: Path) -> None:
    """The `capture` stage: writes one Parquet row per (pack, layer, head, query, k)."""
    length = tokens_of(spec.length)
    if length > spec.maps.length and not spec.allow_extrapolation:
        raise ValueError(
            f"length {spec.length} is beyond the {spec.maps.length} tokens the maps were trained on; "
            "use longer-trained maps, or set allow_extrapolation to measure the collapse"
        )
    maps = PhiMaps.load(phi)
    backbone = load_backbone(spec.backbone, assets)
    maps.require(backbone.shape, spec.backbone.model_id, spec.backbone.revision)
    maps = maps.to(backbone.device)
    corpus = held_out_corpus(spec.corpus, backbone.tokenizer, length + spec.queries, spec.seed, assets)
    log.info("%d packs of %s, %d + %d tokens, on %s", spec.packs, spec.corpus, length, spec.queries, backbone.device)
    frames = []
    for pack in tqdm(range(spec.packs), desc="capture", unit="pack"):
        frames += pack_measures(spec, backbone, maps, corpus.sequence(pack), pack)
    with replacing(out) as temporary:
        pd.concat(frames, ignore_index=True).to_parquet(temporary, index=False)
    write_meta(out, spec=asdict(spec), identity=backbone.identity, phi_sha=maps.sha256, device=str(backbone.device))


@torch.no_grad()
def pack_measures(
    spec: CaptureSpec, backbone: Backbone, maps: PhiMaps, ids: Sequence[int], pack: int
) -> list[pd.DataFrame]:
    """One frame per (layer, budget) of one pack."""
    length = tokens_of(spec.length)
    frames: list[pd.DataFrame] = []

    def handler(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        layer = module.layer_idx
        queries, keys, values = (x[0].float() for x in (q[:, :, length:], k[:, :, :length], v[:, :, :length]))
        for budget in spec.budgets:
            retrieved = retrieved_count(budget, length, spec.anchors.sink + spec.anchors.tail)
            rows = layer_measures(maps, layer, queries, keys, values, scale, retrieved, spec.anchors)
            frames.append(_frame(rows, pack, layer, budget, retrieved))
        return exact_attention(module, q, k, v, mask, scale)

    with attention_hook(backbone.model, handler):
        inputs = torch.tensor([list(ids)], device=backbone.device)
        backbone.model.get_decoder()(inputs, use_cache=False)
    return frames


def _frame(rows: dict[str, Tensor], pack: int, layer: int, budget: float, k: int) -> pd.DataFrame:
    """rows: entries [Hq, Q]."""
    heads, queries = next(iter(rows.values())).shape
    frame = pd.DataFrame({name: value.cpu().flatten().numpy() for name, value in rows.items()})
    index = {
        "pack": pack,
        "layer": layer,
        "head": torch.arange(heads).repeat_interleave(queries).numpy(),
        "query": torch.arange(queries).repeat(heads).numpy(),
        "k": k,
        "budget_percent": budget,
    }
    for position, (name, value) in enumerate(index.items()):
        frame.insert(position, name, value)
    return frame
