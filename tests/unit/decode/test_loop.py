"""The one loop of `partial_kv`, `partial_decoding` and `partial_generate`: what it takes, and what it refuses."""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.conftest import byte_tokenizer, tiny_llama
from tests.needs import KERNELS, TRANSFORMERS_5, needs
from tests.unit.model.families import COMMON, FAMILIES
from torch import Tensor
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, DynamicCache, PreTrainedModel, StaticCache
from transformers.generation import BaseStreamer, StoppingCriteria, StoppingCriteriaList

from residual_mass import PackedCache, partial_decoding, partial_generate, partial_kv
from residual_mass.model.phi_maps import HeadShape, PhiMaps
from residual_mass.spec.settings import MapSpec

BUDGET = 0.3
FEW = {"num_sink": 2, "num_tail": 3}
LOGITS = {"output_logits": True, "return_dict_in_generate": True}
WINDOWED = ["Gemma 3", "gpt-oss", "Llama 4"]


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def model() -> PreTrainedModel:
    return family("Llama")


def family(name: str, **changes: Any) -> PreTrainedModel:
    """In float64, but for experts, whose product torch has in float32 alone."""
    model = next(one for one in FAMILIES if one.name == name).build(**changes)
    return model if name in ("gpt-oss", "Llama 4") else model.double()


def ids_of(length: int) -> Tensor:
    return torch.randint(2, 99, (1, length), generator=torch.Generator().manual_seed(length))


def generated(model: PreTrainedModel, ids: Tensor, **options: Any) -> Any:
    settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 9}
    return model.generate(ids, **settings | options)


def within(
    model: PreTrainedModel, ids: Tensor, method: str = "topk", budget: float | None = BUDGET, **options: Any
) -> Any:
    with partial_kv(model, method, budget, **FEW):
        return generated(model, ids, **options)


def assert_same(ours: Any, theirs: Any, tolerance: float = 1e-4) -> None:
    assert torch.equal(ours.sequences, theirs.sequences)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(theirs.logits), rtol=0, atol=tolerance)


# ---- what it takes ---------------------------------------------------------------------------------------------------


def padded(lengths: list[int], columns: int, side: str) -> tuple[Tensor, Tensor]:
    """Rows of different lengths in so many columns, and their mask."""
    ids = torch.ones(len(lengths), columns, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        place = slice(0, length) if side == "right" else slice(columns - length, columns)
        ids[row, place] = ids_of(length + row)[0, :length]
        mask[row, place] = 1
    return ids, mask


@pytest.mark.parametrize("name", ["Llama", *WINDOWED])
@pytest.mark.parametrize("lengths", [[60, 40], [1, 64]])
def test_padding_is_not_read(name: str, lengths: list[int]) -> None:
    """With everything read, the logits are those of plain generation with the same mask."""
    model = family(name)
    ids, mask = padded(lengths, 64, "left")
    options = {"attention_mask": mask, "max_new_tokens": 4, **LOGITS}
    assert_same(within(model, ids, "topk", 1.0, **options), generated(model, ids, **options))


def test_a_prompt_that_ends_with_padding_is_refused() -> None:
    """`generate` would go on after the padding, at positions that it counts wrongly."""
    ids, mask = padded([60, 40], 64, "right")
    with pytest.raises(ValueError, match=r"^a prompt ends with padding, [^\n]*: pad on the left"):
        within(family("Llama"), ids, "topk", 1.0, attention_mask=mask, max_new_tokens=4)


@needs(TRANSFORMERS_5)
@pytest.mark.parametrize("name", ["Llama", *WINDOWED])
def test_a_prompt_in_chunks_is_the_prompt(name: str) -> None:
    """The last chunk is a single token with 13; the first one is of padding with `size` of it."""
    model = family(name)
    expected = within(model, ids_of(40), "topk_moments")
    for size in (13, 100):
        assert torch.equal(within(model, ids_of(40), "topk_moments", prefill_chunk_size=size), expected)
    ids, mask = padded([40], 47, "left")
    assert torch.equal(
        within(model, ids, "topk_moments", attention_mask=mask, prefill_chunk_size=7)[:, 7:],
        within(model, ids[:, 7:], "topk_moments"),
    )


@needs(KERNELS)
@pytest.mark.parametrize("method", ["cache8", "topk"])
def test_chunks_of_batches_and_rows_without_end_tokens(method: str) -> None:
    """A packed cache reads a batch, or padding, in one piece; without end tokens rows go on to the last step."""
    model = tiny_llama(layers=2, heads=2, kv_heads=1, width=64).double()
    ids, mask = padded([60, 40], 60, "left")
    options = {
        "attention_mask": mask,
        "custom_generate": partial_decoding(method, BUDGET if method == "topk" else None),
    }
    whole = generated(model, ids, eos_token_id=None, **options)
    for rows in (slice(0, 2), slice(1, 2)):
        more = options | {"attention_mask": mask[rows], "eos_token_id": None}
        assert torch.equal(generated(model, ids[rows], prefill_chunk_size=7, **more), whole[rows])


@pytest.mark.parametrize("name", ["Llama", *WINDOWED])
def test_turns_of_full_attention_are_plain_turns(name: str) -> None:
    model, results = family(name), []
    for method in ("full", None):
        cache, text = DynamicCache(config=model.config), ids_of(40)
        for turn in range(3):
            if method is None:
                text = generated(model, text, past_key_values=cache)
            else:
                text = within(model, text, method, None, past_key_values=cache)  # a context of its own for every turn
            assert cache.get_seq_length() == text.shape[1] - 1
            text = torch.cat((text, ids_of(1 + turn)), dim=1)
        results.append(text)
    assert torch.equal(*results)


def test_copies_of_a_cache_go_on_by_themselves(model: PreTrainedModel) -> None:
    shared = DynamicCache()
    text = within(model, ids_of(40), "topk_moments", past_key_values=shared)
    copies = [copy.deepcopy(shared) for _ in range(3)]
    found = []
    for question, cache in zip((ids_of(5), ids_of(7), ids_of(5)), copies, strict=True):
        whole = torch.cat((text, question), 1)
        found.append(within(model, whole, "topk_moments", past_key_values=cache))
    assert shared.get_seq_length() == text.shape[1] - 1
    assert torch.equal(found[0], found[2]) and not torch.equal(found[0][:, :55], found[1][:, :55])


@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"past_key_values": "new"}])
def test_another_text_between_steps_changes_nothing(model: PreTrainedModel, options: dict[str, Any]) -> None:
    def reads(ids: Tensor, scores: Tensor) -> Tensor:
        own = {name: DynamicCache() if value == "new" else value for name, value in options.items()}
        model(ids_of(30), **own)
        return scores

    decoding = partial_decoding("topk_moments", BUDGET, **FEW)
    alone = generated(model, ids_of(40), custom_generate=decoding, **LOGITS)
    beside = generated(model, ids_of(40), custom_generate=decoding, logits_processor=[reads], **LOGITS)
    assert_same(beside, alone, 1e-9)


@pytest.mark.parametrize("method", ["full", "topk_moments", "scan4"])
def test_a_window_as_long_as_the_longest_text_is_none(method: str) -> None:
    """As in Phi-3 mini 128k and Phi-4 mini, whose windows are of 262,144 tokens."""
    model = family("Phi-3 without a window", sliding_window=512)
    expected = generated(model, ids_of(40))
    with partial_kv(model, method, None if method == "full" else 1.0, **FEW) as session:
        assert torch.equal(generated(model, ids_of(40)), expected)
    assert session.partial_calls == {0: 8, 1: 8}


def test_samples_of_everything_retrieved_are_plain_ones(model: PreTrainedModel) -> None:
    options = {"do_sample": True, "top_p": 0.9, "num_return_sequences": 2}
    torch.manual_seed(5)
    plain = generated(model, ids_of(40), **options)
    torch.manual_seed(5)
    assert torch.equal(within(model, ids_of(40), "topk", 1.0, **options), plain)


def test_vectors_in_place_of_ids(model: PreTrainedModel) -> None:
    vectors = model.get_input_embeddings()(ids_of(40))
    options = {"attention_mask": torch.ones(1, 40), "do_sample": False, "max_new_tokens": 9}
    with partial_kv(model, "topk", BUDGET, **FEW):
        assert torch.equal(model.generate(inputs_embeds=vectors, **options), generated(model, ids_of(40))[:, 40:])


class Heard(BaseStreamer):
    """Keeps what it is given: the prompt, tokens, and an end."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.tokens.append(-1)


def test_a_streamer_hears_every_token(model: PreTrainedModel) -> None:
    heard = [Heard(), Heard()]
    text = within(model, ids_of(60), streamer=heard[0])
    decoding = partial_decoding("topk", BUDGET, **FEW, streamer=heard[1])
    assert torch.equal(generated(model, ids_of(60), custom_generate=decoding), text)
    assert heard[0].tokens == heard[1].tokens == [*text[0].tolist(), -1]


def test_stop_strings_with_a_tokenizer() -> None:
    model, tokenizer, ids = tiny_llama(layers=1).double(), byte_tokenizer(), ids_of(40)
    letters = tokenizer.convert_tokens_to_ids([*"abcdefghijklmnopqrstuvwxyz"])
    options = {"eos_token_id": None, "suppress_tokens": [token for token in range(258) if token not in letters]}
    text = within(model, ids, **options)
    stop = tokenizer.decode(text[0, 42:44])
    assert torch.equal(within(model, ids, stop_strings=[stop], tokenizer=tokenizer, **options), text[:, :44])
    with pytest.raises(ValueError, match="tokenizer"):
        within(model, ids, stop_strings=[stop], **options)


class AfterSum(StoppingCriteria):
    """Stops once the sum of the new tokens passes a number."""

    def __init__(self, start: int, limit: int) -> None:
        self.start, self.limit = start, limit

    def __call__(self, ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return ids[:, self.start :].sum(-1) > self.limit


@pytest.mark.parametrize("place", [0, 1, 5])
def test_it_stops_where_generate_stops(model: PreTrainedModel, place: int) -> None:
    """Behind an end token of the call, or of the model's configuration; or by a criterion."""
    free = within(model, ids_of(60))
    end = int(free[0, 60 + place])
    stopped = free[:, : 61 + free[0, 60:].tolist().index(end)]
    after = StoppingCriteriaList([AfterSum(60, int(free[0, 60 : 60 + place].sum()))])
    with warnings.catch_warnings(action="ignore"):  # where the first token ends it
        for ends in (end, [98, end]):
            assert torch.equal(within(model, ids_of(60), eos_token_id=ends), stopped)
        assert torch.equal(within(model, ids_of(60), stopping_criteria=after), free[:, : 61 + place])
        model.generation_config.eos_token_id = end
        settings = {"max_new_tokens": 9, "method": "topk", "budget": BUDGET, **FEW}
        assert torch.equal(partial_generate(model, ids_of(60), **settings), stopped)
        assert torch.equal(partial_generate(model, ids_of(60), eos_token_id=[], **settings), free)


def test_it_follows_processors_and_the_generation_config(model: PreTrainedModel) -> None:
    for options in ({"repetition_penalty": 1.5}, {"no_repeat_ngram_size": 2}):
        plain = generated(model, ids_of(60), **options)
        assert torch.equal(within(model, ids_of(60), "topk", 1.0, **options), plain), options
    free = within(model, ids_of(60))
    model.generation_config.suppress_tokens = free[0, 62:64].tolist()
    settings = {"max_new_tokens": 9, "method": "topk", "budget": BUDGET, **FEW}
    assert not torch.equal(partial_generate(model, ids_of(60), **settings), free)


# ---- the model -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Llama", pytest.param("gpt-oss", marks=pytest.mark.slow)])
def test_a_compiled_model_gives_the_same(name: str) -> None:
    model = family(name)
    plain, expected = generated(model, ids_of(40)), within(model, ids_of(40))
    model.forward = torch.compile(model.forward, backend="eager", dynamic=True)
    assert torch.equal(within(model, ids_of(40)), expected)
    assert torch.equal(generated(model, ids_of(40)), plain)


def test_a_compiled_wrapper_is_left_as_it_was(model: PreTrainedModel) -> None:
    wrapper = torch.compile(model, backend="eager")
    before, expected = dict(vars(model)), generated(model, ids_of(40))
    for _ in range(2):
        with partial_kv(wrapper, "topk", 1.0, **FEW) as session:
            assert torch.equal(generated(wrapper, ids_of(40)), expected)
        assert session.partial_calls == {0: 8, 1: 8}
    assert vars(model).keys() == before.keys()
    assert torch.equal(partial_generate(wrapper, ids_of(40), max_new_tokens=9, method="topk", budget=1.0), expected)


def test_what_a_user_put_on_the_model_comes_back(model: PreTrainedModel) -> None:
    own = lambda *args, **options: type(model).generate(model, *args, **options)  # noqa: E731
    model.generate = own
    with partial_kv(model, "topk", 1.0, **FEW) as session:
        generated(model, ids_of(40))
    assert model.generate is own and session.partial_calls


@needs(TRANSFORMERS_5)
def test_a_layer_that_attends_twice_to_a_token_is_refused() -> None:
    model = DiffLlamaForCausalLM(DiffLlamaConfig(**COMMON)).eval()
    model.generation_config.pad_token_id = 1
    with pytest.raises(ValueError, match="DiffLlamaForCausalLM attends several times to one token"):
        within(model, ids_of(40))


def maps_of(shape: HeadShape) -> PhiMaps:
    torch.manual_seed(0)
    return PhiMaps(shape, MapSpec(d_emb=12, d_phi=4)).requires_grad_(False)


@pytest.mark.parametrize(
    "name", ["DeepSeek V3", "gpt-oss", pytest.param("MiMo V2", marks=needs(TRANSFORMERS_5)), "Gemma 3n"]
)
def test_feature_maps_work_where_they_fit(name: str) -> None:
    model = next(one for one in FAMILIES if one.name == name).build()
    expected = generated(model, ids_of(40))
    with partial_kv(model, "topk_phi", 1.0, maps_of(HeadShape.of(model.config)), **FEW):
        assert torch.equal(generated(model, ids_of(40)), expected)


def test_maps_of_another_width_than_a_layers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = family("DeepSeek V3")
    narrow = HeadShape(2, 4, 4, 4)
    monkeypatch.setattr(HeadShape, "of", lambda _: narrow)
    line = "layer 0 has 4 key heads of width 12, and the phi maps are for 4 of width 4; take a method without maps"
    with pytest.raises(ValueError, match=line), partial_kv(model, "topk_phi", BUDGET, maps_of(narrow), **FEW):
        generated(model, ids_of(40))


# ---- memory ----------------------------------------------------------------------------------------------------------


def live() -> dict[int, int]:
    """Bytes by address of all storages on the CPU that a tensor refers to; other tests may have left some behind."""
    gc.collect()
    found = {}
    for one in gc.get_objects():
        if issubclass(type(one), Tensor):
            with contextlib.suppress(RuntimeError, NotImplementedError):  # a tensor without storage, such as a fake one
                found[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
    return found


@pytest.mark.parametrize("pad", [0, 30])
def test_keys_and_values_are_held_once(pad: int) -> None:
    """By the cache, whose buffers have room for a quarter more: beside it top-K keeps masks of the prompt's tokens, and
    the indices of its anchors.
    """
    model, held, length, steps = family("Llama"), [], 400, 6
    ids, mask = padded([length - pad, length], length, "left")

    def count(tokens: Tensor, scores: Tensor) -> Tensor:
        if tokens.shape[1] == length + steps:
            held.append(sum(size for place, size in live().items() if place not in before))
        return scores

    before = live()
    options = {"attention_mask": mask, "logits_processor": [count]}
    generated(model, ids, **options)
    within(model, ids, "topk", 0.1, **options)
    plain, ours = held
    config = model.config
    cached = 2 * 2 * 8 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * (length + steps)
    assert plain > cached, "the count misses the cache"
    assert ours - plain < cached * 0.32


# ---- what it refuses -------------------------------------------------------------------------------------------------

ASKED = {"return_dict_in_generate": True}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("a partial step does not support beam search: [^\n]*num_beams=1", {"num_beams": 2}),
    ("a partial step does not support beam sample: [^\n]*num_beams=1", {"num_beams": 2, "do_sample": True}),
    ("a partial step does not support contrastive search: ", {
        "penalty_alpha": 0.6, "top_k": 4, "trust_remote_code": True}),
    ("a partial step does not support group beam search: ", {
        "num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5, "trust_remote_code": True}),
    ("a partial step reads one token, not drafts of several: leave out ", {"prompt_lookup_num_tokens": 3}),
    ("a partial step reads one text, but guidance_scale needs a second one", {"guidance_scale": 1.5}),
    ("a partial step computes no attention weights: unset output_attentions", {"output_attentions": True, **ASKED}),
    ("a partial step keeps no hidden states: unset output_hidden_states", {"output_hidden_states": True, **ASKED}),
    ("our loop counts positions itself: leave out position_ids", {"position_ids": torch.arange(40)[None] + 1}),
]  # fmt: skip


@pytest.mark.parametrize(("line", "options"), REFUSED)
def test_what_is_not_served_is_refused_in_one_line(model: PreTrainedModel, line: str, options: dict[str, Any]) -> None:
    """The same by every way into the loop."""
    pattern = f"^{line}[^\n]*$"
    with pytest.raises(ValueError, match=pattern):
        within(model, ids_of(40), **options)
    with pytest.raises(ValueError, match=pattern):
        generated(model, ids_of(40), custom_generate=partial_decoding("topk", BUDGET), **options)


def test_what_replaces_the_loop_is_refused_within_the_context(model: PreTrainedModel) -> None:
    for name, value in (("assistant_model", model), ("custom_generate", partial_decoding("topk", BUDGET))):
        with pytest.raises(ValueError, match=f"^within partial_kv the method decodes, [^\n]*: leave out {name}$"):
            within(model, ids_of(40), **{name: value})


def test_bare_calls_are_refused_within_the_context(model: PreTrainedModel) -> None:
    """They would be full attention; another model is not concerned, nor is this one afterwards."""
    line = "^within partial_kv a model generates, and a plain call would be full attention: [^\n]*$"
    other, cache = family("Llama"), DynamicCache()
    expected = model(ids_of(40)).logits
    with partial_kv(model, "full"):
        for call in (
            lambda: model(ids_of(40)),
            lambda: model(ids_of(40), use_cache=False, output_attentions=True),
            lambda: model.model(ids_of(1), past_key_values=cache),
            lambda: torch.compile(model, backend="eager")(ids_of(40)),
        ):
            with pytest.raises(ValueError, match=line):
                call()
        assert torch.equal(other(ids_of(40)).logits, expected)
    assert torch.equal(model(ids_of(40)).logits, expected)


def test_texts_that_a_cache_does_not_hold_are_refused(model: PreTrainedModel) -> None:
    """The same text again; new tokens alone, which `generate` tells by the mask; a filled static cache."""
    cache = DynamicCache()
    text = within(model, ids_of(40), past_key_values=cache)
    line = "^the cache holds 48 tokens, and input_ids 40: pass the whole text of all turns, with new tokens$"
    with pytest.raises(ValueError, match=line):
        within(model, ids_of(40), past_key_values=cache)
    line = "^input_ids must hold the whole text of all turns, and attention_mask .B, L. cover it$"
    with pytest.raises(ValueError, match=line):
        within(model, ids_of(90), past_key_values=cache, attention_mask=torch.ones(1, 48 + 90))
    static = StaticCache(config=model.config, max_cache_len=100)
    with pytest.raises(ValueError, match="^our loop does not fill a StaticCache: "):
        within(model, text, past_key_values=static)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": "hello"}, r"^partial_generate takes token ids \[1, L\], not a str: pass tokenizer"),
        ({"input_ids": [[5, 6]]}, "not a list: pass tokenizer"),
        ({"input_ids": ids_of(20).repeat(2, 1)}, r"takes one prompt \[1, L\], not \[2, 20\]; use partial_kv"),
        ({"input_ids": ids_of(20)[0]}, r"takes one prompt \[1, L\], not \[20\]"),
        ({"input_ids": ids_of(0)}, r"takes one prompt \[1, L\], not \[1, 0\]"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0, not above 0"),
        ({"method": "topk_phi"}, r"method topk_phi needs phi maps: pass phi=PhiMaps.load\(...\)"),
        (
            {"method": "topk_mean", "phi": maps_of(HeadShape(2, 4, 2, 8))},
            "method topk_mean uses no phi maps: leave",
        ),
        ({"budget": None}, "method topk chooses tokens: give a budget, such as budget=0.02"),
        ({"compile": "always"}, "compile is 'always', not True, False or \"auto\""),
    ],
)
def test_what_partial_generate_refuses(model: PreTrainedModel, arguments: dict[str, Any], message: str) -> None:
    common = {"input_ids": ids_of(20), "max_new_tokens": 3, "method": "topk", "budget": 0.2}
    with pytest.raises(ValueError, match=message):
        partial_generate(model, **common | arguments)


# ---- warnings --------------------------------------------------------------------------------------------------------


def test_a_context_without_a_step_through_the_method_warns(model: PreTrainedModel) -> None:
    line = "^partial_kv: no decode step went through topk, so all attention was full: [^\n]*$"
    with pytest.warns(UserWarning, match=line) as warned, partial_kv(model, "topk", BUDGET):
        pass
    assert warned[0].filename == __file__
    with pytest.warns(UserWarning, match=line):
        within(model, ids_of(40), max_new_tokens=1)
    with pytest.warns(UserWarning, match=line), partial_kv(model, "topk", BUDGET):
        generated(family("Llama"), ids_of(40))  # another model


def test_no_warning_where_the_method_or_full_attention_is_meant(
    model: PreTrainedModel, recwarn: pytest.WarningsRecorder
) -> None:
    within(model, ids_of(40))
    partial_generate(model, ids_of(40), max_new_tokens=1, method="topk_mean", budget=BUDGET)
    with partial_kv(model, "full"):
        pass
    with pytest.raises(RuntimeError, match="inside"), partial_kv(model, "topk", BUDGET):
        raise RuntimeError("inside")
    assert not [one for one in recwarn if "partial_kv" in str(one.message)]


# ---- packed caches ---------------------------------------------------------------------------------------------------


@needs(KERNELS)
@pytest.mark.parametrize("method", ["cache8", "scan4_regression_64"])
def test_a_packed_cache_is_read_by_the_loop_alone(method: str) -> None:
    """With or without `cache=`; a model that is called by itself refuses it, whether it is empty or not."""
    model = tiny_llama(layers=2, heads=2, kv_heads=1, width=64).double()
    model.generation_config.eos_token_id = None
    line = "^only our own loop reads a PackedCache: generate within [^\n]*$"
    budget = BUDGET if "scan" in method else None
    ids, texts = ids_of(100), []
    with pytest.raises(ValueError, match=line):
        generated(model, ids, past_key_values=PackedCache(model, method))
    for given in (True, False):
        cache = PackedCache(model, method)
        with partial_kv(model, method, budget, cache=cache if given else None) as session:
            texts.append(generated(model, ids, **({} if given else {"past_key_values": cache})))
        assert set(session.partial_calls.values()) == {8} and cache.get_seq_length() == 108
    assert torch.equal(*texts)
    with pytest.raises(ValueError, match=line):
        generated(model, torch.cat((texts[0], ids_of(5)), 1), past_key_values=cache)
    with pytest.raises(ValueError, match="made for another method than topk"):
        within(model, ids, past_key_values=PackedCache(model, method))
