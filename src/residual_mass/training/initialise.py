"""Positive random features as a starting point: phi linear before the exponential, calibrated on one teacher pass.

Shape letters: Hq / Hkv = query / KV heads, G = Hq / Hkv, Q = queries, L = keys, M = features, D = head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from residual_mass.backbones.measured import grouped
from residual_mass.backbones.phi_maps import PhiMaps
from residual_mass.core.accounting import attention_scores
from residual_mass.core.feature_maps import ReZeroMap, log_kernel, orthogonal_directions
from residual_mass.core.selection import exhaustive_topk
from residual_mass.core.settings import AnchorSpec
from residual_mass.training.losses import retrieved
from residual_mass.training.side_by_side import side_by_side
from residual_mass.training.teacher import LayerTrace

DIRECTION_SCALE = 0.3
"""Scale of the random directions: unbiased ones (scale 1, minus |x|^2 / 2) have far too much variance at d_phi = 64."""
QUERIES = 64
"""Query positions of the trace used for calibration."""


def positive_random_features(
    maps: PhiMaps, traces: Sequence[LayerTrace], anchors: AnchorSpec, budgets: Sequence[float], seed: int
) -> None:
    """Sets every map to log phi(x) = w x + b, with orthogonal w shared by a KV head's group and b chosen so that each
    query head estimates the mean log mass of the residual correctly over the budgets.

    Matching the whole mass instead would start with a residual a hundred times too large: most of the mass is in the
    anchors and the retrieved tokens, which such broad features cannot distinguish from the rest.

    Raises:
        ValueError: a map is not a ReZero map, or its d_emb is smaller than the head dimension.
    """
    # On one core: rounding would depend on the number of cores.
    side_by_side(1, lambda _: _initialise(maps, traces, anchors, budgets, seed), traces[0].keys.device)


@torch.no_grad()
def _initialise(
    maps: PhiMaps, traces: Sequence[LayerTrace], anchors: AnchorSpec, budgets: Sequence[float], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = maps.shape
    group = shape.query_heads // shape.kv_heads
    for layer, trace in enumerate(traces):
        query_map, key_map = maps.query[layer], maps.key[layer]
        if not isinstance(query_map, ReZeroMap) or not isinstance(key_map, ReZeroMap):
            raise ValueError("map.init positive_random_features is for rezero maps")
        w = orthogonal_directions(shape.kv_heads, maps.map.d_phi, shape.head_dim, generator)
        w = (w * DIRECTION_SCALE * trace.scale**0.5).to(trace.keys.device)  # [Hkv, M, D]
        trace = trace.at(torch.arange(min(QUERIES, len(trace.positions)))).widened()
        bias = _log_mass_gap(trace, w, anchors, budgets)
        key_map.set_log_linear(w, torch.zeros_like(w[..., 0]))
        query_map.set_log_linear(w.repeat_interleave(group, 0), bias.unsqueeze(-1).expand(-1, maps.map.d_phi))


def _log_mass_gap(trace: LayerTrace, w: Tensor, anchors: AnchorSpec, budgets: Sequence[float]) -> Tensor:
    """Returns log Z_R - log Z_R hat of maps without bias, averaged over queries and budgets: [Hq]; 0 where every
    residual is empty.
    """
    kv_heads = trace.keys.shape[0]
    queries = grouped(trace.queries, kv_heads)  # [Hkv, G * Q, D]
    group = queries.shape[1] // len(trace.positions)
    keys = trace.keys[:, : int(trace.positions.max()) + 1]
    last = trace.positions.repeat(group).unsqueeze(-1)
    columns = torch.arange(keys.shape[1], device=keys.device)
    mid = (columns >= anchors.sink) & (columns <= last - anchors.tail)
    teacher = attention_scores(queries, keys, trace.scale)
    student = log_kernel(queries @ w.transpose(-1, -2), keys @ w.transpose(-1, -2))
    gaps = []
    for k in retrieved(trace.positions, anchors, budgets).unbind(-1):
        best = exhaustive_topk(teacher, mid, k.repeat(group)).mask(keys.shape[1])
        left = mid & ~best
        true, estimated = (x.masked_fill(~left, -torch.inf).logsumexp(-1) for x in (teacher, student))
        gaps.append(torch.where(left.any(-1), true - estimated, torch.nan))
    return torch.stack(gaps).unflatten(-1, (group, -1)).nanmean((0, -1)).flatten().nan_to_num()
