"""`partial_kv`: runs a method under transformers' own `model.generate`.

Shape letters: N = batch rows, Hq / Hkv = query / KV heads, G = Hq / Hkv, L = prefix columns, T = all key columns, D =
head dimension.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from residual_mass.core.settings import AnchorSpec
from residual_mass.methods import Method, method_named
from residual_mass.methods.arms import Arm, percent_of_share
from residual_mass.model.hook import (
    attention_hook,
    attention_layers,
    exact_attention,
    sinks_of,
    text_config,
    window_of,
)
from residual_mass.model.packed import PackedCache, PackedSession, Session, packing_of
from residual_mass.model.phi_maps import HeadShape, PhiMaps
from residual_mass.model.prefix import (
    ArmRows,
    Map,
    PrefixLayer,
    Summary,
    arm_rows,
    build_prefix,
    map_heads,
    merge_with_prefix,
    own_precision,
    prefix_terms,
    rows_of_heads,
    summarise_prefix,
)

WATCHED = ("_prefill", "_validate_generation_mode", "prepare_inputs_for_generation")
"""Methods of a model that `generate` calls, and that a context replaces."""
STAYS = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.DOLA_GENERATION)
"""Modes of `generate` in which every row keeps its own tokens."""


@contextmanager
def partial_kv(
    model: PreTrainedModel,
    method: str | Method = "topk_phi",
    budget: float | None = 0.01,
    phi: PhiMaps | None = None,
    num_sink: int = 4,
    num_tail: int = 16,
    fold: int | None = None,
    cache: PackedCache | None = None,
) -> Iterator[Session]:
    """Context in which prompts are read exactly and generated tokens attend to the prompt through `method`.

    Works with `model.generate` (greedy, sampling or beams, left-padded batches, growing or static caches) on
    decoder-only models that use transformers' attention interface; docs/models.md lists families. Layers with a sliding
    window or chunks attend exactly. Several tokens in one call, such as a further turn on the same cache, are read
    exactly and join the prefix. A single token is a generated one, unless `generate` reads it as a prompt's last chunk.

    Args:
        method: full, topk, topk_phi, topk_moments or another name in `residual_mass.methods`, or your own `Method`.
        budget: exact-support budget as a share of each row's own prompt, in (0, 1], including anchors; ignored for
            full. The integer 1 is refused: 0.01 is 1 %, 1.0 the whole prompt.
        phi: maps trained for this backbone; required by methods with phi in their name, refused by methods with another
            residual.
        num_sink, num_tail: first and last positions of the prompt that are always exact.
        fold: None reads every generated token exactly. A number folds that many of the oldest into the prompt whenever
            more than twice as many are unfolded: they are retrieved and estimated like the prompt's tokens, and the
            budget is a share of both. Refused for beams, which exchange generated tokens between rows.
        cache: None keeps transformers' own cache. A `PackedCache`, which `generate` needs as `past_key_values` too,
            holds packed keys and values for compiled steps. It takes no `fold`, because it folds in blocks by itself.

    Yields:
        The session. Its `partial_calls` are the numbers of decode steps by layer, without layers that were not called.

    Warns:
        UserWarning: the context ended without a decode step through the method, so that all attention was full.

    Raises:
        ValueError: the method is unknown, the budget out of range, the maps are missing, not needed or of another head
            shape, the model is not supported or already hooked, or `cache` is for another method; `generate` runs
            without a cache, with drafts, with guidance by a second text, or by beams with `fold` or `cache`.
    """
    session: Session = partial_session(model, method, budget, phi, num_sink, num_tail, fold)
    if cache is not None:
        if fold is not None:
            raise ValueError("fold is for transformers' caches: a PackedCache joins older tokens in blocks by itself")
        if packing_of(session.arm.rule) != cache.packing:
            raise ValueError(
                f"the PackedCache was made for another method than {session.arm.rule.name}: make one with this method"
            )
        session = PackedSession(session.arm, session.anchors, cache)
    with attention_hook(model, session, hybrid=True), _generate_watched(model, session):
        yield session
    if not session.arm.is_full and not session.partial_calls:
        warnings.warn(
            f"partial_kv: no decode step went through {session.arm.rule.name}, so all attention was full: prompts and "
            "several tokens in one call are read exactly",
            stacklevel=3,
        )


def partial_session(
    model: PreTrainedModel,
    method: str | Method,
    budget: float | str | None,
    phi: PhiMaps | None,
    num_sink: int,
    num_tail: int,
    fold: int | None = None,
) -> PartialSession:
    """Checks the arguments of `partial_kv`, and returns the session of a context that has not begun."""
    arm = make_arm(method, budget)
    if fold is not None and fold < 1:
        raise ValueError(f"fold is {fold}, not 1 or more tokens")
    attention_layers(model)
    session = PartialSession(arm, AnchorSpec(num_sink, num_tail), fold)
    require_maps(arm, phi)
    if arm.needs_maps:
        assert phi is not None
        phi.require(HeadShape.of(text_config(model)))
        session.maps, session.shape = phi.on(model).folded(), phi.shape
    return session


@contextmanager
def _generate_watched(model: PreTrainedModel, session: Session) -> Iterator[None]:
    """Refuses modes of `generate` that would run by full attention or take the state of another row, and marks the
    session while `generate` reads a prompt, whose last chunk may be a single token.

    Models with LongRoPE drop the cache where their frequencies change, and read the whole text again. A `PackedCache`
    is emptied then and takes that text, because a cache that transformers makes itself would not be packed.
    """
    read, validate, inputs_for = (getattr(model, name, None) for name in WATCHED)
    packed = session.cache if isinstance(session, PackedSession) else None

    def checked(mode: GenerationMode, config: GenerationConfig, *args: Any, **kwargs: Any) -> None:
        require_steps(config, mode, session.arm.rule)
        require_own_rows(mode, session)
        if config.prefill_chunk_size is not None and read is None:  # as in transformers 4
            raise ValueError("partial_kv reads a prompt in one piece with this transformers: unset prefill_chunk_size")
        validate(mode, config, *args, **kwargs)

    def marked(*args: Any, **kwargs: Any) -> Any:
        with session.doing("reading"):
            return read(*args, **kwargs)

    @wraps(inputs_for)
    def kept(*args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs = inputs_for(*args, **kwargs)
        if kwargs.get("past_key_values") is packed and inputs.get("past_key_values") is None:
            packed.reset()
            inputs["past_key_values"] = packed
        return inputs

    if packed is not None and inputs_for is not None:
        model.prepare_inputs_for_generation = kept
    if read is not None:
        model._prefill = marked
    if validate is not None:
        model._validate_generation_mode = checked
    try:
        yield
    finally:
        for name in WATCHED:
            vars(model).pop(name, None)


def require_steps(config: GenerationConfig, mode: GenerationMode, rule: Method) -> None:
    """Raises ValueError if `generate` would not read one token of each text per step."""
    if mode == GenerationMode.ASSISTED_GENERATION:
        raise ValueError(
            "partial_kv reads one token a step, not drafts of several: leave out assistant_model, "
            "prompt_lookup_num_tokens and assistant_early_exit"
        )
    if config.use_cache is False and not rule.whole_prefix:
        raise ValueError("partial_kv needs the cache: without it every step reads the whole text exactly")
    if config.guidance_scale not in (None, 1):
        raise ValueError("partial_kv reads one text, but guidance_scale needs a second one: leave it out")


def require_own_rows(mode: GenerationMode, session: Session) -> None:
    """Raises ValueError if `generate` moves rows between steps, and states of a row cannot move with its tokens."""
    if mode in STAYS:
        return
    name = mode.value.replace("_", " ")
    if isinstance(session, PackedSession):
        raise ValueError(f"a PackedCache does not follow {name}, which moves rows: generate with num_beams=1")
    if isinstance(session, PartialSession) and session.fold is not None:
        raise ValueError(
            f"fold joins tokens to the summaries of a row, but {name} moves rows between steps: leave fold out, or "
            "generate greedily or by sampling, with num_beams=1"
        )


def make_arm(method: str | Method, budget: float | str | None) -> Arm:
    """Converts the budget to percent; raises ValueError for an unknown method or a budget out of range."""
    rule = method_named(method)
    return Arm(rule, None if rule.whole_prefix else percent_of_share(budget))


def require_maps(arm: Arm, phi: PhiMaps | None) -> None:
    """Raises ValueError if a method lacks its maps, or if maps are given to a method with another residual."""
    if phi is not None and arm.rule.own is not None:
        raise ValueError(f"method {arm.rule.name} uses no phi maps: leave phi out")
    if phi is None and arm.needs_maps:
        raise ValueError(f"method {arm.rule.name} needs phi maps: pass phi=PhiMaps.load(...)")


@dataclass
class PartialSession(Session):
    """State of one `partial_kv` context over a cache of transformers, by layer."""

    fold: int | None = None
    maps: list[tuple[Map, Map]] | None = None
    shape: HeadShape | None = None
    _columns: dict[int, int] = field(default_factory=dict)
    _filled: dict[int, int] = field(default_factory=dict)
    _real: dict[int, Tensor] = field(default_factory=dict)
    _prefix: dict[int, tuple[PrefixLayer, Summary | None, ArmRows]] = field(default_factory=dict)

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        if window_of(module) is not None:
            return exact_attention(module, query, key, value, mask, scale)
        index = module.layer_idx
        if self.verifying:
            self._filled[index] = self._columns[index] = key.shape[2] - query.shape[2]
            return _few_queries(module, query, key, value, mask, scale)
        several = self.reading or query.shape[2] > 1
        # A growing cache is full. In a static cache, which has a constant number of columns, the mask shows the filled.
        grown = not several and key.shape[2] > self._columns.get(index, key.shape[2])
        filled = key.shape[2] if grown else _filled_columns(query, key, mask)
        before, self._filled[index], self._columns[index] = self._filled.get(index), filled, key.shape[2]
        if several or filled == 1:  # a prompt, or more of it
            self._real[index] = _real_columns(filled, key, mask)
            self._prefix.pop(index, None)
            return exact_attention(module, query, key, value, mask, scale)
        if before is None:
            raise ValueError("partial_kv: the prompt has to be read within the context, not before it")
        if filled <= before:
            raise ValueError(
                f"partial_kv: {type(module).__name__} reads {filled} tokens after {before}; either the cache was "
                "cropped or filled outside the context, or the layer attends several times to one token, which is not "
                "supported"
            )
        self.partial_calls[index] = self.partial_calls.get(index, 0) + 1
        if self.arm.is_full:
            return exact_attention(module, query, key, value, mask, scale)
        with own_precision(query):
            return self._attend(module, query, key[:, :, :filled], value[:, :, :filled], scale)

    def _attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Computes attention [N, 1, Hq, D] of one new token per row, query [N, Hq, 1, D], to all columns."""
        index, length = module.layer_idx, self._real[module.layer_idx].shape[1]
        folded = self.fold is not None and key.shape[2] - length > 2 * self.fold
        if folded:
            length += self.fold
            self._real[index] = nn.functional.pad(self._real[index], (0, self.fold), value=True)
        if folded or index not in self._prefix:
            self._prefix[index] = self._build(index, key[:, :, :length], value[:, :, :length], query.shape[1])
        layer, summary, rows = self._prefix[index]
        layer = replace(layer, keys=key[:, :, :length], values=value[:, :, :length])
        log_query = None
        if self.maps is not None:
            log_query = rows_of_heads(map_heads(self.maps[index][0], query), key.shape[1])
        prefix = prefix_terms(rows_of_heads(query, key.shape[1]), log_query, layer, summary, rows, scale)
        visible = torch.ones(1, 1, key.shape[2] - length, dtype=torch.bool, device=key.device)
        near = (key[:, :, length:], value[:, :, length:], visible)
        return merge_with_prefix(module, query, prefix, [near], scale)

    def _build(
        self, index: int, keys: Tensor, values: Tensor, query_heads: int
    ) -> tuple[PrefixLayer, Summary | None, ArmRows]:
        real = self._real[index]
        if index in self._prefix:
            layer = self._prefix[index][0].grown(keys, values, real, self.anchors)
        else:
            layer = build_prefix(keys, values, real, self.anchors)
        if self.shape is not None and (self.shape.kv_heads, self.shape.head_dim) != (keys.shape[1], keys.shape[3]):
            raise ValueError(
                f"layer {index} has {keys.shape[1]} key heads of width {keys.shape[3]}, and the phi maps are for "
                f"{self.shape.kv_heads} of width {self.shape.head_dim}; take a method without maps: topk_moments"
            )
        summary = None if self.maps is None else summarise_prefix(layer, self.maps[index][1])
        rows = arm_rows(
            [self.arm], query_heads // keys.shape[1], real.sum(-1).tolist(), self.anchors, None, keys.device
        )
        # The cache may replace its tensors at every step, and a view would keep the old ones.
        return replace(layer, keys=keys.new_empty(0), values=values.new_empty(0)), summary, rows


def _few_queries(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Computes `exact_attention` of a few queries, without a copy of keys and values for each query head."""
    groups = query.shape[1] // key.shape[1]
    if mask is None or groups == 1 or sinks_of(module) is not None:
        return exact_attention(module, query, key, value, mask, scale)
    rows, mask = query.unflatten(1, (key.shape[1], groups)).flatten(2, 3), mask.repeat(1, 1, groups, 1)
    output = nn.functional.scaled_dot_product_attention(rows, key, value, mask, scale=scale)
    return output.unflatten(2, (groups, -1)).flatten(1, 2).transpose(1, 2).contiguous()


def _filled_columns(query: Tensor, key: Tensor, mask: Tensor | None) -> int:
    """Returns the number of columns that hold a token or padding; the last is the last query's own."""
    if mask is None:
        return key.shape[2] if query.shape[2] == 1 else query.shape[2]
    seen = mask[:, 0, -1].any(0).nonzero()
    return int(seen[-1]) + 1 if len(seen) else query.shape[2]  # a first chunk of padding only


def _real_columns(filled: int, key: Tensor, mask: Tensor | None) -> Tensor:
    """Returns the mask [N, L] of real prompt tokens: those that the last query of a left-padded prompt sees."""
    if mask is None:
        return torch.ones(key.shape[0], filled, dtype=torch.bool, device=key.device)
    return mask[:, 0, -1, :filled].expand(key.shape[0], -1).clone()  # so that the mask [N, 1, L, L] is not kept
