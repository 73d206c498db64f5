"""/v1/responses: OpenAI's newer form of a request for one answer.

Nothing is stored, so a further turn holds the whole conversation.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from residual_mass.serve.answers import LogProb, Piece, Question
from residual_mass.serve.protocol import COMMON_IGNORED, ChatRequest, Closed, JsonSchema, Sampled, TextPart
from residual_mass.serve.service import Service
from residual_mass.serve.shapes import is_clients


class InputMessage(Closed):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None


class TextFormat(JsonSchema):
    type: Literal["text", "json_object", "json_schema"] = "text"

    @property
    def asked(self) -> dict[str, Any]:
        """The `response_format` of /v1/chat/completions."""
        schema = self.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
        return {"type": self.type} | ({"json_schema": schema} if self.type == "json_schema" else {})


class TextSettings(Closed):
    format: TextFormat | None = None
    verbosity: str | None = None  # for other models


LOGPROBS = "message.output_text.logprobs"
"""What a request names in `include` to have logarithms."""


class ResponsesRequest(Sampled):
    """A request to /v1/responses."""

    IGNORED: ClassVar[dict[str, str]] = COMMON_IGNORED | {
        "truncation": "nothing is cut",
        "tool_choice": "there are no tools here",
        "parallel_tool_calls": "there are no tools here",
    }
    REFUSED: ClassVar[dict[str, str]] = {
        "previous_response_id": "no answer is stored: send the whole conversation as input",
        "conversation": "no conversation is stored: send it as input",
        "background": "answers are given at once",
        "tools": "for tools take /v1/chat/completions",
        "n": "there is one answer",
    }

    n: Literal[1] | None = None
    input: str | Annotated[list[InputMessage], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    text: TextSettings | None = None
    include: list[str] | None = None

    @field_validator("include")
    @classmethod
    def _what_there_is(cls, value: Any) -> Any:
        if LOGPROBS in (value or []):
            raise ValueError(f"for {LOGPROBS} take /v1/chat/completions; leave it out")
        return value  # there is nothing of the others, such as the results of searches


ALWAYS = {
    "object": "response",
    "error": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "store": False,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "truncation": "disabled",
}
"""Fields that OpenAI's clients expect in every answer, and that no request changes here."""
ECHOED = ("instructions", "max_output_tokens", "temperature", "top_p")
"""Fields of a request that its answer repeats."""


def chat_of(asked: ResponsesRequest) -> ChatRequest:
    """Returns the same request for /v1/chat/completions."""
    messages: list[dict[str, Any]] = []
    if asked.instructions is not None:
        messages.append({"role": "system", "content": asked.instructions})
    given = [{"role": "user", "content": asked.input}]
    if not isinstance(asked.input, str):
        given = [message.model_dump(include={"role", "content"}) for message in asked.input]
    own = {"input", "instructions", "max_output_tokens", "stop", "text", "include"}
    shared = asked.model_dump(exclude=own, exclude_none=True)
    if asked.text is not None and asked.text.format is not None:
        shared["response_format"] = asked.text.format.asked
    if asked.stop:
        shared["stop"] = asked.stop
    return ChatRequest(messages=messages + given, max_tokens=asked.max_output_tokens, **shared)


def response_body(
    asked: ResponsesRequest, question: Question, service: Service, answer: tuple[str, list[LogProb], str | None]
) -> dict[str, Any]:
    """Returns a whole answer."""
    text, _, finish = answer
    return Response(asked, question, service).body(text, finish or "length")


class Response:
    """What is the same in all events of an answer."""

    def __init__(self, asked: ResponsesRequest, question: Question, service: Service) -> None:
        self.asked = asked
        self.question = question
        self.service = service
        self.id = f"resp_{uuid.uuid4().hex}"
        self.item_id = f"msg_{uuid.uuid4().hex}"
        self.created = int(time.time())

    def body(self, text: str | None, finish: str | None) -> dict[str, Any]:
        status = {None: "in_progress", "stop": "completed", "length": "incomplete"}[finish]
        reason = {"reason": "max_output_tokens"} if finish == "length" else None
        output = [] if text is None else [self.item(text, status)]
        return {
            **ALWAYS,
            **{name: getattr(self.asked, name) for name in ECHOED},
            **self.asked.model_dump(include={"text"}, by_alias=True, exclude_none=True),
            "id": self.id,
            "created_at": self.created,
            "model": self.service.name,
            "status": status,
            "incomplete_details": reason,
            "output": output,
            "usage": None if finish is None else self.usage(),
        }

    def item(self, text: str, status: str) -> dict[str, Any]:
        return {
            "type": "message", "id": self.item_id, "role": "assistant", "status": status, "content": [part(text)],
        }  # fmt: skip

    def usage(self) -> dict[str, Any]:
        prompt = len(self.question.ids)
        generated = self.question.generated
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": self.question.cached},
            "output_tokens": generated,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + generated,
        }


def part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


async def response_events(
    asked: ResponsesRequest, question: Question, service: Service, pieces: AsyncIterator[Piece]
) -> AsyncIterator[str]:
    """Yields the events of a streamed answer."""
    response = Response(asked, question, service)
    place = {"item_id": response.item_id, "output_index": 0, "content_index": 0}
    number = 0

    def event(kind: str, **content: Any) -> str:
        nonlocal number
        fields = {"type": kind, "sequence_number": number, **content}
        number += 1
        return f"event: {kind}\ndata: {json.dumps(fields, separators=(',', ':'))}\n\n"

    yield event("response.created", response=response.body(None, None))
    yield event("response.in_progress", response=response.body(None, None))
    empty = {**response.item("", "in_progress"), "content": []}
    yield event("response.output_item.added", output_index=0, item=empty)
    yield event("response.content_part.added", **place, part=part(""))
    texts = []
    finish = None
    try:
        async for piece in pieces:
            finish = piece.finish
            if piece.text:
                texts.append(piece.text)
                yield event("response.output_text.delta", **place, delta=piece.text, logprobs=[])
    except Exception as error:
        code = "invalid_prompt" if is_clients(error) else "server_error"
        failed = {**response.body(None, None), "status": "failed"}
        yield event("response.failed", response={**failed, "error": {"code": code, "message": str(error)}})
        return
    finally:
        await pieces.aclose()
    text = "".join(texts)
    body = response.body(text, finish or "length")
    yield event("response.output_text.done", **place, text=text, logprobs=[])
    yield event("response.content_part.done", **place, part=part(text))
    yield event("response.output_item.done", output_index=0, item=body["output"][0])
    yield event(f"response.{body['status']}", response=body)
