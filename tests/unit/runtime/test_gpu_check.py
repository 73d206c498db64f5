"""The GPU check without a GPU: its plan, what it does with parts that fail, its snapshot; all of it on a tiny model."""

from __future__ import annotations

import csv
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks import gpu_check
from benchmarks.gpu_check import Outcome, Part, aims, floors, plan, run_parts, snapshot, write_snapshot
from tests.needs import NO_GPU, needs

SCRIPT = Path(gpu_check.__file__)

CRASH = "import os, sys; print('found this', flush=True); print('a fault', file=sys.stderr); os.abort()"
HANG = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
time.sleep(600)
"""
ROWS = "import sys; open(sys.argv[-1], 'w').write('backbone,context\\n1b,4k\\n')"


def script(title: str, code: str, seconds: float = 60) -> Part:
    return Part(title, (sys.executable, "-c", code), seconds)


def step(
    context: str, batch: str, method: str, ms: float, floor: float = 1.0, backbone: str = "1b", side: str = "fused"
) -> dict[str, str]:
    """A row as the runtime stage writes it, at 1000 GB/s."""
    return {
        "backbone": backbone, "implementation": side, "method": method, "context": context, "batch": batch,
        "per_step_ms": f"{ms:.3f}", "per_step_low_ms": f"{ms - 0.1:.3f}", "per_step_high_ms": f"{ms + 0.1:.3f}",
        "step_bytes": str(round(floor * 1e9)), "bandwidth_gb_s": "1000.000", "floor_ms": f"{floor:.3f}",
        "not_measured": "",
    }  # fmt: skip


def lacking(row: dict[str, str]) -> dict[str, str]:
    return row | {"per_step_ms": "", "per_step_low_ms": "", "per_step_high_ms": "", "not_measured": "does not fit"}


def test_a_part_that_crashes_or_hangs_leaves_what_it_said_and_the_next_ones_run() -> None:
    parts = [
        script("Crash", CRASH), script("Hang", HANG, seconds=4), script("Raise", "raise ValueError('not so')"),
        script("Rows", ROWS),
    ]  # fmt: skip
    crash, hang, raising, rows = run_parts(parts, seconds=600)
    assert (crash.text, crash.failure, crash.log) == ("found this", "ended by SIGABRT", "a fault")
    assert hang.failure == "ended after 4 s, which were all it had"
    wait_until_gone(int(hang.text))
    assert raising.failure == "ended with status 1" and raising.log.endswith("ValueError: not so")
    assert rows.failure == "" and rows.rows == [{"backbone": "1b", "context": "4k"}]


def wait_until_gone(pid: int) -> None:
    """A process that nobody asks how it ended stays in the table as a zombie."""
    ends = time.monotonic() + 60
    while (stat := Path(f"/proc/{pid}/stat")).exists():
        try:
            if stat.read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except OSError:
            return
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_ending_the_check_ends_the_part_that_runs(tmp_path: Path) -> None:
    check = subprocess.Popen([sys.executable, SCRIPT, "--device", "cpu", "--out", tmp_path], stderr=subprocess.DEVNULL)
    children = Path(f"/proc/{check.pid}/task/{check.pid}/children")
    while not (found := children.read_text().split()):
        assert check.poll() is None
        time.sleep(0.01)
    check.send_signal(signal.SIGTERM)
    assert check.wait() == 128 + signal.SIGTERM
    wait_until_gone(int(found[0]))


def test_a_log_names_no_place_of_this_machine_and_every_fence_is_closed() -> None:
    code = f"import sys; print('```'); sys.exit(f'{{sys.prefix}}/lib/x.py, {SCRIPT}, {Path.home()}/y.py')"
    (outcome,) = run_parts([script("Places", code)], seconds=600)
    assert outcome.log == "(python)/lib/x.py, ./benchmarks/gpu_check.py, ~/y.py"
    assert outcome.text == "```\n```"


def test_what_has_no_time_left_is_not_started() -> None:
    (outcome,) = run_parts([script("Late", CRASH)], seconds=0)
    assert outcome.failure.startswith("left out") and outcome.text == "" and outcome.seconds == 0


def test_the_snapshot_names_what_failed_and_keeps_the_rest(tmp_path: Path) -> None:
    outcomes = [
        Outcome("Ceilings", "* copies: 4.2 TB/s", [], "", "", 9.6),
        Outcome("Kernels", "| part | 4k |", [], "ended by SIGSEGV", "an illegal access", 4.0),
        Outcome("Steps", "", [step("64k", "1", "topk_phi", 2.0)], "", "", 30.0),
    ]
    write_snapshot(tmp_path, "NVIDIA H200 (SXM)", "* 141 GiB\n", outcomes)
    text = (tmp_path / "gpu_nvidia_h200_sxm.md").read_text()
    assert text == "\n".join(snapshot("NVIDIA H200 (SXM)", "* 141 GiB", outcomes)) + "\n"
    assert text.startswith("# NVIDIA H200 (SXM)\n\n* 141 GiB\n")
    assert "| Ceilings | done | 10 |\n| Kernels | ended by SIGSEGV | 4 |\n| Steps | done | 30 |" in text
    failed = text.partition("## Kernels")[2].partition("## Steps\n")[0]
    assert failed == "\n\n| part | 4k |\n\nThis part failed: ended by SIGSEGV.\n\n```\nan illegal access\n```\n\n"
    assert "at most 2.5 ms: 2.000 (1.900 to 2.100) ms, met" in text
    with open(tmp_path / "gpu_nvidia_h200_sxm_runtime.csv", newline="") as stream:
        assert list(csv.DictReader(stream)) == outcomes[2].rows


def test_no_steps_no_aims(tmp_path: Path) -> None:
    outcomes = [Outcome("Steps", "", [], "ended with status 1", "", 1.0)]
    write_snapshot(tmp_path, "Some GPU", "", outcomes)
    assert "## Aims" not in (tmp_path / "gpu_some_gpu.md").read_text()
    assert not list(tmp_path.glob("*.csv"))


def test_aims_beside_what_was_measured() -> None:
    rows = [
        step("64k", "1", "topk_phi", 2.51, floor=1.7), step("64k", "1", "topk_phi", 85.0, side="prototype"),
        step("64k", "8", "full", 5.0), step("64k", "8", "topk_phi", 4.0, floor=2.0),
        step("64k", "1", "topk_phi", 5.0, floor=3.0, backbone="3b"),
        lacking(step("64k", "8", "topk_phi", 9.0, backbone="3b")),
    ]  # fmt: skip
    assert list(aims(rows)) == [
        "* 1b, TopK+phi at 64k, batch 1: at most 2.5 ms: 2.510 (2.410 to 2.610) ms, missed",
        "* 3b, TopK+phi at 64k, batch 1: at most 5.0 ms: 5.000 (4.900 to 5.100) ms, met",
        "* 1b, TopK+phi at 64k, batch 1: at most 1.5 times the floor: 1.48 times, met",
        "* 1b, TopK+phi at 64k, batch 8: at most 1.5 times the floor: 2.00 times, missed",
        "* 3b, TopK+phi at 64k, batch 1: at most 1.5 times the floor: 1.67 times, missed",
        "* 3b, TopK+phi at 64k, batch 8: at most 1.5 times the floor: not measured (does not fit)",
        "* 1b, TopK+phi at 64k, batch 8: faster than our own Full: 4.00 ms, Full 5.00 ms, ratio 0.80, met",
        "* 3b, TopK+phi at 64k, batch 8: faster than our own Full: not measured (does not fit)",
    ]
    slower = [step("64k", "8", "full", 4.0), step("64k", "8", "topk_phi", 4.0)]
    assert list(aims(slower))[-2].endswith("ratio 1.00, missed")
    assert list(aims([lacking(slower[0]), slower[1]]))[-2].endswith("Full not measured, met")
    assert list(aims(slower[1:]))[-2].endswith("Full not measured, missed")


def test_floors_of_everything_that_was_measured() -> None:
    rows = [step("4k", "1", "full", 3.0, floor=2.0), lacking(step("64k", "8", "topk_phi_nosub", 1.0))]
    assert list(floors(rows))[2:] == [
        "| 1b | 4k | 1 | fused | Full | 3.000 (2.900 to 3.100) | 2.000 | 1.50 |",
        "| 1b | 64k | 8 | fused | TopK+phi (NoSub) | does not fit | 1.000 | -- |",
    ]


def test_the_plan_measures_what_the_aims_ask_for() -> None:
    parts = plan("cuda")
    steps = [part.command for part in parts if "steps" in part.command and "--prototype" not in part.command]
    for shape, command in zip(gpu_check.STEP_AIMS, steps, strict=True):
        for words in (["--shape", shape], ["--contexts", "4k", "16k", "64k"], ["--batches", "1", "8"]):
            place = command.index(words[0])
            assert list(command[place : place + len(words)]) == words
    assert all(part.seconds < 60 * gpu_check.MINUTES < 8 * 60 for part in parts)
    assert {part.command[2] for part in plan("cpu")} == {part.command[2] for part in parts} - {"training"}


@pytest.mark.slow
def test_the_whole_check_on_a_tiny_model(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--device", "cpu", "--out", tmp_path, "--minutes", "60"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (snapshot_file,) = tmp_path.glob("gpu_*.md")
    text = snapshot_file.read_text()
    assert "failed" not in text and text.count("| done |") == len(plan("cpu"))
    for words in ("TB/s, read and write", "TFLOP/s", "| Full: SDPA with grouped heads |", "| topk_phi_nosub |"):
        assert words in text, words
    (table,) = tmp_path.glob("gpu_*_runtime.csv")
    with open(table, newline="") as stream:
        rows = list(csv.DictReader(stream))
    places = {(row["implementation"], row["context"], row["batch"], row["method"]) for row in rows}
    assert len(places) == len(rows) == 2 * 2 * 4 + 4
    assert "| tiny | 4k | 2 | fused | TopK+phi |" in text


@pytest.mark.slow
@needs(NO_GPU)
def test_a_machine_without_a_gpu_is_told_so_in_one_line(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--out", tmp_path], capture_output=True, text=True)
    assert done.returncode == 1 and not list(tmp_path.iterdir())
    assert done.stderr == "gpu-check needs an NVIDIA GPU that torch can use, and there is none here\n"
