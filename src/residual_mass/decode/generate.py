"""Generation with a method: one loop, by which `partial_kv`, `partial_decoding` and `partial_generate` decode.

The loop tells a `Text` what each call is, the prompt or one step, and the first backend that serves the method on the
model and its device computes attention.

Shape letters: B = batch rows, L = tokens so far, V = vocabulary.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.generation import (
    BaseStreamer,
    GenerateDecoderOnlyOutput,
    LogitsProcessorList,
    StoppingCriteriaList,
    StopStringCriteria,
)

from residual_mass.decode.backends import backend_for, require_maps
from residual_mass.decode.compiled import leaves_model, step_for
from residual_mass.decode.generation_settings import REFUSED, require_settings
from residual_mass.decode.packed_backend import PackedCache
from residual_mass.decode.supported import require_served
from residual_mass.decode.text import Text
from residual_mass.methods import Method
from residual_mass.methods.arms import Arm, arm_of
from residual_mass.model.finite import end_tokens
from residual_mass.model.hook import generation_only
from residual_mass.model.layers import attention_layers, device_of, text_config, unwrapped
from residual_mass.model.phi_maps import PhiMaps
from residual_mass.model.rotary import require_constant_frequencies
from residual_mass.spec.settings import AnchorSpec

TAKEN = {
    "attention_mask", "cache_position", "generation_config", "inputs_embeds", "logits_processor", "logits_to_keep",
    "past_key_values", "position_ids", "stopping_criteria", "synced_gpus", "use_cache",
}  # fmt: skip
"""Arguments from `generate` that the loop takes, or that add nothing to these."""


@torch.no_grad()
def partial_generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    method: str | Method = "topk_phi",
    budget: float | None = None,
    phi: PhiMaps | None = None,
    num_sink: int = 4,
    num_tail: int = 16,
    eos_token_id: int | list[int] | None = None,
    compile: bool | str = "auto",
) -> Tensor:
    """Generates greedily, as `model.generate` with `partial_decoding`.

    Args:
        input_ids: [1, L], one prompt without padding.
        method, budget, phi, num_sink, num_tail, compile: as for `partial_decoding`.
        eos_token_id: token or tokens that end the text; None takes those of the model's generation config, and an
            empty list disables them.

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
    decoding = partial_decoding(method, budget, phi, num_sink, num_tail, compile=compile)
    attention_layers(model)
    if model.get_output_embeddings() is None:
        raise ValueError(f"{type(model).__name__} has no language-model head; load it with AutoModelForCausalLM")
    prompt = input_ids.to(device_of(model))
    if unwrapped(model).generation_config.stop_strings is not None:
        raise ValueError(
            "the model's generation config has stop_strings, which need a tokenizer: generate within partial_kv, with "
            "model.generate(..., tokenizer=tokenizer)"
        )
    ends = end_tokens(model, eos_token_id)
    return model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),  # `generate` would guess one from padding tokens in the prompt
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
    budget: float | None = None,
    phi: PhiMaps | None = None,
    num_sink: int = 4,
    num_tail: int = 16,
    streamer: BaseStreamer | None = None,
    compile: bool | str = "auto",
) -> Callable[..., Any]:
    """Returns a decoding loop for `model.generate(**inputs, custom_generate=partial_decoding(...))`.

    Prompts are read exactly, and generated tokens attend through the method. The loop decodes greedily or by sampling,
    with all options of `generate` except beams and drafts, through the first backend that serves the method on the
    model and its device (docs/library.md has the table). A further turn takes the cache of the turn before as
    `past_key_values`, and the whole text as `input_ids`; its new tokens are read exactly, too. Layers with a sliding
    window or chunks attend exactly, and recurrent layers are the model's own.

    Where torch runs in place of a faster step, a logged warning says why, once for a model and reason; with
    `return_dict_in_generate` the output's attribute `backend` is what served: "packed", "triton" or "torch".

    Generated tokens are read exactly. At every 64 of them they join the prompt: from then on they are retrieved and
    estimated like the prompt's tokens, and the budget is a share of both.

    Args:
        method: full, topk, topk_phi, topk_moments or another name in `residual_mass.methods`, or your own `Method`.
        budget: exact-support budget as a share of each row's own text, in (0, 1], including anchors; None for methods
            that choose no tokens, full and caches. The integer 1 is refused: 0.01 is 1 %, 1.0 the whole prompt.
        phi: maps trained for this backbone; required by methods with phi in their name, refused by methods with another
            residual.
        num_sink, num_tail: first and last positions of the prompt that are always exact.
        streamer: receives the prompt and every token, because `generate` passes its own to no `custom_generate`.
        compile: whether `torch.compile` makes one graph of a step, on a CPU: it takes up to a minute or two the first
            time, some seconds in a later process, and nothing in a later call. "auto" compiles if so many tokens are
            asked for that it repays. Logits differ by rounding. Before every step it is checked whether the model is
            still what was compiled; only before the first two if streamer, logits processors and stopping criteria are
            of transformers, or say by an attribute `leaves_model` = True that they do not change the model.

    Raises:
        ValueError: the method is unknown, the budget missing or out of range, the maps are missing, not needed or of
            another head shape; when called, the model or an option of `generate` is not supported, or compile is True
            and the model cannot be compiled.
    """
    return Decoding(arm_of(method, budget), AnchorSpec(num_sink, num_tail), phi, compile).with_streamer(streamer)


@contextmanager
def partial_kv(
    model: PreTrainedModel,
    method: str | Method = "topk_phi",
    budget: float | None = None,
    phi: PhiMaps | None = None,
    num_sink: int = 4,
    num_tail: int = 16,
    cache: PackedCache | None = None,
    compile: bool | str = "auto",
) -> Iterator[Session]:
    """Context in which `model.generate` decodes by `partial_decoding`, for code that calls it somewhere else.

    Other calls of the model in this thread are refused, because they would be full attention; other threads can call
    it. A `generate` that is still running in another thread when the context ends keeps the method to its end.

    Args:
        method, budget, phi, num_sink, num_tail, compile: as for `partial_decoding`.
        cache: what `generate` gets as `past_key_values` if it gets none.

    Yields:
        The session, which counts decode steps.

    Warns:
        UserWarning: the context ended without a decode step through the method, so that all attention was full.

    Raises:
        ValueError: as for `partial_decoding`; contexts on one model are nested.
    """
    attention_layers(model)
    inner = unwrapped(model)
    session = Session(inner, Decoding(arm_of(method, budget), AnchorSpec(num_sink, num_tail), phi, compile), cache)
    if isinstance(getattr(vars(inner).get("generate"), "__self__", None), Session):
        raise ValueError("the model is within partial_kv already; contexts on one model cannot be nested")
    # Only an attribute of the instance has to be restored; the class keeps its method.
    own = vars(inner).get("generate")
    with generation_only(inner):
        inner.generate = session.generate
        try:
            yield session
        finally:
            del inner.generate
            if own is not None:
                inner.generate = own
    arm = session.decoding.arm
    if not arm.is_full and not session.partial_calls:
        warnings.warn(
            f"partial_kv: no decode step went through {arm.rule.name}, so all attention was full: prompts are read "
            "exactly",
            stacklevel=3,
        )


class Session:
    """What a `partial_kv` context runs in place of `model.generate`.

    Attributes:
        partial_calls: number of decode steps through the method by index of a layer that reads the whole text.
    """

    def __init__(self, model: PreTrainedModel, decoding: Decoding, cache: PackedCache | None) -> None:
        decoding.require(model)
        self.model = model
        self.decoding = decoding
        self.cache = cache
        self.partial_calls: Counter[int] = decoding.steps
        # The method itself: the context replaces the model's attribute by `Session.generate` afterwards.
        self._generate = model.generate
        self._own = id(self)

    def generate(self, *args: Any, streamer: BaseStreamer | None = None, tokenizer: Any = None, **options: Any) -> Any:
        """Generates as `model.generate` does, by the method."""
        if self._own != id(self):
            raise ValueError("the model was copied within partial_kv, whose method it has: copy it outside")
        for name in ("custom_generate", "assistant_model"):
            if options.get(name) is not None:
                raise ValueError(f"within partial_kv the method decodes, one token a step: leave out {name}")
        config = options.get("generation_config") or next(iter(args[1:2]), None) or self.model.generation_config
        stops = options.get("stop_strings", config.stop_strings or self.model.generation_config.stop_strings)
        if options.get("token_healing", config.token_healing):
            raise ValueError(REFUSED["token_healing"][1])
        if stops is not None and tokenizer is not None:  # `generate` passes no tokenizer to a loop that is not its own
            stop = StopStringCriteria(getattr(tokenizer, "tokenizer", tokenizer), stops)
            criteria = options.get("stopping_criteria") or ()
            options["stopping_criteria"] = StoppingCriteriaList([*criteria, stop])
            options["stop_strings"] = None
        if self.cache is not None and options.get("past_key_values") is None:
            options["past_key_values"] = self.cache
        return self._generate(*args, custom_generate=self.decoding.with_streamer(streamer), **options)


@dataclass(frozen=True)
class Decoding:
    """A method with all that decides how it decodes.

    Attributes:
        steps: number of decode steps through the method so far, by index of a layer that reads the whole text.

    Raises:
        ValueError: `compile` is something else.
    """

    arm: Arm
    anchors: AnchorSpec
    phi: PhiMaps | None
    compile: bool | str
    steps: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        if self.compile not in (True, False, "auto"):
            raise ValueError(f'compile is {self.compile!r}, not True, False or "auto"')
        require_maps(self.arm, self.phi)

    def require(self, model: PreTrainedModel) -> None:
        """Raises ValueError for a model that is not supported, or not with these maps."""
        require_served(model, self.arm, self.phi)

    def with_streamer(self, streamer: BaseStreamer | None) -> Callable[..., Any]:
        """Returns the loop for `custom_generate`."""

        def decode(model: PreTrainedModel, input_ids: Tensor, **options: Any) -> Any:
            return self.generated(model, input_ids, streamer, options)

        return decode

    def generated(
        self, model: PreTrainedModel, ids: Tensor, streamer: BaseStreamer | None, options: dict[str, Any]
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Continues texts [B, L] with the options that `generate` prepared."""
        config = options["generation_config"]
        self.require(model)
        if "prepare_inputs_for_generation" in vars(model):
            raise ValueError(
                "the adapter prepares the inputs of every step, as soft prompts of PEFT do, and our loop reads tokens "
                "alone: generate without a method, or with an adapter that can be merged into the weights"
            )
        require_settings(config)
        if config.cache_implementation is not None:
            options = options | {"past_key_values": None}  # `generate` has made it; the backend keeps keys in its own
        inputs = taken_inputs(model, ids, options)
        prompt = ids
        if "inputs_embeds" in inputs:  # `ids` are tokens after these vectors, usually none
            prompt = torch.zeros(inputs["inputs_embeds"].shape[:2], dtype=torch.long, device=ids.device)
        mask = options.get("attention_mask")
        require_constant_frequencies(model, prompt, mask, config.max_length)
        if streamer is not None:
            streamer.put(ids.cpu())
        room = 0 if config.max_length is None else config.max_length - ids.shape[1]
        backend = backend_for(model, self.arm, self.anchors, self.phi, options.get("past_key_values"), room)
        processor = options["logits_processor"]
        criteria = options["stopping_criteria"]
        alone = leaves_model(streamer, *processor, *criteria)
        text = Text(model, backend, padding_of(mask), step_for(model, self.compile, len(ids), room, alone))
        logits = read(text, prompt, config.prefill_chunk_size, inputs)
        before = text.tokens
        output = continued(text, ids, logits, config, processor, criteria, streamer)
        if text.tokens > before:
            self.steps.update(dict.fromkeys(text.full_layers, text.tokens - before))
        return output


def read(text: Text, ids: Tensor, size: int | None, inputs: dict[str, Any]) -> Tensor:
    """Reads the tokens of prompts [B, L] that a text lacks, `size` at a time; returns the logits [B, 1, V] after."""
    whole = bool(inputs) or text.frequencies.change
    if whole or (not text.backend.reads_batches_in_parts and (len(ids) > 1 or text.real is not None)):
        size = None
    unread = ids[:, text.tokens :]
    if "position_ids" in inputs:
        # The caller's positions are of the whole text, of which earlier turns are read already.
        inputs = inputs | {"position_ids": inputs["position_ids"][..., -unread.shape[1] :]}
    for piece in unread.split(size or unread.shape[1], 1):
        logits = text.read(piece, **inputs)
    return logits


def continued(
    text: Text,
    ids: Tensor,
    logits: Tensor,
    config: GenerationConfig,
    processor: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    streamer: BaseStreamer | None,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Decodes token by token, as transformers' own loop.

    Args:
        ids: [B, L], the texts so far.
        logits: [B, 1, V] after them.

    Returns:
        What `model.generate` returns.
    """
    stops_rows = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
    unfinished = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    kept_scores: tuple[Tensor, ...] = ()
    kept_logits: tuple[Tensor, ...] = ()
    while True:
        raw = logits[:, -1].to(torch.float32, copy=True)
        scores = processor(ids, raw)
        if config.do_sample:
            token = torch.multinomial(scores.softmax(-1), 1).squeeze(1)
        else:
            token = scores.argmax(-1)
        if stops_rows:  # without end tokens all rows go on
            token = torch.where(unfinished, token, config._pad_token_tensor.to(token.device))
        ids = torch.cat((ids, token[:, None]), 1)
        if streamer is not None:
            streamer.put(token.cpu())
        if config.return_dict_in_generate and config.output_scores:
            kept_scores += (scores,)
        if config.return_dict_in_generate and config.output_logits:
            kept_logits += (raw,)
        unfinished = unfinished & ~criteria(ids, kept_scores or None)
        # Before the step: the last token is never read.
        if not bool(unfinished.any()):
            break
        logits = text.step(ids[:, -1:])
    if streamer is not None:
        streamer.end()
    if not config.return_dict_in_generate:
        return ids
    output = GenerateDecoderOnlyOutput(
        sequences=ids,
        scores=kept_scores if config.output_scores else None,
        logits=kept_logits if config.output_logits else None,
        past_key_values=text.backend.cache,
    )
    output.backend = text.backend.name
    return output


# ---- what the loop takes ---------------------------------------------------------------------------------------------


def padding_of(mask: Tensor | None) -> Tensor | None:
    """Returns the attention mask [B, L] as bool; None if it hides nothing."""
    if mask is None or bool(mask.all()):
        return None
    return mask.bool()


def taken_inputs(model: PreTrainedModel, ids: Tensor, options: dict[str, Any]) -> dict[str, Any]:
    """Returns what the model reads with a prompt beside its ids: vectors in their place, or images.

    Raises:
        ValueError: the loop does not take the inputs of a call of `generate`.
    """
    # `generate` encodes images by itself: an empty dict, where there are none.
    given = {name: value for name, value in options.items() if name not in TAKEN and value is not None}
    more = {name: value for name, value in given.items() if not isinstance(value, dict) or value}
    if more and model.config is text_config(model):
        raise ValueError(f"our loop reads only tokens: leave out {', '.join(sorted(more))}")
    vectors = options.get("inputs_embeds")
    if vectors is not None:
        more["inputs_embeds"] = vectors
    cache = options.get("past_key_values")
    if cache is not None and type(cache) not in (DynamicCache, PackedCache):
        raise ValueError(f"our loop does not fill a {type(cache).__name__}: pass past_key_values=DynamicCache()")
    held = 0 if cache is None else cache.get_seq_length()
    if held and more:
        raise ValueError(f"a further turn takes token ids alone: leave out {', '.join(sorted(more))}")
    if held >= ids.shape[1] > 0:  # beside `inputs_embeds` ids may have no columns
        raise ValueError(
            f"the cache holds {held} tokens, and input_ids {ids.shape[1]}: pass the whole text of all turns, with new "
            "tokens"
        )
    columns = ids.shape if vectors is None else vectors.shape[:2]
    mask = options.get("attention_mask")
    # `_mask_length` is the length of an omitted mask that hides nothing.
    length = getattr(options["generation_config"], "_mask_length", columns[1]) if mask is None else mask.shape[1]
    if length != columns[1] or (mask is not None and mask.ndim != 2):
        raise ValueError("input_ids must hold the whole text of all turns, and attention_mask [B, L] cover it")
    if mask is not None and bool((mask.bool().any(1) & (mask[:, -1] == 0)).any()):
        raise ValueError(
            'a prompt ends with padding, after which `generate` would go on: pad on the left (padding_side="left")'
        )
    positions = options.get("position_ids")
    if positions is not None and positions.ndim == 3:  # of a model that counts images in several dimensions
        more["position_ids"] = positions
    elif not more.keys() - {"inputs_embeds"}:
        require_counted(positions, mask, columns)
    return more


def require_counted(positions: Tensor | None, mask: Tensor | None, columns: tuple[int, int]) -> None:
    """Raises ValueError unless positions [B, L] of a prompt are what the loop counts, without padding."""
    if positions is None or positions.ndim != 2:
        return
    real = torch.ones(columns, dtype=torch.long, device="cpu") if mask is None else mask.cpu()
    counted = real.cumsum(1) - 1
    own = positions.cpu().expand(columns[0], -1)
    # Positions of padding are free: no token attends to it.
    if own.shape != counted.shape or bool(((own != counted) & real.bool()).any()):
        raise ValueError("our loop counts positions itself: leave out position_ids")
