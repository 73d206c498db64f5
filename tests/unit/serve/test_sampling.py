"""How tokens are chosen: each field that samples or changes scores, against its formula and transformers' own."""

from __future__ import annotations

import json
import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
import torch
from tests.needs import KERNELS, needs
from tests.unit.serve.conftest import Asking, at_a_port, lettered, received, served
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from residual_mass.serve.protocol import CompletionRequest
from residual_mass.serve.sampling import Sampling

pytestmark = needs(KERNELS)
PROMPT = torch.tensor([[3, 5, 5, 7]])
EMPTY = torch.tensor([], dtype=torch.long)
SMALL = 12


def scores(seed: int = 0) -> Tensor:
    return 2 * torch.randn(1, SMALL, generator=torch.Generator().manual_seed(seed))


def sampling(defaults: dict[str, Any] | None = None, **fields: Any) -> Sampling:
    request = CompletionRequest.model_validate({"prompt": "a", **fields})
    return Sampling(request, GenerationConfig(**(defaults or {})), SMALL)


def drawn(chooser: Sampling, logits: Tensor, answer: Tensor = EMPTY, times: int = 3000) -> Counter[int]:
    generator = torch.Generator().manual_seed(0)
    text = torch.cat((PROMPT, answer[None]), 1)
    return Counter(chooser.choose(text, answer, logits, generator) for _ in range(times))


@pytest.mark.parametrize(
    ("fields", "warpers"),
    [
        ({"temperature": 0.6}, [TemperatureLogitsWarper(0.6)]),
        ({"temperature": 2}, [TemperatureLogitsWarper(2.0)]),
        ({"top_k": 3}, [TopKLogitsWarper(3)]),
        ({"top_p": 0.7}, [TopPLogitsWarper(0.7)]),
        ({"min_p": 0.2}, [MinPLogitsWarper(0.2)]),
        ({"temperature": 1.5, "top_k": 6, "top_p": 0.9, "min_p": 0.1},
         [TemperatureLogitsWarper(1.5), TopKLogitsWarper(6), TopPLogitsWarper(0.9), MinPLogitsWarper(0.1)]),
    ],
)  # fmt: skip
def test_draws_follow_the_distribution_of_transformers(fields: dict[str, Any], warpers: list[Any]) -> None:
    logits = scores()
    expected = logits
    for warper in warpers:
        expected = warper(PROMPT, expected)
    shares = expected.softmax(-1)[0]
    found = drawn(sampling(**fields), logits)
    for token in range(SMALL):
        share = float(shares[token])
        assert abs(found[token] / 3000 - share) < 4 * math.sqrt(share * (1 - share) / 3000) + 1e-9
    assert set(found) <= set(shares.nonzero().flatten().tolist())


@pytest.mark.parametrize("fields", [{"top_k": 0}, {"top_k": -1}, {"top_p": 1}, {"min_p": 0}, {"temperature": 1}])
def test_bounds_that_keep_all_tokens(fields: dict[str, Any]) -> None:
    assert drawn(sampling(**fields), scores(), times=200) == drawn(sampling(temperature=1.0), scores(), times=200)


def test_greedy_and_defaults_of_the_model() -> None:
    best = int(scores().argmax())
    assert set(drawn(sampling(), scores(), times=20)) == {best}
    assert set(drawn(sampling({"do_sample": True, "temperature": 5.0}, temperature=0), scores(), times=20)) == {best}
    own = {"do_sample": True, "temperature": 1.5, "top_k": 2}
    assert drawn(sampling(own), scores()) == drawn(sampling(temperature=1.5, top_k=2), scores())
    assert drawn(sampling(own, temperature=0.5), scores()) == drawn(sampling(temperature=0.5, top_k=2), scores())
    unused = {"do_sample": False, "top_k": 2}
    assert drawn(sampling(unused, temperature=2), scores()) == drawn(sampling(temperature=2), scores())


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-45, 1e-20])
def test_the_coldest_temperatures_are_greedy(temperature: float) -> None:
    assert set(drawn(sampling(temperature=temperature), scores(), times=20)) == {int(scores().argmax())}


@pytest.mark.parametrize("penalty", [1e-300, 1e-30, 1e30, 1e300])
def test_penalties_of_any_size(penalty: float) -> None:
    """Also of scores that are 0."""
    for temperature in (0, 1.0, 1e-30):
        for logits in (scores(), torch.zeros(1, SMALL), -scores().abs()):
            drawn(sampling(repetition_penalty=penalty, temperature=temperature), logits, times=5)


def test_penalties_are_their_formulas() -> None:
    """Frequency and presence count the answer's tokens, 2 twice and 5 once; repetition the prompt's too."""
    counts = torch.zeros(SMALL)
    counts[2], counts[5] = 2, 1
    for seed in range(12):
        logits = scores(seed)
        for frequency, presence in ((2.0, 0.0), (-2.0, 0.0), (0.0, 2.0), (0.0, -2.0), (1.5, -1.0)):
            chooser = sampling(frequency_penalty=frequency, presence_penalty=presence)
            expected = logits[0] - frequency * counts - presence * (counts > 0)
            assert set(drawn(chooser, logits, torch.tensor([2, 2, 5]), 2)) == {int(expected.argmax())}
        for penalty in (3.0, 0.2):
            expected = logits[0].clone()
            seen = [2, 3, 5, 7]
            expected[seen] = torch.where(expected[seen] < 0, expected[seen] * penalty, expected[seen] / penalty)
            found = drawn(sampling(repetition_penalty=penalty), logits, torch.tensor([2, 2, 5]), 2)
            assert set(found) == {int(expected.argmax())}
            assert found == drawn(sampling({"repetition_penalty": penalty}), logits, torch.tensor([2, 2, 5]), 2)


def test_biases_are_added() -> None:
    assert set(drawn(sampling(logit_bias={"4": 100}), scores(), times=3)) == {4}
    order = scores()[0].argsort(descending=True).tolist()
    assert set(drawn(sampling(logit_bias={str(order[0]): -100.0}), scores(), times=3)) == {order[1]}
    assert 4 not in drawn(sampling(logit_bias={"4": -100}, temperature=2), scores(), times=300)


def test_a_seed_is_of_its_request_alone(asking: Asking) -> None:
    """The same seed gives the same text, also among others at once; n answers have seeds of their own."""
    one = asking.text(temperature=1.5, seed=7)
    assert asking.text(temperature=1.5, seed=8) != one == asking.text(temperature=1.5, seed=7)
    assert len({asking.text(temperature=1.5) for _ in range(3)}) > 1
    several = [choice["text"] for choice in asking.complete(temperature=1.5, seed=7, n=4)["choices"]]
    assert several[0] == one and len(set(several)) == 4
    with at_a_port(served(lettered())) as port, ThreadPoolExecutor(6) as pool:

        def text(seed: int) -> str:
            body = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 1.5, "seed": seed}
            return json.loads(received(port.send("completions", body)).partition("\r\n\r\n")[2])["choices"][0]["text"]

        seeds = [7, 8, 9] * 4
        found = dict(zip(seeds, pool.map(text, seeds), strict=True))
        assert all(found[seed] == each for seed, each in zip(seeds, pool.map(text, seeds), strict=True))
        assert found[7] == one


SCHEMAS = [
    {"type": "object", "properties": {"name": {"enum": ["Ada", "Bob"]}, "old": {"type": "boolean"}},
     "required": ["name", "old"], "additionalProperties": False},
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 1, "maxItems": 3},
    {"anyOf": [{"const": "yes"}, {"const": "no"}]},
    {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {"type": "null"}},
     "required": ["b"], "additionalProperties": False}}, "required": ["a"], "additionalProperties": False},
]  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS)
def test_an_answer_follows_its_schema(asking: Asking, schema: dict[str, Any]) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    for fields in ({}, {"temperature": 2.0, "seed": 1}, {"temperature": 1.0, "seed": 2, "n": 3}):
        answer = asking.chat(max_tokens=400, response_format=wanted, **fields)
        for choice in answer["choices"]:
            if choice["finish_reason"] == "stop":
                jsonschema.validate(json.loads(choice["message"]["content"]), schema)
            else:  # blanks between parts are as many as the model likes
                assert choice["finish_reason"] == "length" and answer["usage"]["completion_tokens"] >= 400
    assert any(choice["finish_reason"] == "stop" for choice in answer["choices"])


def test_any_object(asking: Asking) -> None:
    answer = asking.chat(max_tokens=2, response_format={"type": "json_object"})["choices"][0]
    assert answer["message"]["content"].lstrip().startswith("{")
    assert asking.chat(response_format={"type": "text"})["choices"] == asking.chat()["choices"]


@pytest.mark.parametrize(
    "schema",
    [{"type": "nothing"}, {"$ref": "#/nowhere"}, {"type": "object", "required": 5}, {"pattern": "(", "type": "string"},
     {"type": "array", "minItems": 5, "maxItems": 1}, {"type": "integer", "minimum": 5, "maximum": 1}, {"enum": []}],
)  # fmt: skip
def test_schemas_that_nothing_follows(asking: Asking, schema: dict[str, Any]) -> None:
    wanted = {"type": "json_schema", "json_schema": {"schema": schema}}
    body = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 5, "response_format": wanted}
    error = asking.refusal("chat/completions", body)
    assert error["param"] == "response_format"


def test_repeated_requests_do_not_share_a_grammar(model: PreTrainedModel) -> None:
    asking = Asking(served(model))
    wanted = {"type": "json_schema", "json_schema": {"schema": {"enum": ["aaaa", "bbbb"]}}}
    texts = {asking.chat(max_tokens=50, response_format=wanted)["choices"][0]["message"]["content"] for _ in range(4)}
    assert len(texts) == 1 and texts <= {'"aaaa"', '"bbbb"'}
