"""Routes a model's attention through a handler, and restores it afterwards.

The handler gets the arguments of a transformers attention function: rotary-applied queries and keys, with keys and
values not yet repeated over the query heads of a group. It keeps its own state by `module.layer_idx`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "residual_mass"

Handler = Callable[[nn.Module, Tensor, Tensor, Tensor, Tensor | None, float], Tensor]
"""(module, query [B, Hq, Lq, D], key [B, Hkv, L, D], value [B, Hkv, L, D], mask, scaling) -> [B, Lq, Hq, D].

mask: None (plain causal) or bool [B, 1, Lq, L], True where a query may look.
"""


@contextmanager
def attention_hook(model: PreTrainedModel, handler: Handler) -> Iterator[None]:
    """Makes every attention layer of `model` call `handler` within the context, and restores them on exit.

    Raises:
        ValueError: the model has no layers of the supported kind, or is hooked already.
    """
    layers = attention_layers(model)
    if any(hasattr(layer, "residual_mass_handler") for layer in layers):
        raise ValueError("the model's attention is hooked already; contexts on one model cannot be nested")
    AttentionInterface.register(NAME, _dispatch)
    AttentionMaskInterface.register(NAME, sdpa_mask)  # an unregistered name would silently get no mask at all
    before = model.config._attn_implementation
    for layer in layers:
        layer.residual_mass_handler = handler
    model.config._attn_implementation = NAME
    try:
        yield
    finally:
        model.config._attn_implementation = before
        for layer in layers:
            del layer.residual_mass_handler


def attention_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Returns the model's self-attention modules in layer order.

    Raises:
        ValueError: there are none, or a layer has a sliding window, so that its prefix is not the whole prompt.
    """
    layers = [m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "num_key_value_groups")]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no attention layers of the kind that Llama, Qwen or Mistral have")
    if any(getattr(layer, "sliding_window", None) for layer in layers):
        raise ValueError(f"{type(model).__name__} has sliding-window attention layers, which are not supported")
    return sorted(layers, key=lambda layer: layer.layer_idx)


def exact_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
) -> Tensor:
    """Computes the unmodified backbone's attention (scaled_dot_product_attention); same signature as a handler."""
    groups = query.shape[1] // key.shape[1]
    if query.device.type == "cuda" and query.dtype == torch.float32 and groups > 1:
        # No fused kernel supports grouped heads in float32; the unfused one writes all scores to memory.
        keys, values = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        causal = mask is None and query.shape[2] > 1
        output = F.scaled_dot_product_attention(query, keys, values, mask, is_causal=causal, scale=scaling)
        return output.transpose(1, 2).contiguous()
    output, _ = sdpa_attention_forward(module, query, key, value, mask, dropout=0.0, scaling=scaling)
    return output


def device_of(model: PreTrainedModel) -> torch.device:
    return next(model.parameters()).device


def _dispatch(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    for option in ("sliding_window", "softcap", "s_aux"):
        if options.get(option) is not None:
            raise ValueError(f"{type(module).__name__} uses {option}, which changes attention and is not supported")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return module.residual_mass_handler(module, query, key, value, attention_mask, scale), None
