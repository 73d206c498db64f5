"""`partial_kv`: runs a method under transformers' own `model.generate`, whose calls do not say what they are.

A session follows every text by its cache, which hooks on the decoder see, so that several texts do not mix. How many
columns a cache holds after a call, and the number of new tokens, tell a prompt from a step; while `generate` reads a
prompt, whose last chunk may be a single token, the session is told.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from inspect import signature
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationConfig, PreTrainedModel
from transformers.cache_utils import StaticLayer
from transformers.generation.configuration_utils import GenerationMode

from residual_mass.decode.backend import Backend
from residual_mass.decode.generation_settings import NO_ATTENTIONS, PLAIN, require_settings
from residual_mass.decode.packed_backend import PackedBackend, PackedCache
from residual_mass.decode.torch_backend import TorchBackend
from residual_mass.methods import Method, method_named
from residual_mass.methods.arms import Arm, percent_of_share
from residual_mass.model.hook import attention_hook, exact_attention
from residual_mass.model.layers import attention_layers, text_config, unwrapped, window_of
from residual_mass.model.phi_maps import HeadShape, PhiMaps
from residual_mass.model.rotary import frequencies_of, require_constant_frequencies
from residual_mass.spec.settings import AnchorSpec


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

    Works with `model.generate` (greedy, sampling or beams, padded batches, growing or static caches) on decoder-only
    models that use transformers' attention interface; docs/models.md lists families. Layers with a sliding window or
    chunks attend exactly. Several tokens in one call, such as a further turn on the same cache, are read exactly and
    join the prefix. A single token is a generated one, unless `generate` reads it as a prompt's last chunk. Texts are
    told apart by their caches. A `generate` that is still running in another thread when the context ends keeps the
    method to its end.

    Args:
        method: full, topk, topk_phi, topk_moments or another name in `residual_mass.methods`, or your own `Method`.
        budget: exact-support budget as a share of each row's own prompt, in (0, 1], including anchors; ignored for
            full. The integer 1 is refused: 0.01 is 1 %, 1.0 the whole prompt.
        phi: maps trained for this backbone; required by methods with phi in their name, refused by methods with another
            residual.
        num_sink, num_tail: first and last positions of the prompt that are always exact.
        fold: None reads every generated token exactly. A number folds that many of the oldest into the prompt whenever
            more than twice as many are unfolded: they are retrieved and estimated like the prompt's tokens, and the
            budget is a share of both. Not for beams, which exchange generated tokens between rows.
        cache: None keeps the cache that `generate` uses. A `PackedCache`, which `generate` needs as `past_key_values`
            too, holds packed keys and values for compiled steps. It takes no `fold`, because it folds in blocks.

    Yields:
        The session. Its `partial_calls` are the numbers of decode steps by layer, without layers that were not called.

    Warns:
        UserWarning: the context ended without a decode step through the method, so that all attention was full.

    Raises:
        ValueError: the method is unknown, the budget out of range, the maps are missing, not needed or of another head
            shape, the model is not supported or already hooked, or `cache` is for another method; `generate` runs
            with settings under which no method decodes (`generation_settings.REFUSED`).
    """
    arm = make_arm(method, budget)
    require_supported(model, arm, phi)
    if fold is not None and fold < 1:
        raise ValueError(f"fold is {fold}, not 1 or more tokens")
    if fold is not None and cache is not None:
        raise ValueError("fold is for transformers' caches: a PackedCache joins older tokens in blocks by itself")
    session = Session(unwrapped(model), arm, AnchorSpec(num_sink, num_tail), phi, fold, cache)
    if cache is not None:
        session.packed(cache)  # checks the method
    with session.running():
        yield session
    if not arm.is_full and not session.partial_calls:
        warnings.warn(
            f"partial_kv: no decode step went through {arm.rule.name}, so all attention was full: prompts and several "
            "tokens in one call are read exactly",
            stacklevel=3,
        )


@dataclass(eq=False)
class FollowedText:
    """What a session knows of one text: its backend, and by layer the number of columns after the last call."""

    backend: Backend
    columns: dict[int, int] = field(default_factory=dict)


@dataclass
class Call:
    """One call of the decoder.

    Attributes:
        text: whose call it is.
        cache: its cache; None if the call has none, or makes one itself.
        layers: those that have attended.
    """

    text: FollowedText
    cache: Cache | None
    layers: set[int] = field(default_factory=set)


class ThreadState(threading.local):
    """What a session knows of one thread: the running calls of the decoder, innermost last, and whether `generate`
    reads a prompt.
    """

    def __init__(self) -> None:
        self.calls: list[Call | None] = []
        self.reading = False


class Session:
    """The attention handler of a `partial_kv` context.

    Attributes:
        partial_calls: number of decode steps by index of a layer that reads the whole text; layers without any, such as
            those that bypass the hook, are missing.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        arm: Arm,
        anchors: AnchorSpec,
        phi: PhiMaps | None = None,
        fold: int | None = None,
        cache: PackedCache | None = None,
    ) -> None:
        self.model = model
        self.arm = arm
        self.anchors = anchors
        self.phi = phi
        self.fold = fold
        self.cache = cache
        self.partial_calls: dict[int, int] = {}
        self.frequencies = frequencies_of(model)
        self._texts: WeakKeyDictionary[Cache, FollowedText] = WeakKeyDictionary()
        self._thread = ThreadState()
        self._generating: dict[int, int] = {}
        """Number of running calls of `generate` by thread."""
        self._ended = False
        self._undo = ExitStack()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Hooks the model within the context; afterwards until the last `generate` of another thread returns."""
        with ExitStack() as undo:
            undo.enter_context(attention_hook(self.model, self, hybrid=True))
            undo.enter_context(self._generate_watched())
            undo.enter_context(self._decoder_watched())
            self._undo = undo.pop_all()
        try:
            yield
        finally:
            with _ending:
                self._ended = True
                if not self._generating:
                    self._undo.close()

    def backend_of(self, cache: Cache) -> Backend:
        """Returns the backend of the text in a cache that was read within the context."""
        return self._texts[cache].backend

    def packed(self, cache: PackedCache) -> FollowedText:
        """Returns what is known of a text in a packed cache; raises ValueError if it is for another method."""
        if self.fold is not None:
            raise ValueError("fold is for transformers' caches: a PackedCache joins older tokens in blocks by itself")
        text = FollowedText(PackedBackend(self.model, self.arm, self.anchors, cache))
        text.backend.partial_calls = self.partial_calls
        return text

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        if self._outlived() or window_of(module) is not None:
            return exact_attention(module, query, key, value, mask, scale)
        index = module.layer_idx
        call = self._thread.calls[-1]
        if index in call.layers:
            raise ValueError(f"{type(module).__name__} attends several times to one token, which is not supported")
        call.layers.add(index)
        new = query.shape[2]
        filled = columns_held(call.cache, index, key)
        known = call.text.columns.get(index)
        call.text.columns[index] = filled
        if self.frequencies.change:
            lengths = torch.tensor([filled] * len(query)) if mask is None else mask[:, 0, -1].sum(-1)
            self.frequencies.require_call(lengths[:, None] - torch.tensor([new, 1], device=lengths.device))
        backend = call.text.backend
        if isinstance(backend, TorchBackend):  # a static cache has a constant number of columns
            key = key[:, :, :filled]
            value = value[:, :, :filled]
            mask = None if mask is None else mask[..., :filled]
        before = filled - new
        if new > 1 or before == 0 or self._thread.reading:
            return backend.read(module, query, key, value, mask, scale)
        if known is None and not isinstance(backend, PackedBackend):
            raise ValueError("partial_kv: the prompt has to be read within the context, not before it")
        if known is not None and known < before:
            raise ValueError(
                f"partial_kv: the cache of layer {index} holds {before} tokens before this one, and {known} were read "
                "within the context: read all of them within it"
            )
        if known is not None and known > before and isinstance(backend, TorchBackend):
            backend.forget(index, before)
        return backend.step(module, query, key, value, mask, scale)

    def _outlived(self) -> bool:
        """Returns whether the context has ended, and this thread runs no `generate` that began within it."""
        return self._ended and threading.get_ident() not in self._generating

    def _text_of(self, cache: Cache | None) -> FollowedText:
        """Returns what is known of the text in a cache; a new text for a cache that was not seen before, or none."""
        if isinstance(cache, PackedCache):
            if self.cache is not None and cache is not self.cache:
                raise ValueError(
                    "partial_kv has another PackedCache: pass the same one to the model, or leave cache out"
                )
            if cache not in self._texts:
                self._texts[cache] = self.packed(cache)
            return self._texts[cache]
        if self.cache is not None:
            raise ValueError("partial_kv has a PackedCache: pass it to the model too, as past_key_values")
        if cache is not None and cache in self._texts:
            return self._texts[cache]
        text = FollowedText(TorchBackend(self.model, self.arm, self.anchors, self.phi, None, self.fold))
        text.backend.partial_calls = self.partial_calls
        if cache is not None:
            self._texts[cache] = text
        return text

    def _require_own_rows(self, mode: GenerationMode) -> None:
        """Raises ValueError if `generate` moves rows between steps, and states of a row cannot move with its tokens."""
        if mode in PLAIN:
            return
        name = mode.value.replace("_", " ")
        if self.cache is not None:
            raise ValueError(f"a PackedCache does not follow {name}, which moves rows: generate with num_beams=1")
        if self.fold is not None:
            raise ValueError(
                f"fold joins tokens to the summaries of a row, but {name} moves rows between steps: leave fold out, or "
                "generate greedily or by sampling, with num_beams=1"
            )

    @contextmanager
    def _decoder_watched(self) -> Iterator[None]:
        """Notes whose call of the decoder is running, by its cache."""
        decoder = self.model.get_decoder()
        parameters = signature(decoder.forward)

        @torch.compiler.disable
        def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._outlived():
                return
            self._thread.calls.append(None)  # `end` is called even if this fails
            given = parameters.bind_partial(*args, **kwargs).arguments
            given = given.get("kwargs", {}) | given
            if given.get("output_attentions"):
                raise ValueError(NO_ATTENTIONS)
            cache = given.get("past_key_values")
            self._thread.calls[-1] = Call(self._text_of(cache), cache)
            if isinstance(cache, PackedCache):
                cache.reader = self

        @torch.compiler.disable
        def end(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if self._outlived():
                return
            call = self._thread.calls.pop()
            if call is None:
                return
            made = getattr(output, "past_key_values", None)
            if isinstance(call.cache, PackedCache):
                call.cache.reader = None
            elif call.cache is None and made is not None:
                self._texts[made] = call.text

        handles = [
            decoder.register_forward_pre_hook(begin, with_kwargs=True),
            decoder.register_forward_hook(end, with_kwargs=True, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def _generate_watched(self) -> Iterator[None]:
        """Refuses modes of `generate` that would run by full attention, and notes while `generate` reads a prompt,
        whose last chunk may be a single token, and in which threads it runs.

        Models with LongRoPE drop an empty cache before a long prompt. A `PackedCache` is put back then, because a cache
        that transformers makes would not be packed.
        """
        model = self.model
        originals = {name: getattr(model, name, None) for name in WATCHED}
        generate = originals["generate"]
        read = originals["_prefill"]
        validate = originals["_validate_generation_mode"]
        inputs_for = originals["prepare_inputs_for_generation"]

        def checked(mode: GenerationMode, config: GenerationConfig, *args: Any, **kwargs: Any) -> None:
            if self._outlived():
                return validate(mode, config, *args, **kwargs)
            require_settings(config, mode)
            self._require_own_rows(mode)
            config.use_cache = True  # of this call: a method reads kept keys
            if config.prefill_chunk_size is not None and read is None:  # as in transformers 4
                raise ValueError(
                    "partial_kv reads a prompt in one piece with this transformers: unset prefill_chunk_size"
                )
            return validate(mode, config, *args, **kwargs)

        def marked(ids: Tensor, config: GenerationConfig, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            if not self._outlived():
                require_constant_frequencies(model, ids, inputs.get("attention_mask"), config.max_length)
            self._thread.reading = True
            try:
                return read(ids, config, inputs, *args, **kwargs)
            finally:
                self._thread.reading = False

        @wraps(inputs_for)
        def kept(*args: Any, **kwargs: Any) -> dict[str, Any]:
            inputs = inputs_for(*args, **kwargs)
            cache = kwargs.get("past_key_values")
            if isinstance(cache, PackedCache) and inputs.get("past_key_values") is None:
                inputs["past_key_values"] = cache
            return inputs

        @wraps(generate)
        def counted(*args: Any, **kwargs: Any) -> Any:
            thread = threading.get_ident()
            if self._outlived():
                return generate(*args, **kwargs)
            with _ending:
                self._generating[thread] = self._generating.get(thread, 0) + 1
            try:
                return generate(*args, **kwargs)
            finally:
                with _ending:
                    self._generating[thread] -= 1
                    if not self._generating[thread]:
                        del self._generating[thread]
                    if self._ended and not self._generating:
                        self._undo.close()

        own = {name: vars(model)[name] for name in WATCHED if name in vars(model)}
        for name, function in zip(WATCHED, (counted, marked, checked, kept), strict=True):
            if originals[name] is not None:
                setattr(model, name, function)
        try:
            yield
        finally:
            for name in WATCHED:
                vars(model).pop(name, None)
            vars(model).update(own)


WATCHED = ("generate", "_prefill", "_validate_generation_mode", "prepare_inputs_for_generation")
"""Methods of a model that a session replaces while it runs."""
_ending = threading.RLock()
"""Held while sessions count the running calls of `generate` and end."""


def columns_held(cache: Cache | None, index: int, key: Tensor) -> int:
    """Returns the number of columns of a layer that hold a token or padding, after the tokens of a call were added."""
    if isinstance(cache, PackedCache):
        return cache.get_seq_length(index) + key.shape[2]  # its attention adds them
    if any(isinstance(layer, StaticLayer) for layer in getattr(cache, "layers", ())):
        return int(cache.get_seq_length())  # layers that share keys have none of their own
    return key.shape[2]


def make_arm(method: str | Method, budget: float | str | None) -> Arm:
    """Converts the budget to percent; raises ValueError for an unknown method or a budget out of range."""
    rule = method_named(method)
    return Arm(rule, None if rule.whole_prefix else percent_of_share(budget))


def require_supported(model: PreTrainedModel, arm: Arm, phi: PhiMaps | None) -> None:
    """Raises ValueError for a model that no method works on, and for maps that are missing, not needed or of another
    head shape.
    """
    require_maps(arm, phi)
    attention_layers(model)
    if arm.needs_maps:
        phi.require(HeadShape.of(text_config(model)))


def require_maps(arm: Arm, phi: PhiMaps | None) -> None:
    """Raises ValueError if a method lacks its maps, or if maps are given to a method with another residual."""
    if phi is not None and arm.rule.own is not None:
        raise ValueError(f"method {arm.rule.name} uses no phi maps: leave phi out")
    if phi is None and arm.needs_maps:
        raise ValueError(f"method {arm.rule.name} needs phi maps: pass phi=PhiMaps.load(...)")
