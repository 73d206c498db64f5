"""Teacher traces: what the frozen backbone's attention computes on a text, layer by layer.

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
    one layer, float32. Targets are there for objectives on attention outputs.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    positions: Tensor
    scale: float
    targets: Targets | None = None

    def at(self, chosen: Tensor) -> LayerTrace:
        """The trace at a subset of its query positions, given as indices [q] into them."""
        targets = None if self.targets is None else self.targets.at(chosen)
        return replace(self, queries=self.queries[:, chosen], positions=self.positions[chosen], targets=targets)

    def to(self, device: torch.device) -> LayerTrace:
        """The trace on a device; itself if it is there."""
        if self.keys.device == device:
            return self
        targets = None if self.targets is None else Targets(*(x.to(device) for x in self.targets))
        queries, keys, values = (x.to(device) for x in (self.queries, self.keys, self.values))
        return LayerTrace(queries, keys, values, self.positions.to(device), self.scale, targets)


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


def record_traces(
    backbone: Backbone, ids: Sequence[int], positions: Tensor, prepare: Callable[[LayerTrace], LayerTrace]
) -> list[LayerTrace]:
    """All layers' traces of one pass, each as `prepare` leaves it."""
    traces: list[LayerTrace] = []
    stream_traces(backbone, ids, positions, lambda _, trace: traces.append(prepare(trace)))
    return traces
