"""Runs transformers' own server, `transformers serve`, on one folder and for nothing else."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from transformers import GenerationConfig, PreTrainedModel
from transformers.cli.serve import Serve
from transformers.cli.serving import model_manager, server
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import BaseHandler, GenerateManager

from residual_mass.methods.served import packing_of
from residual_mass.model.rotary import require_constant_frequencies
from residual_mass.serve.answers import Answers, answers_of, new_tokens

BY_HEADER = "x-residual-mass"
"""Header of an answer that says what generated it."""
IGNORED_HEADER = "x-ignored"
"""Header of an answer with the fields of the request that transformers' server does not know how to serve."""
MMAP_THRESHOLD = -3
"""Option of glibc's `mallopt`: blocks from this size on go back to the system when they are freed. glibc raises its
default of 128 KiB by itself unless it is set; then caches that come and go leave gaps that nothing fits in.
"""
_header: ContextVar[dict[str, str]] = ContextVar("header")
_build = server.build_server


def start(folder: Path, host: str, port: int) -> None:
    """Serves the model of a folder until a signal ends it; its name for clients is that of the folder.

    `Serve` is the command of transformers with its defaults. Two of its parts are replaced: the manager of models by
    one that loads nothing else, because a client may name any model, and code is trusted in this folder alone; and the
    function that builds the application, by one that adds what an answer says about itself.
    """
    os.chdir(folder.parent)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(MMAP_THRESHOLD, 128 * 1024)
    model_manager.ModelManager = OneModel
    server.build_server = build_application
    Serve(force_model=folder.name, device="cpu", trust_remote_code=True, host=host, port=port)


class OneModel(ModelManager):
    """Loads the model that the server was started with, and no other."""

    def load_model_and_processor(self, model_id_and_revision: str, *args: Any, **options: Any) -> tuple[Any, Any]:
        if model_id_and_revision != self.process_model_name(self.force_model):
            raise HTTPException(400, f"this server has the model {self.force_model} and no other")
        loaded = super().load_model_and_processor(model_id_and_revision, *args, **options)
        answers_of(loaded[0])
        return loaded

    def shutdown(self) -> None:
        for each in self.loaded_models.values():
            answers_of(each.model).kept.save()
        super().shutdown()

    def get_gen_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:
        """Returns the list of models for clients."""
        return [{"id": self.force_model, "object": "model", "owned_by": "residual-mass", "created": int(time.time())}]


class Generations(GenerateManager):
    """Says in the answer's header what generates it, and refuses a prompt that is too long before the answer begins."""

    def generate_streaming(
        self, model: PreTrainedModel, processor: Any, inputs: Any, gen_config: GenerationConfig, **options: Any
    ) -> Any:
        prepare_header(model, inputs, gen_config)
        return super().generate_streaming(model, processor, inputs, gen_config, **options)

    async def generate_non_streaming(
        self, model: PreTrainedModel, processor: Any, inputs: Any, gen_config: GenerationConfig, **options: Any
    ) -> Any:
        prepare_header(model, inputs, gen_config)
        return await super().generate_non_streaming(model, processor, inputs, gen_config, **options)


def prepare_header(model: PreTrainedModel, inputs: Any, config: GenerationConfig) -> None:
    answers = answers_of(model)
    ids = inputs["input_ids"]
    new = new_tokens(model, ids, config)  # refuses a prompt that is too long
    reason = answers.refusal(ids, config)
    if reason is None:
        require_constant_frequencies(model, ids, None, None if new is None else ids.shape[-1] + new)
    method = served_by(answers)
    _header.get()[BY_HEADER] = method if reason is None else f"full attention: {reason}"


def served_by(answers: Answers) -> str:
    settings = answers.settings
    chooses = packing_of(answers.arm.rule).bits == 4
    budget = f", budget {100 * settings.budget:g} %" if chooses else ""
    weights = "" if settings.weights is None else f", weights in {settings.weights} bits"
    return f"{settings.method}{budget}{weights}"


def build_application(manager: ModelManager, chat: BaseHandler, *, generation_state: Any, **options: Any) -> FastAPI:
    """Returns transformers' application with our parts."""
    generations = Generations()
    generation_state.get_manager = lambda model_id, use_cb=False: generations
    for handler in (chat, options["completion_handler"], options["response_handler"]):
        handler._validate_request = with_ignored_header(handler)
    app = _build(manager, chat, generation_state=generation_state, **options)
    app.add_exception_handler(ValueError, bad_request)
    app.add_exception_handler(HTTPException, bad_request)
    app.add_exception_handler(Exception, internal_error)
    app.middleware("http")(add_headers)
    return app


def with_ignored_header(handler: BaseHandler) -> Callable[[dict[str, Any]], None]:
    validate = handler._validate_request

    def validated(body: dict[str, Any]) -> None:
        ignored = sorted(name for name in body.keys() & handler._unused_fields if body[name])
        if ignored:
            _header.get()[IGNORED_HEADER] = ", ".join(ignored)
        validate(body)

    return validated


async def add_headers(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    _header.set({})
    response = await call_next(request)
    response.headers.update(_header.get())
    return response


async def bad_request(request: Request, error: Exception) -> JSONResponse:
    """Returns a request's mistake in one line, in OpenAI's form."""
    message = " ".join(str(getattr(error, "detail", error)).split())
    status = getattr(error, "status_code", 400)
    return JSONResponse({"error": {"message": message, "type": "invalid_request_error"}}, status)


async def internal_error(request: Request, error: Exception) -> JSONResponse:
    """Returns another error in one line; the server's log has the traceback."""
    message = " ".join(f"{type(error).__name__}: {error}".split())
    return JSONResponse({"error": {"message": message, "type": "server_error"}}, 500)
