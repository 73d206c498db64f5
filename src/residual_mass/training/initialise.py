"""Positive random features as a starting point: phi linear before the exponential, calibrated on one teacher pass.

Shape letters: Hq / Hkv = query / KV heads, G = Hq / Hkv, M = features, D = head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from residual_mass.backbones.phi_maps import PhiMaps
from residual_mass.core.accounting import attention_scores
from residual_mass.core.feature_maps import ReZeroMap, log_kernel, orthogonal_directions
from residual_mass.training.teacher import LayerTrace

DIRECTION_SCALE = 0.3
"""Random directions are shortened to this: unbiased ones (scale 1, minus |x|^2 / 2) have far too much variance at d_phi
= 64.
"""


@torch.no_grad()
def positive_random_features(maps: PhiMaps, traces: Sequence[LayerTrace], seed: int) -> None:
    """Sets every map to log phi(x) = w x + b, with orthogonal w shared by a KV head's group and b so that the mean
    log-partition function over the trace's queries equals the teacher's.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = maps.shape
    group = shape.query_heads // shape.kv_heads
    for layer, trace in enumerate(traces):
        query_map, key_map = maps.query[layer], maps.key[layer]
        if not isinstance(query_map, ReZeroMap) or not isinstance(key_map, ReZeroMap):
            raise ValueError("map.init positive_random_features is for rezero maps")
        w = orthogonal_directions(shape.kv_heads, maps.map.d_phi, shape.head_dim, generator)
        w = (w * DIRECTION_SCALE * trace.scale**0.5).to(trace.keys.device)  # [Hkv, M, D]
        bias = _log_partition_gap(trace, w, group) / 2  # half in phi_q, half in phi_k
        biases = bias.unsqueeze(-1).expand(-1, maps.map.d_phi)
        key_map.set_log_linear(w, biases)
        query_map.set_log_linear(w.repeat_interleave(group, 0), biases.repeat_interleave(group, 0))


def _log_partition_gap(trace: LayerTrace, w: Tensor, group: int) -> Tensor:
    """[Hkv]: mean over the group's queries of log Z of the teacher minus log Z of the bias-free maps, over visible
    keys.
    """
    queries = trace.queries.unflatten(0, (-1, group)).flatten(1, 2)  # [Hkv, G * Q, D]
    length = trace.keys.shape[1]
    visible = torch.arange(length, device=trace.keys.device) <= trace.positions.repeat(group).unsqueeze(-1)
    teacher = attention_scores(queries, trace.keys, trace.scale)
    student = log_kernel(queries @ w.transpose(-1, -2), trace.keys @ w.transpose(-1, -2))
    gap = teacher.masked_fill(~visible, -torch.inf).logsumexp(-1) - student.masked_fill(~visible, -torch.inf).logsumexp(
        -1
    )
    return gap.mean(-1)
