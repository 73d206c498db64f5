"""Routes a model's attention through a handler, and restores it afterwards.

The handler gets the arguments of a transformers attention function: rotary-applied queries and keys, with keys and
values not yet repeated over the query heads of a group. It keeps its own state by `module.layer_idx`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from inspect import isfunction, unwrap
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from residual_mass.model.windows import window_of

NAME = "residual_mass"

Handler = Callable[[nn.Module, Tensor, Tensor, Tensor, Tensor | None, float], Tensor]
"""(module, query [B, Hq, Lq, D], key [B, Hkv, L, D], value [B, Hkv, L, D], mask, scaling) -> [B, Lq, Hq, D].

mask: None (plain causal) or bool [B, 1, Lq, L], True where a query may look.
"""


@contextmanager
def attention_hook(model: PreTrainedModel, handler: Handler, hybrid: bool = False) -> Iterator[None]:
    """Makes every attention layer of `model` call `handler` within the context, and restores them on exit.

    Args:
        hybrid: whether the handler knows layers with a window (`window_of`) and with sinks (`sinks_of`).

    Raises:
        ValueError: the model has no layers of the supported kinds, or is hooked already.
    """
    layers = attention_layers(model)
    if not hybrid:
        require_plain(model)
    if any(hasattr(layer, "residual_mass_handler") for layer in layers):
        raise ValueError("the model's attention is hooked already; contexts on one model cannot be nested")
    AttentionInterface.register(NAME, _dispatch)
    AttentionMaskInterface.register(NAME, sdpa_mask)  # an unregistered name would silently get no mask at all
    configs = list(
        {id(config): config for config in (text_config(model), *(layer.config for layer in layers))}.values()
    )
    before = [config._attn_implementation for config in configs]
    for layer in layers:
        layer.residual_mass_handler = handler
    for config in configs:
        config._attn_implementation = NAME
    try:
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation = name
        for layer in layers:
            del layer.residual_mass_handler


def attention_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Returns the decoder's self-attention modules in layer order.

    Raises:
        ValueError: `model` is none of transformers'; there are no such modules that use transformers' attention
            interface, or none that reads the whole text; they belong to an encoder too, read what follows a token, are
            shared between layers, or cap their scores.
    """
    name = type(model).__name__
    if not hasattr(model, "get_decoder"):
        raise ValueError(
            f"model is a {name}, not a model of transformers; load one with AutoModelForCausalLM.from_pretrained(...)"
        )
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} has an encoder; take a decoder-only model")
    layers = [m for m in model.get_decoder().modules() if hasattr(m, "layer_idx") and _uses_interface(type(m))]
    if not layers:
        raise ValueError(
            f"{name} has no attention layers that go through transformers' attention interface, as Llama's do"
        )
    if not all(getattr(layer, "is_causal", True) for layer in layers):
        raise ValueError(f"{name} reads what follows a token, as encoders do; take a decoder-only model")
    layers.sort(key=lambda layer: layer.layer_idx)
    indices = [layer.layer_idx for layer in layers]
    if indices[0] < 0 or len(set(indices)) < len(layers):
        raise ValueError(f"{name} shares attention modules between layers, so that a layer's text cannot be told")
    if all(window_of(layer) for layer in layers):
        raise ValueError(
            f"{name} has sliding-window attention in every layer, which leaves no prefix to estimate; take a model "
            "with layers of full attention or, for texts within the window, set config.sliding_window=None"
        )
    if getattr(layers[0].config, "attn_logit_softcapping", None) is not None:
        raise ValueError(
            f"{name} caps its attention scores (attn_logit_softcapping), which no estimate can follow; take a model "
            "without a cap, such as Gemma 3"
        )
    return layers


@cache
def _uses_interface(kind: type) -> bool:
    """Whether modules of a class look their attention up, as transformers' own do, where it can be replaced."""
    forwards = (vars(base).get("forward") for base in kind.__mro__)
    return any("ALL_ATTENTION_FUNCTIONS" in unwrap(f).__code__.co_names for f in forwards if isfunction(f))


def require_attention_alone(model: PreTrainedModel) -> None:
    """Raises ValueError if a pass needs more of the text before it than the keys and values of every layer."""
    layers = attention_layers(model)
    name, config = type(model).__name__, text_config(model)
    if getattr(model, "_is_stateful", False) or len(layers) != config.num_hidden_layers:
        raise ValueError(f"{name} has layers with states beside attention, which partial_kv alone supports")
    if getattr(config, "attn_temperature_tuning", False):
        raise ValueError(
            f"{name} scales queries by the length of its cache (attn_temperature_tuning), which partial_kv alone "
            "supports"
        )
    if getattr(config, "num_kv_shared_layers", 0) and transformers.__version__.startswith("4."):
        raise ValueError(
            f"{name} shares keys between layers through its cache in transformers {transformers.__version__}, which "
            "partial_kv alone supports; install transformers 5"
        )


def require_plain(model: PreTrainedModel) -> None:
    """Raises ValueError if a layer has a window, sinks or other states than keys and values."""
    require_attention_alone(model)
    if any(window_of(layer) or sinks_of(layer) is not None for layer in attention_layers(model)):
        raise ValueError(
            f"{type(model).__name__} has layers with a sliding window or sinks, which only partial_kv and decoding "
            "under several arms support"
        )


def text_config(model: PreTrainedModel) -> Any:
    """Returns the configuration of the decoder, which models of images and text keep within another."""
    return model.config.get_text_config(decoder=True)


def sinks_of(layer: nn.Module) -> Tensor | None:
    """Returns the logits [Hq] that a layer's query heads give to no token at all, None if it has none."""
    return getattr(layer, "sinks", None)


def exact_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
) -> Tensor:
    """Computes the unmodified backbone's attention (scaled_dot_product_attention); same signature as a handler."""
    if sinks_of(module) is not None:
        return _attention_with_sinks(module, query, key, value, mask, scaling)
    groups = query.shape[1] // key.shape[1]
    if query.device.type == "cuda" and query.dtype == torch.float32 and groups > 1:
        # No fused kernel supports grouped heads in float32; the unfused one writes all scores to memory.
        keys, values = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        causal = mask is None and query.shape[2] > 1
        output = F.scaled_dot_product_attention(query, keys, values, mask, is_causal=causal, scale=scaling)
        return output.transpose(1, 2).contiguous()
    output, _ = sdpa_attention_forward(module, query, key, value, mask, dropout=0.0, scaling=scaling)
    return output


def _attention_with_sinks(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
) -> Tensor:
    """Adds each head's sink as a first token without a value, and calls the same kernels.

    The token's key is 1 / scaling in a dimension of its own, where the other keys are 0 and queries have the sink. A
    first query that is dropped keeps the plain causal mask aligned.
    """
    sinks = sinks_of(module)
    if mask is None and query.shape[2] > 1:
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]  # a static cache has free columns
        query = F.pad(query, (0, 0, 1, 0))
    query = torch.cat((query, sinks.to(query.dtype).view(-1, 1, 1).expand(*query.shape[:3], 1)), dim=-1)
    key, value = F.pad(key, (0, 1, 1, 0)), F.pad(value, (0, 0, 1, 0))
    key[:, :, 0, -1] = 1 / scaling
    if mask is not None:
        mask = F.pad(mask, (1, 0), value=True)
    output, _ = sdpa_attention_forward(module, query, key, value, mask, dropout=0.0, scaling=scaling)
    return output if mask is not None or query.shape[2] == 1 else output[:, 1:]


def device_of(model: PreTrainedModel) -> torch.device:
    return next(model.parameters()).device


@torch.compiler.disable  # handlers keep states in Python, which a compiled graph would not see change
def _dispatch(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    if window_of(module) is None and options.get("sliding_window") is not None:
        raise ValueError(f"{type(module).__name__} has a sliding window that config.layer_types does not tell of")
    if options.get("s_aux") is not sinks_of(module):
        raise ValueError(f"{type(module).__name__} has sinks (s_aux) other than its parameter `sinks`")
    for option in ("softcap", "position_bias"):
        if options.get(option) is not None:
            raise ValueError(f"{type(module).__name__} uses {option}, which changes attention and is not supported")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return module.residual_mass_handler(module, query, key, value, visible_columns(module, attention_mask), scale), None


def visible_columns(module: nn.Module, mask: Tensor | None) -> Tensor | None:
    """The mask as bool, True where a query may look; older models of transformers add 0 or a very low number instead.

    Raises:
        ValueError: the mask adds other numbers, which change attention.
    """
    if mask is None or mask.dtype == torch.bool:
        return mask
    visible = mask == 0
    if not bool((visible | (mask <= torch.finfo(mask.dtype).min / 2)).all()):
        raise ValueError(f"{type(module).__name__} adds a bias to scores by its mask, which is not supported")
    return visible
