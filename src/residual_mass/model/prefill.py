"""Exact prefill of a prompt: keys and values of every layer, and the next token.

Shape letters: B = batch rows, Hkv = KV heads, L = prompt tokens, D = head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from residual_mass.model.hook import attention_hook, device_of, exact_attention

if TYPE_CHECKING:
    from residual_mass.study.specs import BackboneSpec


@dataclass
class Prefill:
    """State of a model after a prompt; an attention handler that fills itself.

    Attributes:
        layers: keys and values [B, Hkv, L, D] by layer.
        next_token: [B], the greedy continuation.
        finite: [B] bool, False where its logits are not finite.
    """

    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    next_token: Tensor = field(default_factory=lambda: torch.tensor(0))
    finite: Tensor = field(default_factory=lambda: torch.tensor(True))

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        self.layers[module.layer_idx] = (key, value)
        return exact_attention(module, query, key, value, mask, scale)


@torch.no_grad()
def prefill(model: PreTrainedModel, prompts: list[list[int]]) -> Prefill:
    """Reads prompts of equal length in one pass; computes logits only at the last position."""
    read = Prefill()
    with attention_hook(model, read, hybrid=True):
        inputs = torch.tensor(prompts, device=device_of(model))
        logits = model(inputs, use_cache=False, logits_to_keep=1).logits
    read.next_token, read.finite = greedy(logits)
    return read


def model_at_fault(spec: BackboneSpec) -> str:
    """Says why a model may return values that are not finite, and what to do."""
    return f"{spec.model_id} has damaged weights or overflows in {spec.dtype}: fetch it again, or choose another dtype"


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the likeliest next tokens [B] of logits [B, L, V], and whether they are valid [B]: False if a logit is
    NaN or the largest one is infinite.
    """
    last = logits[:, -1]
    token = last.argmax(-1)  # index of a NaN if there is one
    return token, last.gather(-1, token.unsqueeze(-1)).squeeze(-1).isfinite()


def end_tokens(model: PreTrainedModel, given: int | list[int] | None = None) -> frozenset[int]:
    """Returns the ids that end a generation: those given, or else the model's."""
    ends = model.generation_config.eos_token_id if given is None else given
    return frozenset() if ends is None else frozenset([ends] if isinstance(ends, int) else ends)
