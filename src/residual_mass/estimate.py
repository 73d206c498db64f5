"""Estimates the hours of a study: the units of work of each job that trains or decodes, times the seconds per unit of
the nearest finished job. Imports nothing heavy.

The nearest job is one of the same backbone and stage, at the nearest length. Estimates are too low for lengths far
above the measured one, where attention dominates, and too high if answers end early. A backbone without finished jobs
gets no hours, because rates of another model would be a guess.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from residual_mass.files import read_json
from residual_mass.spec.parsing import parsed
from residual_mass.spec.settings import tokens_of
from residual_mass.spec.specs import ForceSpec, Job, read_jobs
from residual_mass.spec.tasks import task_named, tasks_of

STAGES = {"train": "train", "train_variants": "train", "generate": "generate", "force": "force"}
"""The stage of each rule that trains or decodes."""
FINISHED = ("generations/*/*", "forced/*", "phi/*")
"""Patterns of the results of these rules."""


def run(jobs: Path, results: Path) -> None:
    """Prints the hours of each result, and of the jobs left to do by backbone and stage. `study.start` writes the file
    `jobs`.
    """
    hours = _hours(read_jobs(jobs), results)
    if hours.empty:
        print("nothing to train or to decode")
        return
    by_result = hours.groupby("result", sort=False).agg(
        jobs=("hours", "size"), present=("present", "sum"), hours=("hours", lambda hours: hours.sum(skipna=False))
    )
    print(by_result.to_string(float_format="{:.2f}".format, na_rep="no rate yet"))
    to_do = hours[~hours["present"]]
    print(f"\nLeft to do:{' nothing' if to_do.empty else ''}")
    for (backbone, stage), left in to_do.groupby(["backbone", "stage"], sort=False)["hours"]:
        unknown = "no rate measured yet; finish a small job first, for example with --config examples=2"
        known = f"about {left.sum():.2f} hours"
        print(f"  {backbone}, {stage}: {len(left)} jobs, {unknown if left.isna().any() else known}")


def time_left(jobs: Iterable[Job], results: Path) -> str:
    """Returns one line: the number of jobs that train or decode, and their hours if run one after the other."""
    hours = _hours(jobs, results)["hours"]
    without = hours.isna().sum()
    if hours.empty:
        return "nothing to train or to decode"
    if without == len(hours):
        return f"{len(hours)} jobs that train or decode, no rate measured here yet"
    rest = f" without the {without} that have no rate measured here yet" if without else ""
    return f"{len(hours)} jobs that train or decode, about {hours.sum():.2f} hours{rest}"


def _hours(jobs: Iterable[Job], results: Path) -> pd.DataFrame:
    """Returns result, backbone, stage, whether it is present, and hours (NaN: no rate) of jobs that train or decode."""
    rates = list(_rates(results))
    rows = []
    for job in (job for job in jobs if job.rule in STAGES):
        path, backbone, stage = Path(job.outputs[0]), job.spec["backbone"]["name"], STAGES[job.rule]
        length = tokens_of(job.spec["length"])
        fitting = [rate for rate in reversed(rates) if rate[:2] == (backbone, stage)]
        *_, seconds = min(fitting, key=lambda rate: abs(math.log(rate[2] / length)), default=(None,))
        hours = sum(count * seconds[unit] for unit, count in _units(job).items()) / 3600 if seconds else math.nan
        result = path.parent if stage == "generate" else path  # a folder, with one file per task
        rows.append((str(result), backbone, stage, path.exists(), hours))
    return pd.DataFrame(rows, columns=["result", "backbone", "stage", "present", "hours"])


def _units(job: Job) -> dict[str, int]:
    """Returns the units of work of a job by name."""
    spec, length = job.spec, tokens_of(job.spec["length"])
    if job.rule == "generate":
        limits = [task_named(spec["benchmark"], task).max_new_tokens for task in spec["tasks"]]
        prompts, rows = spec["examples"] * len(limits), spec["examples"] * len(spec["arms"])
        return {"prompt token": prompts * length, "generated token": rows * sum(limits)}
    if job.rule == "force":  # a prompt is continued twice under each arm, by its right answer and by the greedy one
        force = parsed(ForceSpec, spec)
        prompts = sum(asked.examples * len(tasks_of(asked.benchmark, length)) for asked in force.asked)
        documents = len(force.corpora) * force.documents
        continuations = documents * len(force.rows_of_document) + 2 * prompts * len(force.rows_of_answer)
        return {"continued token": continuations * length}
    return {"trained token": spec["steps"] * spec["sequences_per_step"] * len(spec["variants"]) * length}


def _rates(results: Path) -> Iterator[tuple[str, str, int, dict[str, float]]]:
    """Yields backbone, stage, length and the seconds per unit of every finished job that recorded them, by name."""
    for path in sorted(path for pattern in FINISHED for path in results.glob(f"{pattern}.meta.json")):
        meta = read_json(path)
        length = tokens_of(meta["spec"]["length"])
        for stage, seconds in _seconds(meta, length):
            yield meta["spec"]["backbone"]["name"], stage, length, seconds


def _seconds(meta: dict[str, Any], length: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Yields the stage of a record and its seconds per unit, or nothing if the job had no work left to do."""
    if meta.get("decode_seconds") and meta.get("prefill_seconds"):
        prefill = meta["prefill_seconds"] / meta["prefill_tokens"]
        yield "generate", {"prompt token": prefill, "generated token": meta["decode_seconds"] / meta["decode_rows"]}
    elif meta.get("steps"):
        tokens = meta["steps"] * meta["spec"]["sequences_per_step"] * length
        yield "train", {"trained token": meta["seconds"] * meta["processes"] / tokens}
    elif meta.get("rows_computed"):
        yield "force", {"continued token": meta["wall_seconds"] / meta["rows_computed"] / length}
