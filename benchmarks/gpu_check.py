"""What a GPU does with this project, as a snapshot: ceilings, kernels, whole steps and their floor, a training pass.

Weights are random at the exact shapes of Llama-3.2, since times do not depend on their values; no network is needed.
Every part (`gpu_parts.py`) runs in a process of its own and under a time limit, for after a fault on the device nothing
works any more in the process that met it. A part that fails is named in the snapshot, with what it had found until
then, and the exit status is 1. With `--device cpu` the same parts run on a tiny model: a check of this check.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from residual_mass.files import csv_text, write_text
from residual_mass.paper.readers.runtime_file import Latency

PARTS = Path(__file__).with_name("gpu_parts.py")
ROOT = Path(__file__).parents[1]
MINUTES = 7.5
"""For all parts together; what has not started by then is left out, and what runs is ended."""
KILL_SECONDS = 10
"""For a part to go after it was killed."""
LOG_LINES = 25
"""Of what a part that failed wrote to its error stream."""
STEP_AIMS = {"1b": 2.5, "3b": 5.0}
"""Milliseconds of a TopK+phi step at most, one prompt of 64k tokens."""
FLOOR_AIM = 1.5
"""Times the floor, at most."""
LONGEST, LARGE_BATCH = "64k", "8"
METHOD_TITLES = {"full": "Full", "topk": "TopK", "topk_phi": "TopK+phi", "topk_phi_nosub": "TopK+phi (NoSub)"}

Row = dict[str, str]


@dataclass(frozen=True)
class Part:
    """A section of the snapshot: a command that prints it, as Markdown, and writes what rows it measures to --rows."""

    title: str
    command: tuple[str, ...]
    seconds: float
    """Limit."""


@dataclass(frozen=True)
class Outcome:
    """What became of a part; `failure` is empty where all went well, `log` the end of its error stream."""

    title: str
    text: str
    rows: list[Row]
    failure: str
    log: str
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/measured"))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--minutes", type=float, default=MINUTES)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the running part is ended
    about = run_part(part(options.device, "The device", "about", 120), 120)
    if about.failure:
        raise SystemExit((about.log.splitlines() or [about.failure])[-1])
    title, _, facts = about.text.partition("\n")
    name = title.removeprefix("# ")
    outcomes = []
    for outcome in run_parts(plan(options.device), 60 * options.minutes - about.seconds):
        outcomes.append(outcome)
        print(f"{outcome.title}: {outcome.failure or 'done'}, {outcome.seconds:.0f} s", file=sys.stderr)
        write_snapshot(options.out, name, facts, outcomes)  # what was measured outlives whatever comes next
    sys.exit(int(any(outcome.failure for outcome in outcomes)))


def plan(device: str) -> list[Part]:
    """The most telling parts first: at the end, time may have run out."""
    shapes = ("1b", "3b") if device == "cuda" else ("tiny",)
    contexts, batches = (("4k", "16k", "64k"), ("1", "8")) if device == "cuda" else (("2k", "4k"), ("1", "2"))
    longest = contexts[-1]
    parts = [part(device, "Ceilings", "ceilings", 60)]
    for shape in shapes:
        places = ("--shape", shape, "--contexts", *contexts, "--batches", *batches)
        parts.append(part(device, f"Kernels, one layer of {shape}", "kernels", 90, *places))
    for shape, dtype in itertools.product(shapes[:1], ("float32", "bfloat16")):
        where = ("--shape", shape, "--contexts", contexts[0], "--dtype", dtype)
        parts.append(part(device, f"Whole steps agree, {shape} in {dtype}", "agreement", 90, *where))
    for shape in shapes:
        places = ("--shape", shape, "--contexts", *contexts, "--batches", *batches)
        parts.append(part(device, f"Steps, {shape}", "steps", 200, *places))
    for shape in shapes:
        where = ("--shape", shape, "--contexts", longest, "--batches", "1", "--prototype")
        parts.append(part(device, f"Steps of the prototype, {shape}", "steps", 90, *where))
    if device == "cuda":
        parts.append(part(device, "A training pass", "training", 120))
    return parts


def part(device: str, title: str, name: str, seconds: float, *arguments: str) -> Part:
    return Part(title, (sys.executable, str(PARTS), name, "--device", device, *arguments), seconds)


def run_parts(parts: Iterable[Part], seconds: float) -> Iterator[Outcome]:
    """One after the other, whatever became of those before, until the time is over."""
    ends = time.monotonic() + seconds
    for one in parts:
        left = ends - time.monotonic()
        if left <= 0:
            yield Outcome(one.title, "", [], "left out, the time was over; give more --minutes", "", 0.0)
        else:
            yield run_part(one, min(left, one.seconds))


def run_part(one: Part, seconds: float) -> Outcome:
    """A part in a process of its own, which is ended with all that it started after so many seconds."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        text, log, rows = (Path(folder) / name for name in ("text.md", "log.txt", "rows.csv"))
        with open(text, "wb") as out, open(log, "wb") as errors:
            command = [*one.command, "--rows", str(rows)]
            process = subprocess.Popen(command, stdout=out, stderr=errors, start_new_session=True)
            failure = "interrupted"
            try:
                failure = _failure(process.wait(seconds))
            except subprocess.TimeoutExpired:
                failure = f"ended after {seconds:.0f} s, which were all it had"
            finally:
                if process.poll() is None:
                    failure += _ended(process)
        said, told = (path.read_text(encoding="utf-8", errors="replace").rstrip() for path in (text, log))
        if said.count("```") % 2:
            said += "\n```"  # its end was not reached
        log_end = _without_places("\n".join(told.splitlines()[-LOG_LINES:]))
        return Outcome(one.title, said, _rows(rows), failure, log_end, time.monotonic() - started)


def _ended(process: subprocess.Popen[bytes]) -> str:
    """Ends a part and all that it started; what is to be said if that takes long, as it may in a faulty driver."""
    os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(KILL_SECONDS)
    except subprocess.TimeoutExpired:
        return ", and could not be ended"
    return ""


def _without_places(log: str) -> str:
    """A log with files named as on any machine: snapshots are published."""
    for place, name in ((sys.prefix, "(python)"), (sys.base_prefix, "(python)"), (ROOT, "."), (Path.home(), "~")):
        if str(place) != "/":
            log = re.sub(rf"{re.escape(str(place))}(?=/|\b)", name, log)
    return log


def _failure(status: int) -> str:
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    return f"ended with status {status}" if status else ""


def _rows(path: Path) -> list[Row]:
    if not path.exists():
        return []
    with open(path, encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def write_snapshot(out: Path, name: str, facts: str, outcomes: Sequence[Outcome]) -> None:
    """`gpu_<name>.md`, and beside it `gpu_<name>_runtime.csv` where steps were measured."""
    slug = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    write_text(out / f"gpu_{slug}.md", "\n".join(snapshot(name, facts, outcomes)) + "\n")
    if rows := [row for outcome in outcomes for row in outcome.rows]:
        write_text(out / f"gpu_{slug}_runtime.csv", csv_text(list(rows[0]), rows))


def snapshot(name: str, facts: str, outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The lines of the Markdown file."""
    yield from (f"# {name}", "", facts.strip(), "", "| part | result | s |", "|---|---|---|")
    for outcome in outcomes:
        yield f"| {outcome.title} | {outcome.failure or 'done'} | {outcome.seconds:.0f} |"
    rows = [row for outcome in outcomes for row in outcome.rows]
    if rows:
        yield from ("", "## Aims", "", *aims(rows), "", "## Steps and their floors", "", *floors(rows))
    for outcome in outcomes:
        yield from ("", f"## {outcome.title}", "")
        if outcome.text:
            yield outcome.text
        if outcome.failure:
            yield from ("", f"This part failed: {outcome.failure}.", "", "```", outcome.log, "```")


def aims(rows: Sequence[Row]) -> Iterator[str]:
    """What was aimed at, beside what was measured; one line each."""
    ours = {_place(row): row for row in rows if row["implementation"] == "fused"}
    for backbone, most in STEP_AIMS.items():
        row = ours.get((backbone, LONGEST, "1", "topk_phi"))
        what = f"{backbone}, TopK+phi at {LONGEST}, batch 1: at most {most} ms"
        yield _aim(what, row, lambda row, most=most: (_step(row), float(row["per_step_ms"]) <= most))
    for (backbone, context, batch, method), row in ours.items():
        if method == "topk_phi":
            what = f"{backbone}, TopK+phi at {context}, batch {batch}: at most {FLOOR_AIM} times the floor"
            yield _aim(what, row, lambda row: (f"{_over_floor(row):.2f} times", _over_floor(row) <= FLOOR_AIM))
    for backbone in STEP_AIMS:
        row, full = (ours.get((backbone, LONGEST, LARGE_BATCH, method)) for method in ("topk_phi", "full"))
        what = f"{backbone}, TopK+phi at {LONGEST}, batch {LARGE_BATCH}: faster than our own Full"
        yield _aim(what, row, lambda row, full=full: _beside(row, full))


def _beside(row: Row, full: Row | None) -> tuple[str, bool]:
    """Where Full does not even fit, there is nothing to be slower than."""
    if full is None or not Latency(full).measured:
        return f"{_step(row)}, Full not measured", full is not None
    step, other = float(row["per_step_ms"]), float(full["per_step_ms"])
    return f"{step:.2f} ms, Full {other:.2f} ms, ratio {step / other:.2f}", step < other


def _aim(what: str, row: Row | None, judged: Callable[[Row], tuple[str, bool]]) -> str:
    if row is None or not Latency(row).measured:
        return f"* {what}: not measured" + (f" ({row['not_measured']})" if row else "")
    measured, met = judged(row)
    return f"* {what}: {measured}, {'met' if met else 'missed'}"


def floors(rows: Sequence[Row]) -> Iterator[str]:
    """Every measured step beside the time that its bytes take at the speed of a large copy."""
    yield "| backbone | context | batch | implementation | method | step ms | floor ms | over floor |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        head = [*_place(row)[:3], row["implementation"], METHOD_TITLES[row["method"]]]
        if Latency(row).measured:
            cells = [_step(row).removesuffix(" ms"), row["floor_ms"], f"{_over_floor(row):.2f}"]
        else:
            cells = [row["not_measured"], row["floor_ms"], "--"]
        yield "| " + " | ".join([*head, *cells]) + " |"


def _place(row: Row) -> tuple[str, str, str, str]:
    return row["backbone"], row["context"], row["batch"], row["method"]


def _step(row: Row) -> str:
    """Median and range of the repeats."""
    return "{} ({} to {}) ms".format(*(f"{float(row[f'per_step_{name}ms']):.3f}" for name in ("", "low_", "high_")))


def _over_floor(row: Row) -> float:
    return float(row["per_step_ms"]) / Latency(row).floor


if __name__ == "__main__":
    main()
