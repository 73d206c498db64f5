"""Generation with a method: `partial_generate`, and `partial_decoding` for `model.generate`; one loop of our own.

The loop calls the model without a cache and tells the backend what each call is: the prompt, one step, or drafts. A
plain text is one without drafts. With drafts, a pass takes n steps through the method, removes their keys and values,
which come from approximate hidden states, and reads the newest token and the drafts at once by full attention. It
accepts the drafts before the first that full attention rejects, and adds a token of full attention's own.

Shape letters: B = batch rows, L = tokens so far, n = drafts, V = vocabulary.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode

from residual_mass.decode.backends import backend_for, loop_refusal
from residual_mass.decode.compiled import step_for
from residual_mass.decode.packed_backend import PackedBackend, PackedCache
from residual_mass.decode.session import make_arm, partial_kv, require_maps, require_steps, require_supported
from residual_mass.decode.text import TextBatch
from residual_mass.decode.told import tell_once
from residual_mass.decode.verify import Pass, accept_or_sample, sample
from residual_mass.kernels.layout import BLOCK
from residual_mass.methods import Method, method_named
from residual_mass.methods.served import backends_of
from residual_mass.model.finite import end_tokens
from residual_mass.model.layers import attention_layers, device_of
from residual_mass.model.phi_maps import PhiMaps
from residual_mass.model.rotary import Frequencies, frequencies_of
from residual_mass.spec.settings import AnchorSpec

log = logging.getLogger(__name__)
MOST_DRAFTS = BLOCK - 1
"""Most drafts of a pass: with the newest token they fill a block of a packed cache."""
TAKEN = {
    "attention_mask", "cache_position", "generation_config", "logits_processor", "logits_to_keep", "past_key_values",
    "position_ids", "stopping_criteria", "synced_gpus", "use_cache",
}  # fmt: skip
"""Arguments from `generate` that the loop takes, or that add nothing to these."""


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
    verify: int | None = None,
    passes: list[Pass] | None = None,
    compile: bool | str = "auto",
) -> Tensor:
    """Generates greedily, as `model.generate` with `partial_decoding`, which chooses the fastest step for the method.

    Args:
        input_ids: [1, L], one prompt without padding.
        method, budget, phi, num_sink, num_tail: as for `partial_kv`.
        eos_token_id: token or tokens that end the text; None takes those of the model's generation config, and an
            empty list disables them.
        verify, passes, compile: as for `partial_decoding`.

    Returns:
        The prompt and up to `max_new_tokens` new tokens, the last of which may be an end token: [1, L + T].

    Raises:
        ValueError: as for `partial_decoding`; input_ids are not one prompt of token ids; max_new_tokens is below 1; the
            model has no language-model head.
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
    decoding = partial_decoding(method, budget, phi, num_sink, num_tail, verify, passes, compile=compile)
    attention_layers(model)
    if model.get_output_embeddings() is None:
        raise ValueError(f"{type(model).__name__} has no language-model head; load it with AutoModelForCausalLM")
    prompt = input_ids.to(device_of(model))
    ends = end_tokens(model, eos_token_id)
    return model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=1,
        eos_token_id=list(ends) or None,
        pad_token_id=next(iter(ends), 0),
        return_dict_in_generate=False,
        custom_generate=decoding,
    )


def partial_decoding(
    method: str | Method = "topk_phi",
    budget: float | None = 0.01,
    phi: PhiMaps | None = None,
    num_sink: int = 4,
    num_tail: int = 16,
    verify: int | None = None,
    passes: list[Pass] | None = None,
    streamer: BaseStreamer | None = None,
    compile: bool | str = "auto",
) -> Callable[..., Any]:
    """Returns a decoding loop for `model.generate(**inputs, custom_generate=partial_decoding(...))`.

    It decodes greedily or by sampling, with all options of `generate` except beams and drafts, through the first
    backend that serves the method on the model and its device (docs/library.md has the table). A further turn takes the
    cache of the turn before as `past_key_values`, and the whole text as `input_ids`. Where the loop does not know an
    input, or the model depends on a cache of its own, transformers' loop runs within `partial_kv`. Where torch or that
    loop runs in place of a faster step, a logged warning says why, once for a model and reason; with
    `return_dict_in_generate` the output's attribute `backend` is what served: "packed", "triton" or "torch".

    With `verify` the text is full attention's: greedy, or sampled from the same distribution, for one prompt. The
    method drafts tokens, and one pass of full attention accepts those that it would have generated. Over a packed 4-bit
    cache full attention reads both planes, 8 bits of every key and value; otherwise it is the model's own.

    Args:
        method, budget, phi, num_sink, num_tail: as for `partial_kv`.
        verify: tokens to draft between two passes of full attention, 1 to 63. Except for logits that tie within
            rounding (to 8 bits over a packed cache), the greedy text does not depend on it, and neither does a sampled
            one's distribution.
        passes: list to which the record of each pass is appended.
        streamer: receives the prompt and every token, because `generate` passes its own to no `custom_generate`.
        compile: whether `torch.compile` makes one graph of a step, on a CPU: it takes up to a minute or two the first
            time, some seconds in a later process, and nothing in a later call. "auto" compiles if so many tokens are
            asked for that it repays. Logits differ by rounding.

    Raises:
        ValueError: as for `partial_kv`; verify is out of range, or the method has no partial step; when called, an
            option of `generate` is not supported, or compile is True and the model cannot be compiled.
    """
    rule = method_named(method)
    if compile not in (True, False, "auto"):
        raise ValueError(f'compile is {compile!r}, not True, False or "auto"')
    if verify is not None and (type(verify) is not int or not 1 <= verify <= MOST_DRAFTS):
        raise ValueError(
            f"verify is {verify!r}, not a number of drafts from 1 to {MOST_DRAFTS}: a longer draft does not fit the "
            f"window of {BLOCK} tokens that is verified at once"
        )
    if verify is not None and rule.whole_prefix:
        raise ValueError(f"method {rule.name} has no partial step to draft by: leave verify out")
    arm = make_arm(rule, budget)
    anchors = AnchorSpec(num_sink, num_tail)
    require_maps(arm, phi)

    def decode(model: PreTrainedModel, input_ids: Tensor, **options: Any) -> Any:
        config = options["generation_config"]
        require_supported(model, arm, phi)
        require_plain_mode(config, rule)
        cache = options.get("past_key_values")
        refusal = loop_refusal(model) or input_refusal(input_ids, config, options)
        if refusal is None and verify is None and frequencies_of(model) is not None:
            refusal = f"{type(model).__name__}'s rotary frequencies depend on the length of the text"
        if verify is not None:
            require_one_plain_prompt(input_ids, options, refusal)
        if cache is not None and cache.get_seq_length() >= input_ids.shape[1] > 0 and refusal is None:
            raise ValueError(
                f"the cache holds {cache.get_seq_length()} tokens, and input_ids {input_ids.shape[1]}: pass the whole "
                "text of all turns, with new tokens"
            )
        if streamer is not None:
            streamer.put(input_ids.cpu())
        if refusal is not None:
            if compile is True:
                raise ValueError(f"compile=True is for our own loop, and {refusal}; leave compile out")
            unpacked = PackedBackend.refusal(model, arm)
            if unpacked is None and takes_packed(model, input_ids, config, options):
                options["past_key_values"] = PackedCache(model, rule)
            served = "packed" if isinstance(options.get("past_key_values"), PackedCache) else "torch"
            loop = (
                f"transformers' own loop decodes {rule.name} on {type(model).__name__} by {served}, not ours: {refusal}"
            )
            tell_once(model, log, loop if unpacked is None or len(backends_of(rule)) == 1 else f"{loop}; {unpacked}")
            with warnings.catch_warnings(), partial_kv(model, rule, budget, phi, num_sink, num_tail):
                warnings.filterwarnings("ignore", "partial_kv: no decode step")  # the first token may be the last
                output = model._sample(input_ids, streamer=streamer, **options)
            if isinstance(output, GenerateDecoderOnlyOutput):
                output.backend = served
            return output
        real = padding_of(options.get("attention_mask"))
        room = MOST_DRAFTS if config.max_length is None else config.max_length - input_ids.shape[1]
        backend = backend_for(model, arm, anchors, phi, cache, crop=verify is not None, room=room)
        text = TextBatch(model, backend, real, step_for(model, compile, len(input_ids), room))
        return Decoding(
            text,
            config,
            options["logits_processor"],
            options["stopping_criteria"],
            streamer,
            verify,
            [] if passes is None else passes,
            frequencies_of(model),
        ).run(input_ids)

    return decode


@dataclass
class Decoding:
    """One generation: continues the texts that `text` reads.

    Attributes:
        verify: number of drafts of a pass; None generates by the method alone.
        passes: list to which the record of each pass is appended.
        frequencies: of the model, if they depend on the length of the text. A pass reads tokens at once whose
            frequencies full attention has one by one, so no draft goes to where they change.
        unfinished: [B] bool, rows that have met no stopping criterion.
    """

    text: TextBatch
    config: GenerationConfig
    processor: LogitsProcessorList
    criteria: StoppingCriteriaList
    streamer: BaseStreamer | None
    verify: int | None
    passes: list[Pass]
    frequencies: Frequencies | None = None
    scores: tuple[Tensor, ...] = ()
    logits: tuple[Tensor, ...] = ()
    unfinished: Tensor = field(default_factory=lambda: torch.empty(0))

    def run(self, ids: Tensor) -> Tensor | GenerateDecoderOnlyOutput:
        """Continues the texts [B, L], whose beginnings may be in the cache; returns what `model.generate` returns."""
        self.unfinished = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
        ids = self._begun(ids)
        while bool(self.unfinished.any()):
            if self.verify is None:
                logits = self.text.step(ids[:, -1:])
                ids, _ = self._extended(ids, logits, [])
            elif self._dropped(ids):
                ids = self._begun(ids)
            else:
                ids = self._verified_pass(ids)
        if self.streamer is not None:
            self.streamer.end()
        if not self.config.return_dict_in_generate:
            return ids
        output = GenerateDecoderOnlyOutput(
            sequences=ids,
            scores=self.scores if self.config.output_scores else None,
            logits=self.logits if self.config.output_logits else None,
            past_key_values=self.text.backend.cache,
        )
        output.backend = self.text.backend.name
        return output

    def _begun(self, ids: Tensor) -> Tensor:
        """Reads the tokens that the backend lacks, all of them where the model would drop its cache. Returns the texts
        with the next tokens.
        """
        size = self.config.prefill_chunk_size
        if self._dropped(ids):
            self.text.restart()
        if self.frequencies is not None and not self.frequencies.grows:
            size = None  # so that all tokens have the same frequencies
        if not self.text.backend.reads_batches_in_parts and (len(ids) > 1 or self.text.real is not None):
            size = None
        unread = ids[:, self.text.tokens :]
        for piece in unread.split(size or unread.shape[1], 1):
            logits = self.text.read(piece)
        ids, _ = self._extended(ids, logits, [])
        return ids

    def _dropped(self, ids: Tensor) -> bool:
        """Returns whether `generate` would drop the cache before it reads these texts, as models with LongRoPE do."""
        held = self.text.tokens
        if self.frequencies is None or self.frequencies.same(held, ids.shape[1]):
            return False
        inputs = self.text.model.prepare_inputs_for_generation(
            ids, past_key_values=self.text.backend.cache, attention_mask=torch.ones_like(ids), use_cache=True
        )
        return inputs.get("past_key_values") is None or self.text.backend.cache.get_seq_length() < held

    def _extended(self, ids: Tensor, logits: Tensor, drafts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, int]:
        """Appends tokens to the texts [B, L] by the logits [B, n + 1, V] after them and after each draft.

        Args:
            drafts: n tokens [1] with the probabilities [V] from which they were drawn.

        Returns:
            The texts with the accepted drafts and one more token, unless they ended before; the number of drafts that
            were accepted.
        """
        num_accepted = 0
        for at in range(len(drafts) + 1):
            raw = logits[:, at].to(torch.float32, copy=True)
            scores = self.processor(ids, raw)
            accepted = False
            if at < len(drafts):
                drafted, q = drafts[at]
                p = self._probabilities(scores)[0]
                token, accepted = accept_or_sample(p, q, drafted)
            else:
                token = self._chosen(scores)
            ids = torch.cat((ids, token[:, None]), 1)
            num_accepted += accepted
            self._tell(token, scores, raw)
            self.unfinished &= ~self.criteria(ids, self.scores or None)
            if not accepted or not bool(self.unfinished.any()):
                break
        return ids, num_accepted

    def _chosen(self, scores: Tensor) -> Tensor:
        """Chooses the next tokens [B] by processed scores [B, V]; finished rows get padding."""
        if self.config.do_sample:
            token = torch.multinomial(scores.softmax(-1), 1).squeeze(1)
        else:
            token = scores.argmax(-1)
        stops_rows = any(hasattr(criterion, "eos_token_id") for criterion in self.criteria)
        if not stops_rows or bool(self.unfinished.all()):  # without end tokens all rows go on, as in `generate`
            return token
        return torch.where(self.unfinished, token, self.config._pad_token_tensor.to(token.device))

    def _probabilities(self, scores: Tensor) -> Tensor:
        """Returns the probabilities [B, V] of the next tokens; those of a greedy choice are 0 and 1."""
        if self.config.do_sample:
            return scores.softmax(-1)
        return torch.zeros_like(scores).scatter_(1, scores.argmax(-1, keepdim=True), 1)

    def _tell(self, token: Tensor, scores: Tensor, raw: Tensor) -> None:
        if self.streamer is not None:
            self.streamer.put(token.cpu())
        if self.config.return_dict_in_generate:
            if self.config.output_scores:
                self.scores += (scores,)
            if self.config.output_logits:
                self.logits += (raw,)

    def _verified_pass(self, ids: Tensor) -> Tensor:
        """Drafts tokens by steps, and keeps those that full attention accepts, with one token of its own."""
        text = self.text
        length = ids.shape[1] - 1
        count = self.verify
        if self.criteria.max_length is not None:
            left = self.criteria.max_length - ids.shape[1]
            count = min(count, left - 1)  # the pass adds a token of full attention's own
        if self.frequencies is not None:
            room = self.frequencies.room(ids.shape[1])
            count = count if room is None else min(count, room)
        text.backend.reserve(count + 1)
        started = time.perf_counter()
        drafted, drafts = self._drafts(ids, count)
        between = time.perf_counter()
        text.crop(len(drafts))
        logits = text.verify(drafted[:, length:])
        ids, num_accepted = self._extended(ids, logits, drafts)
        text.crop(text.tokens - (ids.shape[1] - 1))
        ended = time.perf_counter()
        self.passes.append(Pass(len(drafts), num_accepted, between - started, ended - between))
        return ids

    def _drafts(self, ids: Tensor, count: int) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Drafts up to `count` tokens, fewer after an end token. Returns the text with them, and the tokens [1] with
        the probabilities [V] from which they were drawn.
        """
        given = [] if self.config.eos_token_id is None else self.config.eos_token_id
        ends = end_tokens(self.text.model, given)
        drafts: list[tuple[Tensor, Tensor]] = []
        while len(drafts) < count and not (drafts and int(ids[0, -1]) in ends):
            logits = self.text.step(ids[:, -1:])
            raw = logits[:, -1].to(torch.float32, copy=True)
            scores = self.processor(ids, raw)
            p = self._probabilities(scores)[0]
            token = sample(p)
            drafts.append((token, p))
            ids = torch.cat((ids, token[None]), 1)
        return ids, drafts


# ---- what the loop takes ---------------------------------------------------------------------------------------------


def require_plain_mode(config: GenerationConfig, rule: Method) -> None:
    """Raises ValueError unless `generate` decodes greedily or by sampling, one token of each text a step."""
    mode = config.get_generation_mode()
    require_steps(config, mode, rule)
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(
            f"partial_decoding does not support {mode.value.replace('_', ' ')}: generate greedily or by sampling, with "
            "num_beams=1, or within partial_kv"
        )


def takes_packed(model: PreTrainedModel, ids: Tensor, config: GenerationConfig, options: dict[str, Any]) -> bool:
    """Returns whether transformers' loop can run over a packed cache of ours, in place of an empty `DynamicCache`.

    Padding must be on the left, and the text must keep its rotary frequencies: what is packed is not packed again.
    """
    cache = options.get("past_key_values")
    if cache is not None and (type(cache) is not DynamicCache or cache.get_seq_length() > 0):
        return False
    if not padded_left(options.get("attention_mask")):
        return False
    frequencies = frequencies_of(model)
    if frequencies is None:
        return True
    return config.max_length is not None and frequencies.same(ids.shape[1], config.max_length - 1)


def padded_left(mask: Tensor | None) -> bool:
    """Returns whether an attention mask [B, L] hides nothing but the beginnings of rows."""
    return mask is None or bool((mask.cummax(1).values == mask).all())


def padding_of(mask: Tensor | None) -> Tensor | None:
    """Returns the attention mask [B, L] as bool; None if it hides nothing."""
    if mask is None or bool(mask.all()):
        return None
    return mask.bool()


def input_refusal(ids: Tensor, config: GenerationConfig, options: dict[str, Any]) -> str | None:
    """Returns why our loop does not take the inputs of a call of `generate`, in one line; None if it does."""
    more = sorted(name for name, value in options.items() if name not in TAKEN and value is not None)
    if more:
        return f"it reads only token ids: leave out {', '.join(more)}"
    if config.output_hidden_states:
        return "it keeps no hidden states: unset output_hidden_states"
    mask = options.get("attention_mask")
    # `_mask_length` is the length of an omitted mask that hides nothing.
    if getattr(config, "_mask_length", ids.shape[1]) != ids.shape[1] or (mask is not None and mask.shape != ids.shape):
        return "input_ids must hold the whole text of all turns"
    if not padded_left(mask):
        return "it takes padding on the left alone"
    cache = options.get("past_key_values")
    if cache is not None and type(cache) not in (DynamicCache, PackedCache):
        return f"it does not fill a {type(cache).__name__}: pass past_key_values=DynamicCache()"
    positions = options.get("position_ids")
    if positions is not None:
        counted = (torch.ones_like(ids) if mask is None else mask).cumsum(1) - 1
        own = positions.expand(len(ids), -1)
        if own.shape != counted.shape or bool(((own != counted) & (counted >= 0)).any()):
            return "it counts positions itself: leave out position_ids"
    return None


def require_one_plain_prompt(ids: Tensor, options: dict[str, Any], refusal: str | None) -> None:
    """Raises ValueError for inputs whose drafts cannot be verified."""
    if len(ids) != 1:
        raise ValueError(f"verify takes one prompt, not {len(ids)} (num_return_sequences counts): generate one by one")
    if refusal is None and padding_of(options.get("attention_mask")) is not None:
        refusal = "it takes a prompt without padding"
    if refusal is not None:
        raise ValueError(f"verify runs our own loop, and {refusal}")
