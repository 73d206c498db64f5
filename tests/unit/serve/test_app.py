"""The endpoints: forms of answers, whole and in streams, and who may ask."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tests.needs import KERNELS, needs
from tests.unit.model.families import Family
from tests.unit.model.test_rotary import build as longrope
from tests.unit.serve.conftest import Asking, events, lettered, served
from transformers import PreTrainedModel

from residual_mass.serve import app as serve_app
from residual_mass.serve.app import Access

pytestmark = needs(KERNELS)
PROMPT = "Once upon a time"
MESSAGES = [{"role": "user", "content": "Tell a tale."}]
CHAT = {"messages": MESSAGES, "max_tokens": 12}
COMPLETION = {"prompt": PROMPT, "max_tokens": 12}


def streamed(asking: Asking, path: str, body: dict[str, Any]) -> list[Any]:
    status, text = asking.post(path, {**body, "stream": True})
    assert status == 200 and isinstance(text, str)
    return events(text)


def test_a_chat_whole_and_streamed(asking: Asking) -> None:
    answer = asking.chat()
    choice = answer["choices"][0]
    text = choice["message"]["content"]
    assert len(text) == 12 and choice["finish_reason"] == "length" and choice["message"]["role"] == "assistant"
    prompt = len("<s>") - 2 + len("user: Tell a tale.") + 1 + 1 + len("assistant: ")
    assert answer["usage"] == {
        "prompt_tokens": prompt, "completion_tokens": 12, "total_tokens": prompt + 12,
        "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip
    chunks = streamed(asking, "chat/completions", {**CHAT, "stream_options": {"include_usage": True}})
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"} and len({c["id"] for c in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1]) == text
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == answer["usage"]
    assert all("usage" not in chunk for chunk in streamed(asking, "chat/completions", CHAT))


def test_a_completion_whole_and_streamed(asking: Asking) -> None:
    answer = asking.complete()
    assert answer["object"] == "text_completion" and answer["usage"]["prompt_tokens"] == len(PROMPT)
    chunks = streamed(asking, "completions", COMPLETION)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == answer["choices"][0]["text"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert len(asking.text(PROMPT, max_tokens=None)) == 16


def test_an_end_token_and_the_last_position(asking: Asking) -> None:
    end = asking.service.answers.tokenizer.eos_token_id
    answer = asking.complete(logit_bias={str(end): 100})
    assert answer["choices"][0] == {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}
    assert answer["usage"]["completion_tokens"] == 1
    full = asking.complete("a" * 2040, max_tokens=100)
    assert full["usage"]["completion_tokens"] == 8 and full["choices"][0]["finish_reason"] == "length"


def test_several_prompts_and_answers(asking: Asking) -> None:
    ids = asking.service.answers.tokenizer(PROMPT).input_ids
    one = asking.text()
    for prompt in (ids, [PROMPT], [ids]):
        assert asking.text(prompt) == one
    many = asking.complete([PROMPT, "The sea"], n=2, temperature=1.0, seed=3)
    assert [choice["index"] for choice in many["choices"]] == [0, 1, 2, 3]
    assert many["usage"]["prompt_tokens"] == len(PROMPT) + len("The sea") and many["usage"]["completion_tokens"] > 40
    chunks = streamed(asking, "completions", {**COMPLETION, "prompt": [PROMPT, "The sea"], "n": 2, "temperature": 1.0,
                                              "seed": 3})  # fmt: skip
    for choice in many["choices"]:
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(each["text"] for each in own) == choice["text"]
        assert own[-1]["finish_reason"] == choice["finish_reason"]


@torch.no_grad()
def test_logarithms_are_of_the_model(model: PreTrainedModel) -> None:
    """Of a prompt under full attention, and of an answer that reads all of a short prompt, against the model's own."""
    asking = Asking(served(model, "--method", "scan4_regression_64", "--budget", "100"))
    answer = asking.complete(logprobs=3, echo=True, max_tokens=1)["choices"][0]
    assert answer["text"].startswith(PROMPT) and len(answer["text"]) == len(PROMPT) + 1
    ids = asking.service.answers.tokenizer(answer["text"], return_tensors="pt").input_ids
    expected = model(ids).logits[0].log_softmax(-1)
    logprobs = answer["logprobs"]
    assert "".join(logprobs["tokens"]) == answer["text"]
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert logprobs["text_offset"] == list(range(len(answer["text"])))
    for place in range(1, len(answer["text"])):
        value = float(expected[place - 1, ids[0, place]])
        assert logprobs["token_logprobs"][place] == pytest.approx(value, abs=1e-3)
        assert max(logprobs["top_logprobs"][place].values()) == pytest.approx(
            float(expected[place - 1].max()), abs=1e-3
        )
    scored = asking.complete(logprobs=0, echo=True, max_tokens=0)
    assert scored["choices"][0]["logprobs"]["token_logprobs"] == logprobs["token_logprobs"][:-1]
    assert scored["usage"]["completion_tokens"] == 0 and scored["choices"][0]["text"] == PROMPT


def test_logarithms_of_a_chat(asking: Asking) -> None:
    content = asking.chat(logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert len(content) == 12 and all(len(each["top_logprobs"]) == 2 for each in content)
    for each in content:  # greedy: the likeliest token is the answer's
        assert each["top_logprobs"][0]["token"] == each["token"] and each["bytes"] == list(each["token"].encode())
        assert each["logprob"] == each["top_logprobs"][0]["logprob"] <= 0
    assert asking.chat(logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    biased = asking.chat(logprobs=True, max_tokens=1, logit_bias={"70": 100})["choices"][0]["logprobs"]["content"][0]
    assert biased["token"] == asking.service.answers.tokenizer.decode([70]) and biased["logprob"] < -0.5
    chunks = streamed(asking, "chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2})
    parts = [each for chunk in chunks if (told := chunk["choices"][0]["logprobs"]) for each in told["content"]]
    assert parts == content


def test_roles_parts_tools_and_variables_of_the_template(asking: Asking) -> None:
    def tokens(messages: list[dict[str, Any]], **fields: Any) -> int:
        status, answer = asking.post("chat/completions", {"messages": messages, "max_tokens": 1, **fields})
        assert status == 200, answer
        return answer["usage"]["prompt_tokens"]

    plain = tokens(MESSAGES)
    parts = [{"role": "user", "content": [{"type": "text", "text": "Tell "}, {"type": "text", "text": "a tale."}]}]
    assert tokens(parts) == plain
    assert tokens([{**MESSAGES[0], "role": "developer"}]) == tokens([{**MESSAGES[0], "role": "system"}])
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    assert tokens(MESSAGES, tools=[tool]) > plain + 50 and tokens(MESSAGES, tools=[tool], tool_choice="none") == plain
    assert tokens(MESSAGES, chat_template_kwargs={"mood": "calm"}) == plain + len("calm") + 2
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    history = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]},
               {"role": "tool", "tool_call_id": "1", "content": "rain"}]  # fmt: skip
    assert tokens(history) > plain


def test_a_template_that_refuses(model: PreTrainedModel) -> None:
    asking = Asking(served(model))
    for template in ("{{ raise_exception('roles must alternate') }}", "{{ 1 / 0 }}", "{{ messages[9].role.x }}",
                     "{% for i in range(5) %}{{ messages[0].content[i].no.no }}{% endfor %}"):  # fmt: skip
        asking.service.prompts.tokenizer.chat_template = template
        error = asking.refusal("chat/completions", CHAT)
        assert error["param"] == "messages" and "chat template refuses" in error["message"]
    asking.service.prompts.tokenizer.chat_template = None
    assert "no chat template: send a text to /v1/completions" in asking.refusal("chat/completions", CHAT)["message"]
    assert asking.text()


def test_one_bos(model: PreTrainedModel) -> None:
    from tokenizers.processors import TemplateProcessing

    asking = Asking(served(model))
    tokenizer = asking.service.prompts.tokenizer
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    plain = asking.complete(PROMPT)
    again = asking.complete(f"<s>{PROMPT}")
    assert plain["usage"] == again["usage"] and plain["usage"]["prompt_tokens"] == len(PROMPT) + 1
    assert plain["choices"] == again["choices"]


def test_responses(asking: Asking) -> None:
    body = {"input": "Tell a tale.", "max_output_tokens": 12}
    status, answer = asking.post("responses", body)
    text = answer["output"][0]["content"][0]["text"]
    assert status == 200 and text == asking.chat()["choices"][0]["message"]["content"]
    assert answer["status"] == "incomplete" and answer["usage"]["output_tokens"] == 12
    _, stream = asking.post("responses", {**body, "stream": True})
    parts = [json.loads(part.partition("data: ")[2]) for part in stream.split("\n\n") if part]
    assert [part["sequence_number"] for part in parts] == list(range(len(parts)))
    assert parts[0]["type"] == "response.created" and parts[-1]["type"] == "response.incomplete"
    assert "".join(part["delta"] for part in parts if part["type"] == "response.output_text.delta") == text
    talk = [{"role": "user", "content": [{"type": "input_text", "text": "Tell a tale."}]}]
    assert asking.post("responses", {**body, "input": talk})[1]["output"][0]["content"][0]["text"] == text
    nothing = {"include": ["reasoning.encrypted_content"], "tool_choice": "auto", "parallel_tool_calls": True}
    assert asking.post("responses", {**body, **nothing})[1]["output"][0]["content"][0]["text"] == text
    nothing = {"tools": [], "background": False, "text": {"format": {"type": "text"}}, "previous_response_id": None}
    assert asking.post("responses", {**body, **nothing})[1]["output"][0]["content"][0]["text"] == text
    schema = {"type": "json_schema", "name": "a", "schema": {"enum": ["red"]}}
    chosen = asking.post("responses", {**body, "text": {"format": schema}})[1]
    assert json.loads(chosen["output"][0]["content"][0]["text"]) == "red" and chosen["text"]["format"] == schema
    for wrong in (
        {"n": 2}, {"previous_response_id": "a"}, {"tools": [1]}, {"background": True}, {"input": []}, {"input": 5},
        {"text": {"format": {"type": "xml"}}}, {"include": ["message.output_text.logprobs"]},
    ):  # fmt: skip
        assert asking.refusal("responses", {**body, **wrong})["param"] == next(iter(wrong))


def test_errors_before_a_stream_have_their_status(asking: Asking) -> None:
    for path, body in (("chat/completions", CHAT), ("completions", COMPLETION), ("responses", {"input": "a"})):
        for wrong in ({"temperature": 5}, {"model": "other"}):
            status, error = asking.post(path, {**body, **wrong, "stream": True})
            assert status in (400, 404) and error["error"]["type"] == "invalid_request_error"


def test_routes_that_there_are_not(asking: Asking) -> None:
    for method, path, status in (
        ("GET", "/v1/chat/completions", 405), ("POST", "/v1/models", 405), ("POST", "/reset", 404),
        ("POST", "/load_model", 404), ("POST", "/v1/audio/transcriptions", 404), ("GET", "/v1/models/other", 404),
        ("POST", "/v1/embeddings", 404), ("GET", "/docs", 404), ("DELETE", "/v1/models/tiny", 405),
    ):  # fmt: skip
        reply = asking.http.request(method, path)
        assert reply.status_code == status and reply.json()["error"]["message"], path
    assert asking.http.get("/v1/models").json()["data"] == [asking.http.get("/v1/models/tiny").json()]
    assert asking.http.get("/health").json() == {"status": "ok"}


def test_long_bodies_are_not_read(asking: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_app, "MOST_BYTES", 1000)
    status, answer = asking.post("completions", {"prompt": "a" * 1000})
    assert status == 413 and "longer than 1,000 bytes" in answer["error"]["message"]
    assert asking.post("completions", {"prompt": "a" * 900, "max_tokens": 1})[0] == 200


def statuses(asking: Asking, header: str, values: list[str]) -> list[int]:
    return [asking.http.get("/v1/models", headers={header: value}).status_code for value in values]


def test_the_host_header(model: PreTrainedModel) -> None:
    """A page of another name that resolves to this machine is no client."""
    service = served(model)
    own = ["localhost", "127.0.0.1:8000", "[::1]:8000", "LOCALHOST:1"]
    others = ["evil.example", "127.0.0.1.evil.example", "10.0.0.1", "", "localhost.evil"]
    local = Asking(service)
    assert statuses(local, "host", own) == [200] * 4 and statuses(local, "host", others) == [403] * 5
    everywhere = Asking(service, Access("0.0.0.0", ("box.lan",)))
    assert statuses(everywhere, "host", [*own, "10.0.0.1:8000", "box.lan", "BOX.lan:80"]) == [200] * 7
    assert statuses(everywhere, "host", ["evil.example", "", "lan"]) == [403] * 3


def test_the_key(model: PreTrainedModel) -> None:
    asking = Asking(served(model), Access("127.0.0.1", api_key="secret"))
    assert statuses(asking, "authorization", ["Bearer secret", "bearer secret"]) == [200, 200]
    wrong = ["", "Bearer", "Bearer secre", "Bearer secret2", "Basic secret", "Bearer s\u00e9cret"]
    assert statuses(asking, "authorization", [value.encode("latin-1") for value in wrong]) == [401] * 6
    assert asking.http.get("/health").status_code == 200 and asking.http.get("/openapi.json").status_code == 401


def test_web_pages(model: PreTrainedModel) -> None:
    """Pages of this machine may ask, and those that are named."""
    asking = Asking(served(model), Access("127.0.0.1", origins=("https://friend.example",)))
    for origin, may in (
        ("http://localhost:3000", True), ("https://127.0.0.1", True), ("http://[::1]:5", True),
        ("https://friend.example", True), ("https://evil.example", False), ("http://localhost.evil.example", False),
        ("null", False), ("https://evil.example/http://localhost", False),
    ):  # fmt: skip
        asked = {"origin": origin, "access-control-request-method": "POST",
                 "access-control-request-headers": "content-type,authorization"}  # fmt: skip
        reply = asking.http.options("/v1/chat/completions", headers=asked)
        assert (reply.headers.get("access-control-allow-origin") == origin) == may, origin
        asked_once = asking.http.post(
            "/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers={"origin": origin}
        )
        assert asked_once.status_code == (200 if may else 403), origin
        shown = asking.http.get("/v1/models", headers={"origin": origin}).headers
        assert (shown.get("access-control-allow-origin") == origin) == may, origin


def test_the_header_names_what_generated() -> None:
    asking = Asking(served(lettered(), "--budget", "8", "--weights", "8"))
    reply = asking.http.post("/v1/completions", json=COMPLETION)
    assert reply.headers["x-residual-mass"] == "scan4_regression_64, budget 8 %, weights in 8 bits"


def test_a_model_whose_rotary_frequencies_change() -> None:
    """LongRoPE has others beyond 64 tokens: an answer ends there, and a longer prompt uses no shorter beginning."""
    model = longrope("Phi-3").float()
    asking = Asking(served(model))

    def asked(length: int, tokens: int, **fields: Any) -> tuple[int, int]:
        body = {"prompt": (list(range(2, 90)) * 9)[:length], "max_tokens": tokens, **fields}
        status, answer = asking.post("completions", body)
        assert status == 200, answer
        usage = answer["usage"]
        fresh = asking.post("completions", {**body, "cache_prompt": False})[1]
        assert answer["choices"] == fresh["choices"]
        return usage["completion_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

    assert asked(40, 4) == (4, 0) and asked(60, 20) == (4, 0) and asked(64, 20) == (1, 0)
    assert asked(90, 4, logprobs=2, echo=True) == (4, 0)
    assert asked(600, 4) == (4, 0) and asked(620, 4) == (4, 512) and asked(64, 0, logprobs=1, echo=True) == (0, 0)


def test_a_model_with_dynamic_frequencies(model: PreTrainedModel) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    family = Family("Llama", "LlamaForCausalLM", {"head_dim": 64, "hidden_size": 128, "num_attention_heads": 2,
                    "num_key_value_heads": 1, "vocab_size": 258, "max_position_embeddings": 100,
                    "rope_parameters": rope})  # fmt: skip
    asking = Asking(served(family.build()))
    error = asking.refusal("completions", {"prompt": [5] * 101})
    assert error["param"] == "prompt"
    assert asking.complete([5] * 90, max_tokens=50)["usage"]["completion_tokens"] <= 10
