"""What is looked at when a run starts, before its first job, and said when it ends; the jobs behind a study's files."""

from __future__ import annotations

import contextlib
import csv
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from snakemake.iocontainers import Wildcards

from residual_mass.core.settings import to_json, tokens_of
from residual_mass.estimate import time_left
from residual_mass.files import write_text
from residual_mass.machine import preflight, slurm
from residual_mass.paper import typesetting
from residual_mass.study import paths
from residual_mass.study.jobs import Job, StudyJobs
from residual_mass.study.plan import Plan
from residual_mass.study.prefetch import missing


def problems(plan: Plan, workflow: Any) -> list[str]:
    """What this machine lacks for the jobs that are to be run, one line each."""
    jobs = list(workflow.dag.needrun_jobs(exclude_finished=False))
    specs = [json.loads(job.params.spec) for job in jobs if "spec" in job.params.keys()]
    offline, assets = plan.main.offline, plan.assets_folder
    unmade = [job for job in jobs if not all(Path(path).exists() for path in job.output)]  # none with `--touch`
    running = {job.wildcards.get("backbone") for job in unmade if plan.assets_manifest in job.input}
    submits = None if workflow.dryrun else workflow.executor_plugin.name != "local"
    backbones = [plan.backbone_spec(name) for name in plan.main.backbones if name in running]
    found = preflight.problems(backbones, assets, asks_hub=not offline, submits=submits)
    if offline and any(plan.assets_manifest in (*job.input, *job.output) for job in jobs):
        found += missing(specs, assets)
    if any(job.rule.name == "document_pdf" for job in jobs):
        found += typesetting.problems()
    if workflow.executor_plugin.name == "slurm":
        found += slurm.problems(workflow.executor_settings.status_command, _sites(jobs))
        slurm.see_cancelled_jobs()
    if any(job.output for job in jobs):
        found += slurm.unfinished(Path.cwd())
    kept = {path for job in jobs for path in job.input} - {path for job in jobs for path in job.output}
    found += preflight.from_the_future(map(Path, kept))
    found += preflight.unwritable(Path(path) for job in jobs for path in job.output)
    return found


def say_of_dry_run(plan: Plan, workflow: Any, folder: Path) -> None:
    """Prints one line of what this machine lacks for the jobs of a dry run in a folder, and of how long they take."""
    if (
        not workflow.dryrun or workflow.scheduler is None
    ):  # without a scheduler the run ended before its jobs were known
        return
    jobs = [job for job in workflow.dag.needrun_jobs(exclude_finished=False) if "spec" in job.params.keys()]
    work = [Job(job.rule.name, outputs=tuple(job.output), spec=json.loads(job.params.spec)) for job in jobs]
    if work:
        with contextlib.chdir(folder):  # Snakemake has left it
            found = "; ".join(problems(plan, workflow)) or "this machine lacks nothing"
            print(f"Before the first job: {found}. Time: {time_left(work, Path('results'))}.", flush=True)


def _sites(jobs: list[Any]) -> set[tuple[str, str]]:
    """Partition and account of every job that is to be submitted; each "" where none is given."""
    keys = ("slurm_partition", "slurm_account")
    return {tuple(str(job.resources.get(key) or "") for key in keys) for job in jobs if not job.is_local}


def write_jobs(plan: Plan, workflow: Any) -> None:
    """Writes what the targets that only look at a study are about to read."""
    running = {job.rule.name for job in workflow.dag.needrun_jobs()}
    studies = {"estimate": [plan.main.study], "prefetch": [plan.main.study]}
    studies["doctor"] = [name for name in plan.studies if plan.backbones_of(name)]
    for target in sorted(running & set(studies)):
        found = [study_jobs(plan, workflow.rules, name) for name in studies[target]]
        write_text(Path(paths.JOBS.format(target=target)), json.dumps([json.loads(to_json(each)) for each in found]))


def closing_lines(plan: Plan) -> list[str]:
    """What a finished study says: how far three methods are from full attention, and where the page is."""
    name = plan.main.study
    study, backbone = plan.studies[name], plan.backbones_of(name)[0]
    lines = [f"All results on one page: {Path(paths.REPORT).absolute()}"]
    if not study.fidelity.lengths or not study.fidelity.corpora:
        return lines
    text, length = study.fidelity.corpora[0], max(study.fidelity.lengths, key=tokens_of)
    shown = dict.fromkeys((*(method for method in ("topk", "topk_phi") if method in study.methods), study.methods[-1]))
    with Path(paths.FIDELITY.format(backbone=backbone, length=length)).open(encoding="utf-8") as file:
        place = {"text": text, "state": "own", "metric": "kl", "budget_percent": f"{study.diagnostics.budget:g}"}
        rows = [row for row in csv.DictReader(file) if place.items() <= row.items()]
    found = {row["method"]: row for row in rows if row["maps"] in ("", study.maps.main)}
    numbers = (f"{method} {found[method]['value']}" for method in shown if method in found)
    where = f"{backbone}, {text} at {length}, {study.diagnostics.budget:g} % read exactly"
    return [f"KL from full attention in nats ({where}): {', '.join(numbers)}", *lines]


def study_jobs(plan: Plan, rules: Any, study: str) -> StudyJobs:
    """All jobs of a study."""
    targets = [*plan.results(study), *plan.rendered(study)]
    return StudyJobs(study, plan.backbone_specs(study), tuple(jobs_behind(rules, targets)))


def jobs_behind(rules: Iterable[Any], targets: Iterable[str]) -> Iterator[Job]:
    """Every job that the targets need, each once and after the jobs that need it.

    Args:
        rules: `workflow.rules` of Snakemake.
    """
    rules = list(rules)
    left, seen = list(targets), set()
    while left:
        path = left.pop(0)
        if path in seen or (job := job_of(rules, path)) is None:
            continue
        seen.update((path, *job.outputs))
        left += job.inputs
        yield job


def job_of(rules: Iterable[Any], path: str) -> Job | None:
    """The job that makes a file; None where no rule does."""
    rule = next((rule for rule in rules if rule.is_producer(path)), None)
    if rule is None:
        return None
    wildcards = Wildcards(fromdict=rule.get_wildcards(path))
    try:
        inputs = rule.expand_input(wildcards)[0]
        told = rule.params.spec(wildcards) if "spec" in rule.params.keys() else "{}"
    except SystemExit as refusal:
        return Job(rule.name, outputs=(path,), refused=str(refusal.code))
    return Job(
        rule.name,
        inputs=tuple(map(str, inputs)),
        outputs=tuple(map(str, rule.expand_output(wildcards)[0])),
        spec=json.loads(told),
    )
