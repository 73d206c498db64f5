"""Clients that leave, queues that are full, and the end of the server."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
import urllib.request
from typing import Any

import pytest
from tests.needs import KERNELS, needs
from tests.unit.serve.conftest import Port, at_a_port, lettered, received, served, until

from residual_mass.serve.service import Service

pytestmark = needs(KERNELS)
LONG = {"prompt": "a" * 40, "max_tokens": 1900}
SHORT = {"prompt": "The sea", "max_tokens": 2}


@pytest.fixture
def service() -> Service:
    return served(lettered(), "--queue", "3")


def begin(port: Port, body: dict[str, Any], path: str = "completions") -> Any:
    """Sends a request and waits until its first token is generated."""
    connection = port.send(path, {**body, "stream": True})
    data = b""
    while b"data: " not in data:
        data += connection.recv(65536)
    return connection


def told(caplog: pytest.LogCaptureFixture) -> list[tuple[int, int, bool]]:
    """Tokens of the prompt, new ones, and whether the client left, of each answer that was begun."""
    found = re.findall(
        r"prompt of (\d+) tokens \(\d+ kept\), (\d+) new in [\d.]+ s(, and the client left)?", caplog.text
    )
    return [(int(prompt), int(new), bool(gone)) for prompt, new, gone in found]


def status_of(answer: str) -> int:
    return int(answer.split(" ", 2)[1])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses"])
def test_a_client_that_leaves_while_tokens_come(
    service: Service, caplog: pytest.LogCaptureFixture, path: str, stream: bool
) -> None:
    body = {
        "completions": LONG,
        "chat/completions": {"messages": [{"role": "user", "content": "?"}]},
        "responses": {"input": "?"},
    }[path]
    with caplog.at_level(logging.INFO), at_a_port(service) as port:
        connection = begin(port, body, path) if stream else port.send(path, body)
        until(lambda: service.worker._current is not None)
        time.sleep(0.3)
        connection.close()
        until(lambda: told(caplog), 5)
        assert told(caplog)[0][1] < 1900 and told(caplog)[0][2]
        assert status_of(received(port.send("completions", SHORT))) == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_the_queue(service: Service, caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    """It is not answered, and its place is free at once."""
    with caplog.at_level(logging.INFO), at_a_port(service) as port:
        first = begin(port, LONG)
        for _ in range(2):
            waiting = [port.send("completions", {**LONG, "stream": stream}) for _ in range(3)]
            until(lambda: service.worker.waiting == 3)
            refused = received(port.send("completions", {**SHORT, "stream": stream}))
            assert status_of(refused) == 429 and "retry-after: 5" in refused.lower() and "wait already" in refused
            for connection in waiting:
                connection.close()
            until(lambda: service.worker.waiting == 0, 5)
        first.close()
        assert status_of(received(port.send("completions", SHORT))) == 200
        assert [new for _, new, gone in told(caplog) if not gone] == [2] and len(told(caplog)) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_its_prompt_is_read(
    service: Service, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    """Also while the prompt's own probabilities are computed."""
    slow = service.answers.model.register_forward_pre_hook(lambda *_: time.sleep(0.5))
    with caplog.at_level(logging.INFO), at_a_port(service) as port:
        connection = port.send("completions", {"prompt": "a" * 2000, "max_tokens": 5, "stream": stream})
        until(lambda: service.worker._current is not None)
        connection.close()
        until(lambda: told(caplog), 3)
        assert told(caplog) == [(2000, 0, True)]
        body = {"prompt": "a" * 2000, "max_tokens": 0, "echo": True, "logprobs": 0, "stream": stream}
        connection = port.send("completions", body)
        until(lambda: service.worker._current is not None)
        connection.close()
        until(lambda: service.worker._current is None, 3)
    slow.remove()


def test_others_are_answered_while_a_request_runs(service: Service) -> None:
    with at_a_port(service) as port:
        first = begin(port, LONG)
        begun = time.monotonic()
        answers: list[str] = []
        waiting = threading.Thread(target=lambda: answers.append(received(port.send("completions", SHORT))))
        waiting.start()
        assert urllib.request.urlopen(f"http://127.0.0.1:{port.number}/health", timeout=5).status == 200
        assert time.monotonic() - begun < 2
        first.close()
        waiting.join(20)
        assert status_of(answers[0]) == 200


class Panic(BaseException):
    """As of a library in Rust, which is no Exception."""


@pytest.mark.parametrize("kind", [RuntimeError, Panic])
def test_a_failure_is_told_and_the_next_request_is_answered(service: Service, kind: type[BaseException]) -> None:
    model = service.answers.model

    def fail(*_: Any) -> None:
        raise kind("the first\nfailure")

    with at_a_port(service) as port:
        hook = model.register_forward_pre_hook(fail)
        whole = received(port.send("completions", SHORT))
        assert status_of(whole) == 500
        assert "the first failure" in json.loads(whole.partition("\r\n\r\n")[2])["error"]["message"]
        assert status_of(received(port.send("completions", {**SHORT, "stream": True}))) == 500
        hook.remove()
        stream = begin(port, LONG)
        hook = model.register_forward_pre_hook(fail)
        rest = received(stream)
        assert '"error":{"message":"' in rest and "the first failure" in rest and "[DONE]" in rest
        hook.remove()
        assert status_of(received(port.send("completions", SHORT))) == 200


def test_the_end_breaks_off_what_runs_and_what_waits(service: Service) -> None:
    with at_a_port(service) as port:
        running = begin(port, LONG)
        waiting = [port.send("completions", {**LONG, "stream": stream}) for stream in (True, False, False)]
        until(lambda: service.worker.waiting == 3)
        begun = time.monotonic()
        service.worker.leave()
        assert "the server ends" in received(running)
        assert [status_of(received(connection)) for connection in waiting] == [503] * 3
        assert status_of(received(port.send("completions", SHORT))) == 503
        assert time.monotonic() - begun < 3


def test_a_model_that_overflows_is_told(service: Service) -> None:
    model = service.answers.model
    model.lm_head.weight.data[5] = float("inf")
    with at_a_port(service) as port:
        answer = received(port.send("completions", SHORT))
    assert status_of(answer) == 500 and "logits are not finite" in answer
