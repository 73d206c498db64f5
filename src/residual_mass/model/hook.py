"""The attention function that a model looks up while a text of ours calls it, and exact attention.

A function of attention gets rotary-applied queries and keys, with keys and values not yet repeated over the query heads
of a group.

Shape letters: B = batch rows, Hq / Hkv = query / KV heads, L = tokens, Lq = queries, D = head dimension.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from residual_mass.kernels.prompt import prompt_attention, prompt_library
from residual_mass.model.layers import attention_layers, longest_text, sinks_of, text_config, window_of

ATTENTION_NAME = "residual_mass"


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
    original: str


_switches: dict[int, Switch] = {}
"""By the id of a configuration."""
_switching = threading.Lock()
running = threading.local()
"""State of this thread: `text`, which takes the attention of the call of a model that runs (`decode.text`), and `only`,
ids of configurations whose models generate and do nothing else (`generation_only`).
"""


@contextmanager
def switched(configs: Sequence[Any]) -> Iterator[None]:
    """Makes configurations name our attention function within the context. Contexts may overlap, in several threads."""
    AttentionInterface.register(ATTENTION_NAME, _dispatch)
    AttentionMaskInterface.register(ATTENTION_NAME, _mask)  # an unregistered name would silently get no mask at all
    with _switching:
        for config in configs:
            before = _switches.get(id(config), Switch(0, config._attn_implementation))
            _switches[id(config)] = before._replace(contexts=before.contexts + 1)
            config._attn_implementation = ATTENTION_NAME
    try:
        yield
    finally:
        with _switching:
            for config in configs:
                now = _switches.pop(id(config))
                if now.contexts > 1:
                    _switches[id(config)] = now._replace(contexts=now.contexts - 1)
                else:
                    config._attn_implementation = now.original


@contextmanager
def generation_only(model: PreTrainedModel) -> Iterator[None]:
    """Refuses calls of a model in this thread that are not those of a text of ours, within the context."""
    configs = configs_of(model, attention_layers(model))
    before = getattr(running, "only", frozenset())
    with switched(configs):
        running.only = before | {id(config) for config in configs}
        try:
            yield
        finally:
            running.only = before


def exact_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
) -> Tensor:
    """Computes the unmodified backbone's attention, with a layer's sinks: by the compiled kernels for prompts where
    they serve, else by scaled_dot_product_attention.

    Args:
        query: [B, Hq, Lq, D]; key and value: [B, Hkv, L, D].
        mask: None (plain causal) or bool [B, 1, Lq, L], True where a query may look.

    Returns:
        [B, Lq, Hq, D].
    """
    if mask is None and query.shape[2] == key.shape[2]:  # a static cache has free columns
        output = kernel_attention(module, query, key, value, scaling)
        if output is not None:
            return output
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


def kernel_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None = None
) -> Tensor | None:
    """Computes the attention [B, Lq, Hq, D] of the last Lq of L tokens by the compiled kernels, each to the `window`
    last tokens up to itself, or to all; None where torch's attention serves.
    """
    library = prompt_library(query, key, value)
    if library is None:
        return None
    attend = functools.partial(prompt_attention, library, window=window)
    return with_sinks(attend, module, query, key, value, scaling)


def with_sinks(
    attend: Callable[..., Tensor], module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float
) -> Tensor:
    """Returns outputs [B, Lq, Hq, D] of an attention that can tell the mass of its softmax terms (`log_mass`), with a
    layer's sinks in the softmax.

    A sink has a logit and no value, so that it is one more term of the denominator.
    """
    sinks = sinks_of(module)
    if sinks is None:
        return attend(query, key, value, scaling)
    batch, heads, count, _ = query.shape
    log_mass = torch.empty(batch, count, heads, dtype=torch.float32, device="cpu")
    output = attend(query.float(), key.float(), value.float(), scaling, log_mass=log_mass)
    share = torch.sigmoid(log_mass - sinks.float())
    return (output * share.unsqueeze(-1)).to(query.dtype)


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


def attend(query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float) -> Tensor:
    """Computes the attention of a layer of the text whose call runs in this thread; opaque to `torch.compile`.

    Args:
        query: [B, Hq, Lq, D]; key and value: [B, Hkv, Lq, D], of the new tokens.

    Returns:
        [B, Lq, Hq, D] of values.
    """
    return running.text.attend(layer, query, key, value, scale).contiguous()


# Not `custom_op`, whose wrapper takes as long as a small kernel.
torch.library.define(
    "residual_mass::attend", "(Tensor query, Tensor key, Tensor value, int layer, float scale) -> Tensor"
)
torch.library.impl("residual_mass::attend", "default")(attend)


@torch.library.register_fake("residual_mass::attend")
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
    if torch.compiler.is_compiling() and attention_mask is not None and attention_mask.numel() == len(query):
        # A text of ours, whose prompt was read by the other way, which checks the options.
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return torch.ops.residual_mass.attend(query, key, value, module.layer_idx, scale), None
    return _computed(module, query, key, value, attention_mask, scaling, **options)


@torch.compiler.disable  # backends keep states in Python, which a compiled graph would not see change
def _computed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Computes attention through the text that runs in this thread; without one, as the model does outside of our
    contexts (another thread may call it meanwhile), but eager attention without its weights.
    """
    text = getattr(running, "text", None)
    if text is not None:
        scale = scale_of(module, query, scaling, options)
        visible = visible_columns(module, mask) if text.reads_images else None
        return text.attend(module.layer_idx, query, key, value, scale, visible), None
    if id(module.config) in getattr(running, "only", ()):
        raise ValueError(
            "within partial_kv a model generates, and a plain call would be full attention: call model.generate(...), "
            "or read and step a residual_mass.Text"
        )
    original = ALL_ATTENTION_FUNCTIONS.get(_original_name(module.config))
    if original is not None:
        return original(module, query, key, value, mask, scaling=scaling, **options)
    scale = scale_of(module, query, scaling, options)
    if sinks_of(module) is not None:
        return exact_attention(module, query, key, value, visible_columns(module, mask), scale), None
    # A mask that is added, as the eager one, keeps rows without any visible column finite.
    return sdpa_attention_forward(module, query, key, value, mask, dropout=0.0, scaling=scale)


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Makes the mask of a call: none for a text of ours, which knows its columns unless it reads images; that of the
    model for other threads.
    """
    text = getattr(running, "text", None)
    if text is not None:
        return sdpa_mask(*args, **kwargs) if text.reads_images else None
    config = kwargs.get("config")
    name = "sdpa" if config is None else _original_name(config)
    return ALL_MASK_ATTENTION_FUNCTIONS[name](*args, **kwargs)


def _original_name(config: Any) -> str:
    """Returns the attention that a configuration names outside of our contexts, which may end at any moment."""
    with _switching:
        switch = _switches.get(id(config))
        own = config._attn_implementation if switch is None else switch.original
        # A configuration that was copied within a context keeps our name after it.
        return "sdpa" if own == ATTENTION_NAME else own


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
