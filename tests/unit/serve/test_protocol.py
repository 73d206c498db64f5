"""Fields of requests: each is served, ignored, or refused by name; and mistakes are told in one line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.needs import KERNELS, needs
from tests.unit.serve.conftest import Asking

from residual_mass.serve.protocol import ChatRequest, CompletionRequest, Sampled, tables

pytestmark = needs(KERNELS)
PAGE = Path(__file__).parents[3] / "docs" / "serve.md"
MESSAGES = [{"role": "user", "content": "Tell a tale."}]
CHAT = {"messages": MESSAGES, "max_tokens": 12}
COMPLETION = {"prompt": "Once upon a time", "max_tokens": 12}
KINDS = {"chat/completions": (ChatRequest, CHAT), "completions": (CompletionRequest, COMPLETION)}
DEEP = b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}"


def test_the_table_of_the_page() -> None:
    """If this fails, the message shows what the page should have."""
    assert tables() in PAGE.read_text("utf-8"), f"docs/serve.md should have\n{tables()}"


@pytest.mark.parametrize("path", KINDS)
def test_ignored_fields_change_nothing(asking: Asking, path: str) -> None:
    kind, body = KINDS[path]
    _, plain = asking.post(path, body)
    for name in kind.IGNORED:
        for value in (1, "a", {"b": [None]}):
            status, answer = asking.post(path, {**body, name: value})
            assert status == 200 and answer["choices"] == plain["choices"], name


@pytest.mark.parametrize("path", KINDS)
def test_refused_and_unknown_fields_are_named(asking: Asking, path: str) -> None:
    kind, body = KINDS[path]
    for name in (*kind.REFUSED, "num_beams", "guided_json", "input"):
        error = asking.refusal(path, {**body, name: 1})
        assert error["message"].startswith(f"{name}: ") and error["param"] == name, error
        assert error["message"].endswith("; leave it out") and error["type"] == "invalid_request_error"
        assert kind.REFUSED.get(name, "not a field of this request") in error["message"]


WRONG: dict[str, list[Any]] = {
    "temperature": [-0.1, 2.1, "1", True, [], float("nan"), float("inf")],
    "top_p": [0, 1.1, "1", float("nan")],
    "top_k": [-2, 1.5, "1"],
    "min_p": [-0.1, 1.1, float("nan")],
    "seed": [2**63, 1.5, "1", True],
    "stop": [5, [5], "", ["a", ""], ["a"] * 65, {"a": 1}],
    "frequency_penalty": [2.5, -2.5, "0", float("nan")],
    "presence_penalty": [2.5, -2.5, "0"],
    "repetition_penalty": [0, -1, float("inf"), float("nan")],
    "logit_bias": [{"a": 1}, {"258": 1}, {"-1": 1}, {"1": 101}, {"1": "1"}, [1], {"9" * 5000: 1}, {"1": float("nan")}],
    "n": [0, 17, 1.5, "1"],
    "stream": [1, "true"],
    "stream_options": [{"include_usage": True}, {"other": 1}, 1],
    "cache_prompt": [1, "false"],
    "max_tokens": [-1, 1.5, "1", True],
    "model": ["gpt-4o", 5],
}
WRONG_OF = {
    "chat/completions": {
        "messages": [
            None, "x", [], [5], [{"content": "?"}], [{"role": "user", "content": 5}], [{"role": "king", "content": ""}],
            [{"role": "user"}], [{"role": "user", "content": "?", "other": 1}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}],
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            [{"role": "user", "content": "a" * 140_000}], [{"role": "user", "content": "a" * 2100}],
        ],
        "max_tokens": [0], "max_completion_tokens": [0, "1"], "logprobs": [1, "true"], "top_logprobs": [2, 21, -1],
        "tools": [5, [5], [{"type": "function"}], [{"type": "web_search"}]],
        "tool_choice": ["required", {"type": "function", "function": {"name": "f"}}],
        "response_format": [5, {"type": "xml"}, {"type": "json_schema"}],
        "chat_template_kwargs": [{name: "x"} for name in ("chat_template", "tokenize", "messages", "self")],
    },
    "completions": {
        "prompt": [None, "", [], [[]], ["a", ""], [258], [-1], [1.5], [["a"]], [1, "a"], "a" * 140_000, ["a"] * 257,
                   list(range(250)) * 9],
        "max_tokens": [0], "logprobs": [21, -1, True], "best_of": [2], "echo": [1],
    },
}  # fmt: skip


@pytest.mark.parametrize("path", KINDS)
def test_values_that_a_field_does_not_take(asking: Asking, path: str) -> None:
    _, body = KINDS[path]
    for name, values in (*WRONG.items(), *WRONG_OF[path].items()):
        for value in values:
            if name == "model" and value == "gpt-4o":
                status, answer = asking.post(path, {**body, name: value})
                assert status == 404 and answer["error"]["param"] == "model"
                continue
            error = asking.refusal(path, {**body, name: value})
            assert error["param"] == name and error["message"].startswith(name), (name, value, error)
            assert "\n" not in error["message"] and len(error["message"]) < 1000
    assert asking.post(path, body)[0] == 200


@pytest.mark.parametrize("path", KINDS)
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"5", b'"a"', b"\xff\xfe", b'{"a": 1', DEEP, b'{"n": 1' + b"0" * 5000 + b"}", b"\x00",
     b'{"prompt": "\\ud800", "messages": [{"role": "user", "content": "\\udc00"}]}', b"null"],
)  # fmt: skip
def test_bodies_that_are_no_requests(asking: Asking, path: str, body: bytes) -> None:
    assert asking.refusal(path, body)["message"]


@pytest.mark.parametrize("path", KINDS)
def test_null_is_the_default_of_every_field(asking: Asking, path: str) -> None:
    kind, body = KINDS[path]
    nulls: dict[str, Any] = dict.fromkeys(kind.model_fields.keys() - {"messages", "prompt", "max_tokens"})
    status, answer = asking.post(path, {**body, **nulls})
    assert status == 200 and answer["choices"] == asking.post(path, body)[1]["choices"]


def test_null_is_the_default_of_fields_within_others(asking: Asking) -> None:
    """As clients send them that write all the fields they know of."""
    call = {"id": "a", "type": None, "index": None, "function": {"name": "look", "arguments": None}}
    history = [
        {"role": "user", "content": [{"type": "text", "text": "Hi.", "annotations": None, "cache_control": None}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "content": "1", "tool_call_id": "a"},
    ]
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": None, "strict": None}}
    body = {"messages": history, "max_tokens": 3, "response_format": form}
    assert asking.post("chat/completions", body)[0] == 200
    options = {"stream": True, "stream_options": {"include_usage": None}}
    assert asking.post("completions", {**COMPLETION, **options})[0] == 200
    error = asking.refusal("chat/completions", {"messages": [{"role": None, "content": "a"}]})
    assert error["message"].startswith("messages.0.role: ")


def test_the_fields_are_on_the_page_of_the_interface(asking: Asking) -> None:
    text = asking.http.get("/openapi.json").text
    page = json.loads(text)
    schemas = page["components"]["schemas"]
    for path, (kind, _) in KINDS.items():
        body = page["paths"][f"/v1/{path}"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        schema = schemas[body["$ref"].removeprefix("#/components/schemas/")]
        assert schema["properties"].keys() == kind.model_fields.keys()
        assert issubclass(kind, Sampled) and schema["additionalProperties"] is False
    assert set(re.findall(r'"\$ref":"#/components/schemas/(\w+)"', text)) <= schemas.keys()
    assert text.count('"$ref"') == text.count('"$ref":"#/components/schemas/')


def test_a_mistake_is_named_where_it_is(asking: Asking) -> None:
    """Also within values of several types; null stands for no field everywhere, as in what clients send back."""
    image = {"type": "image_url", "image_url": {"url": "x"}}
    for path, body, message in [
        ("chat/completions", {"messages": [{"role": "user", "content": [image]}]}, "messages.0.content.0.type: Input "),
        ("chat/completions", {"messages": [{"role": "user", "content": 5}]}, "messages.0.content: Input should be a "),
        ("chat/completions", {"messages": [*MESSAGES, {"role": "user", "content": "a", "audio": 1}]},
         "messages.1.audio: not a field of this request; leave it out"),
        ("chat/completions", {"messages": MESSAGES, "stop": ["a", 5]}, "stop.1: Input should be a valid string"),
        ("completions", {"prompt": []}, "prompt: List should have at least 1 item"),
        ("completions", {"prompt": ["a"] * 300}, "prompt: List should have at most 256 items"),
        ("completions", {"prompt": 5}, "prompt: Input should be a valid string or a valid array"),
        ("responses", {"input": [{"type": "reasoning", "summary": []}]}, "input.0.role: Field required"),
    ]:  # fmt: skip
        assert asking.refusal(path, body)["message"].startswith(message), asking.refusal(path, body)
    nulls = {"messages": [{**MESSAGES[0], "audio": None, "phase": None}], "max_tokens": 12, "num_beams": None}
    assert asking.post("chat/completions", nulls)[1]["choices"] == asking.post("chat/completions", CHAT)[1]["choices"]
