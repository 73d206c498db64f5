"""Which Python jobs run: the one that runs Snakemake, whatever PATH has, or that of an environment of --sdm."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from environments import linked_environment
from runs import ROOT, programs

TABLE = "paper_tables/published/loss_ablation.tex"
"""What a job makes in a moment, out of files of the repository."""
TRAINING = "results/phi/smol_2k.safetensors"
CONDA = """
case "$*" in
--version) echo conda 24.7.1 ;;
info*) echo '{{"conda_prefix": "{prefix}", "platform": "linux-64"}}' ;;
config*) echo '{{"get": {{"channel_priority": "strict"}}}}' ;;
*"env create"*)
    for last; do :; done
    mkdir -p "$last/bin"
    cp "{prefix}/python" "$last/bin/python" ;;
esac
"""
"""What stands for conda, which is not on every machine: it makes environments that hold one given Python."""


def environment_of(folder: Path, *without: str) -> str:
    """The Python of an environment of its own with the packages of this one, but for some."""
    return linked_environment(folder, lambda name: name not in without)


def snakemake(folder: Path, python: str, *arguments: str, front: str = "") -> subprocess.CompletedProcess[str]:
    """A run by some Python, with a `python` on PATH that breaks whatever runs it."""
    broken = Path(programs(folder / "broken", python="exit 9", python3="exit 9"))
    path = os.pathsep.join(filter(None, [front, str(broken), "/usr/bin", "/bin"]))
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(
        [python, "-m", "snakemake", "--snakefile", ROOT / "Snakefile", "--directory", folder, *arguments],
        env=environment | {"PATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_jobs_run_the_python_that_runs_snakemake(tmp_path: Path) -> None:
    """In an environment that is not activated, as from cron or an IDE, wherever it is."""
    python = environment_of(tmp_path / "it's {an} env $(touch pwned)")
    run = snakemake(tmp_path, python, "--cores", "1", TABLE)
    assert run.returncode == 0 and (tmp_path / TABLE).read_text().startswith("%"), run.stdout + run.stderr
    assert not list(tmp_path.rglob("pwned"))


def test_a_python_that_lacks_packages_is_told_before_the_first_job(tmp_path: Path) -> None:
    """Where a job needs them: tables of the paper's own values do not."""
    python = environment_of(tmp_path / "env", "torch", "transformers")
    run = snakemake(tmp_path / "planned", python, "-n", TRAINING)
    line = f"{python}, which runs the jobs, lacks torch, transformers: run Snakemake by the Python that has them"
    assert run.returncode == 0 and line in run.stdout.splitlines()[-1], run.stdout + run.stderr
    run = snakemake(tmp_path / "run", python, "--cores", "1", TRAINING)
    assert run.returncode == 1 and line in run.stderr and "rule assets:" not in run.stderr, run.stderr
    run = snakemake(tmp_path / "table", python, "--cores", "1", TABLE)
    assert run.returncode == 0, run.stdout + run.stderr


def test_in_an_environment_of_conda_jobs_run_its_python(tmp_path: Path) -> None:
    """And the one that runs Snakemake may lack what they need."""
    ran, prefix = tmp_path / "ran", tmp_path / "conda"
    front = programs(prefix / "bin", conda=CONDA.format(prefix=prefix), activate='PATH="$1/bin:$PATH"')
    programs(prefix / "made", python=f'echo "$@" >> "{ran}"\nexec "{sys.executable}" "$@"')
    (prefix / "made" / "python").rename(prefix / "python")
    python = environment_of(tmp_path / "env", "torch", "transformers")
    run = snakemake(tmp_path / "run", python, "--cores", "1", "--sdm", "conda", "--", TABLE, front=front)
    assert run.returncode == 0 and (tmp_path / "run" / TABLE).exists(), run.stdout + run.stderr
    assert ran.read_text().startswith("-m residual_mass published ")
    run = snakemake(tmp_path / "planned", python, "-n", "--sdm", "conda", "--", TRAINING, front=front)
    assert run.returncode == 0 and "lacks torch" not in run.stdout, run.stdout + run.stderr


@pytest.mark.slow
def test_without_an_image_for_containers_jobs_run_the_python_that_runs_snakemake(tmp_path: Path) -> None:
    """The rules name none, so `--sdm apptainer` changes nothing."""
    front = programs(tmp_path / "bin", apptainer="echo apptainer version 1.3.4", singularity="echo 3.11.4")
    python = environment_of(tmp_path / "env")
    run = snakemake(tmp_path, python, "--cores", "1", "--sdm", "apptainer", "--", TABLE, front=front)
    assert run.returncode == 0, run.stdout + run.stderr
