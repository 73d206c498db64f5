"""Hook that routes a model's attention through a handler and restores it afterwards; windows of attention layers; and
the exact prefill.

A handler gets the arguments of a transformers attention function: rotary-applied queries and keys, with keys and
values not yet repeated over the query heads of a group. It keeps its own state by `module.layer_idx`.

Shape letters: B = batch rows, Hq / Hkv = query / KV heads, L = tokens, Lq = queries, D = head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from inspect import isfunction, unwrap
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from residual_mass.model.rotary import text_lengths

if TYPE_CHECKING:
    from residual_mass.study.specs import BackboneSpec

Position = TypeVar("Position", int, Tensor)

SLIDING = ("sliding_attention", "hybrid_sliding")
CHUNKED = ("chunked_attention",)
WHOLE = ("full_attention", "hybrid", "attention")
"""Layer types of transformers' configurations. Layers of type `hybrid` have recurrent states and attention."""


@dataclass(frozen=True)
class Window:
    """The tokens that a query sees: the last `size` with its own or, if chunked, those from a multiple of `size` on."""

    size: int
    chunked: bool = False

    def first(self, query: Position) -> Position:
        """Returns the first position that the query at a position sees, negative if the text is shorter."""
        return query // self.size * self.size if self.chunked else query - self.size + 1


def window_of(layer: nn.Module) -> Window | None:
    """Returns the window of an attention layer, None if it reads the whole text.

    Raises:
        ValueError: the layer is of another type, such as one that selects blocks of tokens itself.
    """
    config, types = layer.config, getattr(layer.config, "layer_types", None)  # looked up as transformers' caches do
    sliding, chunk = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    if types is not None:
        kind = types[layer.layer_idx]
    elif sliding is not None and getattr(config, "use_sliding_window", True):
        kind = "sliding_attention"
    else:
        kind = "chunked_attention" if chunk is not None else "full_attention"
    if kind in SLIDING:
        return Window(sliding)
    if kind in CHUNKED:
        return Window(chunk, chunked=True)
    if kind not in WHOLE:
        raise ValueError(f"{type(layer).__name__} is a layer of type {kind}, which selects tokens itself")
    return None


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
    configs = {id(config): config for config in (text_config(model), *(layer.config for layer in layers))}.values()
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
    forwards = (vars(base).get("forward") for base in kind.__mro__)
    return any("ALL_ATTENTION_FUNCTIONS" in unwrap(f).__code__.co_names for f in forwards if isfunction(f))


def require_attention_alone(model: PreTrainedModel) -> None:
    """Raises ValueError if a pass needs more of the tokens before it than their keys and values in every layer."""
    layers = attention_layers(model)
    name, config = type(model).__name__, text_config(model)
    if getattr(model, "_is_stateful", False) or len(layers) != config.num_hidden_layers:
        raise ValueError(f"{name} has layers with states other than keys and values, which only partial_kv supports")
    if getattr(config, "attn_temperature_tuning", False):
        raise ValueError(
            f"{name} scales queries by the length of its cache (attn_temperature_tuning), which only partial_kv "
            "supports"
        )
    if getattr(config, "num_kv_shared_layers", 0) and transformers.__version__.startswith("4."):
        raise ValueError(
            f"{name} shares keys between layers through its cache in transformers {transformers.__version__}, which "
            "only partial_kv supports; install transformers 5"
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
    """Returns the logits [Hq] of a layer's attention sinks, None if it has no sinks."""
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

    An additional dimension holds 1 / scaling in this token's key, 0 in the other keys, and the sink in the queries. An
    additional first query, whose output is dropped, keeps the plain causal mask aligned.
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
    device = next(embedding.parameters()).device
    if device.type == "meta":
        raise ValueError(
            f"{type(model).__name__} has no weights, because it is on the meta device: load them with from_pretrained"
        )
    return device


def weights_stay_on(model: PreTrainedModel, device: torch.device) -> bool:
    """Returns whether all weights are on a device between passes: they are neither offloaded nor on several devices."""
    return all(parameter.device == device for parameter in model.parameters())


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
        raise ValueError(f"{type(module).__name__} has a sliding window that config.layer_types does not name")
    if options.get("s_aux") is not sinks_of(module):
        raise ValueError(f"{type(module).__name__} has sinks (s_aux) other than its parameter `sinks`")
    for option in ("softcap", "position_bias"):
        if options.get(option) is not None:
            raise ValueError(f"{type(module).__name__} uses {option}, which changes attention and is not supported")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return module.residual_mass_handler(module, query, key, value, visible_columns(module, attention_mask), scale), None


def visible_columns(module: nn.Module, mask: Tensor | None) -> Tensor | None:
    """Converts a mask to bool, True where a query may look; older models of transformers add 0 or a very low number.

    Raises:
        ValueError: the mask adds other numbers, which change attention.
    """
    if mask is None or mask.dtype == torch.bool:
        return mask
    visible = mask == 0
    if not bool((visible | (mask <= torch.finfo(mask.dtype).min / 2)).all()):
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
def prefill(model: PreTrainedModel, prompts: list[list[int]], length: int | None = None) -> Prefill:
    """Reads prompts of equal length in one pass; computes logits only at the last position.

    Args:
        length: tokens of the whole text, of which the prompts are the beginning; None for the prompts' own. It matters
            for models whose rotary frequencies depend on it.
    """
    layers = {}

    def kept(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
        layers[module.layer_idx] = key, value
        return exact_attention(module, query, key, value, *rest)

    inputs = torch.tensor(prompts, device=device_of(model))
    with attention_hook(model, kept, hybrid=True), text_lengths(model, [length or inputs.shape[1]] * len(inputs)):
        logits = model(inputs, use_cache=False, logits_to_keep=1).logits
    return Prefill(layers, *greedy(logits))


def model_at_fault(spec: BackboneSpec) -> str:
    """Returns a message that says why a model may return values that are not finite, and what to do."""
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
