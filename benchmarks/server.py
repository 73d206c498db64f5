"""Questions about one document to servers on a CPU: seconds to the first token of each, of the wall and of the CPU.

A document and a question after it are sent as token ids, the same to all; each answer has 16 greedy tokens, and the
next question comes when it is complete. In every run each side starts anew, in a process of its own, and answers a
short text first; runs go through all sides in turn. The table has the least of the runs. CPU seconds are those of the
side's process: where other work takes the cores, they still say what a question costs.

* ours: `residual-mass serve` over HTTP, which keeps the beginnings of texts by itself;
* llama.cpp: its `llama-server` over HTTP with one slot, whose cached prompt the next question goes on from; with flash
  attention, its default, and without, which is faster on a CPU;
* OpenVINO GenAI has no server: its pipeline with prefix caching, in a process (`engine_sides.py`).

All read the weights of one GGUF file (README.md says how to install the engines).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pandas as pd
from engines import FIRST, commit, embedded_gguf, machine, prompt, started, tokenizer_of

QUESTIONS = (
    "Who is the first person that the text names?",
    "In which place does the text begin?",
    "Write down one sentence of the text that holds a number.",
    "What does the text say about the weather, and what about the time of the day?",
    "Summarise the last paragraph in a sentence.",
)
ANSWER = 16
"""Tokens of an answer."""
Ask = Callable[[list[int]], tuple[float, float]]
"""Sends a prompt; returns the seconds and the CPU seconds to its first token, when the answer is complete."""


def main() -> None:
    options = parsed()
    short, prompts = texts(options)
    found: dict[str, list[list[tuple[float, float]]]] = {}
    about: set[str] = set()
    load = []
    for run in range(options.runs):
        for name in options.sides:
            with contextlib.ExitStack() as stack:
                ask, version = SIDES[name](options, len(prompts[0]), short, stack)
                about.add(version)
                seconds = [ask(ids) for ids in prompts]
            load.append(os.getloadavg()[0])
            found.setdefault(name, []).append(seconds)
            shown = ", ".join(f"{wall:.2f} ({cpu:.2f})" for wall, cpu in seconds)
            print(f"run {run + 1}  {name:32s} {shown}  (load {load[-1]:.1f})", flush=True)
    own = machine()
    lengths = [len(ids) for ids in prompts]
    print(f"\n{own['processor']}, {own['cores']} cores ({', '.join(own['instructions'])}); {'; '.join(sorted(about))}")
    print(f"commit {commit()}; {options.threads} threads; prompts of {min(lengths):,} to {max(lengths):,} tokens; "
          f"{options.runs} runs, load {min(load):.1f} to {max(load):.1f}\n")  # fmt: skip
    print(table(found))


def table(found: dict[str, list[list[tuple[float, float]]]]) -> str:
    """Returns the seconds to the first token of each question, and in parentheses CPU seconds, by side, as a table in
    Markdown.

    Args:
        found: by side, for each run the seconds and CPU seconds of all questions.
    """
    lines = []
    for name, runs in found.items():
        line = {"side": name}
        for number, times in enumerate(zip(*runs, strict=True), start=1):
            walls, cpus = zip(*times, strict=True)
            line[f"question {number}"] = f"{min(walls):.2f} ({min(cpus):.2f})"
        lines.append(line)
    return pd.DataFrame(lines).to_markdown(index=False, disable_numparse=True)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=Path, required=True, help="folder of the engines' environment (README.md)")
    parser.add_argument("--gguf", type=Path, help="file that all sides read (default: that of the embedded model)")
    parser.add_argument("--assets", type=Path, default=Path("results/assets"))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=[*SIDES])
    parser.add_argument("--length", type=int, default=8000, help="tokens of the document")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--limit", type=float, default=600, help="seconds after which a side is given up")
    return parser.parse_args()


def texts(options: argparse.Namespace) -> tuple[list[int], list[list[int]]]:
    """Returns the ids of a short text, and those of the document with each question in the model's chat template."""
    ids = prompt(options, options.length)
    tokenizer = tokenizer_of(options)
    document = tokenizer.decode(ids[: options.length])
    prompts = []
    for question in QUESTIONS:
        message = {"role": "user", "content": f"{document}\n\n{question}"}
        text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        prompts.append(tokenizer(text, add_special_tokens=False).input_ids)
    return ids[-FIRST:], prompts


# ---- sides -----------------------------------------------------------------------------------------------------------


def ours(options: argparse.Namespace, length: int, short: list[int], stack: contextlib.ExitStack) -> tuple[Ask, str]:
    import residual_mass

    words = [sys.executable, "-m", "residual_mass", "serve", str(options.gguf or embedded_gguf(options.engines))]
    ask = served(words, options, stack)
    ask(short)
    return ask, f"residual_mass {residual_mass.__version__}"


def llama(
    flash: str, options: argparse.Namespace, length: int, short: list[int], stack: contextlib.ExitStack
) -> tuple[Ask, str]:
    program = options.engines / "llama" / "bin" / "llama-server"
    words = [
        str(program),
        "-m",
        str(options.gguf or embedded_gguf(options.engines)),
        "-c",
        str(length + 256),
        "--parallel",
        "1",
    ]
    words += ["--flash-attn", flash, "--threads", str(options.threads), "--threads-batch", str(options.threads)]
    ask = served(words, options, stack)
    ask(short)
    told = subprocess.run([str(program), "--version"], capture_output=True, text=True, check=True)
    return ask, "llama.cpp " + (told.stdout + told.stderr).partition("version: ")[2].partition("\n")[0]


def openvino(
    options: argparse.Namespace, length: int, short: list[int], stack: contextlib.ExitStack
) -> tuple[Ask, str]:
    """The side of `engines.py`, which keeps the blocks of prompts for its second turns."""
    own = argparse.Namespace(**vars(options), rounds=1, tokens=ANSWER, second_turn=True)
    side = started("openvino-f16", options.threads, length, short, own, stack)
    if side is None:
        raise SystemExit("OpenVINO GenAI does not run here")

    def ask(ids: list[int]) -> tuple[float, float]:
        first = side.ask(do="turn", ids=ids, count=1, most=ANSWER)
        side.ask(do="step", count=ANSWER - 1)
        return first["seconds"][0], first["cpu"]

    return ask, side.found["about"]["version"]


SIDES: dict[str, Callable[[argparse.Namespace, int, list[int], contextlib.ExitStack], tuple[Ask, str]]] = {
    "ours": ours,
    "llama.cpp": partial(llama, "off"),
    "llama.cpp, flash attention": partial(llama, "on"),
    "OpenVINO GenAI": openvino,
}


def served(words: list[str], options: argparse.Namespace, stack: contextlib.ExitStack) -> Ask:
    """Starts a server at a free port; returns what asks it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = stack.enter_context(tempfile.TemporaryFile())
    environment = os.environ | {"OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen([*words, "--port", str(port)], stdout=log, stderr=log, env=environment)

    def end() -> None:
        process.kill()
        process.wait()

    stack.callback(end)
    url = f"http://127.0.0.1:{port}"
    until = time.monotonic() + options.limit
    while True:
        try:
            urllib.request.urlopen(f"{url}/health").close()
            break
        except OSError:
            if process.poll() is not None or time.monotonic() > until:
                log.seek(0)
                raise SystemExit(f"{words[0]} does not serve: {log.read().decode(errors='replace')[-500:]}") from None
            time.sleep(0.2)

    def ask(ids: list[int]) -> tuple[float, float]:
        body = {"prompt": ids, "max_tokens": ANSWER, "temperature": 0, "stream": True}
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        since, before = time.perf_counter(), cpu_seconds(process.pid)
        with urllib.request.urlopen(request, timeout=options.limit) as reply:
            told = [(time.perf_counter() - since, cpu_seconds(process.pid) - before) for _ in events(reply)]
        return told[0]

    return ask


def cpu_seconds(process: int) -> float:
    """Returns the CPU seconds of a process so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def events(lines: Iterator[bytes]) -> Iterator[bytes]:
    """Yields a stream's events as they come."""
    for line in lines:
        if line.startswith(b"data: {"):
            yield line


if __name__ == "__main__":
    main()
