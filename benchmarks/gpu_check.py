"""What a GPU does with this project, as a snapshot: ceilings, kernels, whole steps and their floor, an evaluation's
decoding, training passes, and the tests that need a GPU.

It needs torch, triton, transformers, safetensors and numpy, and nothing else: no network, no installation. Weights are
random at the exact shapes of Llama-3.2, since times do not depend on their values. Every part (`gpu_parts.py`) runs in
a process of its own and under a time limit, for after a fault on the device nothing works any more in the process that
met it. A part that fails is named in the snapshot, with what it had found until then, and the
exit status is 1. The snapshot is written anew after every part. With --only, parts that are measured replace theirs in
the snapshot of this device in --out, and the others stay as they were, so that several short runs make up a whole one.
With --device cpu the same parts run on a tiny model: a check of this check.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from residual_mass.files import csv_text, write_text

PARTS = Path(__file__).with_name("gpu_parts.py")
ROOT = Path(__file__).parents[1]
MINUTES = 27
"""For all parts together; what has not started by then is left out, and what runs is ended."""
LATE = 2.5
"""A part is ended after so many times what it is expected to take."""
KILL_SECONDS = 10
"""For a part to go after it was killed."""
LOG_LINES = 25
"""Of what a part that failed wrote to its error stream."""
STEP_AIMS = {("1b", "topk_moments"): 1.6, ("1b", "topk_phi"): 2.5, ("3b", "topk_phi"): 5.0}
"""Milliseconds of a step at most, one prompt of 64k tokens."""
FLOOR_AIM = 1.5
"""Times the floor, at most, of a TopK+phi step."""
FULL_AIMS = {("1b", "topk_moments"): 0.75, ("1b", "topk_phi"): 1.0, ("3b", "topk_phi"): 1.0}
"""Times a step of our own Full, at most, eight prompts of 64k tokens."""
RULER_AIM = {"1b": 4.0}
"""GPU-hours at most for every arm of RULER at 64k."""
TRAINING_AIMS = {"1b": 0.9, "3b": 2.0}
"""GPU-seconds at most for a sequence of 64k tokens, the teacher's pass included."""
LONGEST, LARGE_BATCH = "64k", "8"
METHOD_TITLES = {
    "full": "Full", "topk": "TopK", "topk_phi": "TopK+phi", "topk_phi_nosub": "TopK+phi (NoSub)",
    "topk_moments": "TopK+moments", "scan4_moments": "4-bit scan+moments",
}  # fmt: skip

STEPS = ("steps", "prototype")
"""Groups of parts that measure decode steps."""

Row = dict[str, str]


@dataclass(frozen=True)
class Part:
    """A section of the snapshot: a command that prints it, as Markdown, and writes what rows it measures to --rows."""

    name: str
    """What --only takes, like its first word alone."""
    title: str
    command: tuple[str, ...]
    seconds: float
    """Limit."""

    @property
    def expected(self) -> float:
        """Seconds, by an estimate."""
        return self.seconds / LATE


@dataclass(frozen=True)
class Outcome:
    """What became of a part; `failure` is empty where all went well, `log` the end of its error stream."""

    name: str
    title: str
    text: str
    rows: list[Row]
    failure: str
    log: str
    seconds: float
    """0 of one that was not started."""
    facts: str = ""
    """Of device and versions, as the part `about` tells them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/measured"))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--only", action="append", metavar="PART", help="may be given several times")
    options = parser.parse_args()
    whole = plan(options.device)
    parts = chosen(whole, options.only or [])
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the running part is ended
    about = run_part(part(options.device, "about", "The device", 60), 120)
    if about.failure:
        raise SystemExit((about.log.splitlines() or [about.failure])[-1])
    title, _, facts = about.text.partition("\n")
    device = title.removeprefix("# ")
    found = read_outcomes(options.out, device) if options.only else {}
    failed = False
    for outcome in run_parts(parts, 60 * options.minutes - about.seconds):
        failed |= bool(outcome.failure)
        if outcome.seconds or outcome.name not in found:  # what was measured earlier is not lost to a lack of time
            found[outcome.name] = replace(outcome, facts=facts.strip())
        print(f"{outcome.title}: {outcome.failure or 'done'}, {outcome.seconds:.0f} s", file=sys.stderr)
        outcomes = [found[one.name] for one in whole if one.name in found]
        write_snapshot(options.out, device, facts, outcomes)  # what was measured outlives whatever comes next
    sys.exit(int(failed))


def plan(device: str) -> list[Part]:
    """The most telling parts first: at the end, time may have run out."""
    on_gpu = device == "cuda"
    shape, *others = ("1b", "3b") if on_gpu else ("tiny",)
    contexts, batches = (("4k", "16k", "64k"), ("1", "8")) if on_gpu else (("2k", "4k"), ("1", "2"))
    many = ("--batches", *batches)
    places = ("--contexts", *contexts, *many)
    longest = ("--contexts", contexts[-1])

    def kernels(shape: str) -> Part:
        return part(device, f"kernels-{shape}", f"Kernels, one layer of {shape}", 75, "--shape", shape, *places)

    def steps(shape: str, seconds: float) -> Part:
        return part(device, f"steps-{shape}", f"Steps, {shape}", seconds, "--shape", shape, *places)

    def training(name: str, shape: str, length: str, seconds: float, *more: str) -> Part:
        title = f"Training passes of {length} tokens, {shape}"
        return part(device, f"training-{name}", title, seconds, "--shape", shape, "--contexts", length, *more)

    parts = [part(device, "ceilings", "Ceilings", 20), kernels(shape)]
    for dtype in ("float32", "bfloat16"):
        where = ("--shape", shape, "--contexts", contexts[0], "--dtype", dtype)
        parts.append(part(device, f"agreement-{dtype}", f"Whole steps agree, {shape} in {dtype}", 60, *where))
    parts.append(steps(shape, 180))
    parts.append(part(device, "tests", "Tests that need a GPU", 150))
    parts.append(part(device, f"evaluation-{shape}", f"An evaluation, {shape}", 60, "--shape", shape, *longest))
    short = "8k" if on_gpu else contexts[0]
    parts.append(training(short, shape, short, 45, "--compare"))
    for other in others:
        parts += [steps(other, 280), kernels(other)]
    parts.append(training(shape, shape, contexts[-1], 45))
    for one in (shape, *others):
        title, where = f"Steps of the prototype, {one}", ("--shape", one, *longest, "--prototype")
        parts.append(part(device, f"prototype-{one}", title, 75, *where))
    parts += [training(other, other, contexts[-1], 75) for other in others]
    return parts


def part(device: str, name: str, title: str, expected: float, *arguments: str) -> Part:
    group = name.partition("-")[0]
    command = "steps" if group in STEPS else group
    return Part(name, title, (sys.executable, str(PARTS), command, "--device", device, *arguments), LATE * expected)


def chosen(parts: Sequence[Part], only: Sequence[str]) -> list[Part]:
    """The parts of these names, or of names that begin with these words; all where there are none.

    Raises:
        SystemExit: no part is called so.
    """
    names = {one.name: {one.name, one.name.partition("-")[0]} for one in parts}
    for word in only:
        if not any(word in words for words in names.values()):
            groups = dict.fromkeys(name.partition("-")[0] for name in names)
            known = ", ".join([*groups, *(name for name in names if name not in groups)])
            raise SystemExit(f"--only {word}: no such part; there are {known}")
    return [one for one in parts if not only or names[one.name] & set(only)]


def run_parts(parts: Iterable[Part], seconds: float) -> Iterator[Outcome]:
    """One after the other, whatever became of those before, until the time is over."""
    ends = time.monotonic() + seconds
    for one in parts:
        left = ends - time.monotonic()
        if left <= 0:
            yield Outcome(one.name, one.title, "", [], "left out, the time was over; give more --minutes", "", 0.0)
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
        return Outcome(one.name, one.title, said, _rows(rows), failure, log_end, time.monotonic() - started)


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


def write_snapshot(out: Path, device: str, facts: str, outcomes: Sequence[Outcome]) -> None:
    """`gpu_<device>.md`, its parts as `gpu_<device>.json` and measured steps as `gpu_<device>_runtime.csv`."""
    write_text(_file(out, device, ".md"), "\n".join(snapshot(device, facts, outcomes)) + "\n")
    write_text(_file(out, device, ".json"), json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")
    if rows := rows_of(outcomes, *STEPS):
        write_text(_file(out, device, "_runtime.csv"), csv_text(list(rows[0]), rows))


def read_outcomes(out: Path, device: str) -> dict[str, Outcome]:
    """The parts of a snapshot by name; none where there is no snapshot."""
    path = _file(out, device, ".json")
    if not path.exists():
        return {}
    return {fields["name"]: Outcome(**fields) for fields in json.loads(path.read_text(encoding="utf-8"))}


def _file(out: Path, device: str, end: str) -> Path:
    return out / f"gpu_{re.sub(r'[^a-z0-9]+', '_', device.lower()).strip('_')}{end}"


def rows_of(outcomes: Iterable[Outcome], *groups: str) -> list[Row]:
    """What the parts whose names begin with these words measured."""
    return [row for outcome in outcomes if outcome.name.partition("-")[0] in groups for row in outcome.rows]


def snapshot(device: str, facts: str, outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The lines of the Markdown file."""
    facts = facts.strip()
    yield from (f"# {device}", "", facts, "", "| part | result | s |", "|---|---|---|")
    for outcome in outcomes:
        result = (outcome.failure or "done") + (", earlier" if outcome.facts != facts else "")
        yield f"| {outcome.title} | {result} | {outcome.seconds:.0f} |"
    if any(outcome.rows for outcome in outcomes):
        yield from ("", "## Aims", "", *aims(outcomes))
    if rows := rows_of(outcomes, *STEPS):
        yield from ("", "## Steps and their floors", "", *floors(rows))
    for outcome in outcomes:
        yield from ("", f"## {outcome.title}", "")
        if outcome.facts != facts:
            yield from ("Of an earlier run:", "", outcome.facts, "")
        if outcome.text:
            yield outcome.text
        if outcome.failure:
            yield from ("", f"This part failed: {outcome.failure}.", "", "```", outcome.log, "```")


def aims(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """What was aimed at, beside what was measured; one line each."""
    yield from step_aims(rows_of(outcomes, "steps"))
    hours = {row["backbone"]: row for row in rows_of(outcomes, "evaluation")}
    for backbone, most in RULER_AIM.items():
        what = f"{backbone}, all arms of RULER at {LONGEST}: at most {most:g} GPU-hours"
        yield _bound(what, hours.get(backbone), "ruler_hours", most, "h, by measured rates")
    for backbone, most in TRAINING_AIMS.items():
        what = f"{backbone}, training on a sequence of {LONGEST}: at most {most:g} GPU-s"
        passes = [
            row for row in rows_of(outcomes, "training") if (row["backbone"], row["context"]) == (backbone, LONGEST)
        ]
        for row in passes or [None]:
            yield _bound(what, row, "sequence_s", most, f"s with products of {row['precision']}" if row else "s")


def _bound(what: str, row: Row | None, column: str, most: float, unit: str) -> str:
    if row is None:
        return f"* {what}: not measured"
    value = float(row[column])
    return f"* {what}: {value:.2f} {unit}, {'met' if value <= most else 'missed'}"


def step_aims(rows: Sequence[Row]) -> Iterator[str]:
    """Those of decode steps, of each the fastest of our implementations."""
    ours: dict[tuple[str, str, str, str], Row] = {}
    for row in rows:
        if row["implementation"] != "prototype":
            ours[_place(row)] = min(row, ours.get(_place(row), row), key=lambda one: float(one["per_step_ms"] or "inf"))
    for (backbone, method), most in STEP_AIMS.items():
        row = ours.get((backbone, LONGEST, "1", method))
        what = f"{backbone}, {METHOD_TITLES[method]} at {LONGEST}, batch 1: at most {most} ms"
        yield _aim(what, row, lambda row, most=most: (_step(row), float(row["per_step_ms"]) <= most))
    for (backbone, context, batch, method), row in ours.items():
        if method == "topk_phi":
            what = f"{backbone}, TopK+phi at {context}, batch {batch}: at most {FLOOR_AIM} times the floor"
            yield _aim(what, row, lambda row: (f"{_over_floor(row):.2f} times", _over_floor(row) <= FLOOR_AIM))
    for (backbone, method), most in FULL_AIMS.items():
        row, full = (ours.get((backbone, LONGEST, LARGE_BATCH, name)) for name in (method, "full"))
        times = "faster than" if most == 1 else f"at most {most:g} times"
        what = f"{backbone}, {METHOD_TITLES[method]} at {LONGEST}, batch {LARGE_BATCH}: {times} our own Full"
        yield _aim(what, row, lambda row, full=full, most=most: _beside(row, full, most))


def _beside(row: Row, full: Row | None, most: float) -> tuple[str, bool]:
    """Where Full does not even fit, there is nothing to be slower than."""
    if full is None or full["not_measured"]:
        return f"{_step(row)}, Full not measured", full is not None
    step, other = float(row["per_step_ms"]), float(full["per_step_ms"])
    ratio = step / other
    kernel = _fastest(full)
    return f"{step:.2f} ms, Full{kernel} {other:.2f} ms, ratio {ratio:.2f}", ratio < 1 if most == 1 else ratio <= most


def _fastest(row: Row) -> str:
    """The attention kernel of a row of Full, in brackets, where there was a choice."""
    name = row["attention_kernels"].partition(" ")[0]
    return f" ({name})" if name else ""


def _aim(what: str, row: Row | None, judged: Callable[[Row], tuple[str, bool]]) -> str:
    if row is None or row["not_measured"]:
        return f"* {what}: not measured" + (f" ({row['not_measured']})" if row else "")
    measured, met = judged(row)
    return f"* {what}: {measured}, {'met' if met else 'missed'}"


def floors(rows: Sequence[Row]) -> Iterator[str]:
    """Every measured step beside the time that its bytes take at the speed of a large copy."""
    yield "| backbone | context | batch | implementation | method | step ms | floor ms | over floor |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        head = [*_place(row)[:3], row["implementation"], METHOD_TITLES[row["method"]] + _fastest(row)]
        if not row["not_measured"]:
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
    floor = int(row["step_bytes"]) / float(row["bandwidth_gb_s"]) / 1e6  # not rounded, as in the file
    return float(row["per_step_ms"]) / floor


if __name__ == "__main__":
    main()
