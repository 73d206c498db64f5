"""Accounting quantities of one layer's queries over one unpadded prefix.

Shape letters: Hq / Hkv = query / KV heads, G = Hq / Hkv, Q = queries per head, L = prefix tokens, D = head dimension, M
= features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from residual_mass.core.accounting import attention_scores, key_features, summarise
from residual_mass.core.measures import row_measures
from residual_mass.core.settings import AnchorSpec
from residual_mass.core.support import Partition, full_prefix, partition
from residual_mass.model.phi_maps import MAPS_AT_FAULT, PhiMaps
from residual_mass.model.prefix import map_heads


@torch.no_grad()
def layer_measures(
    maps: PhiMaps,
    layer: int,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    ks: Sequence[int],
    anchors: AnchorSpec,
) -> dict[str, Tensor]:
    """Computes `core.row_measures` of every query head at every K; entries [Hq, Q, len(ks)].

    Args:
        queries: [Hq, Q, D], of tokens after the prefix; keys, values: [Hkv, L, D]; all finite float32.

    Raises:
        ValueError: errors with the maps are not finite; names the layer.
    """
    kv_heads, length, _ = keys.shape
    masks = partition(full_prefix(length, keys.device), anchors.sink, anchors.tail)
    features, log_shift = key_features(map_heads(maps.key[layer], keys[None])[0], masks.mid)
    log_query = grouped(map_heads(maps.query[layer], queries[None])[0], kv_heads)
    rows = row_measures(
        attention_scores(grouped(queries, kv_heads), keys, scale),
        values,
        Partition(masks.anchors[None], masks.mid[None]),
        ks,
        summarise(features, log_shift, values),
        features,
        log_query,
    )
    if not (rows["e_sub"] + rows["e_nosub"]).isfinite().all():
        raise ValueError(f"layer {layer}: errors with the feature maps are not finite; {MAPS_AT_FAULT}")
    return {name: value.reshape(*queries.shape[:2], len(ks)) for name, value in rows.items()}


def grouped(x: Tensor, kv_heads: int) -> Tensor:
    """Groups query rows by KV head: [Hq, Q, C] -> [Hkv, G * Q, C]."""
    return x.unflatten(0, (kv_heads, -1)).flatten(1, 2)
