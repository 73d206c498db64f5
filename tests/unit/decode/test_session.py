"""What a `partial_kv` context follows or refuses under transformers' own loop: paddings, caches, wrappers, other texts,
threads.
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import transformers
from tests.needs import KERNELS, needs
from tests.unit.model.families import FAMILIES
from tests.unit.model.test_families import FEW, ids_of
from tests.unit.model.test_packed import model as wide_model  # noqa: F401  # a fixture: heads that the kernels serve
from tests.unit.model.test_packed import prompt
from torch import Tensor
from transformers import (
    DynamicCache,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StaticCache,
)

from residual_mass import PackedCache, partial_decoding, partial_generate, partial_kv

BUDGET = 0.3
LOGITS = {"output_logits": True, "return_dict_in_generate": True}


@pytest.fixture
def model() -> PreTrainedModel:
    return family("Llama")


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def family(name: str) -> PreTrainedModel:
    """In float64, but for experts, whose product torch has in float32 alone."""
    model = next(one for one in FAMILIES if one.name == name).build()
    return model if name == "gpt-oss" else model.double()


def generated(model: PreTrainedModel, ids: Tensor, **options: object) -> object:
    settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 9}
    return model.generate(ids, **settings | options)


def padded(lengths: list[int], columns: int, side: str) -> tuple[Tensor, Tensor]:
    """Rows of different lengths in so many columns, and their mask."""
    ids = torch.ones(len(lengths), columns, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        place = slice(0, length) if side == "right" else slice(columns - length, columns)
        ids[row, place] = ids_of(length + row)[0, :length]
        mask[row, place] = 1
    return ids, mask


@pytest.mark.parametrize("name", ["Llama", "Gemma 3", "gpt-oss"])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("lengths", [[40], [60, 40], [64, 40], [1, 64]])
def test_padding_on_either_side_is_not_read(name: str, side: str, lengths: list[int]) -> None:
    """With everything read, the logits are those of plain generation with the same mask."""
    model = family(name)
    ids, mask = padded(lengths, 64, side)
    expected = generated(model, ids, attention_mask=mask, **LOGITS)
    with partial_kv(model, "topk", 1.0, **FEW):
        ours = generated(model, ids, attention_mask=mask, **LOGITS)
    decoded = generated(model, ids, attention_mask=mask, custom_generate=partial_decoding("topk", 1.0, **FEW), **LOGITS)
    for found in (ours, decoded):
        assert torch.equal(found.sequences, expected.sequences)
        tolerance = 1e-9 if model.dtype == torch.float64 else 1e-4
        torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), rtol=0, atol=tolerance)


def test_a_row_padded_on_the_right_is_as_alone(model: PreTrainedModel) -> None:
    """Budget, anchors and summaries are those of the row's own tokens. Every text ends in column 64, so that the first
    generated token has the same logits.
    """
    ids, mask = padded([64, 40], 64, "right")
    for method in ("topk", "topk_moments", "pages"):
        with partial_kv(model, method, BUDGET, **FEW):
            both = generated(model, ids, attention_mask=mask, **LOGITS)
            row = generated(model, ids[1:], attention_mask=mask[1:], **LOGITS)
        logits = [torch.stack(found.logits) for found in (both, row)]
        torch.testing.assert_close(logits[0][:, 1:], logits[1], rtol=0, atol=1e-9)


class Reads(LogitsProcessor):
    """Reads another text between two steps, as decoding that contrasts with it does."""

    def __init__(self, model: PreTrainedModel, other: Tensor, **options: object) -> None:
        self.read = lambda: model(other, **options)

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.read()
        return scores


@pytest.mark.parametrize("method", ["full", "topk", "topk_moments"])
@pytest.mark.parametrize("length", [1, 30, 39, 50])
@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"past_key_values": "new"}])
def test_another_text_between_steps_changes_nothing(
    model: PreTrainedModel, method: str, length: int, options: dict[str, object]
) -> None:
    if "past_key_values" in options:
        options = {"past_key_values": DynamicCache()}
    reads = LogitsProcessorList([Reads(model, ids_of(length), **options)])
    with partial_kv(model, method, BUDGET, **FEW):
        alone = generated(model, ids_of(40), **LOGITS)
        beside = generated(model, ids_of(40), logits_processor=reads, **LOGITS)
    decoding = partial_decoding(method, BUDGET, **FEW)
    decoded = generated(model, ids_of(40), logits_processor=reads, custom_generate=decoding, **LOGITS)
    assert all(map(torch.equal, beside.logits, alone.logits))
    torch.testing.assert_close(torch.stack(decoded.logits), torch.stack(alone.logits), rtol=0, atol=1e-9)


def test_two_texts_take_steps_in_turns(model: PreTrainedModel) -> None:
    texts = [ids_of(40), ids_of(33)]
    alone, together = [], []
    with partial_kv(model, "topk_moments", BUDGET, **FEW):
        for ids in texts:
            cache = DynamicCache()
            outputs = [model(ids, past_key_values=cache), *(model(ids[:, :1], past_key_values=cache) for _ in range(5))]
            alone.append([output.logits[:, -1] for output in outputs[1:]])
        caches = [model(ids).past_key_values for ids in texts]
        for _ in range(5):
            for ids, cache in zip(texts, caches, strict=True):
                together.append(model(ids[:, :1], past_key_values=cache).logits[:, -1])
    assert all(map(torch.equal, together[::2], alone[0]))
    assert all(map(torch.equal, together[1::2], alone[1]))


def test_a_cropped_cache_goes_on_from_there(model: PreTrainedModel) -> None:
    """Also within the prompt, which is then the shorter one."""
    ids = ids_of(40)
    with partial_kv(model, "topk", BUDGET, **FEW):
        for kept in (43, 40, 30):
            cache = DynamicCache()
            model(ids, past_key_values=cache)
            for token in range(4):
                model(ids[:, token : token + 1], past_key_values=cache)
            cache.crop(kept - 44)
            expected = DynamicCache()
            model(ids[:, : min(kept, 40)], past_key_values=expected)
            for token in range(kept - 40):
                model(ids[:, token : token + 1], past_key_values=expected)
            found = model(ids[:, :1], past_key_values=cache).logits
            torch.testing.assert_close(found, model(ids[:, :1], past_key_values=expected).logits, rtol=0, atol=1e-9)


def test_a_cache_from_elsewhere_is_refused(model: PreTrainedModel) -> None:
    cache = DynamicCache()
    model(ids_of(40), past_key_values=cache)
    with partial_kv(model, "topk", BUDGET, **FEW):
        with pytest.raises(
            ValueError, match="^partial_kv: the prompt has to be read within the context, not before it$"
        ):
            model(ids_of(1), past_key_values=cache)
        generated(model, ids_of(40))


def test_copies_of_a_cache_go_on_by_themselves(model: PreTrainedModel) -> None:
    ids, questions = ids_of(40), [ids_of(5), ids_of(7)]
    with partial_kv(model, "topk_moments", BUDGET, **FEW):
        shared = DynamicCache()
        model(ids, past_key_values=shared)
        for question in questions:
            text = torch.cat((ids, question), 1)
            copied = generated(model, text, past_key_values=copy.deepcopy(shared))
            assert torch.equal(copied, generated(model, text))


@pytest.mark.parametrize("method", ["full", "topk_moments", "scan4"])
def test_a_window_as_long_as_the_longest_text_is_none(method: str) -> None:
    """As in Phi-3 mini 128k and Phi-4 mini, whose windows are of 262,144 tokens."""
    phi = next(one for one in FAMILIES if one.name == "Phi-3 without a window")
    model = phi.build(sliding_window=512).double()
    expected = generated(model, ids_of(40))
    with partial_kv(model, method, 1.0, **FEW) as session:
        assert torch.equal(generated(model, ids_of(40)), expected)
        assert torch.equal(generated(model, ids_of(40), cache_implementation="static"), expected)
    assert set(session.partial_calls) == {0, 1}
    assert torch.equal(partial_generate(model, ids_of(40), max_new_tokens=9, method=method, budget=1.0), expected)


# ---- packed caches ---------------------------------------------------------------------------------------------------


@needs(KERNELS)
@pytest.mark.parametrize("method", ["cache8", "scan4_regression_64"])
def test_a_packed_cache_is_read_in_a_context_alone(wide_model: LlamaForCausalLM, method: str) -> None:  # noqa: F811
    """With or without `cache=`; outside of a context it is refused, whether it is empty or not."""
    line = "^only partial_kv and partial_decoding read a PackedCache: call the model within [^\n]*$"
    ids, texts = prompt(100), []
    with pytest.raises(ValueError, match=line):
        generated(wide_model, ids, past_key_values=PackedCache(wide_model, method))
    for given in (True, False):
        cache = PackedCache(wide_model, method)
        with partial_kv(wide_model, method, BUDGET, cache=cache if given else None) as session:
            texts.append(generated(wide_model, ids, past_key_values=cache))
        assert set(session.partial_calls.values()) == {8}
    assert torch.equal(*texts)
    with pytest.raises(ValueError, match=line):
        generated(wide_model, torch.cat((texts[0], prompt(5)), 1), past_key_values=cache)
    with partial_kv(wide_model, "topk", BUDGET), pytest.raises(ValueError, match="made for another method than topk"):
        generated(wide_model, ids, past_key_values=PackedCache(wide_model, method))


@needs(KERNELS)
def test_what_a_packed_cache_cannot_hold_is_decoded_in_torch(wide_model: LlamaForCausalLM) -> None:  # noqa: F811
    """Padding on the right, and a cache of the user's that is to be filled."""
    ids = torch.cat((prompt(60), torch.ones(1, 4, dtype=torch.long)), 1)
    mask = (torch.arange(64) < 60).long()[None]
    decoding = partial_decoding("scan4", 1.0)
    expected = generated(wide_model, ids, attention_mask=mask)
    assert torch.equal(generated(wide_model, ids, attention_mask=mask, custom_generate=decoding), expected)
    filled = StaticCache(config=wide_model.config, max_cache_len=100)
    text = generated(wide_model, prompt(60), past_key_values=filled, custom_generate=decoding)
    assert torch.equal(text, generated(wide_model, prompt(60)))
    assert int(filled.get_seq_length()) == text.shape[1] - 1


# ---- wrappers --------------------------------------------------------------------------------------------------------


def test_a_compiled_wrapper_is_left_as_it_was(model: PreTrainedModel) -> None:
    wrapper = torch.compile(model, backend="eager")
    before, expected = dict(vars(model)), generated(model, ids_of(40))
    for _ in range(3):
        with partial_kv(wrapper, "topk", 1.0, **FEW) as session:
            assert torch.equal(generated(wrapper, ids_of(40)), expected)
        assert set(session.partial_calls.values()) == {8}
    assert vars(model).keys() == before.keys()
    assert torch.equal(partial_generate(wrapper, ids_of(40), max_new_tokens=9, method="topk", budget=1.0), expected)
    assert torch.equal(generated(model, ids_of(40), use_cache=False), expected)


def test_what_a_user_put_on_the_model_comes_back(model: PreTrainedModel) -> None:
    own = lambda *args, **options: type(model).generate(model, *args, **options)  # noqa: E731
    model.generate = own
    with partial_kv(model, "topk", 1.0, **FEW) as session:
        generated(model, ids_of(40))
    assert model.generate is own and session.partial_calls


VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
TEXT = {
    "vocab_size": 120, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.2,
    "bos_token_id": 0, "eos_token_id": None, "pad_token_id": 1,
}  # fmt: skip


def llava() -> PreTrainedModel:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION, projection_dim=32),
        text_config=transformers.LlamaConfig(**TEXT), image_token_index=119,
    )  # fmt: skip
    return transformers.LlavaForConditionalGeneration(config)


def gemma3() -> PreTrainedModel:
    text = transformers.Gemma3TextConfig(**TEXT, layer_types=["sliding_attention", "full_attention"], sliding_window=16)
    config = transformers.Gemma3Config(
        text_config=text, vision_config=transformers.SiglipVisionConfig(**VISION), mm_tokens_per_image=4,
        image_token_index=119,
    )  # fmt: skip
    return transformers.Gemma3ForConditionalGeneration(config)


@pytest.mark.parametrize("build", [llava, gemma3])
@pytest.mark.parametrize("method", ["full", "topk", "topk_moments", "scan4"])
def test_the_text_model_inside_a_multimodal_one(build: Callable[[], PreTrainedModel], method: str) -> None:
    torch.manual_seed(0)
    model = build().eval()
    expected = generated(model, ids_of(40))
    assert torch.equal(partial_generate(model, ids_of(40), max_new_tokens=9, method=method, budget=1.0), expected)


# ---- outputs and threads ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["full", "topk"])
def test_attention_weights_are_refused(model: PreTrainedModel, method: str) -> None:
    line = "^partial_kv computes no attention weights: unset output_attentions$"
    asked = {"output_attentions": True, "return_dict_in_generate": True}
    with partial_kv(model, method, BUDGET, **FEW):
        with pytest.raises(ValueError, match=line):
            generated(model, ids_of(40), **asked)
        with pytest.raises(ValueError, match=line):
            model(ids_of(40), output_attentions=True)
        generated(model, ids_of(40))
    with pytest.raises(ValueError, match=line):
        generated(model, ids_of(40), custom_generate=partial_decoding(method, BUDGET, **FEW), **asked)


def test_hidden_states_are_given(model: PreTrainedModel) -> None:
    """By transformers' own loop, in place of ours."""
    asked = {"output_hidden_states": True, "return_dict_in_generate": True}
    expected = generated(model, ids_of(40), **asked)
    found = generated(model, ids_of(40), custom_generate=partial_decoding("topk", 1.0, **FEW), **asked)
    for ours, theirs in zip(found.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(ours[-1], theirs[-1], rtol=0, atol=1e-9)


class Waits(LogitsProcessor):
    """Holds a generation after its second token."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.go = threading.Event()
        self.calls = 0

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            self.reached.set()
            assert self.go.wait(60)
        return scores


def test_a_generation_that_outlives_its_context_goes_on_by_the_method(model: PreTrainedModel) -> None:
    """As a streamer's thread does. What others generate meanwhile is plain, and so is the model afterwards."""
    with partial_kv(model, "topk", BUDGET, **FEW):
        expected = generated(model, ids_of(40), **LOGITS)
    plain = generated(model, ids_of(30), **LOGITS)
    waits, found = Waits(), []

    def run() -> None:
        found.append(generated(model, ids_of(40), logits_processor=LogitsProcessorList([waits]), **LOGITS))

    thread = threading.Thread(target=run)
    with partial_kv(model, "topk", BUDGET, **FEW):
        thread.start()
        assert waits.reached.wait(60)
    meanwhile = generated(model, ids_of(30), **LOGITS)
    waits.go.set()
    thread.join(60)
    afterwards = generated(model, ids_of(30), **LOGITS)
    assert all(map(torch.equal, found[0].logits, expected.logits))
    for other in (meanwhile, afterwards):
        torch.testing.assert_close(torch.stack(other.logits), torch.stack(plain.logits), rtol=0, atol=1e-9)
    assert not hasattr(model.model.layers[0].self_attn, "residual_mass_handler")


@pytest.mark.parametrize("loop", ["session", "ours"])
def test_threads_do_not_mix(model: PreTrainedModel, loop: str) -> None:
    texts = [ids_of(length) for length in (40, 31, 44)]
    options = {} if loop == "session" else {"custom_generate": partial_decoding("topk", BUDGET, **FEW)}
    found: dict[int, Tensor] = {}

    def run(index: int) -> None:
        found[index] = generated(model, texts[index], max_new_tokens=20, **options)

    def all_of(start: Callable[[int], None]) -> list[Tensor]:
        found.clear()
        for index in range(len(texts)):
            start(index)
        return [found[index] for index in range(len(texts))]

    def in_threads() -> list[Tensor]:
        threads = [threading.Thread(target=run, args=(index,)) for index in range(len(texts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return [found[index] for index in range(len(texts))]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if loop == "ours":
            expected = all_of(run)
            assert all(map(torch.equal, in_threads(), expected))
            return
        with partial_kv(model, "topk", BUDGET, **FEW):
            expected = all_of(run)
            assert all(map(torch.equal, in_threads(), expected))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_model_is_plain_in_other_threads(model: PreTrainedModel, attention: str) -> None:
    """While texts of ours are decoded. In float32: transformers' eager mask overflows in float64."""
    model.float().set_attn_implementation(attention)
    ids, mask = padded([30, 21], 30, "left")
    expected = model(ids, attention_mask=mask).logits
    decoded = generated(model, ids_of(40), max_new_tokens=30, custom_generate=partial_decoding("topk", BUDGET, **FEW))
    found, wrong = [], []

    def decode() -> None:
        options = {"custom_generate": partial_decoding("topk", BUDGET, **FEW), "max_new_tokens": 30}
        found.append(generated(model, ids_of(40), **options))

    def call() -> None:
        for _ in range(60):
            logits = model(ids, attention_mask=mask).logits
            if not torch.allclose(logits[mask.bool()], expected[mask.bool()], rtol=0, atol=1e-4):
                wrong.append(logits)

    threads = [threading.Thread(target=run) for run in (decode, call, decode)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 2 and all(torch.equal(text, decoded) for text in found)
    assert not wrong
    assert model.config._attn_implementation == attention


def test_a_context_that_begins_while_another_thread_decodes(model: PreTrainedModel) -> None:
    expected = generated(model, ids_of(40), max_new_tokens=30, custom_generate=partial_decoding("topk", 1.0, **FEW))
    waits, found = Waits(), []
    options = {
        "custom_generate": partial_decoding("topk", 1.0, **FEW), "max_new_tokens": 30,
        "logits_processor": LogitsProcessorList([waits]),
    }  # fmt: skip
    thread = threading.Thread(target=lambda: found.append(generated(model, ids_of(40), **options)))
    thread.start()
    assert waits.reached.wait(60)
    with partial_kv(model, "topk", 1.0, **FEW):
        assert torch.equal(generated(model, ids_of(40), max_new_tokens=30), expected)
    waits.go.set()
    thread.join(60)
    assert torch.equal(found[0], expected)
    assert model.config._attn_implementation == "sdpa"


@needs(KERNELS)
@pytest.mark.parametrize("method", ["cache8", "topk"])
def test_chunks_of_batches_and_rows_without_end_tokens(wide_model: LlamaForCausalLM, method: str) -> None:  # noqa: F811
    """A packed cache reads a batch, or padding, in one piece; without end tokens rows go on to the last step."""
    ids, mask = padded([60, 40], 60, "left")
    decoding = partial_decoding(method, BUDGET)
    options = {"attention_mask": mask, "custom_generate": decoding, "eos_token_id": None}
    whole = generated(wide_model, ids, **options)
    for rows in (slice(0, 2), slice(1, 2)):
        chunked = generated(wide_model, ids[rows], **options | {"attention_mask": mask[rows]}, prefill_chunk_size=7)
        assert torch.equal(chunked, whole[rows])
