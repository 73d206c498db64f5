"""Why a model is not served: what its configuration and classes say, and what one short call shows."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from residual_mass.model.hook import attention_hook, exact_attention
from residual_mass.model.layers import attention_layers, device_of, require_attention_alone, text_config
from residual_mass.model.phi_maps import HeadShape

_called: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()
"""Models whose call has shown nothing against them."""


def require_served(model: PreTrainedModel, alone: bool = True) -> None:
    """Raises ValueError, in one line, if no method works on a model. Whatever works with models asks here first.

    A model is called once, on two tokens: only this shows layers that attend several times, bypass the attention
    function, or ask it for more than a softmax of scores.

    Args:
        alone: whether a pass must need no more of earlier tokens than keys and values, as for several methods over one
            prompt; generation by one method does without.
    """
    layers = attention_layers(model)
    if alone:
        require_attention_alone(model)
        HeadShape.of(text_config(model))
    if model not in _called:
        _require_plain_calls(model, layers)
        _called.add(model)


@torch.no_grad()
def _require_plain_calls(model: PreTrainedModel, layers: list[nn.Module]) -> None:
    """Raises ValueError unless every layer calls its attention function once for a token, in a way that is known."""
    name = type(model).__name__
    seen: set[int] = set()

    def once(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        if module.layer_idx in seen:
            raise ValueError(f"{name} attends several times to one token in a layer, which no method follows")
        seen.add(module.layer_idx)
        return exact_attention(module, query, key, value, mask, scale)

    ids = torch.tensor([[0, 1]], device=device_of(model))
    try:
        with attention_hook(model, once, hybrid=True):
            model(ids, use_cache=False, logits_to_keep=1)
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, KeyError, RuntimeError, TypeError) as error:
        first, *_ = str(error).strip().splitlines() or [""]
        raise ValueError(f"{name} cannot be called with token ids alone ({type(error).__name__}: {first})") from error
    missing = sorted({layer.layer_idx for layer in layers} - seen)
    if missing:
        raise ValueError(f"{name} bypasses transformers' attention interface in layers {missing}")
