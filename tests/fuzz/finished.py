"""A finished small study, made in this process, and the jobs that made it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.small_study import write_small_study

from residual_mass import cli

MADE_BY = {
    "capture": ("heads", "mass"),
    "comparison": ("out", "picture"),
    "figure": ("pdf", "png"),
    "findings": ("accounting", "claims"),
    "force": ("out", "store"),
    "generate": ("out", "store"),
    "residual-errors": ("heads", "out"),
    "table": ("out", "cells", "data"),
    "train": ("out", "checkpoint", "log_csv"),
}
"""Flags of outputs, where a stage has others than `out`."""
MODEL = ("models/tiny-llama/model.safetensors", "models/tiny-llama/config.json", "models/tiny-llama/tokenizer.json")
TEXT = ("qa/hotpotqa.json",)
TABLES = "nltk_data/tokenizers/punkt_tab/english"
ASSETS_OF = {
    "prompts ruler": (*MODEL[1:], "haystack/PaulGrahamEssays.json", "qa/squad.json", f"{TABLES}/sent_starters.txt"),
    "prompts babilong": (*MODEL[1:], "corpora/books/books.txt", f"{TABLES}/ortho_context.tab"),
    "prompts longbench": (*MODEL[1:], "qa/squad.json", "qa/hotpotqa.json"),
    "train": (*MODEL, *TEXT, "corpora/books/books.txt"),
    "generate": MODEL,
    "force": (*MODEL, *TEXT),
    "runtime": MODEL,
    "capture wiki": (*MODEL, *TEXT),
    "kernels": (*MODEL, *TEXT),
    "residual-errors": (*MODEL, *TEXT),
}
"""What stages read of the assets."""


@dataclass(frozen=True)
class Job:
    """One `python -m residual_mass` of a run, by what it reads and writes."""

    arguments: tuple[str, ...]
    inputs: tuple[Path, ...]
    """As its flags name them; of the assets their folder."""
    outputs: tuple[Path, ...]

    @property
    def stage(self) -> str:
        return self.arguments[0]

    @property
    def kind(self) -> str:
        """The stage, and of which benchmark, text, table or figure where its files depend on that."""
        spec = json.loads(self.arguments[2]) if self.arguments[1] == "--spec" else {}
        what = spec.get({"prompts": "benchmark", "capture": "corpus"}.get(self.stage, "label"), "")
        return f"{self.stage} {what}".strip()

    @property
    def files(self) -> list[Path]:
        """Single files that it reads."""
        found: list[Path] = []
        for path in self.inputs:
            if path.is_dir():
                found += [path / name for name in ASSETS_OF.get(self.kind, ASSETS_OF.get(self.stage, ()))]
                continue
            found.append(path)
            if path.name == "manifest.json" and self.stage in ("generate", "force", "score"):
                found.append(min(path.parent.glob("*.jsonl")))
        return found

    def writing_to(self, folder: str) -> list[str]:
        """Its arguments with every output below a folder of its own."""
        outputs = {str(path) for path in self.outputs}
        return [f"{folder}/{word}" if word in outputs else word for word in self.arguments]


def finished_study(checkout: Path) -> list[Job]:
    """Makes the study in `checkout` and runs all of it; the jobs, in the order in which they ran."""
    write_small_study(checkout)
    jobs = planned(checkout)
    with contextlib.chdir(checkout):
        for job in jobs:
            cli.main(job.arguments)
    return jobs


def planned(checkout: Path) -> list[Job]:
    """The jobs of a dry run, each after those whose outputs it reads."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = [sys.executable, "-m", "snakemake", "--dry-run", "--printshellcmds", "--forceall", "all"]
    run = subprocess.run(command, cwd=checkout, env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    lines = re.findall(r"^Shell command: (?:exec )?python -m residual_mass (.*) > \S+ 2>&1$", run.stdout, re.MULTILINE)
    jobs = [job_of(shlex.split(re.sub(r'"\$\(dirname (\S+)/[^/]+\)"', r"\1", line))) for line in lines]
    return list(_ordered([job for job in jobs if job.stage != "assets"]))


def job_of(arguments: Sequence[str]) -> Job:
    options = cli._parser(arguments[0]).parse_args(arguments)
    made = MADE_BY.get(options.name, ("out",))
    files: dict[bool, list[Path]] = {True: [], False: []}
    for name, value in vars(options).items():
        given = value if isinstance(value, list) else [value]
        files[name in made] += [path for path in given if isinstance(path, Path)]
    return Job(tuple(arguments), tuple(files[False]), tuple(files[True]))


def _ordered(jobs: list[Job]) -> Iterator[Job]:
    while jobs:
        to_come = {path for job in jobs for path in job.outputs}
        ready = [job for job in jobs if not to_come & set(job.inputs)]
        assert ready, "jobs that wait for each other"
        yield from ready
        jobs = [job for job in jobs if job not in ready]
