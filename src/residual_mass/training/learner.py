"""One variant in training: its maps, where they start, their losses and their optimiser, and checks for NaN and
infinities.

Shape letters: Hq / Hkv = query / KV heads, G = Hq / Hkv, Q = query positions, L = keys, D = head dimension, M =
features, S = supports.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from residual_mass.core.accounting import attention_scores, promoted
from residual_mass.core.feature_maps import (
    Baddbmm,
    FoldedMap,
    HedgehogMap,
    ReZeroMap,
    baddbmm_in_bfloat16,
    log_kernel,
    orthogonal_directions,
)
from residual_mass.core.output_matching import Window, complete, lolcats_losses, residual_losses
from residual_mass.core.score_matching import Weights, score_matching_losses
from residual_mass.core.selection import exhaustive_topk
from residual_mass.core.settings import AnchorSpec, to_json, tokens_of
from residual_mass.model.errors import grouped
from residual_mass.model.phi_maps import HeadShape, PhiMaps
from residual_mass.study.sections import ObjectiveSpec
from residual_mass.study.specs import TrainSpec, VariantSpec
from residual_mass.training.teacher import (
    ON_OUTPUTS,
    LayerTrace,
    by_kv_head,
    parallel_layers,
    retrieved,
    training_budgets,
)

MOMENTS = ("exp_avg", "exp_avg_sq")
DIRECTION_SCALE = 0.3
"""Scale of the random directions: unbiased ones (scale 1, minus |x|^2 / 2) have far too much variance at d_phi = 64."""
CALIBRATION_QUERIES = 64
"""Query positions of the trace used for calibration."""


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


class Learner:
    """A variant's maps and optimiser.

    Attributes:
        losses: of every layer and query head [layers, Hq], the mean over the sequences of the current step.
        worked: seconds for losses and gradients of each layer in the current step.
        seconds: time spent only on this variant; approximate on a GPU, which runs asynchronously.
    """

    def __init__(self, spec: TrainSpec, variant: VariantSpec, shape: HeadShape, device: torch.device):
        self.spec, self.label, self.objective = spec, variant.label, variant.objective
        facts = {
            "model_id": spec.backbone.model_id,
            "revision": spec.backbone.revision,
            "length": tokens_of(spec.length),
            # Other variants do not affect these maps.
            "recipe": json.loads(to_json(dataclasses.replace(spec, variants=(variant,)))),
        }
        torch.manual_seed(spec.seed)
        self.maps = PhiMaps(shape, variant.map, facts).to(device)
        self.optimiser = torch.optim.AdamW(
            self.maps.parameters(), lr=spec.learning_rate, weight_decay=spec.weight_decay, fused=True
        )
        self.calibrated = variant.map.init == "positive_random_features"
        self.losses = torch.zeros(shape.layers, shape.query_heads, device=device)
        self.worked = [0.0] * shape.layers
        self.seconds = 0.0
        wanted = self.objective.budgets or spec.eval_budgets
        self.supports = [i for i, budget in enumerate(training_budgets(spec)) if budget in wanted]

    def backward(self, layer: int, trace: LayerTrace) -> None:
        """Adds one sequence's gradient of one layer, divided by the number of sequences of a step."""
        started = time.perf_counter()
        if self.objective.name == "residual" and trace.targets is not None:
            trace = dataclasses.replace(trace, targets=trace.targets.select_supports(self.supports))
        query_map, key_map = self.maps.query[layer], self.maps.key[layer]
        losses = row_losses(query_map, key_map, trace, self.objective, self.spec.anchors, self.spec.precision)
        losses = losses.mean(-1) / self.spec.sequences_per_step
        losses.mean().backward()
        self.losses[layer] += losses.detach()
        self.worked[layer] += time.perf_counter() - started

    def problem(self) -> str | None:
        """Says where a loss or gradient of this step is not finite; None if all are finite."""
        finite = self.losses.isfinite()
        if not finite.all():
            layer, head = (~finite).nonzero()[0].tolist()
            return f"the loss is {self.losses[layer, head].item()} in layer {layer}, head {head}"
        gradients = {name: p.grad for name, p in self.maps.named_parameters() if p.grad is not None}
        norms = torch.stack(torch._foreach_norm(list(gradients.values())))
        if torch.isfinite(norms).all():
            return None
        name = list(gradients)[int((~torch.isfinite(norms)).nonzero()[0])]
        finite_heads = gradients[name].isfinite().flatten(1).all(1)  # every parameter is stacked over heads
        side, layer, parameter = name.split(".")
        head = int((~finite_heads).nonzero()[0])
        return f"the gradient of {parameter} is not finite in layer {layer}, {side} head {head}"

    def update(self, step: int) -> None:
        started = time.perf_counter()
        for group in self.optimiser.param_groups:
            group["lr"] = learning_rate(self.spec, step)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.losses.zero_()
        self.worked = [0.0] * len(self.worked)
        self.seconds += time.perf_counter() - started

    def state(self) -> dict[str, Tensor]:
        """Returns parameters and moments for a checkpoint."""
        tensors = {}
        for name, parameter in self.maps.named_parameters():
            tensors[f"{self.label}/parameter.{name}"] = parameter.detach()
            for key in MOMENTS:
                tensors[f"{self.label}/{key}.{name}"] = self.optimiser.state[parameter][key]
        return tensors

    def restore(self, tensors: dict[str, Tensor], step: int) -> None:
        for name, parameter in self.maps.named_parameters():
            parameter.data.copy_(tensors[f"{self.label}/parameter.{name}"])
            moments = {key: tensors[f"{self.label}/{key}.{name}"].to(parameter.device) for key in MOMENTS}
            self.optimiser.state[parameter] = {"step": torch.tensor(float(step), device=parameter.device), **moments}


def learning_rate(spec: TrainSpec, step: int) -> float:
    """Returns the learning rate: linear warm-up, then constant or half a cosine down to zero at the last step."""
    warm = min(1.0, (step + 1) / spec.warmup_steps) if spec.warmup_steps else 1.0
    decay = 0.5 * (1 + math.cos(math.pi * step / spec.steps)) if spec.schedule == "cosine" else 1.0
    return spec.learning_rate * warm * decay


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
    log_query = query_map.fold()(promoted(trace.queries), baddbmm)
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
    values = promoted(trace.values[:, :seen])
    if objective.name == "lolcats":
        losses = lolcats_losses(by_position, log_key, values, window, trace.targets)
    else:
        completion = complete(by_position, log_key, values, window, trace.targets)
        losses = residual_losses(completion, trace.targets, objective.weight_z, objective.relative)
    return losses.transpose(1, 2).flatten(0, 1)


def _in_blocks(key_map: FoldedMap | HedgehogMap, keys: Tensor, baddbmm: Baddbmm) -> Tensor:
    """Computes log phi_k in blocks, [Hkv, L, D] -> [Hkv, L, M], with activation checkpointing."""

    def log_features(block: Tensor) -> Tensor:
        return key_map(promoted(block), baddbmm)

    at_once = max(1, ACTIVATIONS_AT_ONCE[keys.device.type] // (keys.shape[0] * key_map.width))
    if keys.shape[1] <= at_once:
        return log_features(keys)
    return torch.cat([checkpoint(log_features, block, use_reentrant=False) for block in keys.split(at_once, 1)], 1)


def _weights(objective: ObjectiveSpec) -> Weights:
    """Returns the weights of L_ours = lambda_KL L_KL + (1 - lambda_KL) L_aux, or of only one of the two terms."""
    kl = {"ours": objective.lambda_kl, "kl": 1.0, "aux": 0.0}[objective.name]
    top, fp, z = ((1 - kl) * x for x in (objective.lambda_top, objective.lambda_fp, objective.lambda_z))
    return Weights(kl, top, fp, z, objective.tau, objective.band, objective.huber_delta)


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
    generator = torch.Generator().manual_seed(seed)
    shape = maps.shape

    @torch.no_grad()
    def calibrate(_: int) -> None:
        for layer, trace in enumerate(traces):
            query_map, key_map = maps.query[layer], maps.key[layer]
            if not isinstance(query_map, ReZeroMap) or not isinstance(key_map, ReZeroMap):
                raise ValueError("map.init positive_random_features is for rezero maps")
            w = orthogonal_directions(shape.kv_heads, maps.map.d_phi, shape.head_dim, generator)
            w = (w * DIRECTION_SCALE * trace.scale**0.5).to(trace.keys.device)  # [Hkv, M, D]
            trace = trace.at(torch.arange(min(CALIBRATION_QUERIES, len(trace.positions)))).widened()
            bias = _log_mass_gap(trace, w, anchors, budgets)
            key_map.set_log_linear(w, torch.zeros_like(w[..., 0]))
            w = w.repeat_interleave(shape.query_heads // shape.kv_heads, 0)
            query_map.set_log_linear(w, bias.unsqueeze(-1).expand(-1, maps.map.d_phi))

    parallel_layers(1, calibrate, traces[0].keys.device)  # on one core: rounding would depend on their number


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
