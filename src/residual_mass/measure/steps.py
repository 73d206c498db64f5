"""A method over a cache, and the seconds of `generate`'s decode steps with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from residual_mass.decode.backends import loop_refusal
from residual_mass.decode.compiled import compile_refusal
from residual_mass.decode.generate import partial_decoding
from residual_mass.decode.packed_backend import PackedBackend, PackedCache
from residual_mass.decode.session import make_arm
from residual_mass.decode.verify import Pass
from residual_mass.measure.arguments import Arguments
from residual_mass.methods import Method
from residual_mass.model.hook import Prefill
from residual_mass.model.layers import text_config
from residual_mass.model.phi_maps import HeadShape, PhiMaps
from residual_mass.spec.settings import AnchorSpec
from residual_mass.timing import StepClock, Turn

LayerKeys = dict[int, tuple[Tensor, Tensor]]
"""Keys and values [1, Hkv, L, D] of a prompt by layer."""


@dataclass(frozen=True)
class Side:
    """A method at a share of the prompt, over a packed cache or over transformers' own.

    Attributes:
        compile: whether its steps are one graph of `torch.compile`.
    """

    method: Method
    budget: float | None
    packed: bool
    phi: PhiMaps | None = None
    compile: bool = False

    @property
    def plain(self) -> bool:
        """Whether this is transformers' own full attention."""
        return self.method.whole_prefix and not self.packed


def require_compiler(model: PreTrainedModel, args: Arguments) -> None:
    """Raises ValueError if `--compile` is given and the steps of a model cannot be compiled here."""
    refusal = (loop_refusal(model) or compile_refusal(model)) if args.compile else None
    if refusal is not None:
        raise ValueError(f"--compile: {refusal}; leave it out")


def random_keys(model: PreTrainedModel, length: int) -> LayerKeys:
    """Draws keys and values in place of those of a prompt of `length` tokens; they do not change the time of a step."""
    shape = HeadShape.of(text_config(model))
    draw = torch.Generator().manual_seed(0)
    size = (2, 1, shape.kv_heads, length, shape.head_dim)
    layers = {}
    for index in range(shape.layers):
        drawn = torch.randn(size, generator=draw)
        keys, values = drawn.to(model.device, model.dtype).unbind()
        layers[index] = keys, values
    return layers


def prefilled_cache(model: PreTrainedModel, side: Side, layers: LayerKeys) -> Cache:
    """Returns the cache of a side that holds a prompt."""
    if side.packed:
        cache = PackedCache(model, side.method)
        arm = make_arm(side.method, side.budget)
        backend = PackedBackend(model, arm, AnchorSpec(), cache)
        backend.take(Prefill(layers))
        return cache
    cache = DynamicCache(config=model.config)
    for index, (keys, values) in sorted(layers.items()):
        cache.update(keys, values, index)
    return cache


def bytes_of(cache: Cache) -> int:
    """Returns the bytes of the keys and values in a cache."""
    if isinstance(cache, PackedCache):
        return cache.nbytes
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def timed_after(model: PreTrainedModel, side: Side, ids: Tensor, cache: Cache | None, steps: int) -> Turn:
    """Returns the seconds of `generate`'s decode steps after a text [1, L], of which the cache holds the beginning; it
    reads all of it without one.
    """
    clock = StepClock()
    loop = {"streamer": clock} if side.plain else {"custom_generate": loop_of(side, streamer=clock)}
    generated(model, ids, cache, steps + 2, loop)
    return clock.steps


def timed_drafts(model: PreTrainedModel, side: Side, ids: Tensor, cache: Cache, drafts: int, tokens: int) -> list[Pass]:
    """Returns the passes in which full attention verifies drafts of a side, over so many tokens."""
    passes: list[Pass] = []
    loop = {"custom_generate": loop_of(side, verify=drafts, passes=passes)}
    generated(model, ids, cache, tokens, loop)
    return passes


def loop_of(side: Side, **options: Any) -> Callable[..., Any]:
    return partial_decoding(side.method, side.budget, side.phi, compile=side.compile, **options)


def generated(model: PreTrainedModel, ids: Tensor, cache: Cache | None, tokens: int, loop: dict[str, Any]) -> None:
    """Generates so many tokens greedily."""
    model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, do_sample=False,
        min_new_tokens=tokens, max_new_tokens=tokens, **loop,
    )  # fmt: skip
