"""The forms in which /v1/chat/completions and /v1/completions write answers, whole and as streams."""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from typing import Any

from residual_mass.serve.answers import LogProb, Piece, Question, answer_of
from residual_mass.serve.calls import Parts
from residual_mass.serve.protocol import Bad
from residual_mass.serve.service import Service

Pieces = AsyncGenerator[tuple[int, Piece], None]
"""Pieces of answers, with the number of their question."""


class Shape(ABC):
    """How an endpoint writes answers."""

    object: str
    chunk: str
    prefix: str

    def __init__(self, service: Service, asked: Any) -> None:
        self.service = service
        self.asked = asked
        self.head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": service.name}

    def body(self, questions: list[Question], by_question: list[list[Piece]]) -> dict[str, Any]:
        choices = []
        for number, pieces in enumerate(by_question):
            text, logprobs, finish = answer_of(iter(pieces))
            choices.append(self.choice(number, text, logprobs, finish or "length"))
        return {**self.head, "object": self.object, "choices": choices, "usage": usage_of(questions)}

    async def events(self, questions: list[Question], pieces: Pieces) -> AsyncIterator[str]:
        """Yields server-sent events."""
        options = self.asked.stream_options
        begun: set[int] = set()
        try:
            async for number, piece in pieces:
                for delta in self.deltas(number, piece, number not in begun):
                    yield event({**self.head, "object": self.chunk, "choices": [delta]})
                begun.add(number)
            if options is not None and options.include_usage:
                yield event({**self.head, "object": self.chunk, "choices": [], "usage": usage_of(questions)})
        except Exception as error:
            message = " ".join(str(error).split())
            kind = "invalid_request_error" if is_clients(error) else "server_error"
            yield event({"error": {"message": message, "type": kind, "param": None, "code": None}})
        finally:
            await pieces.aclose()
        yield "data: [DONE]\n\n"

    @abstractmethod
    def choice(self, number: int, text: str, logprobs: list[LogProb], finish: str) -> dict[str, Any]:
        """Returns a whole answer."""

    @abstractmethod
    def deltas(self, number: int, piece: Piece, first: bool) -> Iterator[dict[str, Any]]:
        """Yields what a stream says of a piece."""

    def written(self, token: int) -> str:
        """Returns the text of a token; `bytes:` and their escapes if it is no whole characters, as OpenAI's."""
        data = self.service.bytes[token]
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{each:02x}" for each in data)


class ChatShape(Shape):
    object = "chat.completion"
    chunk = "chat.completion.chunk"
    prefix = "chatcmpl"

    def __init__(self, service: Service, asked: Any, parts: Callable[[], Parts] | None) -> None:
        """Parts: makes what finds the parts of an answer; None if all of it is text."""
        super().__init__(service, asked)
        self.new_parts = parts
        self.parts: dict[int, Parts] = {}

    def choice(self, number: int, text: str, logprobs: list[LogProb], finish: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self.new_parts is not None:
            deltas, finish = self._parts(number, text, finish)
            message["content"] = "".join(delta.get("content", "") for delta in deltas)
            if reasoning := "".join(delta.get("reasoning_content", "") for delta in deltas):
                message["reasoning_content"] = reasoning
            if calls := [call for delta in deltas for call in delta.get("tool_calls", ())]:
                message["tool_calls"] = [{name: call[name] for name in ("id", "type", "function")} for call in calls]
                message["content"] = message["content"] or None
        return {"index": number, "message": message, "logprobs": self._logprobs(logprobs), "finish_reason": finish}

    def deltas(self, number: int, piece: Piece, first: bool) -> Iterator[dict[str, Any]]:
        same = {"index": number, "logprobs": None, "finish_reason": None}
        if first:
            yield {**same, "delta": {"role": "assistant", "content": ""}}
        said, finish = [{"content": piece.text}] if piece.text else [], piece.finish
        if self.new_parts is not None:
            said, finish = self._parts(number, piece.text, piece.finish)
        if piece.logprobs and not said:
            said = [{"content": ""}]
        for place, delta in enumerate(said):
            logprobs = self._logprobs(piece.logprobs) if place == 0 else None
            yield {**same, "delta": delta, "logprobs": logprobs}
        if finish is not None:
            yield {**same, "delta": {}, "finish_reason": finish}

    def _parts(self, number: int, text: str, finish: str | None) -> tuple[list[dict[str, Any]], str | None]:
        """Returns the deltas of a message that more text of an answer makes, and why it ends."""
        if number not in self.parts:
            self.parts[number] = self.new_parts()
        parts = self.parts[number]
        deltas = list(parts.add(text))
        if finish is not None:
            deltas += parts.rest()
        return deltas, "tool_calls" if parts.calls and finish == "stop" else finish

    def _logprobs(self, logprobs: Any) -> dict[str, Any] | None:
        if self.asked.top is None:
            return None
        content = []
        for each in logprobs:
            likeliest = [self._entry(token, value) for token, value in each.top]
            content.append({**self._entry(each.token, each.value), "top_logprobs": likeliest})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, value: float | None) -> dict[str, Any]:
        return {"token": self.written(token), "logprob": value, "bytes": list(self.service.bytes[token])}


class CompletionShape(Shape):
    object = "text_completion"
    chunk = "text_completion"
    prefix = "cmpl"

    def __init__(self, service: Service, asked: Any) -> None:
        super().__init__(service, asked)
        self.special = set(service.answers.tokenizer.all_special_ids)
        self.offsets: dict[int, int] = {}
        """Characters of a choice so far."""

    def choice(self, number: int, text: str, logprobs: list[LogProb], finish: str | None) -> dict[str, Any]:
        return {"index": number, "text": text, "logprobs": self._logprobs(number, logprobs), "finish_reason": finish}

    def deltas(self, number: int, piece: Piece, first: bool) -> Iterator[dict[str, Any]]:
        if piece.text or piece.logprobs or piece.finish is not None:
            yield self.choice(number, piece.text, list(piece.logprobs), piece.finish)

    def _logprobs(self, number: int, logprobs: list[LogProb]) -> dict[str, Any] | None:
        if self.asked.top is None:
            return None
        tokens = [self.written(each.token) for each in logprobs]
        offsets = []
        for each in logprobs:
            offsets.append(self.offsets.setdefault(number, 0))
            self.offsets[number] += self._characters(each.token)
        likeliest = []
        for each in logprobs:
            values = {self.written(token): value for token, value in each.top}
            likeliest.append(None if each.value is None else values | {self.written(each.token): each.value})
        values = [each.value for each in logprobs]
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": likeliest, "text_offset": offsets}

    def _characters(self, token: int) -> int:
        """Returns how many characters begin with a token; none with a special one, which the text does not show."""
        # The bytes after the first one of a character are 10xxxxxx.
        return 0 if token in self.special else sum(byte & 0xC0 != 0x80 for byte in self.service.bytes[token])


def usage_of(questions: list[Question]) -> dict[str, Any]:
    """Returns the tokens of a request; those of a prompt count once for all of its answers."""
    prompt = sum(len(question.ids) for question in questions if question.number == 0)
    cached = sum(question.cached for question in questions if question.number == 0)
    generated = sum(question.generated for question in questions)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def is_clients(error: Exception) -> bool:
    """Returns whether an error is a mistake of the client."""
    return isinstance(error, Bad) and error.status < 500


def event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, separators=(',', ':'))}\n\n"
