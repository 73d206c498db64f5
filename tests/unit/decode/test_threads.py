"""Threads that decode, and others that call the same model meanwhile."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable

import pytest
import torch
from tests.unit.decode.test_generate import BUDGET, FEW, LOGITS, family, generated, ids_of, padded
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from residual_mass import partial_decoding, partial_kv


@pytest.fixture
def model() -> PreTrainedModel:
    return family("Llama").requires_grad_(False)


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
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("loop", ["context", "loop"])
def test_threads_do_not_mix(model: PreTrainedModel, loop: str) -> None:
    texts = [ids_of(length) for length in (40, 31, 44)]
    options = {} if loop == "context" else {"custom_generate": partial_decoding("topk", BUDGET, **FEW)}
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
        if loop == "loop":
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
