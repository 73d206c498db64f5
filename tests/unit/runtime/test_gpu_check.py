"""The GPU check without a GPU: its plan, what it does with parts that fail, its snapshot; all of it on a tiny model."""

from __future__ import annotations

import csv
import importlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from benchmarks import gpu_check
from benchmarks.gpu_check import (
    Outcome,
    Part,
    plan,
    read_outcomes,
    run_parts,
    snapshot,
    step_aims,
    write_snapshot,
)
from tests.needs import NO_GPU, needs

SCRIPT = Path(gpu_check.__file__)
ROOT = SCRIPT.parents[1]
sys.path.append(str(SCRIPT.parent))  # the scripts there find each other like this

gpu_parts = importlib.import_module("gpu_parts")

CRASH = "import os, sys; print('found this', flush=True); print('a fault', file=sys.stderr); os.abort()"
HANG = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
time.sleep(600)
"""
ROWS = "import sys; open(sys.argv[-1], 'w').write('backbone,context\\n1b,4k\\n')"


def script(title: str, code: str, seconds: float = 60) -> Part:
    return Part(title.lower(), title, (sys.executable, "-c", code), seconds)


def step(
    context: str, batch: str, method: str, ms: float, floor: float = 1.0, backbone: str = "1b", side: str = "fused"
) -> dict[str, str]:
    """A row as the runtime stage writes it, at 1000 GB/s."""
    return {
        "backbone": backbone, "implementation": side, "method": method, "context": context, "batch": batch,
        "per_step_ms": f"{ms:.3f}", "per_step_low_ms": f"{ms - 0.1:.3f}", "per_step_high_ms": f"{ms + 0.1:.3f}",
        "step_bytes": str(round(floor * 1e9)), "bandwidth_gb_s": "1000.000", "floor_ms": f"{floor:.3f}",
        "not_measured": "", "attention_kernels": f"flash {ms:.3f}; math 99.000" if method == "full" else "",
    }  # fmt: skip


def lacking(row: dict[str, str]) -> dict[str, str]:
    return row | {"per_step_ms": "", "per_step_low_ms": "", "per_step_high_ms": "", "not_measured": "does not fit"}


def test_a_part_that_crashes_or_hangs_leaves_what_it_said_and_the_next_ones_run() -> None:
    parts = [
        script("Crash", CRASH), script("Hang", HANG, seconds=2), script("Raise", "raise ValueError('not so')"),
        script("Rows", ROWS),
    ]  # fmt: skip
    crash, hang, raising, rows = run_parts(parts, seconds=600)
    assert (crash.text, crash.failure, crash.log) == ("found this", "ended by SIGABRT", "a fault")
    assert hang.failure == "ended after 2 s, which were all it had"
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


def outcome(name: str, text: str = "", failure: str = "", log: str = "", seconds: float = 1, **more: object) -> Outcome:
    facts = {"rows": [], "facts": "* 141 GiB"} | more
    return Outcome(name, name.title(), text, failure=failure, log=log, seconds=seconds, **facts)


def test_the_snapshot_names_what_failed_and_keeps_the_rest(tmp_path: Path) -> None:
    outcomes = [
        outcome("ceilings", "* copies: 4.2 TB/s", seconds=9.6),
        outcome("kernels", "| part | 4k |", "ended by SIGSEGV", "an illegal access", 4),
        outcome("steps", seconds=30, rows=[step("64k", "1", "topk_phi", 2.0)]),
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


def test_a_snapshot_is_read_again_and_says_what_is_of_an_earlier_run(tmp_path: Path) -> None:
    earlier = [outcome("steps", "| a table |", rows=[step("4k", "1", "topk", 3.0)]), outcome("tests", failure="killed")]
    write_snapshot(tmp_path, "Some GPU", "* 141 GiB", earlier)
    found = read_outcomes(tmp_path, "Some GPU")
    assert list(found.values()) == earlier and list(found) == ["steps", "tests"]
    assert read_outcomes(tmp_path, "Another GPU") == {}
    later = [found["steps"], outcome("tests", "3 passed", facts="* 141 GiB, torch 3")]
    text = "\n".join(snapshot("Some GPU", "* 141 GiB, torch 3", later))
    assert "| Steps | done, earlier | 1 |\n| Tests | done | 1 |" in text
    assert "## Steps\n\nOf an earlier run:\n\n* 141 GiB\n\n| a table |" in text and "## Tests\n\n3 passed" in text


def test_aims_beside_what_was_measured() -> None:
    rows = [
        step("64k", "1", "topk_phi", 2.51, floor=1.7), step("64k", "1", "topk_phi", 85.0, side="prototype"),
        step("64k", "8", "full", 5.0), step("64k", "8", "topk_phi", 4.0, floor=2.0),
        step("64k", "1", "topk_moments", 1.7),
        step("64k", "8", "topk_moments", 3.76),
        step("64k", "1", "topk_phi", 5.0, floor=3.0, backbone="3b"),
        lacking(step("64k", "8", "topk_phi", 9.0, backbone="3b")),
    ]  # fmt: skip
    assert list(step_aims(rows)) == [
        "* 1b, TopK+moments at 64k, batch 1: at most 1.6 ms: 1.700 (1.600 to 1.800) ms, missed",
        "* 1b, TopK+phi at 64k, batch 1: at most 2.5 ms: 2.510 (2.410 to 2.610) ms, missed",
        "* 3b, TopK+phi at 64k, batch 1: at most 5.0 ms: 5.000 (4.900 to 5.100) ms, met",
        "* 1b, TopK+phi at 64k, batch 1: at most 1.5 times the floor: 1.48 times, met",
        "* 1b, TopK+phi at 64k, batch 8: at most 1.5 times the floor: 2.00 times, missed",
        "* 3b, TopK+phi at 64k, batch 1: at most 1.5 times the floor: 1.67 times, missed",
        "* 3b, TopK+phi at 64k, batch 8: at most 1.5 times the floor: not measured (does not fit)",
        "* 1b, TopK+moments at 64k, batch 8: at most 0.75 times our own Full: "
        "3.76 ms, Full (flash) 5.00 ms, ratio 0.75, missed",
        "* 1b, TopK+phi at 64k, batch 8: faster than our own Full: 4.00 ms, Full (flash) 5.00 ms, ratio 0.80, met",
        "* 3b, TopK+phi at 64k, batch 8: faster than our own Full: not measured (does not fit)",
    ]
    slower = [step("64k", "8", "full", 4.0), step("64k", "8", "topk_phi", 4.0)]
    assert list(step_aims(slower))[-2].endswith("ratio 1.00, missed")
    assert list(step_aims([lacking(slower[0]), slower[1]]))[-2].endswith("Full not measured, met")
    assert list(step_aims(slower[1:]))[-2].endswith("Full not measured, missed")


def test_the_plan_measures_what_the_aims_ask_for() -> None:
    parts = plan("cuda")
    steps = {part.name.removeprefix("steps-"): part.command for part in parts if part.name.startswith("steps-")}
    assert set(steps) == {shape for shape, _ in gpu_check.STEP_AIMS}
    for shape, command in steps.items():
        for words in (["--shape", shape], ["--contexts", "4k", "16k", "64k"], ["--batches", "1", "8"]):
            place = command.index(words[0])
            assert list(command[place : place + len(words)]) == words
    for kind, shapes in (("evaluation", gpu_check.RULER_AIM), ("training", gpu_check.TRAINING_AIMS)):
        for shape in shapes:
            (command,) = (part.command for part in parts if part.name == f"{kind}-{shape}")
            assert command[command.index("--shape") + 1] == shape and command[command.index("--contexts") + 1] == "64k"
    assert sum(part.expected for part in parts) < 60 * gpu_check.MINUTES
    assert {part.command[2] for part in plan("cpu")} == {part.command[2] for part in parts}


def test_the_evaluation_is_that_of_the_papers_study() -> None:
    study = yaml.safe_load((ROOT / "config" / "studies" / "paper.yaml").read_text())
    assert study["benchmarks"]["ruler"]["examples"] == gpu_parts.EXAMPLES
    arms = [("full", None), *itertools.product(study["methods"][1:], study["budgets"])]
    assert [(arm.method, arm.budget_percent) for arm in gpu_parts.ARMS] == arms
    tokens = [128] * 8 + [30, 120, 50, 32, 32]
    assert gpu_parts.ruler_seconds(2.0, 0.5) == sum(500 * (2 + 0.5 * (count - 1)) for count in tokens)


def test_every_file_with_tests_that_need_a_gpu_is_run() -> None:
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"^@?.*pytest\.mark\.gpu\b", path.read_text(), re.MULTILINE)
    }
    assert marked - {str(Path(__file__).relative_to(ROOT))} == {*gpu_parts.GPU_TESTS, *gpu_parts.GPU_TESTS_WITH_PANDAS}


def on_a_bare_machine(has: str = "") -> dict[str, str]:
    """The environment of a Python without this project's other dependencies."""
    paths = os.pathsep.join([str(ROOT / "tests" / "bare"), str(ROOT / "src")])
    return os.environ | {"PYTHONPATH": paths, "BARE_MACHINE_HAS": has, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def test_the_bare_machine_is_bare() -> None:
    for absent in ("pydantic", "pandas", "pytest", "snakemake"):
        assert find_spec(absent) is not None
        done = subprocess.run(
            [sys.executable, "-c", f"import {absent}"], env=on_a_bare_machine(), capture_output=True, text=True
        )
        assert done.returncode == 1 and "ModuleNotFoundError" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("has", ["pytest", "pytest pandas"])
def test_the_gpu_tests_are_found_on_a_bare_machine(tmp_path: Path, has: str) -> None:
    command = [sys.executable, gpu_parts.__file__, "tests", "--device", "cpu", "--rows", tmp_path / "rows.csv"]
    environment = on_a_bare_machine(has) | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    count = re.search(r"skipped: (\d+) without an NVIDIA GPU", done.stdout)
    assert count is not None and int(count[1]) > 20, done.stdout


@pytest.mark.slow
def test_the_whole_check_on_a_tiny_model_of_a_bare_machine(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, "--device", "cpu", "--out", tmp_path, "--minutes", "60"]
    done = subprocess.run(command, env=on_a_bare_machine(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (snapshot_file,) = tmp_path.glob("gpu_*.md")
    text = snapshot_file.read_text()
    assert "failed" not in text and text.count("| done |") == len(plan("cpu"))
    words = [
        "TB/s, read and write", "TFLOP/s", "| full: torch's attention |", "| topk_phi_nosub |", "| scan4_moments |",
        "* pytest is not installed, so no test was run", "13 arms, one prompt of 4096 tokens", "deviation: losses",
    ]  # fmt: skip
    for word in words:
        assert word in text, word
    (table,) = tmp_path.glob("gpu_*_runtime.csv")
    with open(table, newline="") as stream:
        rows = list(csv.DictReader(stream))
    places = {(row["implementation"], row["context"], row["batch"], row["method"]) for row in rows}
    assert len(places) == len(rows) == 2 * 2 * (4 + len(gpu_parts.OWN)) + 4  # and prototypes
    assert "| tiny | 4k | 2 | fused | TopK+phi |" in text

    parts = {one["name"]: one for one in json.loads(snapshot_file.with_suffix(".json").read_text())}
    done = subprocess.run([*command, "--only", "ceilings"], env=on_a_bare_machine(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    again = {one["name"]: one for one in json.loads(snapshot_file.with_suffix(".json").read_text())}
    assert list(again) == list(parts) and {name for name in parts if again[name] != parts[name]} == {"ceilings"}


@pytest.mark.slow
@needs(NO_GPU)
def test_a_machine_without_a_gpu_is_told_so_in_one_line(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--out", tmp_path], capture_output=True, text=True)
    assert done.returncode == 1 and not list(tmp_path.iterdir())
    assert done.stderr == "gpu-check needs an NVIDIA GPU that torch can use, and there is none here\n"
