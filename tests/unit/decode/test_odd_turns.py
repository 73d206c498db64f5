"""Turns that are hidden, interrupted, in another mode, gone back over, or of a copy: the method stays what it is."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.conftest import byte_tokenizer, tiny_llama
from tests.needs import KERNELS, TRANSFORMERS_5, needs
from tests.unit.decode.test_loop import family
from tests.unit.model.families import FAMILIES
from tests.unit.serve.conftest import lettered
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from residual_mass import PackedCache, Text, backend_for, partial_decoding, partial_generate, partial_kv
from residual_mass.decode.backends import BACKENDS
from residual_mass.decode.torch_backend import TorchBackend
from residual_mass.methods.arms import arm_of

SHARE = 0.2


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_llama(layers=3, heads=2, kv_heads=1, width=64).double()


def some(length: int, seed: int = 0) -> Tensor:
    return torch.randint(2, 258, (1, length), generator=torch.Generator().manual_seed(seed))


def text_by(model: PreTrainedModel, method: str, cache: Any = None, kinds: Any = BACKENDS, **options: Any) -> Text:
    budget = None if method in ("full", "cache8") else SHARE
    return Text(model, backend_for(model, arm_of(method, budget), cache=cache, kinds=kinds), **options)


@needs(KERNELS)
@pytest.mark.parametrize("length", [1, 5, 19, 20, 40])
def test_torch_and_kernels_join_the_same_tokens(length: int) -> None:
    """Also after prompts that are shorter than the anchors, over three joins: one layer, which hardly reads what has
    joined.
    """
    model = tiny_llama(layers=1, width=32)
    ids, more = some(length), some(230, 1)
    logits = []
    for method, kinds in (("scan4", BACKENDS), ("scan4", [TorchBackend]), ("full", [TorchBackend])):
        text = Text(model, backend_for(model, arm_of(method, None if method == "full" else 0.01), kinds=kinds))
        text.read(ids)
        logits.append(text.step(more))
    packed, ours, full = logits
    assert float((packed - ours).abs().max()) < 0.01 * float(full.std())
    exact = 64 + max(0, 20 - length) if length <= 20 else 0  # steps before any token of the mid-region is left out
    far = (ours - full).abs().amax(-1)[0] > 1e-3
    assert int(far.nonzero()[0]) == exact


@needs(KERNELS)
@pytest.mark.parametrize("hidden", [slice(100, 110), slice(160, 170)])
def test_a_mask_over_a_packed_cache_is_followed_or_refused(model: PreTrainedModel, hidden: slice) -> None:
    """Of tokens that are packed, and of those to read."""
    cache = PackedCache(model, "cache8")
    options = {"do_sample": False, "max_new_tokens": 1, "custom_generate": partial_decoding("cache8")}
    model.generate(some(150), attention_mask=torch.ones(1, 150), past_key_values=cache, **options)
    whole = torch.cat((some(150), some(30, 1)), 1)
    mask = torch.ones_like(whole)
    model.generate(whole, attention_mask=mask, past_key_values=copy.deepcopy(cache), **options)
    mask[:, hidden] = 0
    with pytest.raises(ValueError, match="reads all of its tokens, and the attention_mask hides some: leave them out"):
        model.generate(whole, attention_mask=mask, past_key_values=cache, **options)


@pytest.mark.parametrize("method", [pytest.param("cache8", marks=needs(KERNELS)), "topk"])
def test_a_cache_that_was_left_within_a_call_is_refused(model: PreTrainedModel, method: str) -> None:
    cache = PackedCache(model, method) if method == "cache8" else DynamicCache(config=model.config)
    text = text_by(model, method, cache)
    text.read(some(100))

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        text.step(some(1))
    hook.remove()
    with pytest.raises(ValueError, match="hold 100 to 101 tokens, because a call of the model was interrupted: read"):
        text_by(model, method, cache)


@pytest.mark.parametrize("method", ["full", "topk", "topk_moments"])
def test_a_cache_of_inference_mode_goes_on_outside(model: PreTrainedModel, method: str) -> None:
    expected = text_by(model, method, kinds=[TorchBackend])
    expected.read(some(90))
    with torch.inference_mode():
        text = text_by(model, method, kinds=[TorchBackend])
        text.read(some(90))
    more = some(5, 1)
    torch.testing.assert_close(text.step(more), expected.step(more), rtol=0, atol=1e-9)


def test_an_attention_mask_tells_padding_in_any_dtype(model: PreTrainedModel) -> None:
    real = torch.ones(1, 60, dtype=torch.int64)
    real[:, :7] = 0
    logits = [text_by(model, "full", real=each).read(some(60)) for each in (real, real.bool())]
    assert torch.equal(*logits)


@pytest.mark.parametrize("name", ["Llama", pytest.param("LFM2", marks=needs(TRANSFORMERS_5))])
def test_a_further_read_has_the_logits_that_were_asked_for(name: str) -> None:
    model = family(name)
    ids = some(40) % 97 + 2
    whole = text_by(model, "full").read(ids, keep=0)
    text = text_by(model, "full")
    text.read(ids[:, :30])
    for keep in (0, 4, 1):
        found = text_of_beginning(model, ids).read(ids[:, 30:], keep=keep)
        torch.testing.assert_close(found, whole[:, 30:][:, -keep:], rtol=0, atol=1e-4)


def text_of_beginning(model: PreTrainedModel, ids: Tensor) -> Text:
    text = text_by(model, "full")
    text.read(ids[:, :30])
    return text


def test_going_back_over_tokens_that_have_joined_is_refused(model: PreTrainedModel) -> None:
    text = text_by(model, "topk", kinds=[TorchBackend])
    text.read(some(100))
    text.step(some(70, 1))
    with pytest.raises(ValueError, match="only the last 6 tokens can be removed, not 10"):
        text.crop(10)
    text.crop(6)
    other = text_by(model, "topk", kinds=[TorchBackend])
    other.read(some(100))
    other.step(some(64, 1))
    assert text.tokens == 164
    more = some(9, 2)
    torch.testing.assert_close(text.step(more), other.step(more), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["Ministral", pytest.param("LFM2", marks=needs(TRANSFORMERS_5))])
def test_layers_that_keep_no_earlier_tokens_do_not_go_back(name: str) -> None:
    model = family(name)
    text = text_by(model, "topk")
    text.read(some(60) % 97 + 2)
    text.step(some(3) % 97 + 2)
    with pytest.raises(ValueError, match="cannot go back: layers with states or windows keep no earlier tokens"):
        text.crop(1)
    assert text.tokens == 63


def test_a_copy_of_a_model_within_the_context(model: PreTrainedModel) -> None:
    """Its calls are those of a model outside, and it does not generate by the method afterwards."""
    ids = some(50)
    expected = model(ids).logits
    with partial_kv(model, "topk", SHARE):
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2)
        within = copy.deepcopy(model)
    torch.testing.assert_close(within(ids).logits, expected, rtol=0, atol=1e-9)
    with pytest.raises(
        ValueError, match="the model was copied within partial_kv, whose method it has: copy it outside"
    ):
        within.generate(ids, max_new_tokens=2)


def test_an_adapter_that_prepares_inputs_is_refused(model: PreTrainedModel) -> None:
    """As soft prompts of PEFT do, which puts its own method on the model."""
    model.prepare_inputs_for_generation = type(model).prepare_inputs_for_generation.__get__(model)
    with pytest.raises(ValueError, match="the adapter prepares the inputs of every step, as soft prompts of PEFT do"):
        partial_generate(model, some(30), max_new_tokens=2, method="topk", budget=SHARE)


def test_a_processor_without_attributes(model: PreTrainedModel) -> None:
    class Plain:
        __slots__ = ()

        def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
            return scores

    options = {"attention_mask": torch.ones(1, 30), "max_new_tokens": 3, "do_sample": False}
    expected = model.generate(some(30), custom_generate=partial_decoding("topk", SHARE), **options)
    found = model.generate(
        some(30), custom_generate=partial_decoding("topk", SHARE), logits_processor=[Plain()], **options
    )
    assert torch.equal(found, expected)


def test_stop_strings_of_any_configuration() -> None:
    """Given by position, or the model's own beside another; without a tokenizer they are refused."""
    model, tokenizer = lettered(), byte_tokenizer()
    ids = some(40)
    own = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=1)
    plain = model.generate(ids, own, attention_mask=torch.ones_like(ids))
    stop = tokenizer.decode(plain[0, 42])
    model.generation_config.stop_strings = [stop]
    with partial_kv(model, "topk", 1.0):
        found = model.generate(ids, generation_config=own, attention_mask=torch.ones_like(ids), tokenizer=tokenizer)
    assert torch.equal(found, model.generate(
        ids, generation_config=own, attention_mask=torch.ones_like(ids), tokenizer=tokenizer
    ))  # fmt: skip
    with pytest.raises(ValueError, match="has stop_strings, which need a tokenizer: generate within partial_kv"):
        partial_generate(model, ids, max_new_tokens=2, method="topk", budget=1.0)
    model.generation_config.stop_strings = None
    own.stop_strings = [stop]
    with partial_kv(model, "topk", 1.0):
        found = model.generate(ids, own, attention_mask=torch.ones_like(ids), tokenizer=tokenizer)
    assert found.shape[1] < 48
    heal = {"attention_mask": torch.ones_like(ids), "tokenizer": tokenizer, "token_healing": True}
    with pytest.raises(ValueError, match="heal them by model.heal_tokens"), partial_kv(model, "topk", 1.0):
        model.generate(ids, **heal)


@needs(KERNELS)
@needs(TRANSFORMERS_5)
def test_keys_and_values_of_two_widths_are_left_to_torch() -> None:
    model = next(one for one in FAMILIES if one.name == "MiMo V2").build(head_dim=32, v_head_dim=16)
    with pytest.raises(ValueError, match="keys and values of one width, not of 32 and 16 channels"):
        PackedCache(model, "cache8")
    ids = some(40) % 97 + 2
    assert partial_generate(model, ids, max_new_tokens=2, method="cache8").shape == (1, 42)
