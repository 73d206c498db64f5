"""What we know of a model's attention layers: which there are, their windows and sinks, and where their weights are."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cache
from inspect import isfunction, unwrap
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

Position = TypeVar("Position", int, Tensor)
SLIDING_TYPES = ("sliding_attention", "hybrid_sliding")
CHUNKED_TYPES = ("chunked_attention",)
FULL_TYPES = ("full_attention", "hybrid", "attention")
"""Layer types of transformers' configurations. Layers of type `hybrid` have recurrent states and attention."""


@dataclass(frozen=True)
class AttentionWindow:
    """The tokens that a query sees: the last `size` with its own or, if chunked, those from a multiple of `size` on."""

    size: int
    chunked: bool = False

    def first(self, query: Position) -> Position:
        """Returns the first position that the query at a position sees, negative if the text is shorter."""
        if self.chunked:
            return query // self.size * self.size
        return query - self.size + 1


def window_of(layer: nn.Module) -> AttentionWindow | None:
    """Returns the window of an attention layer, None if it reads the whole text; so does a layer with a sliding window
    that holds the longest text of the model, as Phi-3 mini 128k has it.

    Raises:
        ValueError: the layer is of another type, such as one that selects blocks of tokens itself.
    """
    config = layer.config
    types = getattr(config, "layer_types", None)  # looked up as transformers' caches do
    sliding = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    if types is not None:
        kind = types[layer.layer_idx]
    elif sliding is not None and getattr(config, "use_sliding_window", True):
        kind = "sliding_attention"
    else:
        kind = "chunked_attention" if chunk is not None else "full_attention"
    if kind in SLIDING_TYPES:
        return None if sliding >= longest_text(config) else AttentionWindow(sliding)
    if kind in CHUNKED_TYPES:
        return AttentionWindow(chunk, chunked=True)
    if kind not in FULL_TYPES:
        raise ValueError(f"{type(layer).__name__} is a layer of type {kind}, which selects tokens itself")
    return None


def longest_text(config: Any) -> float:
    """Returns the tokens of the longest text that a model was made for; infinity if its configuration has none."""
    return getattr(config, "max_position_embeddings", None) or math.inf


def attention_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Returns the decoder's self-attention modules in layer order.

    Raises:
        ValueError: `model` is not of transformers or has an encoder; no module uses transformers' attention interface,
            or none reads the whole text; the modules are not causal, are shared between layers, or cap their scores.
    """
    name = type(model).__name__
    if not hasattr(model, "get_decoder"):
        raise ValueError(
            f"model is a {name}, not a model of transformers; load one with AutoModelForCausalLM.from_pretrained(...)"
        )
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} has an encoder; take a decoder-only model")
    modules = [m for m in model.get_decoder().modules() if hasattr(m, "layer_idx")]
    layers = [m for m in modules if _uses_interface(type(m))]
    if not layers:
        raise ValueError(
            f"{name} has no attention layers that go through transformers' attention interface, as Llama's do"
        )
    if not all(getattr(layer, "is_causal", True) for layer in layers):
        raise ValueError(f"{name} reads what follows a token, as encoders do; take a decoder-only model")
    layers.sort(key=lambda layer: layer.layer_idx)
    indices = [layer.layer_idx for layer in layers]
    if indices[0] < 0 or len(set(indices)) < len(layers):
        raise ValueError(f"{name} shares attention modules between layers, so that layers cannot be told apart")
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
    """Returns whether modules of a class look up their attention function in transformers' attention interface."""
    for base in kind.__mro__:
        forward = vars(base).get("forward")
        if isfunction(forward) and "ALL_ATTENTION_FUNCTIONS" in unwrap(forward).__code__.co_names:
            return True
    return False


def has_recurrent_layers(model: PreTrainedModel) -> bool:
    """Returns whether layers keep states other than keys and values."""
    layers = len(attention_layers(model))
    return bool(getattr(model, "_is_stateful", False)) or layers != text_config(model).num_hidden_layers


def keeps_states(model: PreTrainedModel) -> bool:
    """Returns whether a model keeps more of a text than keys and values: recurrent states, or the number of tokens,
    which it looks up in its cache; or whether it takes more than tokens.
    """
    config = text_config(model)
    if has_recurrent_layers(model):
        return True
    return bool(getattr(config, "attn_temperature_tuning", False)) or model.config is not config


def require_attention_alone(model: PreTrainedModel) -> None:
    """Raises ValueError if a pass needs more of the tokens before it than their keys and values in every layer."""
    name = type(model).__name__
    config = text_config(model)
    if has_recurrent_layers(model):
        raise ValueError(f"{name} has layers with states other than keys and values, which only generation supports")
    if getattr(config, "attn_temperature_tuning", False):
        raise ValueError(
            f"{name} scales queries by the length of its cache (attn_temperature_tuning), which only generation "
            "supports"
        )
    require_keys_of_its_own(model)


def require_keys_of_its_own(model: PreTrainedModel) -> None:
    """Raises ValueError if layers share keys through the cache that transformers makes, which a text of ours lacks."""
    if getattr(text_config(model), "num_kv_shared_layers", 0) and transformers.__version__.startswith("4."):
        raise ValueError(
            f"{type(model).__name__} shares keys between layers through its cache in transformers "
            f"{transformers.__version__}: install transformers 5"
        )


def require_plain(model: PreTrainedModel) -> None:
    """Raises ValueError if a layer has a window, sinks or other states than keys and values."""
    require_attention_alone(model)
    if any(window_of(layer) or sinks_of(layer) is not None for layer in attention_layers(model)):
        raise ValueError(
            f"{type(model).__name__} has layers with a sliding window or sinks, which only generation and decoding "
            "under several arms support"
        )


def text_config(model: PreTrainedModel) -> Any:
    """Returns the configuration of the decoder, which models of images and text keep within another."""
    return model.config.get_text_config(decoder=True)


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the model of transformers within a compiled model or an adapter; the model itself if it is none."""
    return next((module for module in model.modules() if isinstance(module, PreTrainedModel)), model)


def sinks_of(layer: nn.Module) -> Tensor | None:
    """Returns the logits [Hq] of a layer's attention sinks, None if it has no sinks."""
    return getattr(layer, "sinks", None)


def device_of(model: PreTrainedModel) -> torch.device:
    """Returns the device that token ids go to, that of the input embedding while the model runs.

    Raises:
        ValueError: the weights are on the meta device, and no hook of accelerate loads them for a pass.
    """
    embedding = model.get_input_embeddings()
    for module in (embedding, model):
        hook = getattr(module, "_hf_hook", None)  # of accelerate, which moves offloaded weights there for a pass
        for each in (hook, *getattr(hook, "hooks", ())):
            if getattr(each, "execution_device", None) is not None:
                return torch.device(each.execution_device)
    tensors = itertools.chain(embedding.parameters(), embedding.buffers())
    device = next(tensors).device
    if device.type == "meta":
        raise ValueError(
            f"{type(model).__name__} has no weights, because it is on the meta device: load them with from_pretrained"
        )
    return device


def weights_stay_on(model: PreTrainedModel, device: torch.device) -> bool:
    """Returns whether all weights are on a device between passes: they are neither offloaded nor on several devices."""
    return all(parameter.device == device for parameter in model.parameters())
