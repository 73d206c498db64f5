"""What decoding by a method makes of each setting of `generate`, which generation_config.json may hold too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import GenerationConfig
from transformers.generation.configuration_utils import GenerationMode

SERVED = frozenset(
    """
    max_length max_new_tokens min_length min_new_tokens max_time stop_strings bos_token_id eos_token_id pad_token_id
    do_sample temperature top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff num_return_sequences
    repetition_penalty encoder_repetition_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    renormalize_logits remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    sequence_bias forced_bos_token_id forced_eos_token_id watermarking_config
    return_dict_in_generate output_scores output_logits
    """.split()
)
"""Settings that do what they do without a method."""
WITHOUT_EFFECT = frozenset(
    """
    use_cache cache_implementation cache_config max_cache_len return_legacy_cache prefill_chunk_size low_memory
    compile_config disable_compile continuous_batching_config decoder_start_token_id
    num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold max_matching_ngram_size
    assistant_lookbehind target_lookbehind assistant_ensemble_weight speculation_type
    diversity_penalty early_stopping length_penalty _from_model_config transformers_version
    """.split()
)
"""Settings that change no token: of where keys are kept, of compilation, of encoders, and of drafts and beams,
which other settings turn on. Keys are always kept: `use_cache` is not asked.
"""
OTHER_MODES = frozenset(
    """
    num_beams penalty_alpha dola_layers constraints force_words_ids num_beam_groups prompt_lookup_num_tokens
    assistant_early_exit use_mtp
    """.split()
)
"""Settings that turn on a mode of `generate` which is refused; some of them only together with others."""
NO_DRAFTS = (
    "a partial step reads one token, not drafts of several: leave out assistant_model, prompt_lookup_num_tokens, "
    "assistant_early_exit, use_mtp and is_assistant"
)
REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "output_attentions": (bool, "a partial step computes no attention weights: unset output_attentions"),
    "output_hidden_states": (bool, "a partial step keeps no hidden states: unset output_hidden_states"),
    "guidance_scale": (
        lambda value: value not in (None, 1),
        "a partial step reads one text, but guidance_scale needs a second one: leave it out",
    ),
    "is_assistant": (bool, NO_DRAFTS),
    "token_healing": (
        bool,
        "a method goes on from the prompt's tokens as they are: heal them by model.heal_tokens(ids, tokenizer), and "
        "leave out token_healing",
    ),
}
"""Settings that are refused in every mode: which of their values, and the line."""
PLAIN_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
"""Modes in which every row keeps its own tokens."""


def require_settings(config: GenerationConfig) -> None:
    """Raises ValueError, in one line, unless the settings are those of greedy decoding or sampling by a method."""
    for name, (is_refused, line) in REFUSED.items():
        if is_refused(getattr(config, name, None)):
            raise ValueError(line)
    mode = config.get_generation_mode()
    if mode == GenerationMode.ASSISTED_GENERATION:
        raise ValueError(NO_DRAFTS)
    if mode not in PLAIN_MODES:
        raise ValueError(
            f"a partial step does not support {mode.value.replace('_', ' ')}: generate greedily or by sampling, with "
            "num_beams=1"
        )
