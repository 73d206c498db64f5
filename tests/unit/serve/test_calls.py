"""Calls of tools and reasoning in answers, by the tokenizer's `response_template`; the text is given to the model."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.conftest import byte_tokenizer
from tests.needs import KERNELS, TRANSFORMERS_5, needs
from tests.unit.serve.conftest import Asking, events, served
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from residual_mass.serve.calls import Parts
from residual_mass.serve.sampling import Sampling

pytestmark = [needs(KERNELS), needs(TRANSFORMERS_5)]
TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<s>assistant: ",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<call>", "close": "</call>", "repeats": True, "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text"},
    },
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}}]  # fmt: skip
OSLO = '<call>{"name": "weather", "arguments": {"city": "Oslo", "days": "2"}}</call>'
CALL = ("weather", {"city": "Oslo", "days": 2})
ANSWERS: dict[str, tuple[str, str, list[Any]]] = {
    "Rain < sun.": ("Rain < sun.", "", []),
    f"I look.\n{OSLO}": ("I look.", "", [CALL]),
    f"{OSLO}\n{OSLO}": ("", "", [CALL, CALL]),
    f"<think>Where?</think>{OSLO}": ("", "Where?", [CALL]),
    "<think>Where?</think>There.": ("There.", "Where?", []),
    f"{OSLO}<call>weather</call> <b>": ("<call>weather</call> <b>", "", [CALL]),
    'So <call>{"name": "weath': ('So <call>{"name": "weath', "", []),
    '<call>{"no name": 1}</call>': ('<call>{"no name": 1}</call>', "", []),
    "<call>[1]</call>": ("<call>[1]</call>", "", []),
    "a <cal": ("a <cal", "", []),
}
"""What a model writes: its text, reasoning and calls."""


def tokenizer_with_parts() -> PreTrainedTokenizerBase:
    tokenizer = byte_tokenizer()
    tokenizer.response_template = TEMPLATE
    return tokenizer


def message(deltas: list[dict[str, Any]]) -> tuple[str, str, list[Any]]:
    text = "".join(delta.get("content") or "" for delta in deltas)
    reasoning = "".join(delta.get("reasoning_content") or "" for delta in deltas)
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls") or []]
    return text, reasoning, [(call["name"], json.loads(call["arguments"])) for call in calls]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("answer", ANSWERS)
def test_the_parts_of_an_answer_in_pieces_of_any_size(answer: str, size: int) -> None:
    tokenizer = tokenizer_with_parts()
    parts = Parts(tokenizer, tokenizer("<s>user: Hi.</s><s>assistant: ").input_ids, TOOLS)
    deltas = [delta for at in range(0, len(answer), size) for delta in parts.add(answer[at : at + size])]
    assert message([*deltas, *parts.rest()]) == ANSWERS[answer]


def test_text_is_told_as_it_comes() -> None:
    parts = Parts(tokenizer_with_parts(), [], TOOLS)
    assert list(parts.add("I look")) and not list(parts.add("<call>{"))
    assert list(parts.rest()) == [{"content": "<call>{"}]


@pytest.fixture
def asking(model: PreTrainedModel) -> Asking:
    made = Asking(served(model))
    made.service.answers.tokenizer.response_template = TEMPLATE
    return made


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_whole_and_streamed(asking: Asking, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written = [*asking.service.answers.tokenizer(answer).input_ids, 1]
    monkeypatch.setattr(Sampling, "choose", lambda self, ids, so_far, logits, generator: written[len(so_far)])
    text, reasoning, calls = ANSWERS[answer]
    finish = "tool_calls" if calls else "stop"
    choice = asking.chat(tools=TOOLS, max_tokens=200)["choices"][0]
    assert message([choice["message"]]) == (text, reasoning, calls) and choice["finish_reason"] == finish
    body = {"messages": [{"role": "user", "content": "Hi."}], "tools": TOOLS, "max_tokens": 200, "stream": True}
    told = [chunk["choices"][0] for chunk in events(asking.post("chat/completions", {**body, "logprobs": True})[1])]
    assert message([each["delta"] for each in told]) == (text, reasoning, calls)
    assert told[-1]["finish_reason"] == finish
    assert sum(len(each["logprobs"]["content"]) for each in told if each["logprobs"]) == len(written)
    places = [call["index"] for each in told for call in each["delta"].get("tool_calls", [])]
    assert places == list(range(len(calls)))


INLINE = TEMPLATE | {"fields": TEMPLATE["fields"] | {
    "reasoning": {"open": "<r>", "close": "</r>", "content": "text"},
    "tool_calls": {
        "open_pattern": r"<call=(?P<name>\w+)>", "close_pattern": r"</call>\s*", "repeats": True,
        "content": "xml-inline", "content_args": {"tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</\w+>"},
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    },
}}  # fmt: skip
"""Arguments in tags, of which transformers takes a part for all."""


@pytest.mark.parametrize("length", range(1, 55))
def test_a_call_that_breaks_off_is_text(length: int) -> None:
    answer = "<r>Go.</r><call=weather><city>Oslo</city><days>2</days></call>"
    tokenizer = byte_tokenizer()
    tokenizer.response_template = INLINE
    parts = Parts(tokenizer, [], TOOLS)
    text, reasoning, calls = message([*parts.add(answer[: len(answer) - length]), *parts.rest()])
    assert not calls and (length > 51 or reasoning + text == "Go." + answer[len("<r>Go.</r>") : -length])
    whole = Parts(tokenizer, [], TOOLS)
    assert message([*whole.add(answer), *whole.rest()]) == ("", "Go.", [CALL])


def test_calls_go_back_into_the_history(asking: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the client got them; an answer that a limit ends keeps its reason, and JSON of a schema is no call."""
    written = [*asking.service.answers.tokenizer(OSLO).input_ids, 1]
    with monkeypatch.context() as forced:
        forced.setattr(Sampling, "choose", lambda self, ids, so_far, logits, generator: written[len(so_far)])
        given = asking.chat(tools=TOOLS, max_tokens=200)["choices"][0]["message"]
        cut = asking.chat(tools=TOOLS, max_tokens=len(written) - 1)["choices"][0]
    assert given["content"] is None and given["tool_calls"][0]["type"] == "function"
    assert cut["finish_reason"] == "length" and cut["message"]["tool_calls"]
    result = {"role": "tool", "tool_call_id": given["tool_calls"][0]["id"], "content": "rain"}
    history = [{"role": "user", "content": "Rain?"}, given, result]
    assert asking.post("chat/completions", {"messages": history, "tools": TOOLS, "max_tokens": 3})[0] == 200
    form = {"type": "json_schema", "json_schema": {"schema": {"const": OSLO}}}
    whole = asking.chat(tools=TOOLS, response_format=form, max_tokens=200)["choices"][0]["message"]
    assert json.loads(whole["content"]) == OSLO and "tool_calls" not in whole
