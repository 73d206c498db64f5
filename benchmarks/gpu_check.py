"""Measures this project on a GPU and writes a snapshot: ceilings, kernels, whole steps and their floor, an evaluation's
decoding, training passes, and the tests that need a GPU.

It needs torch, triton, transformers, safetensors and numpy, and nothing else: no network, no installation. Weights are
random at the exact shapes of Llama-3.2, since times do not depend on their values. Every part (`gpu_parts.py`) runs in
a process of its own, because a fault on the device breaks the process, and has a time limit. If a part fails, the
snapshot has its name and its output until then, and the exit status is 1. The snapshot is rewritten after every part.
With --only, the measured parts replace those in the snapshot of this device in --out, and other parts stay, so that
several short runs make up a whole one. With --device cpu, the same parts run on a tiny model, to check this check.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from residual_mass.files import write_text

PARTS = Path(__file__).with_name("gpu_parts.py")
ROOT = Path(__file__).parents[1]
MINUTES = 27
"""Minutes for all parts together; after them, the running part is ended, and the others are left out."""
LATE = 2.5
"""Time limit of a part, as a multiple of its expected time."""
KILL_SECONDS = 10
"""Seconds to wait for a part after it was killed."""
LOG_LINES = 25
"""Last lines of a failed part's error stream that the snapshot shows."""
PLACES = "--contexts 4k 16k 64k --batches 1 8"
PLANS = {
    "cuda": (
        ("ceilings", 20, ""),
        ("kernels-1b", 75, f"--shape 1b {PLACES}"),
        ("agreement-float32", 60, "--shape 1b --contexts 4k --dtype float32"),
        ("agreement-bfloat16", 60, "--shape 1b --contexts 4k --dtype bfloat16"),
        ("steps-1b", 180, f"--shape 1b {PLACES}"),
        ("tests", 150, ""),
        ("evaluation-1b", 60, "--shape 1b --contexts 64k"),
        ("training-1b", 45, "--shape 1b --contexts 64k"),
        ("steps-3b", 280, f"--shape 3b {PLACES}"),
        ("kernels-3b", 75, f"--shape 3b {PLACES}"),
        ("prototype-1b", 75, "--shape 1b --contexts 64k"),
        ("prototype-3b", 75, "--shape 3b --contexts 64k"),
        ("training-3b", 75, "--shape 3b --contexts 64k"),
    ),
    "cpu": (
        ("ceilings", 20, ""),
        ("kernels-tiny", 75, "--shape tiny --contexts 2k 4k --batches 1 2"),
        ("agreement-float32", 60, "--shape tiny --contexts 2k --dtype float32"),
        ("agreement-bfloat16", 60, "--shape tiny --contexts 2k --dtype bfloat16"),
        ("steps-tiny", 180, "--shape tiny --contexts 2k 4k --batches 1 2"),
        ("tests", 150, ""),
        ("evaluation-tiny", 60, "--shape tiny --contexts 4k"),
        ("training-tiny", 45, "--shape tiny --contexts 4k"),
        ("prototype-tiny", 75, "--shape tiny --contexts 4k"),
    ),
}
"""Name, expected seconds and flags of each part, the most important first, because time may run out."""


class Part(NamedTuple):
    """A command that prints a section of the snapshot as Markdown, and the seconds after which it is ended."""

    name: str
    command: Sequence[str]
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """Outcome of a part. `failure` is empty if it succeeded; `log` is the end of its error stream."""

    name: str
    text: str
    failure: str
    log: str
    seconds: float
    """0 if the part was not started."""
    facts: str = ""
    """Device and versions, as the part `about` prints them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/measured"))
    parser.add_argument("--device", choices=PLANS, default="cuda")
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--only", action="append", metavar="PART", help="may be given several times")
    options = parser.parse_args()
    plan = [part(options.device, *each) for each in PLANS[options.device]]
    parts = chosen(plan, options.only or [])
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the running part is ended
    about = run_part(part(options.device, "about", 60, ""))
    if about.failure:
        raise SystemExit((about.log.splitlines() or [about.failure])[-1])
    title, _, facts = about.text.partition("\n")
    device, facts = title.removeprefix("# "), facts.strip()
    found = read_outcomes(options.out, device) if options.only else {}
    failed = False
    for outcome in run_parts(parts, 60 * options.minutes - about.seconds, facts):
        failed |= bool(outcome.failure)
        if outcome.seconds or outcome.name not in found:  # a part without time left keeps its earlier outcome
            found[outcome.name] = outcome
        print(f"{outcome.name}: {outcome.failure or 'done'}, {outcome.seconds:.0f} s", file=sys.stderr)
        outcomes = [found[one.name] for one in plan if one.name in found]
        write_snapshot(options.out, device, facts, outcomes)  # a later crash loses nothing
    sys.exit(int(failed))


def part(device: str, name: str, expected: float, flags: str) -> Part:
    command = (sys.executable, str(PARTS), name.partition("-")[0], "--device", device, *flags.split())
    return Part(name, command, LATE * expected)


def chosen(parts: Sequence[Part], only: Sequence[str]) -> list[Part]:
    """Returns the parts with these names, or whose names begin with these words; all parts if none are given.

    Raises:
        SystemExit: no part has such a name.
    """
    names = {one.name: {one.name, one.name.partition("-")[0]} for one in parts}
    for word in only:
        if not any(word in words for words in names.values()):
            raise SystemExit(
                f"--only {word}: no such part; there are {', '.join(sorted(set().union(*names.values())))}"
            )
    return [one for one in parts if not only or names[one.name] & set(only)]


def run_parts(parts: Iterable[Part], seconds: float, facts: str = "") -> Iterator[Outcome]:
    """Runs parts one after the other until the time is over, even if earlier parts failed."""
    ends = time.monotonic() + seconds
    for one in parts:
        left = ends - time.monotonic()
        if left <= 0:
            yield Outcome(one.name, "", "left out, the time was over; give more --minutes", "", 0.0, facts)
        else:
            yield run_part(one._replace(seconds=min(left, one.seconds)), facts)


def run_part(one: Part, facts: str = "") -> Outcome:
    """Runs a part in a process of its own. When its time is over, it is ended with all of its child processes."""
    started = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as out, tempfile.TemporaryFile("w+", errors="replace") as said:
        process = subprocess.Popen(one.command, stdout=out, stderr=said, start_new_session=True)
        failure = ""
        try:
            if status := process.wait(one.seconds):
                failure = f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        except subprocess.TimeoutExpired:
            failure = f"ended after {one.seconds:.0f} s, its time limit"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                try:
                    process.wait(KILL_SECONDS)
                except subprocess.TimeoutExpired:  # possible with a faulty driver
                    failure += ", and could not be ended"
        out.seek(0)
        said.seek(0)
        text, log = out.read().rstrip(), said.read().rstrip()
    log = _without_places("\n".join(log.splitlines()[-LOG_LINES:]))
    return Outcome(one.name, text, failure, log, time.monotonic() - started, facts)


def _without_places(log: str) -> str:
    """Replaces folders of this machine in a log, because snapshots are published."""
    for place, name in ((sys.prefix, "(python)"), (sys.base_prefix, "(python)"), (ROOT, "."), (Path.home(), "~")):
        if str(place) != "/":
            log = re.sub(rf"{re.escape(str(place))}(?=/|\b)", name, log)
    return log


def write_snapshot(out: Path, device: str, facts: str, outcomes: Sequence[Outcome]) -> None:
    """Writes `gpu_<device>.md`, and its parts as `gpu_<device>.json`."""
    write_text(_file(out, device, ".md"), "\n".join(snapshot(device, facts, outcomes)) + "\n")
    write_text(_file(out, device, ".json"), json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")


def read_outcomes(out: Path, device: str) -> dict[str, Outcome]:
    """Returns the parts of a snapshot by name; none if there is no snapshot."""
    path = _file(out, device, ".json")
    if not path.exists():
        return {}
    return {fields["name"]: Outcome(**fields) for fields in json.loads(path.read_text(encoding="utf-8"))}


def _file(out: Path, device: str, end: str) -> Path:
    return out / f"gpu_{re.sub(r'[^a-z0-9]+', '_', device.lower()).strip('_')}{end}"


def snapshot(device: str, facts: str, outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yields the lines of the Markdown file."""
    yield from (f"# {device}", "", facts, "", "| part | result | s |", "|---|---|---|")
    for outcome in outcomes:
        result = (outcome.failure or "done") + (", earlier" if outcome.facts != facts else "")
        yield f"| {outcome.name} | {result} | {outcome.seconds:.0f} |"
    for outcome in outcomes:
        yield from ("", f"## {outcome.name}", "")
        if outcome.facts != facts:
            yield from ("Of an earlier run:", "", outcome.facts, "")
        if outcome.text:
            yield outcome.text
        if outcome.failure:
            yield from ("", f"This part failed: {outcome.failure}.", "", "```", outcome.log, "```")


if __name__ == "__main__":
    main()
