"""Generation with a method: `partial_generate`, and the same behind `model.generate`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from residual_mass.core.settings import AnchorSpec
from residual_mass.methods import Method, method_named
from residual_mass.methods.arms import Arm
from residual_mass.model.hook import (
    attention_hook,
    attention_layers,
    device_of,
    end_tokens,
    prefill,
    require_plain,
    text_config,
)
from residual_mass.model.packed import PackedCache, PackedSession, kernels_for, packing_of
from residual_mass.model.partial import make_arm, partial_kv, require_maps
from residual_mass.model.phi_maps import PhiMaps
from residual_mass.model.prefix import retrieved_by
from residual_mass.model.static_decode import StaticDecoder, fill_buffers
from residual_mass.model.verified import Pace, Pass, Verified, require_one_plain_prompt, require_verify


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
    """Generates greedily, as `model.generate` within `partial_kv`, by the fastest step that serves the method.

    On a CPU this is a compiled one over a `PackedCache` for full attention and for a 4-bit scan, alone or with
    regression (`residual_mass.kernels`): keys and values have 8 bits then, in place of 16 or 32. On a GPU it is one of
    Triton kernels in a CUDA graph, for the paper's methods and those that choose by all keys' scores, exact or of 4
    bits, alone or with truncated moments; torch has the same steps elsewhere. Other methods run under `partial_kv`.

    Args:
        input_ids: [1, L], one prompt without padding.
        method, budget, phi, num_sink, num_tail: as for `partial_kv`.
        eos_token_id: token or tokens that end the text; None takes those of the model's generation config, an empty
            list none.

    Returns:
        The prompt and up to `max_new_tokens` new tokens, the last of which may be an end token: [1, L + T].

    Raises:
        ValueError: as for `partial_kv`; several prompts or none of token ids; max_new_tokens below 1; a model without a
            language-model head; verify below 1 or above 63, or for a method or model that it does not serve.
    """
    if not isinstance(input_ids, Tensor):
        raise ValueError(
            f"partial_generate takes token ids [1, L], not a {type(input_ids).__name__}: pass "
            'tokenizer(text, return_tensors="pt").input_ids'
        )
    if input_ids.ndim != 2 or len(input_ids) != 1:
        raise ValueError(f"partial_generate takes one prompt [1, L], not {list(input_ids.shape)}; use partial_kv")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}, not above 0")
    arm, anchors = make_arm(method, budget), AnchorSpec(num_sink, num_tail)
    require_plain(model)
    if model.get_output_embeddings() is None:
        raise ValueError(f"{type(model).__name__} has no language-model head; load it with AutoModelForCausalLM")
    require_maps(arm, phi)
    prompt, ends = input_ids.to(device_of(model)), end_tokens(model, eos_token_id)
    options = {
        "attention_mask": torch.ones_like(prompt), "max_new_tokens": max_new_tokens, "do_sample": False,
        "num_beams": 1, "eos_token_id": list(ends) or None, "pad_token_id": next(iter(ends), 0),
    }  # fmt: skip
    if verify is not None:
        decoding = partial_decoding(method, budget, phi, num_sink, num_tail, verify, passes)
        return model.generate(prompt, custom_generate=decoding, return_dict_in_generate=False, **options)
    if kernels_for(model, arm.rule):
        new = _packed(model, prompt, max_new_tokens, arm, anchors, ends)
    elif arm.rule.fused:
        new = _static(model, prompt, max_new_tokens, arm, anchors, phi, ends)
    else:
        with partial_kv(model, method, budget, phi, num_sink, num_tail):
            return model.generate(prompt, **options)
    return torch.cat((prompt, new), dim=1)


def _packed(
    model: PreTrainedModel, prompt: Tensor, count: int, arm: Arm, anchors: AnchorSpec, ends: Collection[int]
) -> Tensor:
    """Up to `count` tokens [1, T] from a `PackedCache`."""
    cache = PackedCache(model, arm.rule)
    tokens, given = [], prompt
    with attention_hook(model, PackedSession(arm, anchors, cache)):
        while len(tokens) < count and (not tokens or int(tokens[-1]) not in ends):
            logits = model(given, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            given = logits[:, -1].argmax(-1, keepdim=True)
            tokens.append(given)
    return torch.cat(tokens, dim=1)


def _static(
    model: PreTrainedModel, prompt: Tensor, count: int, arm: Arm, anchors: AnchorSpec, phi: PhiMaps | None,
    ends: Collection[int],
) -> Tensor:  # fmt: skip
    """Up to `count` tokens [1, T] from static buffers."""
    read = prefill(model, prompt.tolist())
    first = read.next_token
    if count == 1 or int(first) in ends:
        return first.unsqueeze(1)
    k, steps = retrieved_by(arm, prompt.shape[1], anchors, None), count - 1
    decoder = StaticDecoder(model, fill_buffers([read], steps), arm.rule, k, anchors, phi, steps)
    if decoder.sizes_on_device:  # a graph of every step would take longer than to run them once
        decoder.prepare()
    return torch.cat((first.unsqueeze(1), decoder.run(first, ends)), dim=1)


def partial_decoding(
    method: str | Method = "topk_phi",
    budget: float | None = 0.01,
    phi: PhiMaps | None = None,
    num_sink: int = 4,
    num_tail: int = 16,
    verify: int | Literal["auto"] | None = None,
    passes: list[Pass] | None = None,
) -> Callable[..., Any]:
    """Returns a decoding loop for `model.generate(**inputs, custom_generate=partial_decoding(...))`.

    It is transformers' own loop, greedy or sampling, with every option of `generate` but beams and drafts, within
    `partial_kv`. Where the CPU kernels serve the method it runs over a `PackedCache`: an empty one, or for a further
    turn the one that is given as `past_key_values`.

    With `verify` the text is full attention's: greedy, or sampled from the same distribution, of one prompt. The method
    drafts tokens, and one pass of full attention over them keeps those that it would have given itself. Over a packed
    4-bit cache full attention reads both its planes, so 8 bits of every key and value; elsewhere it is the model's own.
    A further turn takes the cache of the turn before it as `past_key_values`.

    Args:
        method, budget, phi, num_sink, num_tail: as for `partial_kv`.
        verify: tokens to draft between two passes of full attention, 1 to 63; "auto" chooses for every pass by the
            drafts accepted and the times measured so far. The text does not depend on it, but for logits that tie
            within rounding; with sampling, its distribution does not.
        passes: a list that gets what each verifying pass did.

    Raises:
        ValueError: verify out of range, or for a method without a partial step; when called, what `generate` is asked
            for is not served.
    """
    rule = method_named(method)
    if verify is not None:
        require_verify(verify)
        if rule.whole_prefix:
            raise ValueError(f"method {rule.name} has no partial step to draft by: leave verify out")

    def decode(model: PreTrainedModel, input_ids: Tensor, **options: Any) -> Any:
        if options["generation_config"].num_beams > 1:
            raise ValueError("partial_decoding follows no beams: generate with num_beams=1, or within partial_kv")
        if verify is not None:
            return _verified(model, input_ids, **options)
        cache = options.get("past_key_values")
        if not isinstance(cache, PackedCache):
            if cache is not None and cache.get_seq_length() > 0:
                raise ValueError("partial_decoding has to read the prompt itself: leave past_key_values out")
            cache = PackedCache(model, rule) if kernels_for(model, rule) else None
        if cache is not None:
            options["past_key_values"] = cache
        with partial_kv(model, rule, budget, phi, num_sink, num_tail, cache=cache):
            return model._sample(input_ids, **options)

    def _verified(
        model: PreTrainedModel, input_ids: Tensor, *, logits_processor: Any, stopping_criteria: Any,
        generation_config: Any, synced_gpus: bool = False, **options: Any,
    ) -> Any:  # fmt: skip
        cache = cache_to_crop(model, rule, options.get("past_key_values"))
        require_one_plain_prompt(input_ids, cache, options, generation_config)
        packed = cache if isinstance(cache, PackedCache) else None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "partial_kv: no decode step")  # drafts may end with the first token
            with partial_kv(model, rule, budget, phi, num_sink, num_tail, cache=packed) as session:
                return Verified(
                    model, session, cache, Pace(verify), [] if passes is None else passes, generation_config,
                    logits_processor, stopping_criteria,
                ).generate(input_ids)  # fmt: skip

    return decode


def cache_to_crop(model: PreTrainedModel, rule: Method, given: Cache | None) -> Cache:
    """Returns the cache that a verified generation takes tokens out of: the one given, or an empty one in its place.

    Raises:
        ValueError: the one given holds tokens and cannot lose any; the model keeps states that cannot go back.
    """
    if getattr(model, "_is_stateful", False) or len(attention_layers(model)) != text_config(model).num_hidden_layers:
        raise ValueError(f"verify takes drafts back, which {type(model).__name__}'s recurrent states do not allow")
    packing = packing_of(rule)
    if isinstance(given, PackedCache):
        if given.packing.bits != 4:
            raise ValueError(f"a PackedCache of {given.packing.bits} bits is read whole: there is nothing to verify")
        return given
    croppable = type(given) is DynamicCache and all(type(layer) is DynamicLayer for layer in given.layers)
    if given is not None and given.get_seq_length() > 0:
        if not croppable:
            raise ValueError(
                f"verify cannot take tokens out of a {type(given).__name__} with windows or fixed sizes: pass "
                "past_key_values=DynamicCache() from the first turn on"
            )
        return given
    if packing is not None and packing.bits == 4 and kernels_for(model, rule):
        return PackedCache(model, rule)
    return given if croppable else DynamicCache()  # without a configuration layers keep all tokens
