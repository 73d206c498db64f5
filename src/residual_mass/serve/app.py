"""The HTTP application: OpenAI's endpoints over one model."""

from __future__ import annotations

import hmac
import ipaddress
import json
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

from anyio import to_thread
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.middleware.cors import CORSMiddleware

from residual_mass.serve.answers import Answers, LogProb, Piece, Question, answer_of
from residual_mass.serve.prompts import Prompts
from residual_mass.serve.protocol import Bad, ChatRequest, CompletionRequest, Sampled, read
from residual_mass.serve.responses import ResponsesRequest, chat_of, response_body, response_events
from residual_mass.serve.sampling import Grammars, Sampling
from residual_mass.serve.worker import Worker

log = logging.getLogger(__name__)

MOST_BYTES = 32 * 2**20
"""Longest body of a request."""
RETRY_SECONDS = 5
LOCAL_ORIGINS = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"
LOCAL_NAMES = {"localhost", "127.0.0.1", "::1"}


@dataclass(frozen=True)
class Access:
    """Who may ask.

    Attributes:
        host: address that is listened at.
        names: further names of this server in requests.
        origins: of web pages that may ask, beside those of this machine.
        api_key: that every request needs; None for none.
    """

    host: str
    names: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    api_key: str | None = None

    def knows(self, host: str) -> bool:
        """Returns whether a Host header names this server: a web page can point a name of its own at any address."""
        name = re.sub(r":\d+$", "", host.strip().lower()).strip("[]")
        if name in LOCAL_NAMES or name in (self.host.lower(), *self.names):
            return True
        if self.host in LOCAL_NAMES:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


@dataclass
class Service:
    """Everything that requests are answered with.

    Attributes:
        name: of the model, for clients.
        served_by: what generates, for the header of answers.
    """

    answers: Answers
    prompts: Prompts
    worker: Worker
    name: str
    served_by: str
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.vocabulary = self.prompts.vocabulary
        self.grammars = Grammars(self.answers.tokenizer, self.vocabulary, self.answers.ends)

    def require_model(self, name: str | None) -> None:
        if name is not None and name != self.name:
            raise Bad(f"model: this server has {self.name} and no other, such as {name!r}", "model", 404)

    def questions(self, request: Sampled, prompts: list[list[int]], keep: bool = True) -> list[Question]:
        """Returns a question for each answer that is asked for; raises Bad for what cannot be asked."""
        if request.stream_options is not None and not request.stream:
            raise Bad("stream_options: they are for streams; leave them out", "stream_options")
        if getattr(request, "top_logprobs", None) is not None and not request.logprobs:
            raise Bad("top_logprobs: it needs logprobs=true", "top_logprobs")
        grammar = self.grammars.of(getattr(request, "response_format", None))
        questions = []
        for ids in prompts:
            for number in range(request.n or 1):
                own = None if grammar is None else grammar.copy()
                sampling = Sampling(request, self.answers.model.generation_config, self.vocabulary, own)
                limit = self.prompts.room(ids, request.limit)
                stops = request.stop or []
                kept = keep and request.cache_prompt is not False
                questions.append(Question(ids, limit, stops, sampling, number, request.top, kept))
        return questions


def build(service: Service, access: Access, closing: Callable[[], None]) -> FastAPI:
    """Returns the application.

    Args:
        closing: called when the server ends.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await to_thread.run_sync(closing)

    app = FastAPI(title=f"{service.name}, {service.served_by}", lifespan=lifespan, docs_url=None, redoc_url=None)
    routes = Routes(service)
    body = {"required": True}
    for path, endpoint, kind in (
        ("/v1/chat/completions", routes.chat, ChatRequest),
        ("/v1/completions", routes.completions, CompletionRequest),
        ("/v1/responses", routes.responses, ResponsesRequest),
    ):
        schema = {"application/json": {"schema": kind.model_json_schema()}}
        app.post(path, openapi_extra={"requestBody": body | {"content": schema}})(endpoint)
    app.get("/v1/models")(routes.models)
    app.get("/v1/models/{name:path}")(routes.model)
    app.get("/health")(routes.health)
    app.add_exception_handler(Bad, refused)
    app.add_exception_handler(HTTPException, refused)
    app.add_exception_handler(404, refused)
    app.add_exception_handler(405, refused)
    app.add_exception_handler(Exception, failed)
    app.middleware("http")(partial(guarded, access, service.served_by))
    app.add_middleware(
        CORSMiddleware,
        allow_origins=list(access.origins),
        allow_origin_regex=LOCAL_ORIGINS,
        allow_methods=["GET", "POST", "OPTIONS"],
        allow_headers=["*"],
    )
    return app


async def guarded(
    access: Access, served_by: str, request: Request, call_next: Callable[[Request], Awaitable[Response]]
) -> Response:
    """Refuses requests to other hosts or without the key, before anything is read."""
    if not access.knows(request.headers.get("host", "")):
        return error_of("the Host header names another server: use its address, or start it with --allow-host", 403)
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    if access.api_key is not None and request.url.path != "/health":
        if not hmac.compare_digest(given.encode(), access.api_key.encode()):
            return error_of("the API key is missing or wrong: send it as a Bearer token", 401)
    response = await call_next(request)
    response.headers["x-residual-mass"] = served_by
    return response


def error_of(message: str, status: int, field: str | None = None) -> JSONResponse:
    """Returns an error in OpenAI's form, in one line."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    error = {"message": " ".join(message.split()), "type": kind, "param": field, "code": None}
    headers = {"Retry-After": str(RETRY_SECONDS)} if status in (429, 503) else {}
    return JSONResponse({"error": error}, status, headers)


async def refused(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, Bad):
        return error_of(str(error), error.status, error.field)
    detail = getattr(error, "detail", str(error))
    return error_of(f"{request.method} {request.url.path}: {detail}", getattr(error, "status_code", 400))


async def failed(request: Request, error: Exception) -> JSONResponse:
    """Returns any other error in one line; the server's log has the traceback."""
    return error_of(f"{type(error).__name__}: {error}", 500)


class Routes:
    """The endpoints."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self.model(self.service.name)]}

    def model(self, name: str) -> dict[str, Any]:
        self.service.require_model(name)
        return {
            "id": self.service.name,
            "object": "model",
            "created": self.service.created,
            "owned_by": "residual-mass",
        }

    async def health(self) -> dict[str, str]:
        return {"status": "ok"}

    async def chat(self, request: Request) -> Response:
        asked: ChatRequest = await self._read(request, ChatRequest)
        ids = await to_thread.run_sync(self.service.prompts.of_chat, asked)
        questions = self.service.questions(asked, [ids])
        shape = ChatShape(self.service, asked)
        return await self._answered(request, asked, questions, shape)

    async def completions(self, request: Request) -> Response:
        asked: CompletionRequest = await self._read(request, CompletionRequest)
        if asked.max_tokens == 0 and not asked.echo:
            raise Bad("max_tokens: 0 new tokens are an answer only with echo=true", "max_tokens")
        prompts = await to_thread.run_sync(self.service.prompts.of_completion, asked)
        if asked.limit is None:
            asked.max_tokens = 16  # as OpenAI's
        questions = self.service.questions(asked, prompts)
        shape = CompletionShape(self.service, asked)
        return await self._answered(request, asked, questions, shape)

    async def responses(self, request: Request) -> Response:
        asked: ResponsesRequest = await self._read(request, ResponsesRequest)
        chat = chat_of(asked)
        ids = await to_thread.run_sync(self.service.prompts.of_chat, chat)
        (question,) = self.service.questions(chat, [ids])
        work = partial(self.service.answers.pieces, question)
        results = self.service.worker.results(work)
        if asked.stream:
            first = await anext(results)
            events = response_events(asked, question, self.service, joined(first, results))
            return StreamingResponse(events, media_type="text/event-stream")
        pieces = [piece async for piece in while_connected(request, results)]
        return JSONResponse(response_body(asked, question, self.service, answer_of(iter(pieces))))

    async def _read(self, request: Request, kind: type[Any]) -> Any:
        """Reads the body of a request up to its limit."""
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > MOST_BYTES:
                raise Bad(f"the body is longer than {MOST_BYTES:,} bytes", status=413)
        asked = await to_thread.run_sync(read, kind, bytes(body))
        self.service.require_model(asked.model)
        return asked

    async def _answered(self, request: Request, asked: Sampled, questions: list[Question], shape: Shape) -> Response:
        """Answers questions one after the other, as one object or as a stream."""
        work = partial(answered, self.service.answers, questions, bool(getattr(asked, "echo", False)))
        results = self.service.worker.results(work)
        if asked.stream:
            first = await anext(results)  # mistakes are told before the stream begins
            return StreamingResponse(shape.events(questions, joined(first, results)), media_type="text/event-stream")
        by_question: list[list[Any]] = [[] for _ in questions]
        async for number, piece in while_connected(request, results):
            by_question[number].append(piece)
        return JSONResponse(shape.body(questions, by_question))


def answered(
    answers: Answers, questions: list[Question], echo: bool, left: Callable[[], bool]
) -> Iterator[tuple[int, Piece]]:
    """Yields the pieces of answers with the number of their question."""
    for number, question in enumerate(questions):
        pieces: Iterator[Piece] = iter(())
        if question.limit > 0:
            pieces = answers.pieces(question, left)
        if echo:
            pieces = chain([echoed(answers, question)], pieces)
        for piece in pieces:
            yield number, piece


def echoed(answers: Answers, question: Question) -> Piece:
    """Returns the prompt as the first piece of its answer."""
    text = answers.tokenizer.decode(question.ids, skip_special_tokens=True)
    logprobs: tuple[LogProb, ...] = ()
    if question.top is not None:
        logprobs = tuple(answers.prompt_logprobs(question.ids, question.top))
    return Piece(text, logprobs, None if question.limit > 0 else "length")


async def joined(first: Any, rest: AsyncIterator[Any]) -> AsyncIterator[Any]:
    yield first
    async for each in rest:
        yield each


async def while_connected(request: Request, results: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """Passes results on; ends the work soon after the client has left."""
    import asyncio

    async def gone() -> None:
        while not await request.is_disconnected():
            await asyncio.sleep(0.2)

    watch = asyncio.ensure_future(gone())
    try:
        while True:
            step = asyncio.ensure_future(anext(results, None))
            await asyncio.wait((step, watch), return_when=asyncio.FIRST_COMPLETED)
            if not step.done():
                step.cancel()
                raise Bad("the client has left", status=499)
            result = step.result()
            if result is None:
                return
            yield result
    finally:
        watch.cancel()
        await results.aclose()


# ---- the forms of answers --------------------------------------------------------------------------------------------


class Shape:
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

    async def events(self, questions: list[Question], pieces: AsyncIterator[tuple[int, Piece]]) -> AsyncIterator[str]:
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
            kind = "invalid_request_error" if isinstance(error, Bad) else "server_error"
            yield event({"error": {"message": message, "type": kind, "param": None, "code": None}})
        finally:
            await pieces.aclose()
        yield "data: [DONE]\n\n"

    def choice(self, number: int, text: str, logprobs: list[LogProb], finish: str) -> dict[str, Any]:
        raise NotImplementedError

    def deltas(self, number: int, piece: Piece, first: bool) -> Iterator[dict[str, Any]]:
        raise NotImplementedError

    def written(self, token: int) -> str:
        return self.service.answers.tokenizer.decode([token])


class ChatShape(Shape):
    object = "chat.completion"
    chunk = "chat.completion.chunk"
    prefix = "chatcmpl"

    def choice(self, number: int, text: str, logprobs: list[LogProb], finish: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": number, "message": message, "logprobs": self._logprobs(logprobs), "finish_reason": finish}

    def deltas(self, number: int, piece: Piece, first: bool) -> Iterator[dict[str, Any]]:
        same = {"index": number, "logprobs": None, "finish_reason": None}
        if first:
            yield {**same, "delta": {"role": "assistant", "content": ""}}
        if piece.text or piece.logprobs:
            yield {**same, "delta": {"content": piece.text}, "logprobs": self._logprobs(piece.logprobs)}
        if piece.finish is not None:
            yield {**same, "delta": {}, "finish_reason": piece.finish}

    def _logprobs(self, logprobs: Any) -> dict[str, Any] | None:
        if self.asked.top is None:
            return None
        content = []
        for each in logprobs:
            likeliest = [self._entry(token, value) for token, value in each.top]
            content.append({**self._entry(each.token, each.value), "top_logprobs": likeliest})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, value: float | None) -> dict[str, Any]:
        text = self.written(token)
        return {"token": text, "logprob": value, "bytes": list(text.encode())}


class CompletionShape(Shape):
    object = "text_completion"
    chunk = "text_completion"
    prefix = "cmpl"

    def choice(self, number: int, text: str, logprobs: list[LogProb], finish: str | None) -> dict[str, Any]:
        return {"index": number, "text": text, "logprobs": self._logprobs(logprobs), "finish_reason": finish}

    def deltas(self, number: int, piece: Piece, first: bool) -> Iterator[dict[str, Any]]:
        if piece.text or piece.logprobs or piece.finish is not None:
            yield self.choice(number, piece.text, list(piece.logprobs), piece.finish)

    def _logprobs(self, logprobs: list[LogProb]) -> dict[str, Any] | None:
        if self.asked.top is None:
            return None
        tokens = [self.written(each.token) for each in logprobs]
        offsets = []
        length = 0
        for token in tokens:
            offsets.append(length)
            length += len(token)
        likeliest = []
        for each in logprobs:
            values = {self.written(token): value for token, value in each.top}
            likeliest.append(None if each.value is None else values | {self.written(each.token): each.value})
        values = [each.value for each in logprobs]
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": likeliest, "text_offset": offsets}


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


def event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, separators=(',', ':'))}\n\n"
