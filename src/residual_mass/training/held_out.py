"""Errors of maps on held-out text: the diagnostics' measures, over few queries and all layers.

Shape letters: Hq / Hkv = query / KV heads, Q = queries, G = Hq / Hkv, S = budgets, L = keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from residual_mass.core.feature_maps import log_kernel
from residual_mass.core.output_matching import Window, complete, log_mass_error, output_errors
from residual_mass.core.selection import retrieved_count
from residual_mass.core.settings import AnchorSpec, tokens_of
from residual_mass.model.loading import Backbone
from residual_mass.model.phi_maps import PhiMaps
from residual_mass.study.specs import TrainSpec
from residual_mass.texts.corpora import held_out_corpus
from residual_mass.training import MEASURES
from residual_mass.training.teacher import LayerTrace, by_kv_head, record_traces, with_targets

PACKS, QUERIES = 3, 4
"""Packs per corpus, and queries per pack, right after its prefix."""


class HeldOut(NamedTuple):
    """Packs of one corpus, each with every layer's trace and its targets for the evaluated budgets."""

    corpus: str
    packs: list[list[LayerTrace]]


def held_out_packs(spec: TrainSpec, backbone: Backbone, assets: Path) -> list[HeldOut]:
    """Records packs of `length` keys, with the queries of the next tokens, each of which sees exactly those keys."""
    length = tokens_of(spec.length)
    positions = torch.arange(length, length + QUERIES, device=backbone.device)

    def only_prefix(trace: LayerTrace) -> LayerTrace:
        last = torch.full_like(positions, length - 1)
        cut = replace(trace, keys=trace.keys[:, :length], values=trace.values[:, :length], positions=last)
        return with_targets(cut, spec.anchors, spec.eval_budgets).to(torch.device("cpu"))  # GPUs have no room for all

    found = []
    for name in spec.held_out:
        corpus = held_out_corpus(name, backbone.tokenizer, length + QUERIES, spec.seed, assets)
        packs = [record_traces(backbone, corpus.sequence(i), positions, only_prefix) for i in range(PACKS)]
        found.append(HeldOut(name, packs))
    return found


@torch.no_grad()
def held_out_rows(maps: PhiMaps, held_out: HeldOut, spec: TrainSpec) -> Iterator[dict[str, object]]:
    """Yields log rows per budget: `layer` "all", then every layer. Values are means over packs, heads and queries;
    `log_z_error` is averaged where it is defined, `clamped_share` is the share of rows whose residual was dropped.
    """
    layers = range(maps.shape.layers)
    made = [[_measures(maps, layer, pack[layer], spec.anchors) for pack in held_out.packs] for layer in layers]
    rows = {  # [layers, packs, Hkv, Q, G, S]
        name: torch.stack([torch.stack([pack[name] for pack in packs]) for packs in made]) for name in made[0][0]
    }
    for s, budget in enumerate(spec.eval_budgets):
        k = retrieved_count(budget, tokens_of(spec.length), spec.anchors.sink + spec.anchors.tail)
        for layer in ("all", *layers):
            chosen = {name: (x if layer == "all" else x[[layer]])[..., s] for name, x in rows.items()}
            gain = (chosen["e_topk"] - chosen["e_sub"]).mean((1, 3))  # [layers, Hkv, G]
            means = {name: x[x.isfinite()].mean().item() for name, x in chosen.items()}
            means["heads_below_topk"] = (gain > 0).float().mean().item()
            yield {"corpus": held_out.corpus, "k": k, "layer": layer} | {n: f"{means[n]:.6f}" for n in MEASURES}


def _measures(maps: PhiMaps, layer: int, trace: LayerTrace, anchors: AnchorSpec) -> dict[str, Tensor]:
    """Computes the measures of one layer's rows, each [Hkv, Q, G, S]."""
    trace = trace.to(next(maps.parameters()).device).widened()
    assert trace.targets is not None
    kv_heads = trace.keys.shape[0]
    log_query = by_kv_head(maps.query[layer](trace.queries), kv_heads)
    log_key = maps.key[layer](trace.keys)
    window = Window(trace.positions, anchors.sink, anchors.tail)
    completion = complete(log_query, log_key, trace.values, window, trace.targets)
    nothing = torch.zeros_like(completion.whole)
    queries = by_kv_head(trace.queries, kv_heads).flatten(1, 2)
    teacher = (queries @ trace.keys.transpose(-1, -2) * trace.scale).log_softmax(-1)
    student = log_kernel(log_query.flatten(1, 2), log_key).log_softmax(-1)
    divergence = (teacher.exp() * (teacher - student)).sum(-1).view(log_query.shape[:3])
    return {
        "e_topk": output_errors(nothing, completion.unit, trace.targets),
        "e_sub": output_errors(completion.rest, completion.unit, trace.targets),
        "e_nosub": output_errors(completion.whole, completion.unit, trace.targets),
        "kl": divergence.unsqueeze(-1).expand(completion.rest.shape[:-1]),
        "log_z_error": log_mass_error(completion, trace.targets),
        "clamped_share": ((completion.rest[..., -1] == 0) & trace.targets.log_rest.isfinite()).float(),
    }
