"""One variant in training: its maps, their initial values, losses and optimiser, checks for NaN and infinity, and
errors on held-out text.

Shape letters: Hq / Hkv = query / KV heads, G = Hq / Hkv, Q = query positions, L = keys, D = head dimension, M =
features, S = supports, one for each budget.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from residual_mass.core.accounting import attention_scores, promoted
from residual_mass.core.feature_maps import (
    FoldedMap,
    HedgehogMap,
    ReZeroMap,
    log_kernel,
    orthogonal_directions,
)
from residual_mass.core.output_matching import (
    Window,
    complete,
    log_mass_error,
    lolcats_losses,
    output_errors,
    residual_losses,
)
from residual_mass.core.score_matching import TorchPasses, Weights, score_matching_losses
from residual_mass.core.selection import exhaustive_topk, retrieved_count
from residual_mass.decode.terms import grouped
from residual_mass.gpu.device import kernels_run_on, tiles_fit
from residual_mass.model.loading import Backbone
from residual_mass.model.phi_maps import HeadShape, PhiMaps
from residual_mass.spec.sections import ObjectiveSpec
from residual_mass.spec.settings import AnchorSpec, to_json, tokens_of
from residual_mass.spec.specs import TrainSpec, VariantSpec
from residual_mass.texts.corpora import held_out_corpus
from residual_mass.training.teacher import (
    ON_OUTPUTS,
    LayerTrace,
    by_kv_head,
    parallel_layers,
    record_traces,
    retrieved,
    training_budgets,
    with_targets,
)

ADAM_MOMENTS = ("exp_avg", "exp_avg_sq")
DIRECTION_SCALE = 0.3
"""Scale of the random directions: unbiased ones (scale 1, minus |x|^2 / 2) have far too much variance at d_phi = 64."""
CALIBRATION_QUERIES = 64
"""Query positions of the trace used for calibration."""
ACTIVATIONS_AT_ONCE = {"cpu": 2**19, "cuda": 2**27}
"""Maximum number of inner activations of a map, over all heads and keys, that are kept for its backward pass."""
HELD_OUT_PACKS = 3
"""Packs per held-out text."""
HELD_OUT_QUERIES = 4
"""Queries per pack, right after its prefix."""
MEASURES = ("e_topk", "e_sub", "e_nosub", "heads_below_topk", "kl", "log_z_error", "clamped_share")
"""Columns of the held-out log: the measures of the diagnostics, over few queries and all layers."""
HeldOut = dict[str, list[list[LayerTrace]]]
"""Traces by held-out text, pack and layer, with targets for the evaluated budgets."""


class Learner:
    """A variant's maps and optimiser.

    Attributes:
        losses: [layers, Hq], the mean of each layer and query head over the sequences of the current step.
        worked: seconds for losses and gradients of each layer in the current step.
        seconds: time spent only on this variant; approximate on a GPU, which runs asynchronously.
    """

    def __init__(self, spec: TrainSpec, variant: VariantSpec, shape: HeadShape, device: torch.device):
        self.spec = spec
        self.label = variant.label
        self.objective = variant.objective
        alone = replace(spec, variants=(variant,))  # other variants do not affect these maps
        training = {
            "model_id": spec.backbone.model_id,
            "revision": spec.backbone.revision,
            "length": tokens_of(spec.length),
            "recipe": json.loads(to_json(alone)),
        }
        torch.manual_seed(spec.seed)
        self.maps = PhiMaps(shape, variant.map, training).to(device)
        self.optimiser = torch.optim.AdamW(
            self.maps.parameters(), lr=spec.learning_rate, weight_decay=spec.weight_decay, fused=True
        )
        self.losses = torch.zeros(shape.layers, shape.query_heads, device=device)
        self.worked = [0.0] * shape.layers
        self.seconds = 0.0
        budgets = self.objective.budgets or spec.eval_budgets
        # Targets are shared by all variants: these are the places of this variant's budgets among theirs.
        self.supports = [place for place, budget in enumerate(training_budgets(spec)) if budget in budgets]

    def backward(self, layer: int, trace: LayerTrace) -> None:
        """Adds one sequence's gradient of one layer, divided by the number of sequences of a step."""
        started = time.perf_counter()
        if self.objective.name == "residual" and trace.targets is not None:
            targets = trace.targets.select_supports(self.supports)
            trace = replace(trace, targets=targets)
        query_map = self.maps.query[layer]
        key_map = self.maps.key[layer]
        losses = row_losses(query_map, key_map, trace, self.objective, self.spec.anchors)
        losses = losses.mean(-1) / self.spec.sequences_per_step
        losses.mean().backward()
        self.losses[layer] += losses.detach()
        self.worked[layer] += time.perf_counter() - started

    def problem(self) -> str | None:
        """Says where a loss or the norm of a gradient of this step is not finite; None if all are finite."""
        finite = self.losses.isfinite()
        if not finite.all():
            layer, head = (~finite).nonzero()[0].tolist()
            return f"the loss is {self.losses[layer, head].item()} in layer {layer}, head {head}"
        gradients = {name: p.grad for name, p in self.maps.named_parameters() if p.grad is not None}
        # A tensor with a NaN or an infinity has such a norm, and so has one whose squares overflow, as Adam's would.
        norms = torch.stack(torch._foreach_norm(list(gradients.values())))
        finite_norms = norms.isfinite()
        if finite_norms.all():
            return None
        first = int((~finite_norms).nonzero()[0])
        name = list(gradients)[first]
        of_heads = gradients[name].double().flatten(1).norm(dim=1)  # every parameter is stacked over heads
        side, layer, parameter = name.split(".")
        head = int(of_heads.argmax())  # of a NaN, if there is one
        return f"the gradient of {parameter} has the norm {of_heads[head]:.3g} in layer {layer}, {side} head {head}"

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
            for key in ADAM_MOMENTS:
                moment = self.optimiser.state[parameter][key]
                tensors[f"{self.label}/{key}.{name}"] = moment
        return tensors

    def restore(self, tensors: dict[str, Tensor], step: int) -> None:
        for name, parameter in self.maps.named_parameters():
            parameter.data.copy_(tensors[f"{self.label}/parameter.{name}"])
            # The fused optimiser counts steps in a float32 tensor beside the parameter.
            state = {"step": torch.tensor(float(step), device=parameter.device)}
            for key in ADAM_MOMENTS:
                moment = tensors[f"{self.label}/{key}.{name}"]
                state[key] = moment.to(parameter.device)
            self.optimiser.state[parameter] = state


def learning_rate(spec: TrainSpec, step: int) -> float:
    """Returns the learning rate: linear warm-up, then constant or half a cosine down to zero at the last step."""
    warm = 1.0
    if spec.warmup_steps:
        warm = min(1.0, (step + 1) / spec.warmup_steps)  # step 0 already learns
    decay = 1.0
    if spec.schedule == "cosine":
        decay = 0.5 * (1 + math.cos(math.pi * step / spec.steps))
    return spec.learning_rate * warm * decay


def row_losses(
    query_map: nn.Module, key_map: nn.Module, trace: LayerTrace, objective: ObjectiveSpec, anchors: AnchorSpec
) -> Tensor:
    """Computes the objective of one layer's maps per query head and position: [Hq, Q].

    `ours` is lambda_KL L_KL + (1 - lambda_KL) L_aux, `kl` and `aux` are one of the two terms. Objectives in ON_OUTPUTS
    need a trace with targets; `residual` averages over all supports of the targets.
    """
    seen = int(trace.positions.max()) + 1
    keys = trace.keys[:, :seen]
    log_query = query_map.fold()(promoted(trace.queries))
    log_key = _in_blocks(key_map.fold(), keys)
    kv_heads = keys.shape[0]
    if objective.name not in ON_OUTPUTS:
        group = trace.queries.shape[0] // kv_heads
        queries = grouped(trace.queries, kv_heads)
        log_query = grouped(log_query, kv_heads)
        # Rows are ordered by query head, then position.
        last = trace.positions.repeat(group)
        kl = {"ours": objective.lambda_kl, "kl": 1.0, "aux": 0.0}[objective.name]
        aux = 1 - kl
        weights = Weights(
            kl=kl,
            top=aux * objective.lambda_top,
            fp=aux * objective.lambda_fp,
            z=aux * objective.lambda_z,
            tau=objective.tau,
            band=objective.band,
            huber_delta=objective.huber_delta,
        )
        passes = passes_for(keys, log_query, log_key)
        losses = score_matching_losses(log_query, log_key, queries, keys, trace.scale, last, weights, passes)
        return losses.view(trace.queries.shape[:2])  # [Hkv, G * Q] -> [Hq, Q]
    assert trace.targets is not None
    by_position = by_kv_head(log_query, kv_heads)
    window = Window(trace.positions, anchors.sink, anchors.tail)
    values = promoted(trace.values[:, :seen])
    if objective.name == "lolcats":
        losses = lolcats_losses(by_position, log_key, values, window, trace.targets)
    else:
        completion = complete(by_position, log_key, values, window, trace.targets)
        losses = residual_losses(completion, trace.targets, objective.weight_z, objective.relative)
    return losses.transpose(1, 2).flatten(0, 1)  # [Hkv, Q, G] -> [Hq, Q]


def _in_blocks(key_map: FoldedMap | HedgehogMap, keys: Tensor) -> Tensor:
    """Computes log phi_k in blocks, [Hkv, L, D] -> [Hkv, L, M], with activation checkpointing."""

    def log_features(block: Tensor) -> Tensor:
        return key_map(promoted(block))

    activations_of_key = keys.shape[0] * key_map.width
    at_once = max(1, ACTIVATIONS_AT_ONCE[keys.device.type] // activations_of_key)
    if keys.shape[1] <= at_once:
        return log_features(keys)
    blocks = []
    for block in keys.split(at_once, 1):
        blocks.append(checkpoint(log_features, block, use_reentrant=False))
    return torch.cat(blocks, 1)


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
            query_map = maps.query[layer]
            key_map = maps.key[layer]
            if not isinstance(query_map, ReZeroMap) or not isinstance(key_map, ReZeroMap):
                raise ValueError("map.init positive_random_features is for rezero maps")
            w = orthogonal_directions(shape.kv_heads, maps.map.d_phi, shape.head_dim, generator)
            # Random features are for exp(x . y): sqrt(scale) on each side gives x . y = scale q . k.
            w = (w * DIRECTION_SCALE * trace.scale**0.5).to(trace.keys.device)  # [Hkv, M, D]
            num_queries = min(CALIBRATION_QUERIES, len(trace.positions))
            few_queries = trace.at(torch.arange(num_queries)).widened()
            bias = _log_mass_gap(few_queries, w, anchors, budgets)
            # A bias b of all features multiplies Z_R hat by e^b. It is in phi_q: a group of query heads shares phi_k.
            key_map.set_log_linear(w, torch.zeros_like(w[..., 0]))
            by_query_head = w.repeat_interleave(shape.group, 0)
            query_map.set_log_linear(by_query_head, bias.unsqueeze(-1).expand(-1, maps.map.d_phi))

    parallel_layers(1, calibrate, traces[0].keys.device)  # on one core: rounding would depend on their number


def _log_mass_gap(trace: LayerTrace, w: Tensor, anchors: AnchorSpec, budgets: Sequence[float]) -> Tensor:
    """Returns log Z_R - log Z_R hat of maps without bias, averaged over queries and budgets: [Hq]; 0 where every
    residual is empty.
    """
    kv_heads = trace.keys.shape[0]
    queries = grouped(trace.queries, kv_heads)  # [Hkv, G * Q, D]
    group = queries.shape[1] // len(trace.positions)
    seen = int(trace.positions.max()) + 1
    keys = trace.keys[:, :seen]
    last = trace.positions.repeat(group).unsqueeze(-1)
    columns = torch.arange(keys.shape[1], device=keys.device)
    # The tail anchors are the columns last - tail + 1 to last.
    mid = (columns >= anchors.sink) & (columns <= last - anchors.tail)
    teacher = attention_scores(queries, keys, trace.scale)
    directions = w.transpose(-1, -2)
    student = log_kernel(queries @ directions, keys @ directions)
    gaps = []
    for k in retrieved(trace.positions, anchors, budgets).unbind(-1):
        best = exhaustive_topk(teacher, mid, k.repeat(group)).mask(seen)
        left = mid & ~best
        log_z = teacher.masked_fill(~left, -torch.inf).logsumexp(-1)
        log_z_hat = student.masked_fill(~left, -torch.inf).logsumexp(-1)
        # An empty residual has log Z = -inf on both sides and no gap: `nanmean` leaves it out.
        gaps.append(torch.where(left.any(-1), log_z - log_z_hat, torch.nan))
    by_head = torch.stack(gaps).unflatten(-1, (group, -1))  # [budgets, Hkv, G, Q]
    return by_head.nanmean((0, -1)).flatten().nan_to_num()


# ---- errors on held-out text -----------------------------------------------------------------------------------------


def held_out_packs(spec: TrainSpec, backbone: Backbone, assets: Path) -> HeldOut:
    """Records packs of `length` keys, with the queries of the next tokens, each of which sees exactly those keys."""
    length = tokens_of(spec.length)
    positions = torch.arange(length, length + HELD_OUT_QUERIES, device=backbone.device)

    def only_prefix(trace: LayerTrace) -> LayerTrace:
        last = torch.full_like(positions, length - 1)
        keys = trace.keys[:, :length]
        values = trace.values[:, :length]
        prefix = replace(trace, keys=keys, values=values, positions=last)
        traced = with_targets(prefix, spec.anchors, spec.eval_budgets)
        return traced.to(torch.device("cpu"))  # GPUs have no room for all

    packs: HeldOut = {}
    for name in spec.held_out:
        corpus = held_out_corpus(name, backbone.tokenizer, length + HELD_OUT_QUERIES, spec.seed, assets)
        packs[name] = []
        for index in range(HELD_OUT_PACKS):
            traces = record_traces(backbone, corpus.sequence(index), positions, only_prefix)
            packs[name].append(traces)
    return packs


@torch.no_grad()
def held_out_rows(maps: PhiMaps, packs: Sequence[Sequence[LayerTrace]], spec: TrainSpec) -> Iterator[dict[str, object]]:
    """Yields the log rows of one text: for each budget `layer` "all", then every layer. Values are means over packs,
    heads and queries; `log_z_error` is averaged where it is defined. `clamped_share` is the share of rows whose
    residual was dropped.
    """
    layers = range(maps.shape.layers)
    found: dict[str, list[Tensor]] = {}
    for layer in layers:
        for pack in packs:
            for name, measure in _measures(maps, layer, pack[layer], spec.anchors).items():
                found.setdefault(name, []).append(measure)
    rows = {}  # [layers, packs, Hkv, Q, G, S]
    for name, measures in found.items():
        rows[name] = torch.stack(measures).unflatten(0, (-1, len(packs)))
    num_anchors = spec.anchors.sink + spec.anchors.tail
    for place, budget in enumerate(spec.eval_budgets):
        k = retrieved_count(budget, tokens_of(spec.length), num_anchors)
        for layer in ("all", *layers):
            of_layers = rows if layer == "all" else {name: x[[layer]] for name, x in rows.items()}
            chosen = {name: x[..., place] for name, x in of_layers.items()}
            gain = chosen["e_topk"] - chosen["e_sub"]
            gain = gain.mean((1, 3))  # [layers, Hkv, G]
            means = {name: x[x.isfinite()].mean() for name, x in chosen.items()}
            means["heads_below_topk"] = (gain > 0).float().mean()
            columns = {name: f"{means[name].item():.6f}" for name in MEASURES}
            yield {"k": k, "layer": layer} | columns


def _measures(maps: PhiMaps, layer: int, trace: LayerTrace, anchors: AnchorSpec) -> dict[str, Tensor]:
    """Computes the measures of one layer's rows, each [Hkv, Q, G, S]."""
    trace = trace.to(next(maps.parameters()).device).widened()
    assert trace.targets is not None
    kv_heads = trace.keys.shape[0]
    log_query = by_kv_head(maps.query[layer](trace.queries), kv_heads)
    log_key = maps.key[layer](trace.keys)
    window = Window(trace.positions, anchors.sink, anchors.tail)
    completion = complete(log_query, log_key, trace.values, window, trace.targets)
    zero = torch.zeros_like(completion.whole)
    queries = by_kv_head(trace.queries, kv_heads).flatten(1, 2)
    scores = queries @ trace.keys.transpose(-1, -2) * trace.scale
    teacher = scores.log_softmax(-1)  # no mask: a held-out query sees all keys of its pack
    student = log_kernel(log_query.flatten(1, 2), log_key).log_softmax(-1)
    divergence = (teacher.exp() * (teacher - student)).sum(-1).view(log_query.shape[:3])
    dropped = completion.rest[..., -1] == 0
    # A support that covers the mid-region has no residual to drop: its log Z_R is -inf.
    clamped = dropped & trace.targets.log_rest.isfinite()
    kl = divergence.unsqueeze(-1).expand(completion.rest.shape[:-1])  # a divergence is of all supports
    return {
        "e_topk": output_errors(zero, completion.unit, trace.targets),
        "e_sub": output_errors(completion.rest, completion.unit, trace.targets),
        "e_nosub": output_errors(completion.whole, completion.unit, trace.targets),
        "kl": kl,
        "log_z_error": log_mass_error(completion, trace.targets),
        "clamped_share": clamped.float(),
    }


def passes_for(keys: Tensor, log_query: Tensor, log_key: Tensor) -> Callable[..., TorchPasses]:
    """Returns the passes over the keys [H, L, D] of the objective: kernels on a GPU where their tiles fit."""
    if log_query.dtype != torch.float32 or not kernels_run_on(keys.device):
        return TorchPasses
    if not tiles_fit(keys.shape[-1], log_key.shape[-1]):
        return TorchPasses
    from residual_mass.gpu.training import TritonPasses  # late: it imports triton, which may be missing without a GPU

    return TritonPasses
