"""What a decode step reads under every method, counted on the documents themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from residual_mass.backbones.loading import Backbone
from residual_mass.backbones.method_errors import ReadLayer
from residual_mass.backbones.phi_maps import PhiMaps
from residual_mass.core.settings import AnchorSpec
from residual_mass.diagnostics.packs import visit_layers
from residual_mass.methods import Step, method_named
from residual_mass.methods.step_bytes import full_bytes, step_bytes

DOCUMENTS = 1
"""Of each text that tokens are counted on: their number hardly varies between documents."""
QUERIES = 8
"""Tokens after each of these prompts whose queries are counted."""


class Reading(NamedTuple):
    """What a step reads of the prompt, means over layers, KV heads and queries."""

    share: float
    """Bytes, in units of what full attention reads."""
    recall: float
    """Share of the true top K's mass that was read; NaN where K is 0."""


def readings(
    backbone: Backbone,
    sequences: Sequence[Sequence[int]],
    length: int,
    methods: Sequence[str],
    budgets: Sequence[float],
    anchors: AnchorSpec,
    maps: PhiMaps | None,
) -> Mapping[tuple[str, float], Reading]:
    """Counts what methods read at every budget, by method and budget.

    Args:
        sequences: token ids, prompts of `length` tokens and what follows.
    """
    folded = None if maps is None else maps.on(backbone.device).folded()
    counts: dict[str, list[Tensor]] = {method: [] for method in methods}

    def visit(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> None:
        inputs = queries.float(), keys.float(), values.float()
        read = ReadLayer(*inputs, scale, budgets, anchors, None if folded is None else folded[layer])
        for method in methods:
            found = read.errors(method)
            counts[method].append(torch.stack((found["tokens_read"], found["recall"])).mean((1, 2)))  # [2, B]

    for sequence in sequences[:DOCUMENTS]:
        visit_layers(backbone, sequence[: length + QUERIES], length, visit, hybrid=True)
    shape, fixed = backbone.shape, anchors.sink + anchors.tail
    step = Step(length, shape.head_dim, shape.query_heads // shape.kv_heads, fixed, 0)
    step = step if maps is None else step._replace(features=maps.map.d_phi)
    found = {}
    for method, by_layer in counts.items():
        tokens, recall = torch.stack(by_layer).double().mean(0).tolist()
        for budget, read, kept in zip(budgets, tokens, recall, strict=True):
            size = step_bytes(method_named(method), step._replace(retrieved=read - fixed)).total
            found[method, budget] = Reading(size / full_bytes(step), kept)
    return found
