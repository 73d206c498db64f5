"""Whatever a client sends, the server answers it or says in one line what is wrong, and answers the next as before.

Bodies are made from the schemas of the server's own OpenAPI page, some with one thing in them changed.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import tiny_llama
from tests.fuzz.test_specs import JSON, STABLE, changed
from tests.needs import KERNELS, needs
from tests.unit.serve.conftest import Asking, served

pytestmark = needs(KERNELS)
POSITIONS = 96
"""Tokens that the model was made for: no answer takes long."""
TEXTS = st.text(max_size=12) | st.sampled_from(["The sea", "a" * 90, "<s>", "</s>", "{{ 1 / 0 }}", "0", "\0", "\ud800"])
SCHEMAS = st.sampled_from([
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"enum": ["yes", 1]},
    {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}}, {"$ref": "#"},
    {"$ref": "http://127.0.0.1/"}, {"type": "string", "pattern": "(a|b)*c{3,5}"}, {"type": "string", "pattern": "("},
    {"type": "number", "minimum": 5, "maximum": 1}, {"not": {}}, {"oneOf": [{"type": "null"}, {"maxLength": 1}]},
    {"type": "string", "maxLength": -1}, {"type": "strin"}, {"minItems": 10**9, "type": "array"},
])  # fmt: skip
OWN = {
    "schema": SCHEMAS | st.dictionaries(st.text(max_size=5), JSON, max_size=2),
    "logit_bias": st.dictionaries(st.integers(-1, 300).map(str), st.floats(-100, 100) | st.integers(), max_size=3),
    "stop": st.lists(st.text(min_size=1, max_size=3), max_size=3) | TEXTS,
    "arguments": st.sampled_from(["", "{}", '{"a": [1]}', "{", "[]", "NaN", {}, {"a": 1}]),
    "tool_choice": st.sampled_from(["auto", "none", None]),
    "max_tokens": st.integers(1, 5), "max_completion_tokens": st.integers(1, 5), "max_output_tokens": st.integers(1, 5),
    "n": st.integers(1, 3),
}  # fmt: skip
"""Values of fields of which any others take long or are hardly ever right."""


ALWAYS = ("max_tokens", "max_output_tokens", "content")
"""Fields without which an answer takes long, or a message is refused."""


def values(schema: dict[str, Any], defs: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values of a schema as pydantic writes it."""
    if "$ref" in schema:
        return values(defs[schema["$ref"].rpartition("/")[2]], defs)
    if "anyOf" in schema:
        return st.one_of([values(each, defs) for each in schema["anyOf"]])
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum", [schema.get("const")]))
    kind = schema.get("type")
    if kind == "object":
        return objects(schema, defs)
    if kind == "array":
        return st.lists(values(schema["items"], defs), min_size=schema.get("minItems", 0), max_size=3)
    if kind == "integer":
        most = schema.get("maximum", schema.get("exclusiveMaximum", 2**70) - 1)
        return st.integers(schema.get("minimum"), most) | st.integers(max(schema.get("minimum", 0), 0), min(most, 258))
    if kind == "number":
        low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
        floats = st.floats(low, high, allow_nan=False, allow_infinity=False)
        return floats.filter(lambda number: number != schema.get("exclusiveMinimum"))
    return {"string": TEXTS, "boolean": st.booleans(), "null": st.none(), None: JSON}[kind]


@st.composite
def objects(draw: st.DrawFn, schema: dict[str, Any], defs: dict[str, Any]) -> dict[str, Any]:
    """Objects with the required fields and up to four others."""
    properties = schema.get("properties", {})
    if not properties:
        inside = schema.get("additionalProperties")
        return draw(st.dictionaries(TEXTS, JSON if inside is True else values(inside, defs), max_size=2))
    names = list(dict.fromkeys([*schema.get("required", []), *(name for name in ALWAYS if name in properties)]))
    if others := sorted({*properties} - {*names}):
        names += draw(st.lists(st.sampled_from(others), max_size=4, unique=True))
    return {name: draw(OWN[name] if name in OWN else values(properties[name], defs)) for name in names}


@pytest.fixture(scope="module")
def asking() -> Asking:
    model = tiny_llama(width=64)
    model.config.max_position_embeddings = POSITIONS
    return Asking(served(model, "--memory", "4"))


def check(path: str, body: bytes, asking: Asking) -> None:
    reply = asking.http.post(path, content=body)
    if reply.status_code != 200:
        error = reply.json()["error"]
        assert reply.status_code in (400, 404) and error["type"] == "invalid_request_error", (body, reply.text)
        assert len(error["message"].splitlines()) == 1, error
    elif reply.headers["content-type"].startswith("text/event-stream"):
        assert '"server_error"' not in reply.text and "response.failed" not in reply.text, (body, reply.text)
        assert path == "/v1/responses" or reply.text.endswith("data: [DONE]\n\n")
    else:
        assert reply.json()["model"] == "tiny"


@pytest.mark.parametrize("examples", [25, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_any_request_is_answered_and_the_next_one_too(asking: Asking, path: str, examples: int) -> None:
    page = asking.http.get("/openapi.json").json()
    defs = page["components"]["schemas"]
    body = page["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    right = values(body, defs)
    alive = {"prompt": "Once upon a time", "max_tokens": 5, "cache_prompt": False}
    _, before = asking.post("completions", alive)

    @settings(STABLE, max_examples=examples)
    @given(right | right.flatmap(changed) | JSON)
    def ask(given: Any) -> None:
        check(path, json.dumps(given).encode(), asking)
        _, after = asking.post("completions", alive)
        assert after["choices"] == before["choices"], given

    ask()
