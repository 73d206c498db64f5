"""Models whose rotary frequencies depend on the length of the text, against plain generation and one pass over a text.

In float64, so that other tokens come from other frequencies alone. A new model for every text: transformers' dynamic
scaling keeps the frequencies of a longer text before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from lm_eval.models.huggingface import HFLM
from tests.conftest import TINY, byte_tokenizer
from tests.needs import KERNELS, needs
from torch import Tensor
from transformers import PreTrainedModel

from residual_mass import PackedCache, partial_decoding, partial_generate, partial_kv
from residual_mass.decode.engine import SharedPrefillEngine
from residual_mass.decode.forced import ForcedDecoder
from residual_mass.lm_eval import PartialKV
from residual_mass.model.hook import prefill
from residual_mass.model.loading import Backbone
from residual_mass.model.rotary import Frequencies, frequencies_of, text_lengths
from residual_mass.spec.arms import ArmSpec
from residual_mass.spec.settings import AnchorSpec

LIMIT, WIDTH, NEW = 64, 64, 12
LENGTHS = (40, 58, 80)
"""Prompts whose texts stay below the limit, go beyond it, and are beyond it from the beginning."""
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * (WIDTH // 2),
    "long_factor": [4.0] * (WIDTH // 2), "original_max_position_embeddings": LIMIT, "factor": 16.0,
}  # fmt: skip
SIZES = {
    "vocab_size": 258, "hidden_size": 2 * WIDTH, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.2, "sliding_window": None,
    "bos_token_id": 0, "eos_token_id": None, "pad_token_id": 1,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Phi-3": (
        "Phi3ForCausalLM",
        {"max_position_embeddings": 1024, "original_max_position_embeddings": LIMIT, "rope_parameters": LONG},
    ),
    "Phi-3.5 MoE": (
        "PhimoeForCausalLM",
        {
            "max_position_embeddings": 1024, "original_max_position_embeddings": LIMIT, "num_local_experts": 2,
            "rope_parameters": LONG | {"short_mscale": 1.0, "long_mscale": 1.3},
        },
    ),
    "dynamic NTK": (
        "LlamaForCausalLM",
        {
            "max_position_embeddings": LIMIT,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
        },
    ),
}  # fmt: skip
names = pytest.mark.parametrize("name", MODELS)
once = pytest.mark.parametrize("name", ["Phi-3", "Phi-3.5 MoE"])
lengths = pytest.mark.parametrize("length", LENGTHS)


def build(name: str) -> PreTrainedModel:
    kind, settings = MODELS[name]
    torch.manual_seed(0)
    kind = getattr(transformers, kind)
    model = kind(kind.config_class(**SIZES | settings)).double().eval()
    model.generation_config.eos_token_id = None
    if model.model.config.model_type == "phimoe":
        model.set_experts_implementation("eager")  # the default one has no float64
    return model


def ids_of(length: int) -> Tensor:
    return torch.randint(2, 258, (1, length), generator=torch.Generator().manual_seed(length))


def generated(model: PreTrainedModel, ids: Tensor, **options: Any) -> Tensor:
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False}
    return model.generate(ids, **settings | options)


def engine_of(model: PreTrainedModel, *arms: ArmSpec) -> SharedPrefillEngine:
    backbone = Backbone(TINY, model, byte_tokenizer(), "tiny")
    return SharedPrefillEngine(backbone, arms or [ArmSpec("full")], AnchorSpec(), None, None)


@names
def test_the_limit_is_where_the_model_changes_its_keys(name: str) -> None:
    found = frequencies_of(build(name))
    assert found is not None and found.limit == LIMIT and found.grows == (name == "dynamic NTK")
    first = []
    for length in (LIMIT, LIMIT + 1, LIMIT + 2):
        keys, _ = prefill(build(name), ids_of(length)[:, :length].tolist()).layers[0]
        first.append(prefill(build(name), [[5] * length]).layers[0][0][:, :, 1])
        assert keys.shape[2] == length
    assert not torch.equal(first[0], first[1])
    assert torch.equal(first[1], first[2]) == (not found.grows)


def test_lengths_with_the_same_frequencies() -> None:
    once, grows = Frequencies("longrope", 64, False), Frequencies("dynamic", 64, True)
    assert once.same(3, 64) and once.same(65, 90) and not once.same(64, 65)
    assert grows.same(3, 64) and not grows.same(65, 66) and not grows.same(64, 65)
    assert [each.room(length) for each in (once, grows) for length in (60, 64, 70)] == [4, 0, None, 4, 0, 0]


WAYS: dict[str, Callable[[PreTrainedModel, Tensor], Tensor]] = {
    "in the context": lambda model, ids: within(model, ids, "topk", budget=1.0),
    "fastest step": lambda model, ids: partial_generate(model, ids, max_new_tokens=NEW, method="topk", budget=1.0),
    "verified": lambda model, ids: generated(
        model, ids, custom_generate=partial_decoding("topk_moments", 0.5, verify=3)
    ),
}


def within(model: PreTrainedModel, ids: Tensor, method: str, **settings: Any) -> Tensor:
    with partial_kv(model, method, **settings):
        return generated(model, ids)


@names
@lengths
@pytest.mark.parametrize("way", WAYS)
def test_texts_are_those_of_plain_generation(name: str, length: int, way: str) -> None:
    assert torch.equal(WAYS[way](build(name), ids_of(length)), generated(build(name), ids_of(length)))


@once
@lengths
def test_a_prompt_in_chunks_is_verified_as_one_of_a_piece(name: str, length: int) -> None:
    decoding = partial_decoding("topk_moments", 0.5, verify=5)
    ours = generated(build(name), ids_of(length), prefill_chunk_size=25, custom_generate=decoding)
    assert torch.equal(ours, generated(build(name), ids_of(length)))


@needs(KERNELS)
@names
@lengths
def test_a_packed_cache_holds_the_keys_of_the_whole_text(name: str, length: int) -> None:
    """Its rounding to bfloat16 moves logits by at most 0.2, other frequencies by several."""
    options = {"output_logits": True, "return_dict_in_generate": True}
    plain = generated(build(name), ids_of(length), **options)
    model = build(name)
    cache = PackedCache(model, "full")
    with partial_kv(model, "full", cache=cache):
        found = generated(model, ids_of(length), past_key_values=cache, **options)
    equal = int((found.sequences == plain.sequences)[0, length:].long().cumprod(0).sum())
    assert equal > 8
    for ours, theirs in list(zip(found.logits, plain.logits, strict=True))[:equal]:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.3)
    assert cache.get_seq_length() == length + NEW - 1


@names
@lengths
@torch.no_grad()
def test_given_tokens_are_read_as_one_pass_reads_them(name: str, length: int) -> None:
    text = ids_of(length + NEW)
    plain = build(name)(text).logits[0, length:]
    decoder = ForcedDecoder(engine_of(build(name), ArmSpec("full"), ArmSpec("topk", 100.0)), text[0, :length].tolist())
    given = text[0, length:].tolist()
    for _ in range(2):
        full, dense = decoder.full(given)
        torch.testing.assert_close(full, plain, rtol=0, atol=1e-9)
        for state in (None, dense):
            (topk,) = decoder.logits([ArmSpec("topk", 100.0)], given, state)
            torch.testing.assert_close(topk, plain, rtol=0, atol=1e-9)
        decoder.full(given[:2])  # a shorter text, of other frequencies


@names
def test_prompts_of_several_lengths_decode_as_alone(name: str) -> None:
    prompts = [ids_of(length)[0].tolist() for length in (30, 90, 75)]
    arms = ArmSpec("full"), ArmSpec("topk_moments", 20.0)
    together = engine_of(build(name), *arms).generate(prompts, NEW)
    for prompt, row in zip(prompts, together, strict=True):
        (alone,) = engine_of(build(name), *arms).generate([prompt], NEW)
        assert [each.tokens for each in row] == [each.tokens for each in alone]
        plain = generated(build(name), torch.tensor([prompt]))[0, len(prompt) :].tolist()
        assert row[0].tokens == plain


@names
@pytest.mark.parametrize("length", [30, 90])
def test_the_greedy_text_of_a_prompt(name: str, length: int) -> None:
    """A shorter text after a longer one is not read with the longer one's frequencies."""
    model = build(name)
    engine_of(model).generate([ids_of(150)[0].tolist()], 3)
    *prefix, first = ids_of(length)[0].tolist()
    decoder = ForcedDecoder(engine_of(model), prefix)
    assert decoder.greedy(first, NEW) == generated(build(name), ids_of(length))[0, length:].tolist()


@once
def test_what_would_have_to_be_read_again_is_refused_in_one_line(name: str) -> None:
    model = build(name)
    line = f"^{type(model).__name__}'s rotary frequencies change beyond 64 tokens [^\n]*{{}}[^\n]*partial_kv[^\n]*$"
    prompts = [ids_of(length)[0].tolist() for length in (30, 58)]
    with pytest.raises(ValueError, match=line.format("prompt 1 grows from 58 to 69")):
        engine_of(model).generate(prompts, NEW)
    engine_of(model).generate(prompts, [NEW, 7])
    with pytest.raises(ValueError, match=line.format("grows from 59 to 70")):
        ForcedDecoder(engine_of(model), prompts[1]).greedy(5, NEW)


def test_hooks_on_a_rotary_embedding_come_back() -> None:
    model = build("Phi-3")
    rotary = model.model.rotary_emb
    for own in (None, lambda *args, forward=rotary.forward: forward(*args)):
        if own is not None:
            rotary.forward = own
        with pytest.raises(KeyError), text_lengths(model, [5]):
            raise KeyError
        assert vars(rotary).get("forward") is own


@names
@pytest.mark.parametrize("kind", ["loglikelihood", "loglikelihood_rolling"])
def test_likelihoods_are_lm_evals_own(name: str, kind: str) -> None:
    """Of a short text, one whose continuation goes beyond the limit, and a long one."""
    from lm_eval.api.instance import Instance

    texts = ["Once upon. " * times for times in (2, 5, 9)]
    asked = [(text, " and so on to the end") for text in texts] if kind == "loglikelihood" else [(t,) for t in texts]
    answers = []
    for make in (HFLM, lambda **options: PartialKV(**options, method="full", stride=16)):
        answers.append([])
        for index, arguments in enumerate(asked):
            model = make(pretrained=build(name), tokenizer=byte_tokenizer(), max_length=200, softmax_dtype="float64")
            (answer,) = getattr(model, kind)([Instance(kind, {}, arguments, index)])
            answers[-1].append(answer[0] if kind == "loglikelihood" else answer)
    assert answers[1] == pytest.approx(answers[0], abs=1e-4)
