"""Runs of Snakemake on the real Snakefile, in a folder of their own, and what they said."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from snakemake.utils import update_config
from tests import forks

from residual_mass.study import plan, specs
from residual_mass.study.config import load

ROOT = Path(__file__).parents[2]
SPECS: dict[str, type[Any]] = {
    "prompts": specs.PromptsSpec, "train": specs.TrainSpec, "train_variants": specs.TrainSpec,
    "generate": specs.GenerateSpec, "force": specs.ForceSpec, "fidelity": specs.FidelitySpec, "score": specs.ScoreSpec,
    "capture": specs.CaptureSpec, "kernels": specs.KernelsSpec, "findings": specs.FindingsSpec,
    "residual_errors": specs.ResidualErrorsSpec, "runtime": specs.RuntimeSpec, "table": specs.TableSpec,
    "comparison": specs.ComparisonSpec, "numbers": specs.NumbersSpec, "figure": specs.FigureSpec,
    "document": specs.DocumentSpec, "report": specs.ReportSpec,
}  # fmt: skip
"""Of the stages that take one."""


@dataclass(frozen=True)
class Run:
    code: int
    output: str

    @property
    def said(self) -> list[str]:
        """What remains of a refused run's output besides Snakemake's banner."""
        banner = (
            r"Assuming unrestricted|SNAKEMAKE|=+$|  [A-Z][\w ]+(\(s\))?: |Building DAG|Config file .* is extended|$"
        )
        return [line for line in self.output.splitlines() if not re.match(banner, line)]

    @property
    def jobs(self) -> dict[str, int]:
        """Number of jobs by rule, `all` and `total` included."""
        table = self.output.partition("Job stats:")[2].partition("\n\n")[0]
        return {name: int(count) for name, count in re.findall(r"^(\w+) +(\d+)$", table, re.MULTILINE)}

    @property
    def commands(self) -> list[list[str]]:
        """Arguments of every `python -m residual_mass` (or through torchrun's module), in sorted order."""
        torchrun = r"python -m torch\.distributed\.run --standalone --nproc-per-node \d+"
        on_gpus = rf"python -m residual_mass\.machine\.gpus \d+ {torchrun}"
        start = rf"^Shell command: (?:exec )?(?:python|{on_gpus}) -m residual_mass "
        lines = re.findall(rf"{start}(.*) > \S+ 2>&1$", self.output, re.MULTILINE)
        return sorted(shlex.split(line) for line in lines)


def snakemake(folder: Path, *arguments: str, snakefile: Path = ROOT / "Snakefile", **environment: str) -> Run:
    """Runs Snakemake in `folder`, where importing torch or transformers fails: the workflow itself must do without."""
    poison = folder / "poison"
    for name in ("torch", "transformers"):
        (poison / name).mkdir(parents=True, exist_ok=True)
        (poison / name / "__init__.py").write_text(f"raise ImportError('the workflow imports {name}')\n")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(poison), **environment}
    own_source = not (snakefile.parent / "src").samefile(ROOT / "src")
    command = ["--snakefile", str(snakefile), "--directory", str(folder), *arguments]
    log = poison / f"{len(list(poison.iterdir()))}.log"
    code = forks.run("snakemake.cli", command, log, environment, ["residual_mass"] if own_source else [])
    return Run(code, log.read_text())


def without_gpus(folder: Path) -> str:
    """PATH whose nvidia-smi finds no GPU, so that torch is not asked for one."""
    programs = folder / "programs"
    programs.mkdir(parents=True)
    (programs / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (programs / "nvidia-smi").chmod(0o755)
    return os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])


def dry_run(folder: Path, *arguments: str, snakefile: Path = ROOT / "Snakefile") -> Run:
    return snakemake(folder, "--dry-run", "--printshellcmds", *arguments, snakefile=snakefile)


def made(folder: Path, snakefile: Path, planned: Run) -> Path:
    """The folder with all files of a planned run of `all` in it, empty JSON every one, and up to date."""
    words = {word for command in planned.commands for word in command} - {"results/assets"}
    for path in ("results/assets/manifest.json", *words):
        if not path.startswith(("results/", "paper_tables/")):
            continue
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("{}")
    touched = snakemake(folder, "--cores", "1", "--touch", "--forceall", "all", snakefile=snakefile)
    assert touched.code == 0, touched.output
    return folder


def planned(folder: Path) -> dict[str, int]:
    """Jobs by rule that `all` would run in a checkout, without the totals."""
    run = dry_run(folder, "all", snakefile=folder / "Snakefile")
    assert run.code == 0, run.output
    return {name: count for name, count in run.jobs.items() if name not in ("all", "total")}


@contextmanager
def changed(path: Path, text: str) -> Iterator[None]:
    """The file holds `text` meanwhile; then it is as it was, its time included."""
    before, stat = path.read_text(), path.stat()
    try:
        path.write_text(text)
        yield
    finally:
        path.write_text(before)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def configuration_error(checkout: Path, settings: dict[str, Any] | None = None) -> str:
    """What is wrong with the configuration of a checkout; empty where nothing is."""
    config = yaml.safe_load((checkout / "config" / "config.yaml").read_text())
    update_config(config, settings or {})
    try:
        load(checkout, config)
    except ValueError as error:
        return str(error)
    return ""


def plan_of(checkout: Path, **config: Any) -> plan.Plan:
    """The plan of a checkout, with settings as on the command line."""
    return plan.load(checkout, yaml.safe_load((checkout / "config" / "config.yaml").read_text()) | config)
