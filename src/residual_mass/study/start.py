"""Checks before the first job of a run, its last lines, and the jobs behind a study's files."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from snakemake.iocontainers import Wildcards

from residual_mass.estimate import time_left
from residual_mass.files import write_text
from residual_mass.machine import preflight, slurm
from residual_mass.metrics import KL, budget_text
from residual_mass.paper import latex
from residual_mass.paper.headline import headline
from residual_mass.paper.results import load_results
from residual_mass.paper.tables import find, middle_budget
from residual_mass.provenance import sidecar_of
from residual_mass.spec import paths
from residual_mass.spec.specs import Job
from residual_mass.study.jobs import job_of
from residual_mass.study.plan import Plan
from residual_mass.study.prefetch import missing
from residual_mass.study.resources import brings_python
from residual_mass.study.tables import inputs_and_spec


def problems(plan: Plan, workflow: Any) -> list[str]:
    """Returns what this machine lacks for the jobs of a run, one line each."""
    jobs = list(workflow.dag.needrun_jobs(exclude_finished=False))
    read: set[str] = set()
    made: set[str] = set()
    for job in jobs:
        read.update(job.input)
        made.update(job.output)
    offline = plan.main.offline
    assets = plan.assets_folder
    unmade = []  # none with `--touch`
    for job in jobs:
        if not all(Path(path).exists() for path in job.output):
            unmade.append(job)
    running = {job.wildcards.get("backbone") for job in unmade if plan.assets_manifest in job.input}
    submits = None if workflow.dryrun else workflow.executor_plugin.name != "local"
    backbones = [plan.backbone_spec(name) for name in plan.main.backbones if name in running]
    own_python = not brings_python(workflow)
    lacking = preflight.backbone_problems(backbones, assets, not offline, submits, own_python)
    if plan.assets_manifest in read | made:
        if own_python:
            lacking += preflight.package_problems(plan.root / "pyproject.toml")
        if offline:
            lacking += missing([job.spec for job in _with_specs(jobs)], assets)
    if any(job.rule.name == "document_pdf" for job in jobs):
        lacking += latex.pdf_problems()
    if workflow.executor_plugin.name == "slurm":
        sites = []
        for job in jobs:
            if not job.is_local:
                partition = job.resources.get("slurm_partition")
                account = job.resources.get("slurm_account")
                sites.append((str(partition or ""), str(account or "")))
        lacking += slurm.submission_problems(workflow.executor_settings.status_command, sites)
        slurm.patch_slurm_plugin()
    if made:
        lacking += slurm.unfinished(Path.cwd())
    lacking += preflight.with_future_mtimes(map(Path, read - made))
    lacking += preflight.unwritable(map(Path, made))
    return lacking


def print_dry_run_summary(plan: Plan, workflow: Any, folder: Path) -> None:
    """Prints one line with what this machine lacks for the jobs of a dry run in a folder, and how long they take; if no
    job is left, the last lines of the study.
    """
    if not workflow.dryrun or workflow.scheduler is None:  # no scheduler: the run ended before its jobs were known
        return
    left = list(workflow.dag.needrun_jobs(exclude_finished=False))
    work = _with_specs(left)
    with contextlib.chdir(folder):  # Snakemake has left it
        if work:
            lacking = "; ".join(problems(plan, workflow)) or "this machine lacks nothing"
            print(f"Before the first job: {lacking}. Time: {time_left(work, Path('results'))}.", flush=True)
        elif not left and makes_the_page(workflow):
            print(*closing_lines(plan), sep="\n", flush=True)


def makes_the_page(workflow: Any) -> bool:
    """Whether the page of a study is among the targets of a run or their inputs."""
    return any(job.rule.name == "report" for job in workflow.dag.jobs)


def _with_specs(jobs: Iterable[Any]) -> list[Job]:
    """Returns those of Snakemake's jobs that have a spec."""
    return [found for job in jobs if (found := job_of(job)).spec]


def closing_lines(plan: Plan) -> list[str]:
    """Returns the last lines of a finished study: the KL that its page opens with, here of up to three methods, and the
    path of the page.
    """
    name = plan.main.study
    study = plan.studies[name]
    page = f"All results on one page: {Path(paths.REPORT).absolute()}"
    if not study.fidelity.lengths or not study.fidelity.corpora:
        return [page]
    files, spec = inputs_and_spec(plan, name, "fidelity")
    results = [Path(file) for file in files]
    if not all(result.exists() and sidecar_of(result).exists() for result in results):
        return [page]  # removed after the page was made, or copied without records and touched
    cells = find("fidelity").cells(load_results(results), spec)
    distances = headline(cells, KL.name, middle_budget(spec))
    methods = dict.fromkeys(("topk", "topk_phi", study.recommended))
    shown = [distances[method] for method in methods if method in distances]
    numbers = ", ".join(f"{cell['method']} {cell['text']}" for cell in shown)
    first = shown[0]
    place = f"{first['backbone']}, {first['corpus']} at {first['length']}"
    budget = budget_text(first["budget_percent"])
    return [f"KL from full attention in nats ({place}, {budget} % read exactly): {numbers}", page]


# ---- jobs of a whole study -------------------------------------------------------------------------------------------


def write_jobs(plan: Plan, workflow: Any) -> None:
    """Writes the jobs of the study that config.yaml names if `estimate` or `prefetch` will read them."""
    for target in {"estimate", "prefetch"} & {job.rule.name for job in workflow.dag.needrun_jobs()}:
        jobs = _jobs_behind(list(workflow.rules), plan.targets(plan.main.study))
        file = Path(paths.JOBS.format(target=target))
        write_text(file, json.dumps([asdict(job) for job in jobs]))


def _jobs_behind(rules: list[Any], targets: list[str]) -> Iterator[Job]:
    """Yields every job that the targets need once, after the jobs that need it."""
    left = list(targets)
    seen: set[str] = set()
    while left:
        path = left.pop(0)
        if path in seen:
            continue
        rule = next((rule for rule in rules if rule.is_producer(path)), None)
        if rule is None:
            continue
        wildcards = Wildcards(fromdict=rule.get_wildcards(path))
        outputs = tuple(map(str, rule.expand_output(wildcards)[0]))
        seen.update((path, *outputs))
        left += map(str, rule.expand_input(wildcards)[0])
        spec = {}
        if "spec" in rule.params.keys():
            spec = json.loads(rule.params.spec(wildcards))
        yield Job(rule.name, outputs, spec)
