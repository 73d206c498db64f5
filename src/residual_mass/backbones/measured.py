"""Accounting quantities of one layer's queries over one unpadded prefix.

Shape letters: Hq / Hkv = query / KV heads, G = Hq / Hkv, Q = queries per head, L = prefix tokens, D = head dimension, M
= features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from residual_mass.backbones.phi_maps import PhiMaps
from residual_mass.backbones.prefix import map_heads
from residual_mass.core.accounting import attention_scores, key_features, summarise
from residual_mass.core.measures import row_measures
from residual_mass.core.support import Partition, full_prefix, partition
from residual_mass.specs import AnchorSpec


@torch.no_grad()
def layer_measures(
    maps: PhiMaps, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float, k: int, anchors: AnchorSpec
) -> dict[str, Tensor]:
    """`core.row_measures` of every query head; entries [Hq, Q].

    Args:
        queries: [Hq, Q, D], of tokens after the prefix; keys, values: [Hkv, L, D]; all float32.
    """
    kv_heads, length, _ = keys.shape

    def grouped(x: Tensor) -> Tensor:
        """[Hq, Q, C] -> [Hkv, G * Q, C]."""
        return x.unflatten(0, (kv_heads, -1)).flatten(1, 2)

    masks = partition(full_prefix(length, keys.device), anchors.sink, anchors.tail)
    features, log_shift = key_features(map_heads(maps.key[layer], keys[None])[0], masks.mid)
    log_query = grouped(map_heads(maps.query[layer], queries[None])[0])
    rows = row_measures(
        attention_scores(grouped(queries), keys, scale),
        values,
        Partition(masks.anchors[None], masks.mid[None]),
        k,
        summarise(features, log_shift, values),
        features,
        log_query,
    )
    return {name: value.reshape(queries.shape[:2]) for name, value in rows.items()}
