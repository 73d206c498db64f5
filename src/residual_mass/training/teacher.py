"""Teacher traces: what the frozen backbone's attention computes on a text, layer by layer.

Shape letters: Hq / Hkv = query / KV heads, Q = sampled query positions, L = keys, D = head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from residual_mass.backbones.hook import attention_hook, exact_attention
from residual_mass.backbones.loading import Backbone


@dataclass(frozen=True)
class LayerTrace:
    """Rotary-applied queries [Hq, Q, D] at `positions` [Q], and all keys and values [Hkv, L, D] of one layer."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    positions: Tensor
    scale: float

    def at(self, chosen: Tensor) -> LayerTrace:
        """The trace at a subset of its query positions, given as indices [q] into them."""
        return LayerTrace(self.queries[:, chosen], self.keys, self.values, self.positions[chosen], self.scale)


class _LastLayerDone(Exception):
    """Leaves the forward pass once nothing that follows is needed."""


@torch.no_grad()
def stream_traces(
    backbone: Backbone, ids: Sequence[int], positions: Tensor, consume: Callable[[int, LayerTrace], None]
) -> None:
    """Runs the teacher over `ids`, handing each layer's trace to `consume` as soon as its attention is reached.

    Attention itself is never replaced. The pass ends at the last layer's queries and keys; logits are not computed.
    `consume` may train: gradients are enabled while it runs.
    """
    last = backbone.shape.layers - 1

    def handler(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        trace = LayerTrace(q[0, :, positions].float(), k[0].float(), v[0].float(), positions, scale)
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


def record_traces(backbone: Backbone, ids: Sequence[int], positions: Tensor, keep_values: bool) -> list[LayerTrace]:
    """All layers' traces of one pass, for replay. Values, which most objectives never read, are kept on demand."""
    traces: list[LayerTrace] = []

    def keep(_: int, trace: LayerTrace) -> None:
        values = trace.values if keep_values else trace.values[:, :0]
        traces.append(LayerTrace(trace.queries, trace.keys, values, trace.positions, trace.scale))

    stream_traces(backbone, ids, positions, keep)
    return traces
