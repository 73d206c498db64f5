"""The GPU check without a GPU: failing parts, its snapshot, and the whole check on a tiny model."""

from __future__ import annotations

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
from benchmarks.gpu_check import PLANS, Outcome, Part, read_outcomes, run_parts, snapshot, write_snapshot
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


def script(name: str, code: str, seconds: float = 60) -> Part:
    return Part(name, (sys.executable, "-c", code), seconds)


def test_a_part_that_crashes_or_hangs_leaves_what_it_said_and_the_next_ones_run() -> None:
    parts = [
        script("crash", CRASH), script("hang", HANG, seconds=2), script("raise", "raise ValueError('not so')"),
        script("fine", "print('all')"),
    ]  # fmt: skip
    crash, hang, raising, fine = run_parts(parts, seconds=600)
    assert (crash.text, crash.failure, crash.log) == ("found this", "ended by SIGABRT", "a fault")
    assert hang.failure == "ended after 2 s, its time limit"
    wait_until_gone(int(hang.text))
    assert raising.failure == "ended with status 1" and raising.log.endswith("ValueError: not so")
    assert (fine.text, fine.failure) == ("all", "")


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


def test_the_snapshot_names_what_failed_and_what_is_of_an_earlier_run(tmp_path: Path) -> None:
    facts = "* 141 GiB, torch 3"
    outcomes = [
        Outcome("ceilings", "* copies: 4.2 TB/s", "", "", 9.6, facts),
        Outcome("kernels-1b", "| part | 4k |", "ended by SIGSEGV", "an illegal access", 4, facts),
        Outcome("tests", "3 passed", "", "", 30, "* 141 GiB"),
    ]
    write_snapshot(tmp_path, "NVIDIA H200 (SXM)", facts, outcomes)
    text = (tmp_path / "gpu_nvidia_h200_sxm.md").read_text()
    assert text == "\n".join(snapshot("NVIDIA H200 (SXM)", facts, outcomes)) + "\n"
    assert text.startswith(f"# NVIDIA H200 (SXM)\n\n{facts}\n")
    assert "| ceilings | done | 10 |\n| kernels-1b | ended by SIGSEGV | 4 |\n| tests | done, earlier | 30 |" in text
    failed = text.partition("## kernels-1b")[2].partition("## tests\n")[0]
    assert failed == "\n\n| part | 4k |\n\nThis part failed: ended by SIGSEGV.\n\n```\nan illegal access\n```\n\n"
    assert text.endswith("## tests\n\nOf an earlier run:\n\n* 141 GiB\n\n3 passed\n")
    assert list(read_outcomes(tmp_path, "NVIDIA H200 (SXM)").values()) == outcomes
    assert read_outcomes(tmp_path, "Another GPU") == {}


def test_the_plan_fits_into_its_time_and_a_cpu_tries_every_kind_of_part() -> None:
    assert sum(seconds for _, seconds, _ in PLANS["cuda"]) < 60 * gpu_check.MINUTES
    kinds = [{name.partition("-")[0] for name, _, _ in PLANS[device]} for device in ("cuda", "cpu")]
    assert kinds[0] == kinds[1]


def test_the_evaluation_is_that_of_the_papers_study() -> None:
    study = yaml.safe_load((ROOT / "config" / "studies" / "paper.yaml").read_text())
    arms = [("full", None), *itertools.product(study["methods"][1:], study["budgets"])]
    assert [(arm.method, arm.budget_percent) for arm in gpu_parts.ARMS] == arms


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
    assert find_spec("pydantic") is not None
    done = subprocess.run(
        [sys.executable, "-c", "import pydantic"], env=on_a_bare_machine(), capture_output=True, text=True
    )
    assert done.returncode == 1 and "ModuleNotFoundError" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("has", ["pytest", "pytest pandas"])
def test_the_gpu_tests_are_found_on_a_bare_machine(has: str) -> None:
    command = [sys.executable, gpu_parts.__file__, "tests", "--device", "cpu"]
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
    assert "failed" not in text and text.count("| done |") == len(PLANS["cpu"])
    words = [
        "TB/s, read and write", "TFLOP/s", "| full: torch's attention |", "| topk_phi_nosub |", "| scan4_moments |",
        "* pytest is not installed, so no test was run", "13 arms, one prompt of 4k", "with training",
    ]  # fmt: skip
    for word in words:
        assert word in text, word
    assert len(re.findall(r"^\| [24]k \| [12] \| ", text, re.MULTILINE)) == 2 * 2 * (4 + len(gpu_parts.OWN)) + 4

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
