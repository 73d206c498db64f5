"""Teacher traces: queries, keys and values of the frozen backbone on a text, layer by layer.

Shape letters: Hq / Hkv = query / KV heads, Q = sampled query positions, L = keys, D = head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from residual_mass.backbones.hook import attention_hook, exact_attention
from residual_mass.backbones.loading import Backbone
from residual_mass.core.output_matching import Targets


@dataclass(frozen=True)
class LayerTrace:
    """Rotary-applied queries [Hq, Q, D] that see the keys up to `positions` [Q], and all keys and values [Hkv, L, D] of
    one layer, in the backbone's dtype. Objectives on attention outputs also need targets.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    positions: Tensor
    scale: float
    targets: Targets | None = None

    def at(self, chosen: Tensor) -> LayerTrace:
        """Selects query positions, given as indices [q]."""
        targets = None if self.targets is None else self.targets.at(chosen)
        return replace(self, queries=self.queries[:, chosen], positions=self.positions[chosen], targets=targets)

    def widened(self) -> LayerTrace:
        """Converts queries, keys and values as `widened` does."""
        queries, keys, values = (widened(x) for x in (self.queries, self.keys, self.values))
        return replace(self, queries=queries, keys=keys, values=values)

    def to(self, device: torch.device) -> LayerTrace:
        """Moves the trace to a device; returns itself if it is already there."""
        if self.keys.device == device:
            return self
        targets = None if self.targets is None else Targets(*(x.to(device) for x in self.targets))
        queries, keys, values = (x.to(device) for x in (self.queries, self.keys, self.values))
        return LayerTrace(queries, keys, values, self.positions.to(device), self.scale, targets)


def widened(x: Tensor) -> Tensor:
    """Converts half precision to float32, which is exact."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _LastLayerDone(Exception):
    """Ends the forward pass once the rest is not needed."""


@torch.no_grad()
def stream_traces(
    backbone: Backbone, ids: Sequence[int], positions: Tensor, consume: Callable[[int, LayerTrace], None]
) -> None:
    """Runs the teacher over `ids` and calls `consume` with each layer's trace as soon as its attention is reached.

    Attention itself is not replaced. The pass ends at the last layer's queries and keys, without logits. Gradients are
    enabled in `consume`, so that it may train.
    """
    last = backbone.shape.layers - 1

    def handler(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        trace = LayerTrace(q[0, :, positions], k[0], v[0], positions, scale)
        with torch.enable_grad():
            consume(module.layer_idx, trace)
        if module.layer_idx == last:
            raise _LastLayerDone
        return exact_attention(module, q, k, v, mask, scale)

    inputs = torch.tensor([list(ids)], device=backbone.device)
    try:
        with attention_hook(backbone.model, handler):
            backbone.model.get_decoder()(inputs, use_cache=False)
    except _LastLayerDone:
        pass


def record_traces(
    backbone: Backbone, ids: Sequence[int], positions: Tensor, prepare: Callable[[LayerTrace], LayerTrace]
) -> list[LayerTrace]:
    """Records all layers' traces of one pass, each transformed by `prepare`."""
    traces: list[LayerTrace] = []
    stream_traces(backbone, ids, positions, lambda _, trace: traces.append(prepare(trace)))
    return traces
