"""A small study through a real SLURM on this machine: results, failures, stops and restarts.

Installs packages and starts daemons, so it runs only if RESIDUAL_MASS_SLURM=1.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pandas as pd
import pytest
import yaml
from tests.needs import SLURM
from tests.small_study import edited, write_small_study

pytestmark = pytest.mark.slow

DEADLINE = 1200
"""Seconds after which a run, or what is waited for, counts as stuck."""
EXAMPLES = 8
"""Of each task, so that generating takes long enough to be stopped in the midst of it."""
ONENODE = Path(__file__).with_name("onenode.sh")
PROFILE = ("--workflow-profile", "workflow/profiles/slurm", "--slurm-init-seconds-before-status-checks", "5")
CSV = "results/ruler_tiny_1k.csv"
STORE = "results/generations/_store/ruler_tiny_1k_main/all.jsonl"
GENERATIONS = "results/generations/ruler_tiny_1k_main/all.jsonl"


def test_a_folder_of_other_things_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "thesis").write_text("the only copy")
    for command in (["up"], ["down"]):
        run = subprocess.run(
            ["bash", ONENODE, *command], env={**os.environ, "ONENODE": str(tmp_path)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        said = "is neither empty nor a cluster" if os.geteuid() == 0 else "needs root"
        assert run.returncode == 1 and said in run.stderr and [path.name for path in tmp_path.iterdir()] == ["thesis"]


@pytest.fixture(scope="module", params=["squeue", "sacct"])
def asked(request: pytest.FixtureRequest) -> Iterator[str]:
    """A cluster without accounting, then one with it: what Snakemake asks for its jobs there."""
    if os.environ.get("RESIDUAL_MASS_SLURM") != "1" or os.geteuid() != 0:
        SLURM.skip()
    arguments = ["accounting"] if request.param == "sacct" else []
    started = subprocess.run(["bash", ONENODE, "up", *arguments], capture_output=True, text=True, check=False)
    if started.returncode:
        subprocess.run(["bash", ONENODE, "down"], check=False)
        print(started.stderr)
        SLURM.skip()
    yield request.param
    subprocess.run(["bash", ONENODE, "down"], check=True)


@pytest.fixture(scope="module")
def study(asked: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small study with nothing made yet but its assets."""
    folder = tmp_path_factory.mktemp(asked) / "check out"  # a blank in the path must not matter
    write_small_study(folder)
    protocol = folder / "config" / "studies" / "mini.yaml"
    benchmarks = yaml.safe_load(protocol.read_text())["benchmarks"]
    benchmarks["ruler"]["examples"] = EXAMPLES
    edited(protocol, benchmarks=benchmarks)
    return folder


def command(study: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "snakemake", *PROFILE, *arguments],
        cwd=study, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def snakemake(study: Path, *arguments: str) -> tuple[int, str]:
    process = command(study, *arguments)
    return ended(process)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit status and output of a run; it is killed, and the test fails, where it does not come to its end."""
    try:
        output, _ = process.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, output


def slurm(*arguments: str) -> str:
    return subprocess.run(arguments, capture_output=True, text=True, check=True).stdout


def submitted(output: str) -> list[str]:
    return re.findall(r"submitted with SLURM jobid (\d+)", output)


def state(job: str) -> str:
    return slurm("squeue", "--states=all", "--noheader", "--jobs", job, "--format=%T").strip()


def until(done: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    end = time.monotonic() + DEADLINE
    while not done():
        if process is not None and process.poll() is not None:
            raise AssertionError(process.communicate()[0])
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


def rows(study: Path) -> int:
    return (study / STORE).read_bytes().count(b"\n") if (study / STORE).exists() else 0


@pytest.fixture(scope="module")
def finished(study: Path) -> dict[str, bytes]:
    """Bytes of the undisturbed run's files."""
    code, output = snakemake(study, CSV)
    assert code == 0, output
    jobs = submitted(output)
    assert len(jobs) == 3 and {state(job) for job in jobs} == {"COMPLETED"}, output  # scores are made where we are
    return {path: (study / path).read_bytes() for path in (STORE, GENERATIONS, CSV)}


def forget(study: Path) -> None:
    """As if the texts had never been generated."""
    for path in (STORE, GENERATIONS, CSV):
        (study / path).unlink(missing_ok=True)


def interrupted(study: Path) -> tuple[subprocess.Popen[str], str]:
    """A run whose generation has made some rows and stands still, and its job."""
    forget(study)
    process = command(study, CSV, "--retries", "0")
    until(lambda: rows(study) >= 10, process)
    queue = [line.split("|") for line in slurm("squeue", "--noheader", "--format=%i|%Z").splitlines()]
    (job,) = [number for number, where in queue if where == str(study)]
    slurm("scontrol", "suspend", job)
    until(lambda: state(job) == "SUSPENDED", process)
    return process, job


def test_a_result_is_made_by_jobs(asked: str, study: Path, finished: dict[str, bytes]) -> None:
    table = pd.read_csv(study / CSV)
    arms = table.groupby(["method", "budget_percent", "maps"], dropna=False).task
    assert arms.ngroups > 1 and (arms.apply(set) == set(table.task)).all(), "a task of an arm is missing"
    assert not table.duplicated(["method", "budget_percent", "maps", "task"]).any()
    assert set(table.n[table.task != "all"]) == {EXAMPLES}, "not every example has its answer"
    forget(study)
    code, output = snakemake(study, CSV, "--slurm-status-command", "sacct", "--retries", "0")
    if asked == "sacct":
        assert code == 0 and len(submitted(output)) == 1, output
        assert (study / CSV).read_bytes() == finished[CSV]
        return
    (line,) = [line for line in output.splitlines() if "sacct does not answer" in line]
    assert code != 0 and not submitted(output) and "set slurm-status-command: squeue" in line
    code, output = snakemake(study, CSV)
    assert code == 0 and (study / CSV).read_bytes() == finished[CSV], output


def test_a_partition_that_is_not_there_is_told_before_the_first_job(study: Path, finished: dict[str, bytes]) -> None:
    code, output = snakemake(study, CSV, "--forcerun", "generate", "--default-resources", "slurm_partition=night")
    (line,) = [line for line in output.splitlines() if line.startswith("sbatch refuses partition 'night'")]
    assert code != 0 and not submitted(output) and "workflow/profiles/slurm/config.yaml" in line


@pytest.fixture
def torch_for_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What pip would say of a torch with CUDA: with one for CPUs alone, no job that needs a GPU is submitted."""
    version = metadata.version("torch").partition("+")[0]
    record = tmp_path / f"torch-{version}.dist-info" / "METADATA"
    record.parent.mkdir()
    record.write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)


@pytest.mark.usefixtures("torch_for_gpus")
def test_a_job_on_two_gpus_fails_and_the_others_go_on(study: Path, finished: dict[str, bytes]) -> None:
    """The node's GPUs are no GPUs, so the training that asks for two must fail: the failure is the test."""
    config, protocol = study / "config" / "config.yaml", study / "config" / "studies" / "mini.yaml"
    before = config.read_text(), protocol.read_text()
    backbone = yaml.safe_load(before[0])["backbones"]["tiny"]
    edited(config, backbones={"large": backbone | {"title": "Large", "dtype": "bfloat16", "requires_gpu": True}})
    edited(protocol, phi={"gpus": 2, "sequences_per_step": 2})
    training, prompts = "results/phi/large_512.safetensors", "results/prompts/babilong_tiny_1k/manifest.json"
    try:
        code, output = snakemake(study, training, prompts, "--retries", "0")
    finally:
        config.write_text(before[0])
        protocol.write_text(before[1])
    assert code != 0 and (study / prompts).exists() and not (study / training).exists(), output
    states = {state(job): slurm("scontrol", "show", "job", job) for job in submitted(output)}
    assert set(states) == {"COMPLETED", "FAILED"}
    granted = states["FAILED"]
    assert "TresPerJob=gres:gpu:2\n" in granted and "NumNodes=1 " in granted, granted
    assert "TRES=cpu=8,mem=125G,node=1," in granted
    assert "TimeLimit=7-00:00:00" in granted and "gres" not in states["COMPLETED"]
    log = (study / "logs" / "train" / "large_512.log").read_text()
    assert log.count("needs a GPU that torch can use") >= 1 and "waiting for" not in log
    assert "logs/train/large_512.log" in output and "needs a GPU that torch can use" in output


def test_a_cancelled_job_goes_on_where_it_was(study: Path, finished: dict[str, bytes]) -> None:
    process, job = interrupted(study)
    slurm("scontrol", "resume", job)
    slurm("scancel", job)
    code, output = ended(process)
    assert code != 0 and state(job) == "CANCELLED" and not (study / CSV).exists(), output
    kept = (study / STORE).read_bytes()
    kept = kept[: kept.rfind(b"\n") + 1]
    assert 0 < len(kept) < len(finished[STORE])
    code, output = snakemake(study, CSV)
    assert code == 0 and len(submitted(output)) == 1, output
    assert (study / STORE).read_bytes().startswith(kept) and rows(study) == finished[STORE].count(b"\n")
    assert all((study / path).read_bytes() == finished[path] for path in (GENERATIONS, CSV))


def test_a_killed_submission_loses_and_doubles_no_job(study: Path, finished: dict[str, bytes]) -> None:
    process, job = interrupted(study)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    code, output = snakemake(study, CSV)
    assert code != 0 and "--unlock" in output
    assert snakemake(study, "--unlock")[0] == 0
    code, output = snakemake(study, CSV)
    assert code != 0 and not submitted(output) and f"stop them with `scancel {job}`" in output, output
    slurm("scontrol", "resume", job)
    until(lambda: state(job) == "COMPLETED")
    code, output = snakemake(study, CSV)
    assert code == 0 and not submitted(output), output  # what the job made is taken as it is, and scored
    assert rows(study) == finished[STORE].count(b"\n")
    assert all((study / path).read_bytes() == finished[path] for path in (GENERATIONS, CSV))
