"""Hook that routes a model's attention through a handler and restores it afterwards, exact attention, and the exact
prefill.

A handler gets the arguments of a transformers attention function: rotary-applied queries and keys, with keys and
values not yet repeated over the query heads of a group. It keeps its own state by `module.layer_idx`.

Shape letters: B = batch rows, Hq / Hkv = query / KV heads, L = tokens, Lq = queries, D = head dimension.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from residual_mass.model.finite import greedy
from residual_mass.model.layers import (
    attention_layers,
    device_of,
    longest_text,
    require_plain,
    sinks_of,
    text_config,
    window_of,
)
from residual_mass.model.rotary import changing_rotations, frequencies_of_each_call

ATTENTION_NAME = "residual_mass"


class Handler(Protocol):
    """What computes a layer's attention."""

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, /
    ) -> Tensor:
        """Returns [B, Lq, Hq, D].

        Args:
            query: [B, Hq, Lq, D]; key and value: [B, Hkv, L, D].
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
    for layer in layers:
        layer.residual_mass_handler = handler
    try:
        with switched(configs_of(model, layers), hooks=1), frequencies_of_each_call(changing_rotations(model)):
            yield
    finally:
        for layer in layers:
            del layer.residual_mass_handler


def configs_of(model: PreTrainedModel, layers: Sequence[nn.Module]) -> list[Any]:
    """Returns the configurations in which a model and its attention layers look up their attention function."""
    configs = [text_config(model)]
    for layer in layers:
        if not any(layer.config is config for config in configs):  # equal ones may be several objects
            configs.append(layer.config)
    return configs


class Switch(NamedTuple):
    """How often the attention of a configuration is switched to ours now, and what it was."""

    contexts: int
    hooks: int
    """Contexts of `attention_hook` among them."""
    original: str


_switches: dict[int, Switch] = {}
"""By the id of a configuration."""
_switching = threading.Lock()
running = threading.local()
"""`text` is what takes the attention of the call of a model that runs in this thread (`decode.text`)."""


@contextmanager
def switched(configs: Sequence[Any], hooks: int = 0) -> Iterator[None]:
    """Makes configurations name our attention function within the context. Contexts may overlap, in several threads."""
    AttentionInterface.register(ATTENTION_NAME, _dispatch)
    AttentionMaskInterface.register(ATTENTION_NAME, _mask)  # an unregistered name would silently get no mask at all
    with _switching:
        for config in configs:
            before = _switches.get(id(config), Switch(0, 0, config._attn_implementation))
            _switches[id(config)] = Switch(before.contexts + 1, before.hooks + hooks, before.original)
            config._attn_implementation = ATTENTION_NAME
    try:
        yield
    finally:
        with _switching:
            for config in configs:
                now = _switches.pop(id(config))
                if now.contexts > 1:
                    _switches[id(config)] = Switch(now.contexts - 1, now.hooks - hooks, now.original)
                else:
                    config._attn_implementation = now.original


def exact_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
) -> Tensor:
    """Computes the unmodified backbone's attention (scaled_dot_product_attention); same signature as a handler."""
    if sinks_of(module) is not None:
        return _attention_with_sinks(module, query, key, value, mask, scaling)
    groups = query.shape[1] // key.shape[1]
    if query.device.type == "cuda" and query.dtype == torch.float32 and groups > 1:
        # No fused kernel supports grouped heads in float32; the unfused one writes all scores to memory.
        keys = key.repeat_interleave(groups, dim=1)
        values = value.repeat_interleave(groups, dim=1)
        causal = mask is None and query.shape[2] > 1
        output = F.scaled_dot_product_attention(query, keys, values, mask, is_causal=causal, scale=scaling)
        return output.transpose(1, 2).contiguous()
    output, _ = sdpa_attention_forward(module, query, key, value, mask, dropout=0.0, scaling=scaling)
    return output


def _attention_with_sinks(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
) -> Tensor:
    """Adds each head's sink as a first token without a value, and calls the same kernels.

    An additional dimension holds 1 / scaling in this token's key, 0 in the other keys, and the sink in the queries. An
    additional first query, whose output is dropped, keeps the plain causal mask aligned.
    """
    sinks = sinks_of(module)
    causal = mask is None and query.shape[2] > 1
    if causal:
        length = query.shape[2]
        key = key[:, :, :length]  # a static cache has free columns
        value = value[:, :, :length]
        query = F.pad(query, (0, 0, 1, 0))
    sinks = sinks.to(query.dtype).view(-1, 1, 1)  # [Hq, 1, 1]
    further = sinks.expand(*query.shape[:3], 1)
    query = torch.cat((query, further), dim=-1)
    key = F.pad(key, (0, 1, 1, 0))
    value = F.pad(value, (0, 0, 1, 0))
    key[:, :, 0, -1] = 1 / scaling
    if mask is not None:
        mask = F.pad(mask, (1, 0), value=True)
    output, _ = sdpa_attention_forward(module, query, key, value, mask, dropout=0.0, scaling=scaling)
    return output[:, 1:] if causal else output


@torch.library.custom_op("residual_mass::attend", mutates_args=())
def attend(query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float) -> Tensor:
    """Computes the attention of a layer of the text whose call runs in this thread; opaque to `torch.compile`.

    Args:
        query: [B, Hq, Lq, D]; key and value: [B, Hkv, Lq, D], of the new tokens.

    Returns:
        [B, Lq, Hq, D] of values.
    """
    return running.text.attend(layer, query, key, value, scale).contiguous()


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


def _dispatch(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    hooked = hasattr(module, "residual_mass_handler")
    if (
        torch.compiler.is_compiling()
        and not hooked
        and attention_mask is not None
        and attention_mask.numel() == len(query)
    ):
        # A text of ours, whose prompt was read by the other way, which checks the options.
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return attend(query, key, value, module.layer_idx, scale), None
    return _handled(module, query, key, value, attention_mask, scaling, **options)


@torch.compiler.disable  # handlers keep states in Python, which a compiled graph would not see change
def _handled(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    text = getattr(running, "text", None)
    handler = getattr(module, "residual_mass_handler", None)
    if text is None and handler is None:  # another thread calls the model meanwhile
        return _original_attention(module, query, key, value, attention_mask, scaling, **options)
    scale = scale_of(module, query, scaling, options)
    if text is not None:
        return text.attend(module.layer_idx, query, key, value, scale), None
    mask = visible_columns(module, attention_mask)
    return handler(module, query, key, value, mask, scale), None


def _original_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Computes attention as the model does outside of our contexts; eager attention without its weights."""
    original = ALL_ATTENTION_FUNCTIONS.get(_original_name(module.config))
    if original is not None:
        return original(module, query, key, value, mask, scaling=scaling, **options)
    scale = scale_of(module, query, scaling, options)
    if sinks_of(module) is not None:
        return exact_attention(module, query, key, value, visible_columns(module, mask), scale), None
    # A mask that is added, as the eager one, keeps rows without any visible column finite.
    return sdpa_attention_forward(module, query, key, value, mask, dropout=0.0, scaling=scale)


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Makes the mask of a call: none for a text of ours, which knows its columns; the model's own for other threads."""
    if getattr(running, "text", None) is not None:
        return None
    config = kwargs.get("config")
    switch = _switches.get(id(config))
    if config is None or (switch is not None and switch.hooks):
        return sdpa_mask(*args, **kwargs)
    return ALL_MASK_ATTENTION_FUNCTIONS[_original_name(config)](*args, **kwargs)


def _original_name(config: Any) -> str:
    """Returns the attention that a configuration names outside of our contexts, which may end at any moment."""
    with _switching:
        switch = _switches.get(id(config))
        return config._attn_implementation if switch is None else switch.original


def scale_of(module: nn.Module, query: Tensor, scaling: float | None, options: dict[str, Any]) -> float:
    """Returns the factor of a layer's scores.

    Raises:
        ValueError: the layer asks for more than a scaled softmax with the windows and sinks that we know.
    """
    window = options.get("sliding_window")
    if window is not None and window_of(module) is None and window < longest_text(module.config):
        raise ValueError(f"{type(module).__name__} has a sliding window that config.layer_types does not name")
    if options.get("s_aux") is not sinks_of(module):
        raise ValueError(f"{type(module).__name__} has sinks (s_aux) other than its parameter `sinks`")
    for option in ("softcap", "position_bias"):
        if options.get(option) is not None:
            raise ValueError(f"{type(module).__name__} uses {option}, which changes attention and is not supported")
    return query.shape[-1] ** -0.5 if scaling is None else scaling


def visible_columns(module: nn.Module, mask: Tensor | None) -> Tensor | None:
    """Converts a mask to bool, True where a query may look; older models of transformers add 0 or a very low number.

    Raises:
        ValueError: the mask adds other numbers, which change attention.
    """
    if mask is None or mask.dtype == torch.bool:
        return mask
    visible = mask == 0
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    if not bool((visible | hidden).all()):
        raise ValueError(f"{type(module).__name__} adds a bias to scores by its mask, which is not supported")
    return visible


class Prefill(NamedTuple):
    """State of a model after prompts of equal length."""

    layers: dict[int, tuple[Tensor, Tensor]]
    """Keys and values [B, Hkv, L, D] by layer."""
    next_token: Tensor = torch.tensor(0)
    """[B], the greedy continuation."""
    finite: Tensor = torch.tensor(True)
    """[B] bool, False where its logits are not finite."""


@torch.no_grad()
def prefill(model: PreTrainedModel, prompts: list[list[int]]) -> Prefill:
    """Reads prompts of equal length in one pass; computes logits only at the last position."""
    layers = {}

    def kept(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
        layers[module.layer_idx] = key, value
        return exact_attention(module, query, key, value, *rest)

    inputs = torch.tensor(prompts, device=device_of(model))
    with attention_hook(model, kept, hybrid=True):
        logits = model(inputs, use_cache=False, logits_to_keep=1).logits
    return Prefill(layers, *greedy(logits))
