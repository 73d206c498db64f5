"""Answers one model's requests: `answer` stands in for `model.generate`, decodes by a method, and keeps the caches.

A folder that `residual-mass serve` wrote has a `custom_generate/generate.py` that calls it, and settings beside that.
"""

from __future__ import annotations

import copy
import logging
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import StoppingCriteriaList, StopStringCriteria
from transformers.generation.streamers import BaseStreamer

from residual_mass.decode.generate import padding_of, partial_decoding
from residual_mass.decode.generation_settings import require_settings
from residual_mass.decode.packed_backend import PackedBackend, PackedCache
from residual_mass.files import read_json
from residual_mass.methods import method_named
from residual_mass.methods.arms import Arm, arm_of
from residual_mass.model.identity import digest_of, identity_of
from residual_mass.model.layers import keeps_states, text_config
from residual_mass.model.packed_weights import pack_weights
from residual_mass.model.rotary import frequencies_of
from residual_mass.serve.kept import Kept

log = logging.getLogger(__name__)

SETTINGS = "custom_generate/settings.json"
"""Place of the settings in a served folder."""
_answers: weakref.WeakKeyDictionary[PreTrainedModel, Answers] = weakref.WeakKeyDictionary()


def answer(model: PreTrainedModel, inputs: Tensor | None = None, **options: Any) -> Any:
    """Generates as `model.generate` does, by the method of the folder that the model was loaded from.

    Raises:
        ValueError: as for `model.generate`; the prompt is empty, or longer than the model was made for; the method is
            not served on this model or machine.
    """
    ids = options.pop("input_ids", inputs)
    return answers_of(model).generate(model, ids, **options)


def answers_of(model: PreTrainedModel) -> Answers:
    """Returns what answers a model's requests. The first call packs the model's weights, if the settings say so."""
    if model not in _answers:
        settings = ServeSettings(**read_json(Path(model.name_or_path) / SETTINGS))
        _answers[model] = open_answers(model, settings)
    return _answers[model]


@dataclass(frozen=True)
class ServeSettings:
    """What a served folder says beside its `generate.py`.

    Attributes:
        model: folder that the files come from.
        budget: share of the prompt that is read exactly.
        weights: bits of packed weights; None leaves them.
        compile: whether a step is compiled, before the first answer.
        memory: MiB of kept caches.
        keep: folder of caches that leave the memory.
    """

    model: str
    method: str
    budget: float
    weights: int | None
    compile: bool
    memory: int
    keep: str | None


def open_answers(model: PreTrainedModel, settings: ServeSettings) -> Answers:
    """Prepares a model for its requests.

    Raises:
        ValueError: the CPU kernels do not serve the method here, or weights or steps cannot be packed or compiled.
    """
    arm = arm_of(settings.method, settings.budget if method_named(settings.method).chooses else None)
    reason = PackedBackend.refusal(model, arm)
    if reason is not None:
        raise ValueError(f"{settings.model}: cannot be served with {settings.method}: {reason}")
    if settings.weights is not None:
        pack_weights(model, bits=settings.weights)
    identity = folder = None
    if settings.keep is not None:
        identity = identity_of(model)
        decoding = {"method": settings.method, "budget": str(settings.budget)}
        folder = Path(settings.keep) / digest_of(identity | decoding)[:16]
    # A packed cache lacks what a model with recurrent states keeps besides.
    limit = settings.memory * 2**20 if not keeps_states(model) else 0

    def make() -> PackedCache:
        cache = PackedCache(model_of(), arm.rule)
        cache.identity = identity
        return cache

    model_of = weakref.ref(model)
    kept = Kept(make, limit, folder if limit else None, frequencies_of(model))
    answers = Answers(settings, arm, kept)
    if settings.compile:
        prompt = torch.tensor([[0, 0]])
        answers.generate(model, prompt, generation_config=GenerationConfig(max_new_tokens=3, eos_token_id=[]))
        answers.kept.entries.clear()
    return answers


@dataclass
class Answers:
    """Answers the requests to a model, one after the other.

    Attributes:
        kept: caches of the texts so far.
    """

    settings: ServeSettings
    arm: Arm
    kept: Kept

    def generate(
        self,
        model: PreTrainedModel,
        ids: Tensor | None,
        generation_config: GenerationConfig | None = None,
        streamer: BaseStreamer | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **options: Any,
    ) -> Any:
        """Returns what `model.generate` returns; full attention answers, with a warning, what the method does not.

        Args:
            ids: [B, L].
            generation_config: `max_new_tokens` is lowered in it to what the model has positions for.
            options: further ones of `model.generate`.
        """
        given = model.generation_config if generation_config is None else generation_config
        config = copy.deepcopy(given)
        options = config.update(**options)
        generate = type(model).generate
        reason = self.refusal(ids, config)
        if ids is not None:
            config.max_new_tokens = given.max_new_tokens = new_tokens(model, ids, config)
        if reason is not None:
            log.warning("full attention answers: %s", reason)
            return generate(model, ids, generation_config=config, streamer=streamer, tokenizer=tokenizer, **options)
        if config.stop_strings is not None:  # `generate` passes no tokenizer to a loop that is not its own
            criteria = options.get("stopping_criteria") or StoppingCriteriaList()
            stop = StopStringCriteria(getattr(tokenizer, "tokenizer", tokenizer), config.stop_strings)
            options["stopping_criteria"] = StoppingCriteriaList([*criteria, stop])
            config.stop_strings = None
        alone = len(ids) == 1 and padding_of(options.get("attention_mask")) is None
        if not alone or options.get("past_key_values") is not None:
            decoding = self._decoding(streamer)
            return generate(model, ids, generation_config=config, custom_generate=decoding, **options)
        return self._continued(model, ids, config, streamer, options)

    def refusal(self, ids: Tensor | None, config: GenerationConfig) -> str | None:
        """Returns why the method does not answer a request, in one line; None if it does."""
        if ids is None:
            return "the input is not token ids"
        if config.cache_implementation is not None:
            return f"cache_implementation={config.cache_implementation} asks for another cache"
        if (config.num_return_sequences or 1) > 1:
            return f"num_return_sequences={config.num_return_sequences} asks for several texts"
        try:
            require_settings(config)
        except ValueError as error:
            return str(error)
        return None

    def _decoding(self, streamer: BaseStreamer | None) -> Any:
        compile = self.settings.compile or "auto"
        return partial_decoding(self.arm.rule, self.settings.budget, streamer=streamer, compile=compile)

    def _continued(
        self,
        model: PreTrainedModel,
        ids: Tensor,
        config: GenerationConfig,
        streamer: BaseStreamer | None,
        options: dict[str, Any],
    ) -> Any:
        """Generates from the longest kept beginning of a text [1, L], and keeps what it holds then."""
        cache = self.kept.take(ids[0])
        held = cache.get_seq_length()
        recorder = TokenRecorder(streamer)
        options = options | {"past_key_values": cache, "custom_generate": self._decoding(recorder)}
        started = time.perf_counter()
        try:
            return type(model).generate(model, ids, generation_config=config, **options)
        except Exception:
            if not recorder.stopped:  # an error within a step may leave layers with different numbers of tokens
                cache = None
            raise
        finally:
            seconds = time.perf_counter() - started
            count = ids.shape[1]
            new = max(len(recorder.ids) - count, 0)
            left = ", and the client left" if recorder.stopped else ""
            log.info("prompt of %d tokens (%d kept), %d new in %.1f s%s", count, held, new, seconds, left)
            if cache is not None and cache.get_seq_length() > 0:
                self.kept.put(recorder.ids[: cache.get_seq_length()], cache)


class TokenRecorder(BaseStreamer):
    """Passes a prompt and new tokens on, and knows them when generation was broken off.

    Attributes:
        ids: [L], all tokens so far.
        stopped: whether the receiver broke generation off, as a server's does when its client has left.
    """

    def __init__(self, receiver: BaseStreamer | None) -> None:
        self.receiver = receiver
        self.ids = torch.empty(0, dtype=torch.int64)
        self.stopped = False

    def put(self, value: Tensor) -> None:
        self.ids = torch.cat((self.ids, value.reshape(-1)))
        if self.receiver is None:
            return
        try:
            self.receiver.put(value)
        except Exception:
            self.stopped = True
            raise

    def end(self) -> None:
        if self.receiver is not None:
            self.receiver.end()


def new_tokens(model: PreTrainedModel, ids: Tensor, config: GenerationConfig) -> int | None:
    """Returns the number of new tokens that a prompt [B, L] leaves positions for, at most what was asked for.

    Raises:
        ValueError: the prompt is empty, or leaves none.
    """
    count = ids.shape[-1]
    if count == 0:
        raise ValueError("the prompt is empty: write at least one token")
    positions = getattr(text_config(model), "max_position_embeddings", None)
    if not positions:
        return config.max_new_tokens
    if count >= positions:
        name = Path(model.name_or_path).name
        raise ValueError(
            f"the prompt has {count:,} tokens, and {name} was made for texts of {positions:,} with the answer: "
            "shorten it"
        )
    if config.max_new_tokens is None:
        return None
    return min(config.max_new_tokens, positions - count)
