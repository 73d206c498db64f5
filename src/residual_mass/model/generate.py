"""Generation with a method: `partial_generate`, and a decoding loop for `model.generate`; with or without verification.

Verification is speculative decoding with one model: partial attention drafts, full attention verifies. A pass drafts n
tokens by partial steps, reads the newest token and the drafts at once by full attention, accepts the drafts before the
first that full attention rejects, and adds a token of full attention's own (Leviathan et al. 2023, "Fast inference from
transformers via speculative decoding", algorithm 1). The drafts' keys and values come from approximate hidden states,
so they are removed from the cache before the verifying pass writes those of full attention.

Shape letters: L = tokens so far, n = drafts, V = vocabulary.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode

from residual_mass.core.settings import AnchorSpec
from residual_mass.kernels.cache import BLOCK
from residual_mass.methods import Method, method_named
from residual_mass.model.hook import (
    attention_layers,
    device_of,
    end_tokens,
    prefill,
    require_plain,
    text_config,
    weights_stay_on,
)
from residual_mass.model.packed import PackedCache, Session, kernels_for, packing_of
from residual_mass.model.partial import make_arm, partial_kv, require_maps, require_steps
from residual_mass.model.phi_maps import PhiMaps
from residual_mass.model.prefix import retrieved_by
from residual_mass.model.rotary import Frequencies, frequencies_of
from residual_mass.model.static_decode import StaticDecoder, fill_buffers

MOST = BLOCK - 1
"""Most drafts of a pass: with the newest token they fill a block of a packed cache."""
READ = {"attention_mask", "past_key_values", "use_cache", "cache_position", "position_ids", "logits_to_keep"}
"""Arguments from `generate` that add nothing to tokens and cache, for one prompt without padding."""


class Pass(NamedTuple):
    """Record of one pass: tokens drafted, drafts accepted into the text, seconds of drafting and of verifying."""

    drafted: int
    accepted: int
    drafting: float
    verifying: float


@torch.no_grad()
def partial_generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    method: str | Method = "topk_phi",
    budget: float | None = 0.01,
    phi: PhiMaps | None = None,
    num_sink: int = 4,
    num_tail: int = 16,
    eos_token_id: int | list[int] | None = None,
    verify: int | Literal["auto"] | None = None,
    passes: list[Pass] | None = None,
) -> Tensor:
    """Generates greedily, as `model.generate` within `partial_kv`, by the fastest step that supports the method.

    On a CPU this is a compiled step over a `PackedCache` (`residual_mass.kernels`) for full attention in bfloat16, an
    8-bit cache, and a 4-bit scan, alone or with regression. On a GPU it is a step of Triton kernels in a CUDA graph for
    the paper's methods and those that choose by all keys' scores, exact or of 4 bits, alone or with truncated moments;
    without kernels torch runs the same step. Other methods run under `partial_kv`.

    Args:
        input_ids: [1, L], one prompt without padding.
        method, budget, phi, num_sink, num_tail: as for `partial_kv`.
        eos_token_id: token or tokens that end the text; None takes those of the model's generation config, and an
            empty list disables them.

    Returns:
        The prompt and up to `max_new_tokens` new tokens, the last of which may be an end token: [1, L + T].

    Raises:
        ValueError: as for `partial_kv`; input_ids are not one prompt of token ids; max_new_tokens is below 1; the model
            has no language-model head; verify is below 1 or above 63, or does not support the method or the model.
    """
    if not isinstance(input_ids, Tensor):
        raise ValueError(
            f"partial_generate takes token ids [1, L], not a {type(input_ids).__name__}: pass "
            'tokenizer(text, return_tensors="pt").input_ids'
        )
    if input_ids.ndim != 2 or len(input_ids) != 1 or input_ids.numel() == 0:
        raise ValueError(f"partial_generate takes one prompt [1, L], not {list(input_ids.shape)}; use partial_kv")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}, not above 0")
    arm, anchors = make_arm(method, budget), AnchorSpec(num_sink, num_tail)
    require_plain(model)
    if model.get_output_embeddings() is None:
        raise ValueError(f"{type(model).__name__} has no language-model head; load it with AutoModelForCausalLM")
    require_maps(arm, phi)
    device, ends = device_of(model), end_tokens(model, eos_token_id)
    prompt = input_ids.to(device)
    options = {
        "attention_mask": torch.ones_like(prompt), "max_new_tokens": max_new_tokens, "do_sample": False,
        "num_beams": 1, "eos_token_id": list(ends) or None, "pad_token_id": next(iter(ends), 0),
    }  # fmt: skip
    decoding = partial_decoding(method, budget, phi, num_sink, num_tail, verify, passes)

    def static(model: PreTrainedModel, input_ids: Tensor, **asked: Any) -> Tensor:
        """Decodes from static buffers, unless the model's generation config adds processors or criteria."""
        if asked["logits_processor"] or len(asked["stopping_criteria"]) > 1 + bool(ends):
            return decoding(model, input_ids, **asked)
        read = prefill(model, input_ids.tolist())
        first = read.next_token
        text = torch.cat((input_ids, first.unsqueeze(1)), dim=1)
        if max_new_tokens == 1 or int(first) in ends:
            return text
        k, steps = retrieved_by(arm, input_ids.shape[1], anchors, None), max_new_tokens - 1
        decoder = StaticDecoder(model, fill_buffers([read], steps), arm.rule, k, anchors, phi, steps)
        if decoder.sizes_on_device:  # a graph of every step would take longer than to run them once
            decoder.prepare()
        return torch.cat((text, decoder.run(first, ends)), dim=1)

    # Buffers are on one device and hold keys of the same frequencies, and their attention is computed in float32.
    fits = frequencies_of(model) is None and weights_stay_on(model, device) and model.dtype != torch.float64
    in_buffers = verify is None and arm.rule.fused and fits and not kernels_for(model, arm.rule)
    options["custom_generate"] = static if in_buffers else decoding
    return model.generate(prompt, return_dict_in_generate=False, **options)


def partial_decoding(
    method: str | Method = "topk_phi",
    budget: float | None = 0.01,
    phi: PhiMaps | None = None,
    num_sink: int = 4,
    num_tail: int = 16,
    verify: int | Literal["auto"] | None = None,
    passes: list[Pass] | None = None,
    streamer: BaseStreamer | None = None,
) -> Callable[..., Any]:
    """Returns a decoding loop for `model.generate(**inputs, custom_generate=partial_decoding(...))`.

    It runs transformers' own loop within `partial_kv`, greedy or sampling, with all options of `generate` except beams
    and drafts. If the CPU kernels support the method, it runs over a `PackedCache`: an empty one or, for a further
    turn, the one in `past_key_values`.

    With `verify` the text is full attention's: greedy, or sampled from the same distribution, for one prompt. The
    method drafts tokens, and one pass of full attention accepts those that it would have generated. Over a packed 4-bit
    cache full attention reads both planes, 8 bits of every key and value; otherwise it is the model's own. A further
    turn takes the cache of the previous turn as `past_key_values`.

    Args:
        method, budget, phi, num_sink, num_tail: as for `partial_kv`.
        verify: tokens to draft between two passes of full attention, 1 to 63; "auto" chooses the number for every pass
            by the drafts accepted and the times measured so far. Except for logits that tie within rounding (to 8 bits
            over a packed cache), the greedy text does not depend on it, and neither does a sampled one's distribution.
        passes: list to which the record of each pass is appended.
        streamer: receives the prompt and every token, because `generate` passes its own to no `custom_generate`.

    Raises:
        ValueError: verify is out of range, or the method has no partial step; when called, an option of `generate` is
            not supported.
    """
    rule = method_named(method)
    if verify not in (None, "auto") and (type(verify) is not int or not 1 <= verify <= MOST):
        raise ValueError(
            f'verify is {verify!r}, not "auto" or a number of drafts from 1 to {MOST}: a longer draft does not fit '
            f"the window of {BLOCK} tokens that is verified at once"
        )
    if verify is not None and rule.whole_prefix:
        raise ValueError(f"method {rule.name} has no partial step to draft by: leave verify out")

    def decode(model: PreTrainedModel, input_ids: Tensor, **options: Any) -> Any:
        config = options["generation_config"]
        mode = config.get_generation_mode()
        require_steps(config, mode, rule)
        if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            raise ValueError(
                f"partial_decoding does not support {mode.value.replace('_', ' ')}: generate greedily or by sampling, "
                "with num_beams=1, or within partial_kv"
            )
        if streamer is not None:
            streamer.put(input_ids.cpu())
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "partial_kv: no decode step")  # the first token may be the last
            return (_plain if verify is None else _verified)(model, input_ids, streamer=streamer, **options)

    def _plain(model: PreTrainedModel, input_ids: Tensor, **options: Any) -> Any:
        cache, config = options.get("past_key_values"), options["generation_config"]
        if not isinstance(cache, PackedCache):
            if cache is not None and cache.get_seq_length() > 0:
                raise ValueError("partial_decoding has to read the prompt itself: leave past_key_values out")
            serves = kernels_for(model, rule) and _read_once(model, input_ids, config)
            cache = PackedCache(model, rule) if serves else None
        if cache is not None:
            options["past_key_values"] = cache
        with partial_kv(model, rule, budget, phi, num_sink, num_tail, cache=cache):
            return model._sample(input_ids, **options)

    def _verified(
        model: PreTrainedModel, input_ids: Tensor, *, logits_processor: Any, stopping_criteria: Any,
        generation_config: Any, streamer: BaseStreamer | None, synced_gpus: bool = False, **options: Any,
    ) -> Any:  # fmt: skip
        cache = cache_to_crop(model, rule, options.get("past_key_values"))
        require_one_plain_prompt(input_ids, cache, options, generation_config)
        packed = cache if isinstance(cache, PackedCache) else None
        with partial_kv(model, rule, budget, phi, num_sink, num_tail, cache=packed) as session:
            return Verified(
                model, session, cache, Pace(verify), [] if passes is None else passes, generation_config,
                logits_processor, stopping_criteria, streamer, frequencies_of(model),
            ).generate(input_ids)  # fmt: skip

    return decode


def _read_once(model: PreTrainedModel, ids: Tensor, config: GenerationConfig) -> bool:
    """Returns whether a text keeps its rotary frequencies, so that what is packed of the prompt is not packed again."""
    frequencies, last = frequencies_of(model), config.max_length
    return frequencies is None or (last is not None and frequencies.same(ids.shape[1], last - 1))


def cache_to_crop(model: PreTrainedModel, rule: Method, given: Cache | None) -> Cache:
    """Returns a cache from which a verified generation can remove tokens: `given`, or a new one.

    Raises:
        ValueError: `given` holds tokens and cannot remove any; the model has states that cannot be rolled back.
    """
    if getattr(model, "_is_stateful", False) or len(attention_layers(model)) != text_config(model).num_hidden_layers:
        raise ValueError(f"verify removes drafts again, which {type(model).__name__}'s recurrent states do not allow")
    packing = packing_of(rule)
    if isinstance(given, PackedCache):
        if given.packing.bits != 4:
            raise ValueError(f"a PackedCache of {given.packing.bits} bits is read whole: there is nothing to verify")
        return given
    croppable = type(given) is DynamicCache and all(type(layer) is DynamicLayer for layer in given.layers)
    if given is not None and given.get_seq_length() > 0:
        if not croppable:
            raise ValueError(
                f"verify cannot remove tokens from a {type(given).__name__} with windows or fixed sizes: pass "
                "past_key_values=DynamicCache() from the first turn on"
            )
        return given
    if packing is not None and packing.bits == 4 and kernels_for(model, rule):
        return PackedCache(model, rule)
    return given if croppable else DynamicCache()  # without a configuration, its layers keep all tokens


# ---- drafts and their verification -----------------------------------------------------------------------------------


def accepted_or_drawn(p: Tensor, q: Tensor, drafted: Tensor) -> tuple[Tensor, bool]:
    """Accepts a token drawn from q with probability min(1, p / q), otherwise draws one from the normalised positive
    part of p - q. The returned token has the distribution p.

    Args:
        p, q: probabilities [V] of full attention and of the draft.
        drafted: [1].

    Returns:
        The token [1], and whether the drafted one was accepted.
    """
    full, draft = float(p[drafted]), float(q[drafted])
    if full >= draft or (full > 0 and float(torch.rand((), dtype=torch.float64, device="cpu")) * draft < full):
        return drafted, True
    rest = (p - q).clamp_min(0)
    return drawn(rest if bool(rest.any()) else p), False  # rest is 0 if p and q differ only by rounding errors


def drawn(p: Tensor) -> Tensor:
    """Draws a token [1] from probabilities or weights [V], without a random number if only one is possible."""
    return p.argmax(-1, keepdim=True) if int(p.count_nonzero()) == 1 else torch.multinomial(p, 1)


@dataclass
class Pace:
    """Chooses how many tokens to draft: a given number, or the number with the most expected tokens per second.

    The model: drafts are accepted independently, with the observed share of accepted drafts; a verifying pass takes a
    constant time and a time per token, by least squares. The weight of a pass decreases with every later one.
    """

    verify: int | Literal["auto"]
    passes: int = 0
    right: float = 1
    looked_at: float = 1.5
    draft: tuple[float, float] = (0, 0)
    """Number of draft steps, and their seconds."""
    moments: list[float] = field(default_factory=lambda: [0.0] * 5)
    """Sums of 1, n, n^2, seconds and n seconds over verifying passes with n drafts."""
    KEPT = 0.95
    TRIED = (2, 6)
    AGAIN = 32
    """Passes after which drafts are tried again if none are expected to be faster than full attention."""

    def drafts(self) -> int:
        if self.verify != "auto":
            return self.verify
        if self.passes < len(self.TRIED):
            return self.TRIED[self.passes]
        best = max(range(MOST + 1), key=self.speed)
        return best or (self.TRIED[0] if self.passes % self.AGAIN == 0 else 0)

    def speed(self, n: int) -> float:
        """Returns the expected tokens per second of passes with n drafts."""
        share, (steps, seconds), (count, x, xx, y, xy) = self.right / self.looked_at, self.draft, self.moments
        spread = xx - x * x / count
        slope = max(0.0, (xy - x * y / count) / spread) if spread > 1e-6 * count else 0.0
        verifying = max(y / count + slope * (n - x / count), 1e-9)
        return sum(share**i for i in range(n + 1)) / (n * seconds / max(steps, 1e-9) + verifying)

    def saw(self, done: Pass) -> None:
        """Records a pass. The draft time of the first is discarded, because it includes the method's preparation."""
        self.passes += 1
        kept = 0 if self.passes == 2 else self.KEPT  # the second replaces the first
        self.draft = kept * self.draft[0] + done.drafted, kept * self.draft[1] + done.drafting
        self.right = self.KEPT * self.right + done.accepted
        self.looked_at = self.KEPT * self.looked_at + min(done.accepted + 1, done.drafted)
        n, seconds = done.drafted, done.verifying
        new = (1, n, n * n, seconds, n * seconds)
        self.moments = [self.KEPT * old + added for old, added in zip(self.moments, new, strict=True)]


@dataclass
class Verified:
    """One verified generation, within the session's attention hook.

    Attributes:
        cache: between passes, full attention's keys and values of all tokens except the newest.
        passes: list to which the record of each pass is appended.
        frequencies: of the model, if they depend on the length of the text. A pass reads tokens at once whose
            frequencies full attention has one by one, so no draft goes to where they change.
    """

    model: PreTrainedModel
    session: Session
    cache: Cache
    pace: Pace
    passes: list[Pass]
    config: GenerationConfig
    processor: LogitsProcessorList
    criteria: StoppingCriteriaList
    streamer: BaseStreamer | None
    frequencies: Frequencies | None = None
    scores: tuple[Tensor, ...] = ()
    logits: tuple[Tensor, ...] = ()

    def generate(self, ids: Tensor) -> Tensor | GenerateDecoderOnlyOutput:
        """Continues the text [1, L], whose beginning is in the cache; returns what `model.generate` returns."""
        ids, done = self._begun(ids)
        ends = end_tokens(self.model, [] if self.config.eos_token_id is None else self.config.eos_token_id)
        while not done:
            if self._dropped(ids):
                ids, done = self._begun(ids)
                continue
            length, limit = ids.shape[1] - 1, self.criteria.max_length
            count = self.pace.drafts()
            if limit is not None:
                count = min(count, limit - ids.shape[1] - 1)
            if self.frequencies is not None and (room := self.frequencies.room(ids.shape[1])) is not None:
                count = min(count, room)
            if isinstance(self.cache, PackedCache):
                self.cache.reserve(count + 1)
            text, expected, started = ids, [], time.perf_counter()
            while len(expected) < count and not (expected and int(text[0, -1]) in ends):
                p, _ = self._distribution(text, self._read(text[:, -1:])[-1:])
                expected.append(p)
                text = torch.cat((text, drawn(p)[None]), 1)
            drafted, drafts = time.perf_counter(), list(text[0, length + 1 :, None])
            self._crop(len(drafts))
            with self.session.doing("verifying"):
                logits = self._read(text[:, length:])
            ids, right, done = self._taken(ids, logits, drafts, expected)
            self._crop(self.cache.get_seq_length() - (ids.shape[1] - 1))
            self.passes.append(Pass(len(drafts), right, drafted - started, time.perf_counter() - drafted))
            self.pace.saw(self.passes[-1])
        if self.streamer is not None:
            self.streamer.end()
        if not self.config.return_dict_in_generate:
            return ids
        return GenerateDecoderOnlyOutput(
            sequences=ids, scores=self.scores if self.config.output_scores else None,
            logits=self.logits if self.config.output_logits else None, past_key_values=self.cache,
        )  # fmt: skip

    def _begun(self, ids: Tensor) -> tuple[Tensor, bool]:
        """Reads the tokens that the cache lacks as a prompt, all of them where the model drops the cache. Returns the
        text with the next token, and whether it has ended.
        """
        piece = self.config.prefill_chunk_size or ids.shape[1]
        if self._dropped(ids):
            self._empty()
        if self.frequencies is not None and not self.frequencies.grows:
            piece = ids.shape[1]  # whose tokens have the same frequencies
        with self.session.doing("reading"):
            for tokens in ids[:, self.cache.get_seq_length() :].split(piece, 1):
                logits = self._read(tokens, logits_to_keep=1)
        ids, _, done = self._taken(ids, logits, [], [])
        return ids, done

    def _dropped(self, ids: Tensor) -> bool:
        """Returns whether `generate` would drop the cache before it reads this text, as models with LongRoPE do."""
        held = self.cache.get_seq_length()
        if self.frequencies is None or self.frequencies.same(held, ids.shape[1]):
            return False
        inputs = self.model.prepare_inputs_for_generation(
            ids, past_key_values=self.cache, attention_mask=torch.ones_like(ids), use_cache=True
        )
        return inputs.get("past_key_values") is None or self.cache.get_seq_length() < held

    def _empty(self) -> None:
        """Empties the cache."""
        if isinstance(self.cache, PackedCache):
            self.cache.reset()
        else:
            self._crop(self.cache.get_seq_length())

    def _taken(
        self, ids: Tensor, logits: Tensor, drafts: list[Tensor], expected: list[Tensor]
    ) -> tuple[Tensor, int, bool]:
        """Verifies drafts by full attention's logits [n + 1, V]. Returns the text with the accepted drafts and the next
        token, the number of accepted drafts, and whether the text has ended.
        """
        right, done = 0, False
        for at in range(len(drafts) + 1):
            p, scores = self._distribution(ids, logits[at : at + 1])
            if at < len(drafts):
                token, accepted = accepted_or_drawn(p, expected[at], drafts[at])
            else:
                token, accepted = drawn(p), False
            ids, right = torch.cat((ids, token[None]), 1), right + accepted
            if self.streamer is not None:
                self.streamer.put(token.cpu())
            if self.config.return_dict_in_generate:
                self.scores += (scores,) if self.config.output_scores else ()
                self.logits += (logits[at : at + 1].float(),) if self.config.output_logits else ()
            done = bool(self.criteria(ids, self.scores or None).all())
            if done or not accepted:
                break
        return ids, right, done

    def _distribution(self, ids: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the probabilities [V] of the next token, from logits [1, V], and the processed scores [1, V]."""
        scores = self.processor(ids, logits.to(torch.float32, copy=True))
        if self.config.do_sample:
            return scores[0].softmax(-1), scores
        return torch.zeros_like(scores[0]).index_fill_(0, scores[0].argmax(-1), 1), scores

    def _read(self, tokens: Tensor, **options: Any) -> Tensor:
        """Computes the logits [T, V] after tokens [1, T], which follow those in the cache."""
        return self.model(tokens, past_key_values=self.cache, use_cache=True, return_dict=True, **options).logits[0]

    def _crop(self, count: int) -> None:
        if count:
            self.cache.crop(-count)


def require_one_plain_prompt(ids: Tensor, cache: Cache, options: dict[str, Any], config: GenerationConfig) -> None:
    """Raises ValueError for arguments that a verified generation does not support."""
    if len(ids) != 1:
        raise ValueError(f"verify takes one prompt, not {len(ids)} (num_return_sequences counts): generate one by one")
    if config.output_attentions or config.output_hidden_states:
        raise ValueError("verify keeps no attentions or hidden states: unset output_attentions, output_hidden_states")
    if more := sorted(name for name, value in options.items() if name not in READ and value is not None):
        raise ValueError(f"verify reads only token ids: leave out {', '.join(more)}")
    mask, positions = options.get("attention_mask"), options.get("position_ids")
    if positions is not None:
        in_order = torch.arange(positions.shape[-1], device=positions.device)
    if (
        getattr(config, "_mask_length", ids.shape[1]) != ids.shape[1]  # of an omitted mask that hides nothing
        or (mask is not None and (mask.shape != ids.shape or not bool(mask.all())))
        or (positions is not None and bool((positions != in_order).any()))
    ):
        raise ValueError(
            "verify takes a prompt without padding or custom positions; input_ids must hold the whole text of all turns"
        )
    if cache.get_seq_length() >= ids.shape[1]:
        raise ValueError(
            f"the cache holds {cache.get_seq_length()} tokens, and input_ids {ids.shape[1]}: pass the whole text of "
            "all turns, with new tokens"
        )
