"""A server process as users start it, on this machine alone, with the openai client and curl."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import APIError, OpenAI
from tests.needs import CURL, KERNELS, TRANSFORMERS_5, needs
from tests.unit.serve.conftest import printable  # noqa: F401  # a fixture

pytestmark = [pytest.mark.slow, needs(KERNELS), needs(TRANSFORMERS_5)]
READ = re.compile(r"prompt of (\d+) tokens \((\d+) kept\), (\d+) new in")
QUESTION = [{"role": "user", "content": "Where does the river go after the bridge, and why?"}]


class Server:
    """`residual-mass serve` in a process of its own."""

    def __init__(self, model: Path, folder: Path, *flags: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.log = folder / "log.txt"
        words = [sys.executable, "-m", "residual_mass", "serve", str(model), "--out", str(folder / "served")]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(folder / "modules")}
        with self.log.open("w") as stream:
            self.process = subprocess.Popen(
                [*words, "--port", str(self.port), *flags], stdout=stream, stderr=stream, env=environment
            )
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = OpenAI(base_url=f"{self.url}/v1", api_key="none")
        for _ in range(300):
            try:
                urllib.request.urlopen(f"{self.url}/health").close()
                return
            except OSError:
                assert self.process.poll() is None, self.log.read_text()
                time.sleep(0.5)
        raise AssertionError(self.log.read_text())

    def stop(self) -> str:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(60)
        return self.log.read_text()

    def reads(self, count: int = 0) -> list[tuple[int, ...]]:
        """Tokens of the prompt, those of a kept text, and new ones, of each answer; waits for so many answers."""
        for _ in range(100):
            found = READ.findall(self.log.read_text())
            if len(found) >= count:
                return [tuple(map(int, numbers)) for numbers in found]
            time.sleep(0.1)
        raise AssertionError(self.log.read_text())

    def ask(self, messages: list[dict[str, str]], **options: Any) -> tuple[str, str]:
        """The text and the reason of its end, streamed."""
        text, reason = "", ""
        before = len(self.reads())
        stream = self.client.chat.completions.create(messages=messages, model="printable", stream=True, **options)
        for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            reason = chunk.choices[0].finish_reason or reason
        self.reads(before + 1)
        return text, reason


@pytest.fixture(scope="module")
def server(printable: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:  # noqa: F811
    started = Server(printable, tmp_path_factory.mktemp("server"), "--memory", "8")
    yield started
    started.stop()


def test_a_stream_is_the_answer(server: Server) -> None:
    text, reason = server.ask(QUESTION, max_tokens=30)
    answer = server.client.chat.completions.create(model="printable", messages=QUESTION, max_tokens=30)
    assert answer.choices[0].message.content == text and len(text) == 30
    assert (reason, answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", "length", 30)


def test_stop_strings(server: Server) -> None:
    whole, _ = server.ask(QUESTION, max_tokens=30)
    text, reason = server.ask(QUESTION, max_tokens=30, stop=[whole[10:12]])
    assert text == whole[: whole.index(whole[10:12]) + 2] and reason == "stop"


def test_two_conversations_in_turn(server: Server) -> None:
    """Every turn reads what is new: the end of the template's answer, the question, and the last token before."""
    talks = [[{"role": "user", "content": f"{name} asks about the sea."}] for name in ("Ada", "Bob")]
    for turn in range(3):
        for talk in talks:
            text, _ = server.ask(talk, max_tokens=20)
            prompt, kept, new = server.reads()[-1]
            assert new == 20 and (turn == 0 or prompt - kept < 40)
            talk += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
    assert talks[0][1] != talks[1][1]


def test_a_client_that_hangs_up(server: Server) -> None:
    question = [{"role": "user", "content": "Tell a very long story."}]
    before = len(server.reads())
    stream = server.client.chat.completions.create(messages=question, model="printable", stream=True, max_tokens=1900)
    parts = [next(iter(stream)).choices[0].delta.content or "" for _ in range(5)]
    stream.close()
    _, _, new = server.reads(before + 1)[before]
    assert new < 1900 and "and the client left" in server.log.read_text()
    told = "".join(parts)
    again = [*question, {"role": "assistant", "content": told}, {"role": "user", "content": "Go on."}]
    text, _ = server.ask(again, max_tokens=5)
    assert len(text) == 5 and server.ask(question, max_tokens=len(told))[0] == told


def test_requests_that_cannot_be_answered(server: Server) -> None:
    long = [{"role": "user", "content": "a" * 2100}]
    for options, message in [
        ({"model": "gpt-4o", "messages": QUESTION}, "pinned to 'printable'; requested 'gpt-4o'"),
        ({"model": "printable", "messages": long}, "was made for texts of 2,048 with the answer: shorten it"),
        ({"model": "printable", "messages": long, "stream": True}, "was made for texts of 2,048"),
    ]:
        with pytest.raises(APIError, match=message) as refused:
            server.client.chat.completions.create(**options)
        assert refused.value.status_code == 400
    with pytest.raises(APIError, match="KeyError: 'role'"):
        server.client.chat.completions.create(model="printable", messages=[{"content": "?"}])


def test_the_answer_says_what_generated_it(server: Server) -> None:
    create = server.client.chat.completions.with_raw_response.create
    own = create(model="printable", messages=QUESTION, max_tokens=5, logprobs=True)
    assert own.headers["x-residual-mass"] == "scan4_regression_64, budget 4 %"
    assert own.headers["x-ignored"] == "logprobs"
    beams = {"generation_config": json.dumps({"num_beams": 2, "max_new_tokens": 5})}
    full = create(model="printable", messages=QUESTION, extra_body=beams)
    assert full.headers["x-residual-mass"].startswith("full attention: ") and "x-ignored" not in full.headers
    assert len(full.parse().choices[0].message.content) == 5


def test_no_other_model_is_loaded(server: Server, printable: Path, tmp_path: Path) -> None:  # noqa: F811
    """A client cannot make the server load a folder with code, although it trusts the code of its own."""
    evil = shutil.copytree(printable, tmp_path / "evil")
    (evil / "custom_generate").mkdir()
    victim = tmp_path / "pwned"
    (evil / "custom_generate" / "generate.py").write_text(f"open({str(victim)!r}, 'w')\ndef generate(): pass\n")
    for place, body in [("load_model", {"model": str(evil)}), ("v1/chat/completions", {"model": str(evil)})]:
        request = urllib.request.Request(
            f"{server.url}/{place}",
            json.dumps(body | {"messages": QUESTION}).encode(),
            {"content-type": "application/json"},
        )
        try:
            reply = urllib.request.urlopen(request).read().decode()
        except urllib.error.HTTPError as error:
            reply = error.read().decode()
        assert "this server has the model printable and no other" in reply or "pinned to 'printable'" in reply
    assert not victim.exists()
    assert [model.id for model in server.client.models.list().data] == ["printable"]


@needs(CURL)
def test_curl(server: Server) -> None:
    body = json.dumps({"messages": QUESTION, "max_tokens": 12, "stream": True})
    words = ["curl", "-sN", f"{server.url}/v1/chat/completions", "-H", "content-type: application/json", "-d", body]
    lines = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == server.ask(QUESTION, max_tokens=12)[0] and chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_memory_stays_bounded(server: Server) -> None:
    """After the kept caches have reached their limit, a hundred further texts leave the process as large as it was."""
    sizes = []
    for number in range(140):
        server.ask([{"role": "user", "content": f"{number} " * 60}], max_tokens=4)
        status = Path(f"/proc/{server.process.pid}/status").read_text()
        sizes.append(int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024)
    assert max(sizes[40:]) - max(sizes[:40]) < 8


def test_caches_outlive_the_server(printable: Path, tmp_path: Path) -> None:  # noqa: F811
    """With `--keep` they are on disk when it ends, and a later one goes on from there; it listens here alone."""
    flags = ("--keep", str(tmp_path / "kept"), "--weights", "8")
    first = Server(printable, tmp_path, *flags)
    text, _ = first.ask(QUESTION, max_tokens=20)
    assert "stopped by SIGINT" in first.stop()
    second = Server(printable, tmp_path, *flags)
    listening = subprocess.run(["ss", "-ltnH"], capture_output=True, text=True) if shutil.which("ss") else None
    talk = [*QUESTION, {"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
    second.ask(talk, max_tokens=20)
    prompt, kept, _ = second.reads()[-1]
    second.stop()
    assert kept > 70 and prompt - kept < 40
    assert listening is None or f"127.0.0.1:{second.port}" in listening.stdout
