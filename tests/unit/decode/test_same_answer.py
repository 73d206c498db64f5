"""One prompt, method and budget give the same tokens and logits by every door of the package."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from tests.conftest import TINY, byte_tokenizer, tiny_llama
from tests.needs import KERNELS, needs
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from residual_mass import PackedCache, partial_decoding, partial_generate, partial_kv
from residual_mass.decode.backends import backend_for
from residual_mass.decode.engine import SharedPrefillEngine
from residual_mass.decode.forced import ForcedDecoder
from residual_mass.decode.text import Text
from residual_mass.lm_eval import PartialKV
from residual_mass.methods import method_named
from residual_mass.methods.arms import arm_of
from residual_mass.model.loading import Backbone
from residual_mass.serve.answers import Answers, Question
from residual_mass.serve.kept import STRIDE, Kept
from residual_mass.serve.protocol import CompletionRequest
from residual_mass.serve.sampling import Sampling
from residual_mass.spec.arms import ArmSpec
from residual_mass.spec.settings import AnchorSpec

PROMPT = 4 * "The quick brown fox jumps over the lazy dog. "
GIVEN = " And then it sleeps"
NEW = 8
METHODS = ["full", "topk", "topk_moments", "cache8", "scan4_regression_64"]
methods = pytest.mark.parametrize("method", METHODS)
pytestmark = needs(KERNELS)


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@cache
def model() -> PreTrainedModel:
    """In float64, in which no code flips; heads of a width that the kernels serve."""
    made = tiny_llama(layers=2, heads=2, kv_heads=1, width=64).double().requires_grad_(False)
    made.generation_config.eos_token_id = None
    return made


def ids_of(text: str) -> Tensor:
    return torch.tensor([byte_tokenizer()(text, add_special_tokens=False).input_ids])


def budget_of(method: str) -> float | None:
    return 0.2 if method_named(method).chooses else None


def text_of(method: str) -> Text:
    return Text(model(), backend_for(model(), arm_of(method, budget_of(method))))


@cache
def by_hand(method: str, piece: int = 10**6) -> tuple[list[int], Tensor]:
    """Greedy tokens, and the logits [T, V] that each was taken from; the prompt is read in pieces of so many tokens."""
    text, tokens = text_of(method), []
    logits = [text.read(part) for part in ids_of(PROMPT).split(piece, 1)][-1:]
    for _ in range(NEW):
        tokens.append(int(logits[-1].argmax()))
        logits.append(text.step(torch.tensor([[tokens[-1]]])))
    assert text.backend.name == ("packed" if method in ("cache8", "scan4_regression_64") else "torch")
    return tokens, torch.cat(logits, 1)[0]


def assert_same(method: str, output: Any) -> None:
    tokens, logits = by_hand(method)
    assert output.sequences[0, len(PROMPT) :].tolist() == tokens
    torch.testing.assert_close(torch.cat(output.logits), logits[:-1].float(), rtol=0, atol=1e-5)


OPTIONS = {
    "max_new_tokens": NEW, "do_sample": False, "output_logits": True, "return_dict_in_generate": True,
    "pad_token_id": 1,
}  # fmt: skip


@methods
def test_generate_within_the_context_or_with_the_loop(method: str) -> None:
    ids = ids_of(PROMPT)
    settings = {"method": method, "budget": budget_of(method)}
    options = OPTIONS | {"attention_mask": torch.ones_like(ids)}
    assert_same(method, model().generate(ids, custom_generate=partial_decoding(**settings), **options))
    with partial_kv(model(), **settings):
        assert_same(method, model().generate(ids, **options))
    found = partial_generate(model(), ids, max_new_tokens=NEW, **settings)
    assert found[0, len(PROMPT) :].tolist() == by_hand(method)[0]


@methods
def test_a_continuation_of_a_measurement(method: str) -> None:
    """Which reads the prompt once for all arms, and the given tokens at once."""
    arm = ArmSpec(method, None if method == "full" else 20.0)
    engine = SharedPrefillEngine(Backbone(TINY, model(), byte_tokenizer(), "m"), [arm], AnchorSpec(), None, None)
    decoder = ForcedDecoder(engine, ids_of(PROMPT)[0].tolist())
    tokens, logits = by_hand(method)
    torch.testing.assert_close(decoder.served(arm, tokens), logits[1:], rtol=0, atol=1e-5)
    if method in ("full", "topk", "topk_moments"):
        of_arms = decoder.full(tokens)[0] if method == "full" else next(decoder.logits([arm], tokens))
        torch.testing.assert_close(of_arms, logits[1:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", ["cache8", "scan4_regression_64"])
def test_a_server(method: str) -> None:
    kept = Kept(lambda: PackedCache(model(), method), 2**30, None, 0)
    answers = Answers(model(), byte_tokenizer(), arm_of(method, budget_of(method)), kept, frozenset())
    sampling = Sampling(CompletionRequest(prompt="x", temperature=0.0), GenerationConfig(), model().config.vocab_size)
    question = Question(ids_of(PROMPT)[0].tolist(), NEW, [], sampling, top=0)
    found = [each for piece in answers.pieces(question, lambda: False) for each in piece.logprobs]
    tokens, logits = by_hand(method, STRIDE)
    assert [each.token for each in found] == tokens[:NEW]
    expected = logits[:NEW].float().log_softmax(-1)[range(NEW), tokens[:NEW]]
    torch.testing.assert_close(torch.tensor([each.value for each in found]), expected, rtol=0, atol=1e-4)


@methods
def test_lm_eval(method: str) -> None:
    """Likelihoods decode the last token of the context, too."""
    lm = PartialKV(model(), tokenizer=byte_tokenizer(), method=method, budget=budget_of(method), max_length=1000)
    (text,) = lm.generate_until(
        [Instance("generate_until", {}, (PROMPT.rstrip(), {"until": [], "max_gen_toks": NEW}), 0)]
    )
    own, tokens = text_of(method), ids_of(PROMPT.rstrip())
    logits = own.read(tokens)
    found = []
    for _ in range(NEW):
        found.append(int(logits.argmax()))
        logits = own.step(torch.tensor([[found[-1]]]))
    assert text == byte_tokenizer().decode(found, skip_special_tokens=True)
    ((value, _),) = lm.loglikelihood([Instance("loglikelihood", {}, (PROMPT.rstrip(), GIVEN), 0)])
    own, given = text_of(method), ids_of(GIVEN)[0]
    own.read(tokens[:, :-1])
    logits = own.step(torch.cat((tokens[0, -1:], given[:-1]))[None])[0]
    assert value == pytest.approx(float(logits.log_softmax(-1).gather(1, given[:, None]).sum()), abs=1e-4)
