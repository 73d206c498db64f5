"""The next token by a model's logits, whether they are finite, and what ends a text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from transformers import PreTrainedModel

if TYPE_CHECKING:
    from residual_mass.spec.specs import BackboneSpec


def model_at_fault(spec: BackboneSpec) -> str:
    """Returns a message that says why a model may return values that are not finite, and what to do."""
    return f"{spec.model_id} has damaged weights or overflows in {spec.dtype}: fetch it again, or choose another dtype"


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the likeliest next tokens [B] of logits [B, L, V], and whether they are valid [B]: False if a logit is
    NaN or the largest one is infinite.
    """
    last = logits[:, -1]
    token = last.argmax(-1)  # index of a NaN if there is one
    largest = last.gather(-1, token.unsqueeze(-1)).squeeze(-1)
    return token, largest.isfinite()


def end_tokens(model: PreTrainedModel, given: int | list[int] | None = None) -> frozenset[int]:
    """Returns the ids that end a generation: those given, or else the model's."""
    ends = model.generation_config.eos_token_id if given is None else given
    if ends is None:
        return frozenset()
    return frozenset([ends] if isinstance(ends, int) else ends)
