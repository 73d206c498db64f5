"""Losses of a layer's maps on its trace.

Shape letters: Hq / Hkv = query / KV heads, G = Hq / Hkv, Q = query positions, L = keys, D = head dimension, M =
features, S = supports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from residual_mass.backbones.measured import grouped
from residual_mass.core.feature_maps import Baddbmm, FoldedMap, HedgehogMap, baddbmm_in_bfloat16
from residual_mass.core.output_matching import (
    Targets,
    Window,
    complete,
    exact_targets,
    lolcats_losses,
    residual_losses,
)
from residual_mass.core.score_matching import Weights, score_matching_losses
from residual_mass.core.settings import AnchorSpec
from residual_mass.core.support import retrieved_count
from residual_mass.study.sections.training import ObjectiveSpec
from residual_mass.training.teacher import LayerTrace, widened

ON_OUTPUTS = ("lolcats", "residual")
"""Objectives that need values and the teacher's targets."""


class Precision(NamedTuple):
    """How products are computed."""

    baddbmm: Baddbmm
    """Of the maps."""
    features: torch.dtype | None
    """What features are rounded to in the paper's objective; None leaves them as they are."""


PRECISIONS = {"float32": Precision(torch.baddbmm, None), "bfloat16": Precision(baddbmm_in_bfloat16, torch.bfloat16)}
"""By the values of `phi.precision`."""
ACTIVATIONS_AT_ONCE = {"cpu": 2**19, "cuda": 2**27}
"""Most inner activations of a map, over all heads and keys, kept for its backward pass."""
SCORES_AT_ONCE = {"cpu": 2**20, "cuda": 2**27}
"""Query-key pairs scored at once for the targets."""


def row_losses(
    query_map: nn.Module,
    key_map: nn.Module,
    trace: LayerTrace,
    objective: ObjectiveSpec,
    anchors: AnchorSpec,
    precision: str = "float32",
) -> Tensor:
    """Computes the objective of one layer's maps per query head and position: [Hq, Q].

    Objectives in ON_OUTPUTS need a trace with targets; `residual` averages over all of their supports.
    """
    seen = int(trace.positions.max()) + 1
    keys = trace.keys[:, :seen]
    baddbmm, features = PRECISIONS[precision]
    log_query = query_map.fold()(widened(trace.queries), baddbmm)
    log_key = _in_blocks(key_map.fold(), keys, baddbmm)
    kv_heads = keys.shape[0]
    if objective.name not in ON_OUTPUTS:
        group = trace.queries.shape[0] // kv_heads
        queries, log_query = (grouped(x, kv_heads) for x in (trace.queries, log_query))
        last = trace.positions.repeat(group)
        weights = _weights(objective)
        losses = score_matching_losses(log_query, log_key, queries, keys, trace.scale, last, weights, features)
        return losses.view(trace.queries.shape[:2])
    assert trace.targets is not None
    by_position = by_kv_head(log_query, kv_heads)
    window = Window(trace.positions, anchors.sink, anchors.tail)
    values = widened(trace.values[:, :seen])
    if objective.name == "lolcats":
        losses = lolcats_losses(by_position, log_key, values, window, trace.targets)
    else:
        completion = complete(by_position, log_key, values, window, trace.targets)
        losses = residual_losses(completion, trace.targets, objective.weight_z, objective.relative)
    return losses.transpose(1, 2).flatten(0, 1)


def with_targets(trace: LayerTrace, anchors: AnchorSpec, budgets: Sequence[float]) -> LayerTrace:
    """Adds the teacher's targets for the supports of these budgets (percent of the keys that each query sees)."""
    seen = int(trace.positions.max()) + 1
    at_once = max(1, SCORES_AT_ONCE[trace.keys.device.type] // (trace.queries.shape[0] * seen))
    whole = trace.widened()
    parts = [_targets(whole.at(rows), seen, anchors, budgets) for rows in _indices(trace.positions).split(at_once)]
    most = max(targets.best.shape[-1] for targets in parts)
    parts = [t._replace(best=F.pad(t.best, (0, most - t.best.shape[-1]))) for t in parts]
    by_head = (torch.cat(part, 1) for part in zip(*(targets[:5] for targets in parts), strict=True))
    return replace(trace, targets=Targets(*by_head, torch.cat([targets.ks for targets in parts])))


def by_kv_head(x: Tensor, kv_heads: int) -> Tensor:
    """Groups query heads by KV head: [Hq, Q, C] -> [Hkv, Q, G, C]."""
    return x.unflatten(0, (kv_heads, -1)).transpose(1, 2)


def _targets(trace: LayerTrace, seen: int, anchors: AnchorSpec, budgets: Sequence[float]) -> Targets:
    keys, values = trace.keys[:, :seen], trace.values[:, :seen]
    queries = by_kv_head(trace.queries, keys.shape[0])
    scores = (queries.flatten(1, 2) @ keys.transpose(-1, -2) * trace.scale).unflatten(1, queries.shape[1:3])
    window = Window(trace.positions, anchors.sink, anchors.tail)
    return exact_targets(scores, values, window, retrieved(trace.positions, anchors, budgets))


def retrieved(positions: Tensor, anchors: AnchorSpec, budgets: Sequence[float]) -> Tensor:
    """Returns K of every support for queries that see the keys up to their position: [Q, S]."""
    num_anchors = anchors.sink + anchors.tail
    counts = [[retrieved_count(budget, p + 1, num_anchors) for budget in budgets] for p in positions.tolist()]
    return torch.tensor(counts, dtype=torch.long, device=positions.device).view(len(counts), len(budgets))


def _in_blocks(key_map: FoldedMap | HedgehogMap, keys: Tensor, baddbmm: Baddbmm) -> Tensor:
    """Computes log phi_k in blocks, [Hkv, L, D] -> [Hkv, L, M], with activation checkpointing."""

    def log_features(block: Tensor) -> Tensor:
        return key_map(widened(block), baddbmm)

    at_once = max(1, ACTIVATIONS_AT_ONCE[keys.device.type] // (keys.shape[0] * key_map.width))
    if keys.shape[1] <= at_once:
        return log_features(keys)
    return torch.cat([checkpoint(log_features, block, use_reentrant=False) for block in keys.split(at_once, 1)], 1)


def _indices(x: Tensor) -> Tensor:
    return torch.arange(len(x), device=x.device)


def _weights(objective: ObjectiveSpec) -> Weights:
    """Returns the weights of L_ours = lambda_KL L_KL + (1 - lambda_KL) L_aux, or of only one of the two terms."""
    kl = {"ours": objective.lambda_kl, "kl": 1.0, "aux": 0.0}[objective.name]
    top, fp, z = ((1 - kl) * x for x in (objective.lambda_top, objective.lambda_fp, objective.lambda_z))
    return Weights(kl, top, fp, z, objective.tau, objective.band, objective.huber_delta)
