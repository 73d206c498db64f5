"""The HTTP application: OpenAI's endpoints over one model."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from anyio import to_thread
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.datastructures import Headers
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic.json_schema import models_json_schema

from residual_mass.serve.answers import Answers, LogProb, Piece, Question, answer_of
from residual_mass.serve.calls import Parts
from residual_mass.serve.protocol import Bad, ChatRequest, CompletionRequest, Sampled, read
from residual_mass.serve.responses import ResponsesRequest, chat_of, response_body, response_events
from residual_mass.serve.service import Service
from residual_mass.serve.shapes import ChatShape, CompletionShape, Shape

log = logging.getLogger(__name__)

Asgi = Callable[..., Awaitable[Any]]
MOST_BYTES = 32 * 2**20
"""Longest body of a request."""
RETRY_SECONDS = 5
COMPONENT = "#/components/schemas/{model}"
"""Where the OpenAPI page has the schema of a class."""
STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}
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

    def lets_pages(self, origin: str) -> bool:
        """Returns whether web pages of an origin may ask: a browser sends a page's requests before it refuses it the
        answers.
        """
        return origin in self.origins or "*" in self.origins or re.fullmatch(LOCAL_ORIGINS, origin) is not None

    def knows(self, host: str) -> bool:
        """Returns whether a Host header names this server: a web page can point a name of its own at any address."""
        name = re.sub(r":\d+$", "", host.strip().lower()).strip("[]")
        if name in LOCAL_NAMES or name in (self.host.lower(), *self.names):
            return True
        if self.host in LOCAL_NAMES:
            return False
        # A page can point a name of its own here, but its requests then have that name as Host and no address.
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


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
    for path, endpoint, kind in (
        ("/v1/chat/completions", routes.chat, ChatRequest),
        ("/v1/completions", routes.completions, CompletionRequest),
        ("/v1/responses", routes.responses, ResponsesRequest),
    ):
        body = {"application/json": {"schema": {"$ref": COMPONENT.format(model=kind.__name__)}}}
        app.post(path, openapi_extra={"requestBody": {"required": True, "content": body}}, responses=STREAM)(endpoint)
    app.get("/v1/models")(routes.models)
    app.get("/v1/models/{name:path}")(routes.model)
    app.get("/health")(routes.health)
    app.add_exception_handler(Bad, refused)
    app.add_exception_handler(HTTPException, refused)
    # The router raises Starlette's HTTPException, of which FastAPI's is a subclass.
    app.add_exception_handler(404, refused)
    app.add_exception_handler(405, refused)
    app.add_exception_handler(Exception, failed)
    app.add_middleware(Guard, access=access, served_by=service.served_by)
    # Added last and so outermost: preflights carry no key, and pages must be able to read refusals.
    app.add_middleware(
        CORSMiddleware,
        allow_origins=list(access.origins),
        allow_origin_regex=LOCAL_ORIGINS,
        allow_methods=["GET", "POST", "OPTIONS"],
        allow_headers=["*"],
    )
    components = app.openapi().setdefault("components", {})  # the page that is served from now on
    components["schemas"] = components.get("schemas", {}) | bodies(service.name)
    return app


def bodies(model: str) -> dict[str, Any]:
    """Returns the JSON schemas of requests to a model and of their parts, by name."""
    kinds = (ChatRequest, CompletionRequest, ResponsesRequest)
    _, found = models_json_schema([(kind, "validation") for kind in kinds], ref_template=COMPONENT)
    for kind in kinds:
        found["$defs"][kind.__name__]["properties"]["model"] = {"enum": [model, None]}
    return dict(found["$defs"])


class Guard:
    """Refuses requests to other hosts or without the key, before anything is read, and names what generates.

    An ASGI application around `app`. (With Starlette's own class for functions, endpoints do not see that a client has
    left.)
    """

    def __init__(self, app: Callable[..., Awaitable[None]], access: Access, served_by: str) -> None:
        self.app = app
        self.access = access
        self.served_by = served_by

    async def __call__(self, scope: dict[str, Any], receive: Asgi, send: Asgi) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def named(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-residual-mass", self.served_by.encode())]
            await send(message)

        refusal = self.refusal(Headers(scope=scope), scope["path"])
        if refusal is not None:
            await refusal(scope, receive, send)
        else:
            await self.app(scope, receive, named)

    def refusal(self, headers: Headers, path: str) -> Response | None:
        """Returns the answer to a request that is not let through."""
        if not self.access.knows(headers.get("host", "")):
            return error_of("the Host header names another server: use its address, or start it with --allow-host", 403)
        origin = headers.get("origin")
        if origin is not None and not self.access.lets_pages(origin):
            return error_of(f"web pages of {origin} may not ask: allow them with --cors", 403)
        key = self.access.api_key
        scheme, _, given = headers.get("authorization", "").partition(" ")
        given = given if scheme.lower() == "bearer" else ""
        # compare_digest takes equally long wherever keys differ, so that none can be guessed by parts.
        if key is not None and path != "/health" and not hmac.compare_digest(given.encode(), key.encode()):
            return error_of("the API key is missing or wrong: send it as a Bearer token", 401)
        return None


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
        tokenizer, tools = self.service.answers.tokenizer, self.service.prompts.tools_of(asked) or []
        parts = partial(Parts, tokenizer, ids, tools) if self.service.has_parts(asked) else None
        questions = await to_thread.run_sync(self.service.questions, asked, [ids], parts is not None)
        shape = ChatShape(self.service, asked, parts)
        return await self._answered(request, asked, questions, shape)

    async def completions(self, request: Request) -> Response:
        asked: CompletionRequest = await self._read(request, CompletionRequest)
        if asked.max_tokens == 0 and not asked.echo:
            raise Bad("max_tokens: 0 new tokens are an answer only with echo=true", "max_tokens")
        prompts = await to_thread.run_sync(self.service.prompts.of_completion, asked)
        if asked.limit is None:
            asked.max_tokens = 16  # as OpenAI's
        questions = await to_thread.run_sync(self.service.questions, asked, prompts)
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
            first = await connected(request, results)
            events = response_events(asked, question, self.service, joined(first, results))
            return StreamingResponse(events, media_type="text/event-stream")
        pieces = [piece async for piece in while_connected(request, results)]
        return JSONResponse(response_body(asked, question, self.service, answer_of(iter(pieces))))

    async def _read(self, request: Request, kind: type[Any]) -> Any:
        """Reads the body of a request up to its limit."""
        body = bytearray()
        async for part in request.stream():
            body += part
            # Counted as it comes in: Content-Length may be missing or wrong.
            if len(body) > MOST_BYTES:
                raise Bad(f"the body is longer than {MOST_BYTES:,} bytes", status=413)
        # In a thread, because parsing a long body would hold up all other requests.
        asked = await to_thread.run_sync(read, kind, bytes(body))
        self.service.require_model(asked.model)
        return asked

    async def _answered(self, request: Request, asked: Sampled, questions: list[Question], shape: Shape) -> Response:
        """Answers questions one after the other, as one object or as a stream."""
        work = partial(answered, self.service.answers, questions, bool(getattr(asked, "echo", False)))
        results = self.service.worker.results(work)
        if asked.stream:
            first = await connected(request, results)  # mistakes are told before the stream begins
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
            pieces = chain([echoed(answers, question, left)], pieces)
        for piece in pieces:
            yield number, piece


def echoed(answers: Answers, question: Question, left: Callable[[], bool]) -> Piece:
    """Returns the prompt as the first piece of its answer."""
    text = answers.tokenizer.decode(question.ids, skip_special_tokens=True)
    logprobs: tuple[LogProb, ...] = ()
    if question.top is not None:
        logprobs = tuple(answers.prompt_logprobs(question.ids, question.top, left))
    return Piece(text, logprobs, None if question.limit > 0 else "length")


async def joined(first: Any, rest: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    try:
        yield first
        async for each in rest:
            yield each
    finally:
        await rest.aclose()


async def while_connected(request: Request, results: AsyncGenerator[Any, None]) -> AsyncIterator[Any]:
    """Passes results on; ends the work soon after the client has left."""
    try:
        while (result := await connected(request, results)) is not None:
            yield result
    finally:
        await results.aclose()


async def connected(request: Request, results: AsyncGenerator[Any, None]) -> Any:
    """Returns the next result, None if there is none; ends the work and raises Bad if the client leaves before."""
    watch = asyncio.ensure_future(gone(request))
    step = asyncio.ensure_future(anext(results, None))
    try:
        await asyncio.wait((step, watch), return_when=asyncio.FIRST_COMPLETED)
        if step.done():
            return step.result()
    finally:
        watch.cancel()
        step.cancel()
    # A generator cannot be closed while a step of it runs.
    await asyncio.wait((step,))
    await results.aclose()
    raise Bad("the client has left", status=499)


async def gone(request: Request) -> None:
    """Returns when the client has left: the body has been read, and nothing else can come."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
