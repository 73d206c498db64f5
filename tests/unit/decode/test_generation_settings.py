"""Every setting of `generate`, as a model's generation_config.json may hold it, against plain generation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.conftest import tiny_llama
from tests.needs import KERNELS, TRANSFORMERS_5, needs
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from residual_mass import PackedCache, partial_decoding, partial_generate, partial_kv
from residual_mass.decode.generation_settings import OTHER_MODES, REFUSED, SERVED, WITHOUT_EFFECT

NEW = 8
IDS = torch.randint(6, 250, (1, 40), generator=torch.Generator().manual_seed(1))
SAMPLED = {"do_sample": True}
OFTEN = (83, 192)
"""The first new token of the plain text, and a later one."""
VALUES: dict[str, dict[str, Any]] = {
    "max_length": {"max_length": 45}, "max_new_tokens": {"max_new_tokens": 5}, "min_length": {"min_length": 45},
    "min_new_tokens": {"min_new_tokens": 6}, "early_stopping": {"early_stopping": True, "num_beams": 3},
    "max_time": {"max_time": 1000.0}, "stop_strings": {"stop_strings": ["a"]}, "do_sample": SAMPLED,
    "num_beams": {"num_beams": 3}, "use_mtp": {"use_mtp": True}, "use_cache": {"use_cache": False},
    "cache_implementation": {"cache_implementation": "static"},
    "cache_config": {"cache_config": {"backend": "quanto", "nbits": 4}}, "max_cache_len": {"max_cache_len": 100},
    "temperature": SAMPLED | {"temperature": 0.3}, "top_k": SAMPLED | {"top_k": 5}, "top_p": SAMPLED | {"top_p": 0.5},
    "min_p": SAMPLED | {"min_p": 0.1}, "top_h": SAMPLED | {"top_h": 0.5}, "typical_p": SAMPLED | {"typical_p": 0.5},
    "epsilon_cutoff": SAMPLED | {"epsilon_cutoff": 3e-2}, "eta_cutoff": SAMPLED | {"eta_cutoff": 3e-2},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.3},
    "length_penalty": {"length_penalty": 0.5, "num_beams": 3}, "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[token] for token in OFTEN]},
    "renormalize_logits": {"renormalize_logits": True},
    "forced_bos_token_id": {"forced_bos_token_id": 5}, "forced_eos_token_id": {"forced_eos_token_id": 9},
    "remove_invalid_values": {"remove_invalid_values": True},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": 7},
    "suppress_tokens": {"suppress_tokens": [*OFTEN]}, "begin_suppress_tokens": {"begin_suppress_tokens": [*OFTEN]},
    "sequence_bias": {"sequence_bias": [[[OFTEN[0]], -10.0]]}, "token_healing": {"token_healing": True},
    "guidance_scale": {"guidance_scale": 1.5},
    "watermarking_config": {"watermarking_config": {"bias": 2.5, "seeding_scheme": "selfhash"}},
    "num_return_sequences": SAMPLED | {"num_return_sequences": 2}, "output_attentions": {"output_attentions": True},
    "output_hidden_states": {"output_hidden_states": True, "return_dict_in_generate": True},
    "output_scores": {"output_scores": True, "return_dict_in_generate": True},
    "output_logits": {"output_logits": True, "return_dict_in_generate": True},
    "return_dict_in_generate": {"return_dict_in_generate": True}, "pad_token_id": {"pad_token_id": 3},
    "bos_token_id": {"bos_token_id": 4}, "eos_token_id": {"eos_token_id": [*OFTEN]},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "decoder_start_token_id": {"decoder_start_token_id": 5}, "is_assistant": {"is_assistant": True},
    "num_assistant_tokens": {"num_assistant_tokens": 3},
    "num_assistant_tokens_schedule": {"num_assistant_tokens_schedule": "constant"},
    "assistant_confidence_threshold": {"assistant_confidence_threshold": 0.3},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
    "max_matching_ngram_size": {"max_matching_ngram_size": 2},
    "assistant_early_exit": {"assistant_early_exit": 1}, "assistant_lookbehind": {"assistant_lookbehind": 3},
    "target_lookbehind": {"target_lookbehind": 3}, "assistant_ensemble_weight": {"assistant_ensemble_weight": 0.5},
    "speculation_type": {"speculation_type": "dflash"}, "compile_config": {},
    "disable_compile": {"disable_compile": True},
    "continuous_batching_config": {}, "low_memory": {"low_memory": True},
    "penalty_alpha": {"penalty_alpha": 0.6, "top_k": 4}, "dola_layers": {"dola_layers": "high"},
    "diversity_penalty": {"diversity_penalty": 0.5}, "num_beam_groups": {"num_beam_groups": 2, "num_beams": 4},
    "constraints": {"constraints": ["any"]}, "force_words_ids": {"force_words_ids": [[7]]},
    "prefill_chunk_size": {"prefill_chunk_size": 16}, "_from_model_config": {"_from_model_config": True},
    "transformers_version": {"transformers_version": "4.40.0"}, "return_legacy_cache": {},
}  # fmt: skip
"""Of every setting a value that matters, with what it takes to matter."""
NEEDS_A_TOKENIZER = ("stop_strings", "token_healing")
"""`generate` passes none to a loop that is not its own, and refuses these itself without one."""


def test_every_setting_of_the_installed_transformers_is_listed_once() -> None:
    kinds = (SERVED, WITHOUT_EFFECT, OTHER_MODES, REFUSED.keys())
    listed = [name for kind in kinds for name in kind]
    assert len(listed) == len(set(listed)) and set(VALUES) == set(listed)
    unknown = set(vars(GenerationConfig())) - set(listed)
    assert not unknown, "decide in generation_settings.py what a method makes of these, and give them a value here"


def model_with(**settings: Any) -> PreTrainedModel:
    """A model in float64 with settings as saved."""
    model = tiny_llama().double()
    model.generation_config = GenerationConfig(bos_token_id=0, pad_token_id=1)
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    return model


def text_of(model: PreTrainedModel, settings: dict[str, Any], **options: Any) -> Tensor:
    if "max_length" not in settings and "max_new_tokens" not in settings:
        options["max_new_tokens"] = NEW
    torch.manual_seed(3)
    output = model.generate(IDS, attention_mask=torch.ones_like(IDS), **options)
    return output if isinstance(output, Tensor) else output.sequences


def in_context(settings: dict[str, Any], method: str) -> Tensor:
    model = model_with(**settings)
    with partial_kv(model, method, 1.0):
        return text_of(model, settings)


def by_own_loop(settings: dict[str, Any], method: str) -> Tensor:
    return text_of(model_with(**settings), settings, custom_generate=partial_decoding(method, 1.0))


def greedily(settings: dict[str, Any], method: str) -> Tensor:
    return partial_generate(model_with(**settings), IDS, max_new_tokens=NEW, method=method, budget=1.0)


def plain_of(settings: dict[str, Any], way: Any) -> Tensor:
    if way is not greedily:
        return text_of(model_with(**settings), settings)
    greedy = {"do_sample": False, "num_beams": 1, "max_new_tokens": NEW}
    return text_of(model_with(**settings | greedy), greedy)


@needs(TRANSFORMERS_5)
@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("way", [in_context, by_own_loop, greedily])
@pytest.mark.parametrize("method", ["full", "topk"])
def test_a_setting_does_what_it_does_without_a_method_or_is_refused(way: Any, name: str, method: str) -> None:
    settings = VALUES[name]
    beams = settings.get("num_beams", 1) > 1
    if name in REFUSED or name in NEEDS_A_TOKENIZER:
        refused = True
    elif way is greedily and settings.get("num_return_sequences", 1) > 1:
        refused = True  # as `generate` does: greedy texts are all the same
    elif name in OTHER_MODES:
        refused = way is not greedily or not beams  # `partial_generate` has one beam
    else:
        refused = beams and way is not greedily
    if refused:
        with pytest.raises(ValueError, match=r"^[^\n]+$"):
            way(settings, method)
    else:
        assert torch.equal(way(settings, method), plain_of(settings, way))


@needs(TRANSFORMERS_5)
def test_these_values_matter() -> None:
    """So that equal texts show that a setting is followed."""
    plain = {True: text_of(model_with(**SAMPLED), {}), False: text_of(model_with(), {})}
    silent = {
        *WITHOUT_EFFECT, "do_sample", "max_time", "min_length", "min_new_tokens", "pad_token_id", "bos_token_id",
        "forced_bos_token_id", "renormalize_logits", "remove_invalid_values", "early_stopping", "length_penalty",
        "num_beams", "top_h", "return_dict_in_generate", "output_scores", "output_logits", "output_hidden_states",
        "encoder_repetition_penalty", *NEEDS_A_TOKENIZER,
    }  # fmt: skip
    for name in SERVED - silent:
        settings = VALUES[name]
        found = text_of(model_with(**settings), settings)
        assert not torch.equal(found, plain["do_sample" in settings]), name


@needs(KERNELS)
@pytest.mark.parametrize("place", ["config", "generation_config", "argument"])
@pytest.mark.parametrize("method", ["full", "cache8", "scan4"])
def test_a_packed_cache_is_filled_though_use_cache_is_off(place: str, method: str) -> None:
    """As after a fine-tuning with gradient checkpointing."""
    options = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": NEW, "do_sample": False, "pad_token_id": 1}
    options |= {"eos_token_id": []}
    texts = []
    for off in (False, True):
        model = tiny_llama(width=64)
        more = dict(options)
        if off and place == "argument":
            more["use_cache"] = False
        elif off:
            getattr(model, place).use_cache = False
        cache = PackedCache(model, method)
        with partial_kv(model, method, 1.0, cache=cache):
            texts.append(model.generate(IDS, past_key_values=cache, **more))
        texts.append(model.generate(IDS, custom_generate=partial_decoding(method, 1.0), **more))
        assert cache.get_seq_length() == IDS.shape[1] + NEW - 1
    assert all(torch.equal(text, texts[0]) for text in texts[1:])
