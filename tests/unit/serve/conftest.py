"""Tiny models that are served, in this process and at a port of their own."""

from __future__ import annotations

import argparse
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn
from starlette.testclient import TestClient
from tests.conftest import byte_tokenizer, tiny_llama
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from residual_mass.serve import command
from residual_mass.serve.app import Access, build
from residual_mass.serve.model import service_of
from residual_mass.serve.service import Service

TEMPLATE = (
    "{% if tools %}<s>tools: {{ tools | tojson }}</s>{% endif %}"
    "{% for message in messages %}<s>{{ message.role }}: {{ message.content }}</s>{% endfor %}"
    "{% if mood %}<s>{{ mood }}</s>{% endif %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
HOST = "127.0.0.1"


def options(*words: str) -> command.ServeOptions:
    """The flags of the command, checked."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.checked(parser.parse_args(["model", "--port", "0", *words]))


def with_template(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def lettered() -> PreTrainedModel:
    """Writes letters and blanks alone, so that its texts are read again as they were."""
    model = tiny_llama(width=64)
    letters = byte_tokenizer().convert_tokens_to_ids([*"abcdefghijklmnopqrstuvwxyz", "Ġ"])
    with torch.no_grad():
        others = torch.ones(len(model.lm_head.weight), dtype=torch.bool)
        others[letters] = False
        model.lm_head.weight[others] = 0
    return model


def served(model: PreTrainedModel, *words: str) -> Service:
    return service_of(model, with_template(byte_tokenizer()), "tiny", options(*words))


def application(service: Service, access: Access | None = None) -> Any:
    def closing() -> None:
        service.worker.close()
        service.answers.kept.save()

    return build(service, access or Access(HOST), closing)


class Asking:
    """A client of an application, without a port."""

    def __init__(self, service: Service, access: Access | None = None) -> None:
        self.service = service
        self.http = TestClient(application(service, access), f"http://{HOST}", raise_server_exceptions=False)

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        reply = self.http.post(f"/v1/{path}", content=data, headers=headers)
        if reply.headers["content-type"].startswith("text/event-stream"):
            return reply.status_code, reply.text
        return reply.status_code, reply.json()

    def chat(self, text: str = "Tell a tale.", **fields: Any) -> Any:
        """An answer to one message."""
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 12, **fields}
        status, answer = self.post("chat/completions", body)
        assert status == 200, answer
        return answer

    def complete(self, prompt: Any = "Once upon a time", **fields: Any) -> Any:
        status, answer = self.post("completions", {"prompt": prompt, "max_tokens": 12, **fields})
        assert status == 200, answer
        return answer

    def text(self, prompt: Any = "Once upon a time", **fields: Any) -> str:
        return self.complete(prompt, **fields)["choices"][0]["text"]

    def refusal(self, path: str, body: Any) -> dict[str, Any]:
        """The error that a request is refused with, for a mistake of the client."""
        status, answer = self.post(path, body)
        assert status == 400, (status, answer)
        return answer["error"]


def events(text: str) -> list[Any]:
    """Data of server-sent events, without the last."""
    parts = [part.removeprefix("data: ") for part in text.split("\n\n") if part.startswith("data: ")]
    assert parts[-1] == "[DONE]"
    return [json.loads(part) for part in parts[:-1]]


@pytest.fixture(scope="session")
def model() -> PreTrainedModel:
    return lettered()


@pytest.fixture(scope="session")
def asking(model: PreTrainedModel) -> Asking:
    return Asking(served(model))


@pytest.fixture(scope="session")
def printable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `lettered`."""
    folder = tmp_path_factory.mktemp("models") / "printable"
    lettered().save_pretrained(folder)
    with_template(byte_tokenizer()).save_pretrained(folder)
    return folder


class Port:
    """An application at a port, for clients that leave."""

    def __init__(self, service: Service) -> None:
        self.service = service
        with socket.create_server((HOST, 0)) as free:
            self.number = free.getsockname()[1]
        config = uvicorn.Config(application(service), HOST, self.number, log_level="warning")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        until(lambda: self.server.started)

    def send(self, path: str, body: dict[str, Any]) -> socket.socket:
        """Sends a request, and does not wait for its answer."""
        data = json.dumps(body).encode()
        connection = socket.create_connection((HOST, self.number))
        head = f"POST /v1/{path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
        connection.sendall(head.encode() + data)
        return connection


@contextmanager
def at_a_port(service: Service) -> Iterator[Port]:
    port = Port(service)
    yield port
    port.server.should_exit = True
    port.thread.join(20)


def until(reached: Callable[[], Any], seconds: float = 30) -> None:
    """Waits for something that other threads do."""
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.02)


def received(connection: socket.socket) -> str:
    """Everything that a connection still holds, until the server closes it."""
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts).decode()
