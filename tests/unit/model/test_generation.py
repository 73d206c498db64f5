"""Uses of `partial_kv` in generation: turns, chunks, caches, sampling, beams, compiled models."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from tests.needs import TRANSFORMERS_5, needs
from tests.unit.model.families import COMMON, FAMILIES
from tests.unit.model.test_families import FEW, ids_of
from torch import Tensor
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, DynamicCache, PreTrainedModel

from residual_mass.decode.generate import partial_generate
from residual_mass.decode.session import Session, partial_kv
from residual_mass.model.phi_maps import HeadShape, PhiMaps
from residual_mass.spec.settings import MapSpec

BUDGET = 0.3
models = pytest.mark.parametrize("name", ["Llama", "Gemma 3", "gpt-oss", "Llama 4"])


def model_of(name: str) -> PreTrainedModel:
    return next(family for family in FAMILIES if family.name == name).build()


def generated(model: PreTrainedModel, ids: Tensor, **options: object) -> Tensor:
    """The sequences [B, L + 9]."""
    settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 9}
    return model.generate(ids, **settings | options)


def under(model: PreTrainedModel, method: str = "topk_moments", **options: object) -> tuple[Session, Tensor]:
    with partial_kv(model, method, BUDGET, **FEW) as session:
        return session, generated(model, ids_of(40), **options)


@needs(TRANSFORMERS_5)
@models
@pytest.mark.parametrize("size", [3, 13, 39, 100])
def test_a_prompt_in_chunks_is_the_prompt(name: str, size: int) -> None:
    """The last chunk is a single token with 3, 13 and 39."""
    model = model_of(name)
    whole, expected = under(model)
    chunked, ours = under(model, prefill_chunk_size=size)
    assert torch.equal(ours, expected)
    assert chunked.partial_calls == whole.partial_calls
    padded, mask = F.pad(ids_of(40), (size, 0), value=1), F.pad(torch.ones_like(ids_of(40)), (size, 0))
    with partial_kv(model, "topk_moments", BUDGET, **FEW):  # a first chunk of padding
        ours = generated(model, padded, attention_mask=mask, prefill_chunk_size=size)
    assert torch.equal(ours[:, size:], expected)


@models
@pytest.mark.parametrize("method", ["full", "topk_moments"])
def test_a_static_cache_is_the_default_one(name: str, method: str) -> None:
    model = model_of(name)
    expected = under(model, method)[1]
    assert torch.equal(under(model, method, cache_implementation="static")[1], expected)
    padded = F.pad(ids_of(40), (5, 0), value=1)
    mask = F.pad(torch.ones_like(ids_of(40)), (5, 0))
    with partial_kv(model, method, BUDGET, **FEW):
        ours = generated(model, padded, attention_mask=mask, cache_implementation="static")
    assert torch.equal(ours[:, 5:], expected)


@models
def test_a_second_turn_reads_everything_before_it_exactly(name: str) -> None:
    """Its prefix is all text so far, with the keys that generated tokens had."""
    model, (first, second) = model_of(name), (ids_of(40), ids_of(11))
    cache = DynamicCache(config=model.config)
    with partial_kv(model, "topk", BUDGET, **FEW) as session:
        answer = generated(model, first, past_key_values=cache)
        text = torch.cat((answer, second), dim=1)
        kept = copy.deepcopy(cache)
        steps = dict(session.partial_calls)
        ours = generated(model, text, past_key_values=cache, output_logits=True, return_dict_in_generate=True)
        layer = session.backend_of(cache).prefixes[1][0]
    assert layer.partition.mid.shape[-1] == text.shape[1] and layer.partition.mid.sum() == text.shape[1] - 5
    assert session.partial_calls == {index: 2 * calls for index, calls in steps.items()}
    exact = generated(
        model, text, past_key_values=kept, output_logits=True, return_dict_in_generate=True, max_new_tokens=1
    )
    torch.testing.assert_close(ours.logits[0], exact.logits[0], rtol=0, atol=1e-4)


@models
def test_turns_of_full_attention_are_plain_turns(name: str) -> None:
    model, results = model_of(name), []
    for method in ("full", None):
        cache, text = DynamicCache(config=model.config), ids_of(40)
        for turn in range(3):
            if method is None:
                text = generated(model, text, past_key_values=cache)
            else:
                with partial_kv(model, method):  # a context of its own for every turn
                    text = generated(model, text, past_key_values=cache)
            text = torch.cat((text, ids_of(1 + turn)), dim=1)
        results.append(text)
    assert torch.equal(*results)


@models
def test_beams_and_samples_of_everything_retrieved_are_plain_ones(name: str) -> None:
    model = model_of(name)
    for options in ({"num_beams": 3}, {"do_sample": True, "top_p": 0.9}, {"num_beams": 2, "do_sample": True}):
        torch.manual_seed(5)
        plain = generated(model, ids_of(40), **options)
        torch.manual_seed(5)
        with partial_kv(model, "topk", 1.0, **FEW):
            assert torch.equal(generated(model, ids_of(40), **options), plain), options


@pytest.mark.parametrize("name", ["Llama", pytest.param("gpt-oss", marks=pytest.mark.slow)])
def test_a_compiled_model_gives_the_same(name: str) -> None:
    model = model_of(name)
    plain, (whole, expected) = generated(model, ids_of(40)), under(model)
    model.forward = torch.compile(model.forward, backend="eager", dynamic=True)
    assert torch.equal(generated(model, ids_of(40)), plain)
    session, ours = under(model)
    assert torch.equal(ours, expected) and session.partial_calls == whole.partial_calls
    assert torch.equal(generated(model, ids_of(40)), plain)


def test_chunks_are_refused_where_prompts_cannot_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in transformers 4."""
    model = model_of("Llama")
    monkeypatch.setattr(type(model), "_prefill", None, raising=False)
    with pytest.raises(ValueError, match="in one piece with this transformers: unset prefill_chunk_size"):
        under(model, prefill_chunk_size=8)
    model.generation_config.prefill_chunk_size = 8
    with pytest.raises(ValueError, match="unset prefill_chunk_size"):
        under(model)


def test_drafts_are_watched_for_within_the_context_alone() -> None:
    model = model_of("Llama")
    expected = generated(model, ids_of(40))
    model.generation_config.prompt_lookup_num_tokens = 3
    with pytest.raises(ValueError, match="drafts of several"):
        under(model)
    assert torch.equal(generated(model, ids_of(40)), expected)


def test_drafts_are_refused() -> None:
    """Several tokens in one call would be read exactly, as a prompt."""
    model = model_of("Llama")
    for option in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": model_of("Llama")}):
        with pytest.raises(ValueError, match="^partial_kv reads one token a step, not drafts of several: leave out "):
            under(model, **option)
    with pytest.raises(ValueError, match="^partial_kv reads one text, but guidance_scale needs a second one"):
        under(model, guidance_scale=1.5)


def test_a_context_without_a_step_through_the_method_warns() -> None:
    model, line = model_of("Llama"), "^partial_kv: no decode step went through topk, so all attention was full: [^\n]*$"
    with pytest.warns(UserWarning, match=line) as warned, partial_kv(model, "topk", BUDGET):
        model(ids_of(40))
    assert warned[0].filename == __file__
    with pytest.warns(UserWarning, match=line), partial_kv(model, "topk", BUDGET):
        generated(model, ids_of(40), max_new_tokens=1)
    with pytest.warns(UserWarning, match=line), partial_kv(model, "topk", BUDGET):
        generated(model_of("Llama"), ids_of(40))  # another model


def test_no_warning_where_the_method_or_full_attention_is_meant(recwarn: pytest.WarningsRecorder) -> None:
    model = model_of("Llama")
    under(model, "topk")
    partial_generate(model, ids_of(40), max_new_tokens=1, method="topk_mean", budget=BUDGET)
    with partial_kv(model, "full"):
        model(ids_of(40))
    with pytest.raises(RuntimeError, match="inside"), partial_kv(model, "topk", BUDGET):
        raise RuntimeError("inside")
    assert not [one for one in recwarn if "partial_kv" in str(one.message)]


@needs(TRANSFORMERS_5)
def test_a_layer_that_attends_twice_to_a_token_is_refused() -> None:
    model = DiffLlamaForCausalLM(DiffLlamaConfig(**COMMON)).eval()
    model.generation_config.pad_token_id = 1
    with pytest.raises(ValueError, match="DiffLlamaAttention attends several times to one token"):
        under(model)


@pytest.mark.parametrize(
    "name", ["DeepSeek V3", "gpt-oss", pytest.param("MiMo V2", marks=needs(TRANSFORMERS_5)), "Gemma 3n"]
)
def test_feature_maps_work_where_they_fit(name: str) -> None:
    model = model_of(name)
    shape = HeadShape.of(model.config)
    torch.manual_seed(0)
    maps = PhiMaps(shape, MapSpec(d_emb=12, d_phi=4)).requires_grad_(False)
    with partial_kv(model, "topk_phi", 1.0, maps, **FEW):
        assert torch.equal(generated(model, ids_of(40)), generated(model_of(name), ids_of(40)))


def test_maps_of_another_width_than_a_layers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("DeepSeek V3")
    narrow = HeadShape(2, 4, 4, 4)
    monkeypatch.setattr(HeadShape, "of", lambda _: narrow)
    maps = PhiMaps(narrow, MapSpec(d_emb=12, d_phi=4)).requires_grad_(False)
    line = "layer 0 has 4 key heads of width 12, and the phi maps are for 4 of width 4; take a method without maps"
    with pytest.raises(ValueError, match=line), partial_kv(model, "topk_phi", BUDGET, maps, **FEW):
        generated(model, ids_of(40))
