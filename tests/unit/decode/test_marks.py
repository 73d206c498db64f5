"""Marks of a packed cache: what goes on from one is, bit by bit, what was read to there afresh."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.needs import KERNELS, TRANSFORMERS_5, needs
from tests.unit.model.families import Family
from torch import Tensor
from transformers import PreTrainedModel

from residual_mass import PackedCache
from residual_mass.decode.marks import cache_at, mark_of
from residual_mass.decode.packed_backend import PackedBackend, PackedLayer, window_state
from residual_mass.decode.text import Text
from residual_mass.methods import method_named
from residual_mass.methods.arms import Arm
from residual_mass.spec.settings import AnchorSpec

pytestmark = needs(KERNELS)
WIDE = {
    "vocab_size": 258, "hidden_size": 128, "head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
}  # fmt: skip
WINDOWS = {"sliding_window": 40, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
FAMILIES = [
    Family("Llama", "LlamaForCausalLM", WIDE),
    pytest.param(Family("Gemma 3", "Gemma3ForCausalLM", WIDE | WINDOWS), marks=needs(TRANSFORMERS_5)),
    pytest.param(Family("GPT-OSS", "GptOssForCausalLM", WIDE | WINDOWS | EXPERTS), marks=needs(TRANSFORMERS_5)),
]
METHODS = ["full", "cache8", "scan4", "scan4_regression_64"]
PIECES = (256, 256, 100)


def text_of(model: PreTrainedModel, name: str, cache: PackedCache) -> Text:
    arm = Arm(method_named(name), 4.0 if method_named(name).chooses else None)
    return Text(model, PackedBackend(model, arm, AnchorSpec(), cache))


def ids_of(seed: int, length: int) -> Tensor:
    return torch.randint(2, 258, (1, length), generator=torch.Generator().manual_seed(seed))


def state(cache: PackedCache) -> list[dict[str, Tensor]]:
    return [
        layer.packed.state()[0] if isinstance(layer, PackedLayer) else window_state(layer)[0] for layer in cache.layers
    ]


@torch.no_grad()
def continued(text: Text, first: Tensor, steps: int) -> Tensor:
    """Reads a further turn, then generates; returns all logits, the joins of older tokens among them."""
    found = [text.read(first)]
    for _ in range(steps):
        found.append(text.step(found[-1][:, -1:].argmax(-1)))
    return torch.cat(found, 1)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@torch.no_grad()
def test_a_cache_at_a_mark_is_that_of_the_text_read_afresh(family: Family, method: str) -> None:
    """Marks within a prompt, at its end and within an answer, taken while the text went on, in any order."""
    model = family.build()
    cache = PackedCache(model, method)
    text = text_of(model, method, cache)
    prompt = ids_of(0, sum(PIECES))
    marks = {}
    for piece in prompt.split(PIECES, 1):
        logits = text.read(piece)
        marks[text.tokens] = mark_of(cache)
    answer = []
    for _ in range(150):  # past two joins
        answer.append(logits[:, -1:].argmax(-1))
        logits = text.step(answer[-1])
        if text.tokens in (670, 700, 740):
            marks[text.tokens] = mark_of(cache)
    for place in (512, 740, 612, 670):
        fresh = PackedCache(model, method)
        again = text_of(model, method, fresh)
        for piece in prompt[:, : min(place, 612)].split(256, 1):
            again.read(piece)
        for token in answer[: max(0, place - 612)]:
            again.step(token)
        held = cache_at(cache, marks[place])
        assert held.get_seq_length() == fresh.get_seq_length() == place
        expected = continued(again, ids_of(place, 30), 70)
        assert torch.equal(continued(text_of(model, method, held), ids_of(place, 30), 70), expected), place
    assert torch.equal(text.step(logits[:, -1:].argmax(-1)), text_of_all(model, method, prompt, answer, logits))


def text_of_all(model: PreTrainedModel, method: str, prompt: Tensor, answer: list[Tensor], logits: Tensor) -> Tensor:
    """The step after all that was said, by a cache that was never gone back to."""
    alone = text_of(model, method, PackedCache(model, method))
    for piece in prompt.split(PIECES, 1):
        alone.read(piece)
    for token in answer:
        alone.step(token)
    return alone.step(logits[:, -1:].argmax(-1))


@torch.no_grad()
def test_branches_and_copies_of_a_mark_go_on_alone() -> None:
    model = FAMILIES[0].build()
    cache = PackedCache(model, "scan4_regression_64")
    text = text_of(model, "scan4_regression_64", cache)
    text.read(ids_of(0, 256))
    mark = mark_of(cache)
    text.read(ids_of(1, 200))
    before = copy.deepcopy(state(cache))
    found = []
    for seed in (2, 3, 2):
        branch = cache_at(copy.deepcopy(cache), mark)
        found.append(continued(text_of(model, "scan4_regression_64", branch), ids_of(seed, 70), 70))
    further = cache_at(cache, mark)
    assert torch.equal(continued(text_of(model, "scan4_regression_64", further), ids_of(3, 70), 70), found[1])
    assert torch.equal(found[0], found[2]) and not torch.equal(found[0], found[1])
    for layer, own in zip(before, state(cache), strict=True):
        assert all(torch.equal(own[name], tensor) for name, tensor in layer.items())


@torch.no_grad()
def test_a_mark_of_a_mark_is_one_of_the_text() -> None:
    """A cache at a mark has the marks before it, as its own."""
    model = FAMILIES[0].build()
    cache = PackedCache(model, "cache8")
    text = text_of(model, "cache8", cache)
    marks = []
    for piece in ids_of(0, 768).split(256, 1):
        text.read(piece)
        marks.append(mark_of(cache))
    by_two = cache_at(cache_at(cache, marks[1]), marks[0])
    at_once = cache_at(cache, marks[0])
    found = [continued(text_of(model, "cache8", each), ids_of(1, 300), 5) for each in (by_two, at_once)]
    assert torch.equal(*found)


@torch.no_grad()
def test_a_mark_is_small() -> None:
    model = FAMILIES[0].build()
    cache = PackedCache(model, "scan4_regression_64")
    text_of(model, "scan4_regression_64", cache).read(ids_of(0, 2048))
    size = mark_of(cache).nbytes
    text_of(model, "scan4_regression_64", cache).read(ids_of(1, 1024))
    assert mark_of(cache).nbytes < 1.5 * size < cache.nbytes / 2
