"""Runs Snakemake on the real Snakefile, each run in its own folder, and keeps its output."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import yaml
from snakemake.utils import update_config
from tests import forks

from residual_mass.spec import specs
from residual_mass.study import plan
from residual_mass.study.config import load_configuration

ROOT = Path(__file__).parents[2]
SPECS: dict[str, type[Any]] = {"train_variants": specs.TrainSpec} | {
    stage: getattr(specs, name)
    for stage in plan.JOBS_OF_STAGES
    if hasattr(specs, name := f"{stage.title().replace('_', '')}Spec")
}
"""Of the stages that take one."""
NO_ACCESS = {"HF_HOME": "nowhere", "HF_TOKEN": "", "HF_TOKEN_PATH": "nowhere"}
"""The environment of a machine without models, or a token to fetch them."""


@dataclass(frozen=True)
class Run:
    code: int
    output: str

    @property
    def said(self) -> list[str]:
        """What remains of a refused run's output besides Snakemake's banner."""
        name = r"Using workflow specific profile|  [A-Z][\w ]+(\(s\))?: "
        banner = rf"host: |Assuming unrestricted|SNAKEMAKE|=+$|{name}|Building DAG|Config file .* is extended|$"
        return [line for line in self.output.splitlines() if not re.match(banner, line)]

    @property
    def jobs(self) -> dict[str, int]:
        """Number of jobs by rule, `all` and `total` included."""
        table = self.output.partition("Job stats:")[2].partition("\n\n")[0]
        return {name: int(count) for name, count in re.findall(r"^(\w+) +(\d+)$", table, re.MULTILINE)}

    @property
    def commands(self) -> list[list[str]]:
        """Arguments of every `"$PYTHON" -m residual_mass` (or through torchrun's module), in sorted order."""
        torchrun = r'"\$PYTHON" -m torch\.distributed\.run --standalone --nproc-per-node \d+'
        on_gpus = rf'"\$PYTHON" -m residual_mass\.machine\.gpus \d+ {torchrun}'
        start = rf'^Shell command: (?:exec )?(?:"\$PYTHON"|{on_gpus}) -m residual_mass '
        lines = re.findall(rf"{start}(.*) > \S+ 2>&1$", self.output, re.MULTILINE)
        return sorted(shlex.split(line) for line in lines)


def snakemake(folder: Path, *arguments: str, snakefile: Path = ROOT / "Snakefile", **environment: str) -> Run:
    """Runs Snakemake in `folder`, where importing torch or transformers fails: the workflow itself must do without."""
    poison = folder / "poison"
    for name in ("torch", "transformers"):
        (poison / name).mkdir(parents=True, exist_ok=True)
        (poison / name / "__init__.py").write_text(f"raise ImportError('the workflow imports {name}')\n")
    environment = {**os.environ, "PYTHONPATH": str(poison), **environment}
    checkout = snakefile.parent.parent if snakefile.parent.name == "workflow" else snakefile.parent
    own_source = not (checkout / "src").samefile(ROOT / "src")
    command = ["--snakefile", str(snakefile), "--directory", str(folder), *arguments]
    log = poison / f"{len(list(poison.iterdir()))}.log"
    code = forks.run("snakemake.cli", command, log, environment, ["residual_mass"] if own_source else [])
    return Run(code, log.read_text())


def copied(folder: Path, *linked: str) -> Path:
    """A copy of what a run needs of the repository; the named folders are links to it."""
    folders = ("config", "docs", "src", "workflow", "paper_tables/templates")
    for name in (*folders, "Snakefile", "Makefile", "environment.yml", "pyproject.toml"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if name in linked:
            (folder / name).symlink_to(ROOT / name)
        elif name in folders:
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def programs(folder: Path, *linked: str, **scripts: str) -> str:
    """A folder for PATH with links to programs of this machine, and shell scripts by their names."""
    folder.mkdir(parents=True)
    for name in linked:
        (folder / name).symlink_to(str(shutil.which(name)))
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return str(folder)


def before_others(folder: str) -> str:
    """PATH with a folder first."""
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


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


def change(checkout: Path, study: str, changes: dict[str, Any]) -> None:
    """Changes keys of a study, dotted where they are in sections; `...` takes one out."""
    path = checkout / "config" / "studies" / f"{study}.yaml"
    protocol = yaml.safe_load(path.read_text())
    for key, value in changes.items():
        *sections, last = key.split(".")
        section = reduce(dict.__getitem__, sections, protocol)
        section.pop(last, None)
        section |= {} if value is ... else {last: value}
    path.write_text(yaml.safe_dump(protocol))


def configuration_error(checkout: Path, settings: dict[str, Any] | None = None) -> str:
    """What is wrong with the configuration of a checkout; empty where nothing is."""
    config = yaml.safe_load((checkout / "config" / "config.yaml").read_text())
    update_config(config, settings or {})
    try:
        load_configuration(checkout, config)
    except ValueError as error:
        return str(error)
    return ""


def plan_of(checkout: Path, **config: Any) -> plan.Plan:
    """The plan of a checkout, with settings as on the command line."""
    return plan.load_plan(checkout, yaml.safe_load((checkout / "config" / "config.yaml").read_text()) | config)
