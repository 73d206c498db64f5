"""Models whose rotary frequencies depend on the length of the text, against plain generation and one pass over a text.

In float64, so that other tokens come from other frequencies alone. A new model for every plain text: transformers'
dynamic scaling keeps the frequencies of a longer text before.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tests.conftest import TINY, byte_tokenizer
from tests.needs import KERNELS, needs
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from residual_mass import PackedCache, partial_decoding, partial_generate, partial_kv
from residual_mass.decode.backends import backend_for
from residual_mass.decode.engine import SharedPrefillEngine
from residual_mass.decode.forced import ForcedDecoder
from residual_mass.decode.recording import prefill
from residual_mass.decode.text import Text
from residual_mass.lm_eval import BadArgument, PartialKV
from residual_mass.methods.arms import arm_of
from residual_mass.model.loading import Backbone
from residual_mass.model.rotary import frequencies_of
from residual_mass.spec.arms import ArmSpec
from residual_mass.spec.settings import AnchorSpec

LIMIT, WIDTH, NEW = 64, 64, 7
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
served = pytest.mark.parametrize(
    ("name", "length"),
    [("Phi-3", 40), ("Phi-3", 58), ("Phi-3", 65), ("Phi-3", 80), ("Phi-3.5 MoE", 58), ("Phi-3.5 MoE", 65),
     ("dynamic NTK", 40), ("dynamic NTK", 58)],
)  # fmt: skip
"""Prompts whose texts of NEW more tokens read all of them on one side of the limit; the last token is not read."""
crossing = pytest.mark.parametrize(
    ("name", "length"), [("Phi-3", 59), ("Phi-3", 64), ("Phi-3.5 MoE", 59), ("dynamic NTK", 59), ("dynamic NTK", 80)]
)


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


def generated(model: PreTrainedModel, ids: Tensor, new: int = NEW, **options: Any) -> Tensor:
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": new, "do_sample": False}
    return model.generate(ids, **settings | options)


def engine_of(model: PreTrainedModel, *arms: ArmSpec) -> SharedPrefillEngine:
    backbone = Backbone(TINY, model, byte_tokenizer(), "tiny")
    return SharedPrefillEngine(backbone, arms or [ArmSpec("full")], AnchorSpec(), None, None)


def line_of(name: str, lengths: str = "") -> str:
    """The one line that refuses a text."""
    place = "within" if name == "dynamic NTK" else "on one side of"
    kind = "dynamic" if name == "dynamic NTK" else "longrope"
    model = MODELS[name][0]
    return (
        rf"^{model}'s rotary frequencies change beyond 64 tokens \({kind}\), and this asks for texts of "
        rf"{lengths}[^\n]* tokens: keep prompts and answers {place} 64 tokens$"
    )


@names
def test_the_limit_is_where_the_model_changes_its_keys(name: str) -> None:
    assert frequencies_of(build(name)).limit == LIMIT
    first = []
    for length in (LIMIT, LIMIT + 1, LIMIT + 2):
        first.append(prefill(build(name), [[5] * length]).layers[0][0][:, :, 1])
    assert not torch.equal(first[0], first[1])
    assert torch.equal(first[1], first[2]) == (name != "dynamic NTK")


def within(model: PreTrainedModel, ids: Tensor, method: str = "topk", budget: float = 1.0) -> Tensor:
    with partial_kv(model, method, budget):
        return generated(model, ids)


def with_packed_cache(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return generated(model, ids, past_key_values=PackedCache(model, "full"), custom_generate=partial_decoding("full"))


def by_hand(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """A loop of the user's own."""
    text = Text(model, backend_for(model, arm_of("topk", 1.0)))
    with torch.no_grad():
        logits = text.read(ids)
        for _ in range(NEW):
            ids = torch.cat((ids, logits[:, -1:].argmax(-1)), 1)
            logits = text.step(ids[:, -1:])
    return ids


WAYS: dict[str, Callable[[PreTrainedModel, Tensor], Tensor]] = {
    "in the context": within,
    "with a packed cache": with_packed_cache,
    "by hand": by_hand,
    "fastest step": lambda model, ids: partial_generate(model, ids, max_new_tokens=NEW, method="topk", budget=1.0),
    "in chunks": lambda model, ids: generated(
        model, ids, prefill_chunk_size=25, custom_generate=partial_decoding("topk", 1.0)
    ),
}
ways = pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[needs(KERNELS)] if "packed" in way else []) for way in WAYS]
)


@served
@ways
def test_texts_on_one_side_are_those_of_plain_generation(name: str, length: int, way: str) -> None:
    assert torch.equal(WAYS[way](build(name), ids_of(length)), generated(build(name), ids_of(length)))


@crossing
@ways
def test_a_text_that_would_change_its_frequencies_is_refused(name: str, length: int, way: str) -> None:
    with pytest.raises(ValueError, match=line_of(name)):
        WAYS[way](build(name), ids_of(length))


@names
def test_rows_of_a_batch_are_on_one_side(name: str) -> None:
    """Padding does not count."""
    ids = torch.cat((ids_of(90), ids_of(90)))
    mask = torch.ones_like(ids)
    mask[1, :50] = 0
    for custom in (None, partial_decoding("topk", 1.0)):
        model = build(name)
        with pytest.raises(ValueError, match=line_of(name)):
            if custom is None:
                with partial_kv(model, "topk", 1.0):
                    generated(model, ids, attention_mask=mask)
            generated(model, ids, attention_mask=mask, custom_generate=custom)
    ids, mask = ids[:, -60:], mask[:, -60:]
    found = generated(build(name), ids, 5, attention_mask=mask, custom_generate=partial_decoding("topk", 1.0))
    assert torch.equal(found, generated(build(name), ids, 5, attention_mask=mask))


@names
@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=needs(KERNELS))])
def test_a_further_turn_keeps_the_frequencies_of_the_first(name: str, packed: bool) -> None:
    model = build(name)
    method = "full" if packed else "topk"

    def turn(ids: Tensor, cache: Any) -> Tensor:
        decoding = partial_decoding(method, None if packed else 1.0)
        return generated(model, ids, past_key_values=cache, custom_generate=decoding)

    cache = PackedCache(model, method) if packed else DynamicCache()
    first = turn(ids_of(40), cache)
    before = copy.deepcopy(cache)
    with pytest.raises(ValueError, match=line_of(name)):
        turn(torch.cat((first, ids_of(60)), 1), cache)
    text = torch.cat((first, ids_of(10)), 1)
    assert torch.equal(turn(text, cache), turn(text, before)), "what was refused left the cache as it was"
    if not packed:  # whose keys are rounded
        assert torch.equal(turn(text, DynamicCache()), generated(build(name), text))


@names
def test_a_text_between_the_steps_leaves_the_frequencies_alone(name: str) -> None:
    """A criterion calls the model on a longer text after every token, and the text ends at the limit."""
    for ways in ({}, {"custom_generate": partial_decoding("topk", 1.0)}):
        model = build(name)

        def reads_a_long_text(ids: Tensor, scores: Any, model: PreTrainedModel = model, **options: Any) -> Tensor:
            with torch.no_grad():
                model(ids_of(150), use_cache=False)
            return torch.zeros(len(ids), dtype=torch.bool)

        options = {"stopping_criteria": [reads_a_long_text], **ways}
        if ways:
            found = generated(model, ids_of(58), **options)
        else:
            model(ids_of(150))
            with partial_kv(model, "topk", 1.0):
                found = generated(model, ids_of(58))
        assert torch.equal(found, generated(build(name), ids_of(58)))


@names
def test_another_thread_reads_longer_texts_meanwhile(name: str) -> None:
    model = build(name)
    stop = threading.Event()

    def read() -> None:
        with torch.no_grad():
            while not stop.is_set():
                model.model.rotary_emb(torch.zeros(1, dtype=torch.double), torch.arange(200)[None])

    thread = threading.Thread(target=read)
    thread.start()
    try:
        found = [partial_generate(model, ids_of(58), max_new_tokens=NEW, method="topk", budget=1.0) for _ in range(3)]
    finally:
        stop.set()
        thread.join()
    plain = generated(build(name), ids_of(58))
    assert all(torch.equal(each, plain) for each in found)


@served
@torch.no_grad()
def test_given_tokens_are_read_as_one_pass_reads_them(name: str, length: int) -> None:
    text = ids_of(length + NEW - 1)
    plain = build(name)(text).logits[0, length:]
    decoder = ForcedDecoder(engine_of(build(name), ArmSpec("full"), ArmSpec("topk", 100.0)), text[0, :length].tolist())
    given = text[0, length:].tolist()
    full, dense = decoder.full(given)
    torch.testing.assert_close(full, plain, rtol=0, atol=1e-9)
    for state in (None, dense):
        (topk,) = decoder.logits([ArmSpec("topk", 100.0)], given, state)
        torch.testing.assert_close(topk, plain, rtol=0, atol=1e-9)


@crossing
def test_the_engine_refuses_texts_that_change_their_frequencies(name: str, length: int) -> None:
    model = build(name)
    prompt = ids_of(length)[0].tolist()
    topk = ArmSpec("topk", 100.0)
    with pytest.raises(ValueError, match=line_of(name)):
        engine_of(model).generate([prompt], NEW)
    decoder = ForcedDecoder(engine_of(model, topk), prompt)
    for work in (
        lambda: decoder.greedy(5, NEW),
        lambda: decoder.full([5] * NEW),
        lambda: list(decoder.logits([topk], [5] * NEW)),
    ):
        with pytest.raises(ValueError, match=line_of(name)):
            work()


@names
def test_the_engine_decodes_prompts_of_one_side_as_alone(name: str) -> None:
    sides = [(30, 58, 12)] if name == "dynamic NTK" else [(30, 58, 12), (90, 75)]
    arms = ArmSpec("full"), ArmSpec("topk_moments", 20.0)
    for lengths in sides:
        prompts = [ids_of(length)[0].tolist() for length in lengths]
        together = engine_of(build(name), *arms).generate(prompts, NEW)
        for prompt, row in zip(prompts, together, strict=True):
            (alone,) = engine_of(build(name), *arms).generate([prompt], NEW)
            assert [each.tokens for each in row] == [each.tokens for each in alone]
            plain = generated(build(name), torch.tensor([prompt]))[0, len(prompt) :].tolist()
            assert row[0].tokens == plain
    both = [ids_of(length)[0].tolist() for length in (30, 90)]
    with pytest.raises(ValueError, match=line_of(name, "30 to 96")):
        engine_of(build(name)).generate(both, NEW)


def likelihoods(kind: str, texts: list[str], make: Any) -> list[Any]:
    asked = [(text, " and so on to the end") for text in texts] if kind == "loglikelihood" else [(t,) for t in texts]
    model = make(tokenizer=byte_tokenizer(), max_length=200, softmax_dtype="float64")
    return getattr(model, kind)([Instance(kind, {}, arguments, place) for place, arguments in enumerate(asked)])


@names
@pytest.mark.parametrize("kind", ["loglikelihood", "loglikelihood_rolling"])
def test_likelihoods_are_lm_evals_own_or_refused(name: str, kind: str) -> None:
    """Of a short text; of one whose continuation goes beyond the limit, and a long one. A rolling likelihood reads a
    text from its beginning on.
    """

    def ours(**options: Any) -> PartialKV:
        return PartialKV(build(name), method="full", stride=16, **options)

    def theirs(**options: Any) -> HFLM:
        return HFLM(build(name), **options)

    good, across, long = ("Once upon. " * times for times in (2, 5, 9))
    refused = [long] if name == "dynamic NTK" or kind == "loglikelihood_rolling" else []
    if kind == "loglikelihood":
        refused.append(across)
    for text in (good, across, long):
        if text in refused:
            with pytest.raises(BadArgument, match=line_of(name)):
                likelihoods(kind, [good, text], ours)
        else:
            (found,), (expected,) = likelihoods(kind, [text], ours), likelihoods(kind, [text], theirs)
            assert found == pytest.approx(expected, abs=1e-4)


def test_lm_eval_refuses_generation_beyond_the_limit() -> None:
    model = PartialKV(build("Phi-3"), tokenizer=byte_tokenizer(), method="full", max_length=200)
    settings = {"until": ["\n"], "max_gen_toks": 20}
    with pytest.raises(BadArgument, match=line_of("Phi-3", "50 to 69")):
        model.generate_until([Instance("generate_until", {}, ("x" * 50, settings), 0)])


def test_hooks_are_removed() -> None:
    model = build("Phi-3")
    with pytest.raises(KeyError), partial_kv(model, "topk", 0.5):
        assert model.model.rotary_emb._forward_hooks
        raise KeyError
    assert not model.model.rotary_emb._forward_hooks
