"""Estimates the hours of a study: the units of work of each job that trains or decodes, times the seconds per unit of
the nearest finished job. Imports nothing heavy.

The nearest job is one of the same backbone and stage, at the nearest length. Estimates are too low for lengths far
above the measured one, where attention dominates, and too high if answers end early. A backbone without finished jobs
gets no hours, because rates of another model would be a guess.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from residual_mass.files import read_json
from residual_mass.spec.parsing import parsed
from residual_mass.spec.settings import tokens_of
from residual_mass.spec.specs import ForceSpec, Job, read_jobs
from residual_mass.spec.tasks import task_named, tasks_of

log = logging.getLogger(__name__)
STAGE_OF_RULE = {"train": "train", "train_variants": "train", "generate": "generate", "force": "force"}
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

    def total(hours: pd.Series) -> float:
        return hours.sum(skipna=False)

    of_results = hours.groupby("result", sort=False)
    by_result = of_results.agg(jobs=("hours", "size"), present=("present", "sum"), hours=("hours", total))
    print(by_result.to_string(float_format="{:.2f}".format, na_rep="no rate yet"))
    to_do = hours[~hours["present"]]
    print("\nLeft to do: nothing" if to_do.empty else "\nLeft to do:")
    for (backbone, stage), left in to_do.groupby(["backbone", "stage"], sort=False)["hours"]:
        time = f"about {left.sum():.2f} hours"
        if left.isna().any():
            time = "no rate measured yet; finish a small job first, for example with --config examples=2"
        print(f"  {backbone}, {stage}: {len(left)} jobs, {time}")


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
    rates = rates_of(results)
    rows = []
    for job in jobs:
        if job.rule not in STAGE_OF_RULE:
            continue
        path = Path(job.outputs[0])
        stage = STAGE_OF_RULE[job.rule]
        result = path.parent if stage == "generate" else path  # a folder, with one file per task
        hours = seconds_of(job, rates) / 3600
        rows.append((str(result), job.spec["backbone"]["name"], stage, path.exists(), hours))
    return pd.DataFrame(rows, columns=["result", "backbone", "stage", "present", "hours"])


class Rate(NamedTuple):
    """What a finished job took.

    Attributes:
        length: in tokens.
        seconds: per unit of work, by its name.
    """

    backbone: str
    stage: str
    length: int
    seconds: dict[str, float]


def seconds_of(job: Job, rates: Sequence[Rate]) -> float:
    """Returns the seconds of a job by the rate of the nearest length; NaN if there is no rate of its backbone and
    stage, or if it neither trains nor decodes.
    """
    stage = STAGE_OF_RULE.get(job.rule)
    own = [rate for rate in rates if stage == rate.stage and rate.backbone == job.spec["backbone"]["name"]]
    if not own:
        return math.nan
    length = tokens_of(job.spec["length"])
    # By ratio: 2k tokens are as far from 4k as 8k are.
    nearest = min(own, key=lambda rate: abs(math.log(rate.length / length)))
    seconds = 0.0
    for unit, count in _units(job).items():
        seconds += count * nearest.seconds[unit]
    return seconds


def _units(job: Job) -> dict[str, int]:
    """Returns the units of work of a job by name."""
    spec = job.spec
    length = tokens_of(spec["length"])
    if job.rule == "generate":
        limits = [task_named(spec["benchmark"], task).max_new_tokens for task in spec["tasks"]]
        prompts = spec["examples"] * len(limits)
        rows_per_task = spec["examples"] * len(spec["arms"])
        return {"prompt token": prompts * length, "generated token": rows_per_task * sum(limits)}
    if job.rule == "force":  # a prompt is continued twice under each arm, by its right answer and by the greedy one
        force = parsed(ForceSpec, spec)
        prompts = 0
        for benchmark in force.asked:
            prompts += benchmark.examples * len(tasks_of(benchmark.benchmark, length))
        documents = len(force.corpora) * force.documents
        continuations = documents * len(force.rows_of_document) + 2 * prompts * len(force.rows_of_answer)
        return {"continued token": continuations * length}
    sequences = spec["steps"] * spec["sequences_per_step"]
    return {"trained token": sequences * len(spec["variants"]) * length}


def rates_of(results: Path) -> list[Rate]:
    """Returns the rate of every finished job that recorded one, the last by name first."""
    rates = []
    for path in sorted(path for pattern in FINISHED for path in results.glob(f"{pattern}.meta.json")):
        meta = read_json(path)
        try:
            length = tokens_of(meta["spec"]["length"])
            name = meta["spec"]["backbone"]["name"]
            rates += [Rate(name, stage, length, seconds) for stage, seconds in _seconds(meta, length)]
        except (KeyError, TypeError, ValueError):
            log.warning("%s: not the record of a job; delete it, and its job gives a rate when it runs again", path)
    return rates[::-1]


def _seconds(meta: dict[str, Any], length: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Yields the stage of a record and its seconds per unit, or nothing if the job had no work left to do."""
    if meta.get("decode_seconds") and meta.get("prefill_seconds"):
        per_prompt_token = meta["prefill_seconds"] / meta["prefill_tokens"]
        per_generated_token = meta["decode_seconds"] / meta["decode_rows"]
        yield "generate", {"prompt token": per_prompt_token, "generated token": per_generated_token}
    elif meta.get("steps"):
        tokens = meta["steps"] * meta["spec"]["sequences_per_step"] * length
        yield "train", {"trained token": meta["seconds"] * meta["processes"] / tokens}
    elif meta.get("rows_computed"):
        yield "force", {"continued token": meta["wall_seconds"] / meta["rows_computed"] / length}
