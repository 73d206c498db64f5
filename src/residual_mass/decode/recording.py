"""Prompts that are read once by full attention while something watches: for prefixes, training and diagnostics.

Shape letters: B = batch rows, L = tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from residual_mass.decode.backend import Backend, LayerCall, Prefill
from residual_mass.decode.text import Text
from residual_mass.model.finite import greedy
from residual_mass.model.hook import exact_attention
from residual_mass.model.layers import device_of


class Recording(Backend):
    """Reads one prompt by full attention, holds nothing, and shows the call of every layer.

    Args:
        observe: gets the calls in the order of the layers, those with a window included. An exception that it raises
            ends the pass.
    """

    name = "recording"
    tokens = 0

    def __init__(self, observe: Callable[[LayerCall], None]) -> None:
        self.observe = observe

    def read(self, call: LayerCall) -> Tensor:
        self.observe(call)
        return exact_attention(*call)

    def step(self, call: LayerCall) -> Tensor:
        raise ValueError("a recording reads a prompt and no steps")

    def stored(self, call: LayerCall) -> tuple[Tensor, Tensor]:
        self.observe(call)
        return call.key, call.value


@torch.no_grad()
def prefill(model: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> Prefill:
    """Reads prompts [B, L] of equal length in one pass; computes logits only at the last position."""
    layers = {}

    def keep(call: LayerCall) -> None:
        layers[call.index] = call.key, call.value

    ids = torch.tensor([list(prompt) for prompt in prompts], device=device_of(model))
    logits = Text(model, Recording(keep)).read(ids)
    return Prefill(layers, *greedy(logits))
