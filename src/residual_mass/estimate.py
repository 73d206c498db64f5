"""Hours that a study takes: units of work of its jobs that train or decode, times the seconds per unit that the nearest
finished job recorded; imports nothing heavy.

The nearest job is one of the same backbone and stage, at the nearest length. Estimates are too low for lengths far
above the measured one, where attention dominates, and too high if answers end early. A backbone without finished jobs
gets no hours, because rates of another model would be a guess.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from residual_mass.benchmarks.catalogue import task_named, tasks_of
from residual_mass.core.settings import tokens_of
from residual_mass.files import read_json
from residual_mass.study.jobs import TRAIN, Job, read_studies
from residual_mass.study.specs import ForceSpec
from residual_mass.study.values import parsed


@dataclass(frozen=True)
class Work:
    """Units of work of a job by their name, or of a finished one the seconds that each took."""

    file: str
    stage: str
    backbone: str
    length: int
    units: dict[str, float]


def run(jobs: Path, results: Path) -> None:
    """Prints the hours of each study, one line for each result, and of what is left by backbone and stage.

    Args:
        jobs: jobs of the studies, as `study.start` writes them.
    """
    for study in read_studies(jobs):
        lines = pd.DataFrame(_lines(study.jobs, results), columns=["result", "backbone", "stage", "present", "hours"])
        if lines.empty:
            print(f"study {study.name}: nothing that trains or decodes")
            continue
        by_result = lines.groupby("result", sort=False).agg(
            jobs=("hours", "size"), present=("present", "sum"), hours=("hours", lambda hours: hours.sum(skipna=False))
        )
        print(by_result.to_string(float_format="{:.2f}".format, na_rep="no rate yet"))
        to_do = lines[~lines["present"]]
        print(f"\nLeft to do in study {study.name}:{' nothing' if to_do.empty else ''}")
        for (backbone, stage), left in to_do.groupby(["backbone", "stage"], sort=False):
            hours = f"about {left['hours'].sum():.2f} hours"
            unknown = "no rate measured yet; finish a small one first, for one with --config examples=2"
            print(f"  {backbone}, {stage}: {len(left)} jobs, {unknown if left['hours'].isna().any() else hours}")


def time_left(jobs: Iterable[Job], results: Path) -> str:
    """Says in one line how many of the jobs train or decode, and how long that takes one job after the other."""
    hours = [hours for *_, hours in _lines(jobs, results)]
    if not hours:
        return "nothing to train or to decode"
    known = [each for each in hours if not math.isnan(each)]
    what, without = f"{len(hours)} jobs that train or decode", len(hours) - len(known)
    if not known:
        return f"{what}, no rate measured here yet"
    rest = f" without the {without} that have no rate measured here yet" if without else ""
    return f"{what}, about {sum(known):.2f} hours{rest}"


def _lines(jobs: Iterable[Job], results: Path) -> Iterator[tuple[str, str, str, bool, float]]:
    """Of every job that trains or decodes: result, backbone, stage, whether it is there, and hours (NaN: no rate)."""
    finished = defaultdict(list)
    for rate in _rates(results):
        finished[rate.backbone, rate.stage].append(rate)
    for work in filter(None, map(work_of, jobs)):
        fitting = reversed(finished[work.backbone, work.stage])
        nearest = min(fitting, key=lambda rate: abs(math.log(rate.length / work.length)), default=None)
        hours = math.nan
        if nearest:
            hours = sum(count * nearest.units[name] for name, count in work.units.items()) / 3600
        path = Path(work.file)
        result = path.parent if work.stage == "generate" else path  # whose tasks have a file each
        yield str(result), work.backbone, work.stage, path.exists(), hours


def work_of(job: Job) -> Work | None:
    """Returns the work of a job; None unless it trains or decodes."""
    if job.rule not in (*TRAIN, "generate", "force"):
        return None
    spec = job.spec
    length = tokens_of(spec["length"])
    if job.rule == "generate":
        limits = [task_named(spec["benchmark"], task).max_new_tokens for task in spec["tasks"]]
        prompts, rows = spec["examples"] * len(limits), spec["examples"] * len(spec["arms"])
        units = {"prompt token": prompts * length, "generated token": rows * sum(limits)}
    elif job.rule == "force":
        units = {"continued token": _continuations(parsed(ForceSpec, spec)) * length}
    else:
        units = {"token": spec["steps"] * spec["sequences_per_step"] * len(spec["variants"]) * length}
    stage = "train" if job.rule in TRAIN else job.rule
    return Work(job.outputs[0], stage, spec["backbone"]["name"], length, units)


def _continuations(spec: ForceSpec) -> int:
    """Continuations over all arms; a prompt is continued twice, by its right answer and by the greedy one."""
    prompts = sum(asked.examples * len(tasks_of(asked.benchmark, tokens_of(spec.length))) for asked in spec.asked)
    return len(spec.corpora) * spec.documents * len(spec.rows_of_document) + 2 * prompts * len(spec.rows_of_answer)


def _rates(results: Path) -> Iterator[Work]:
    """Yields the seconds per unit of every finished job under `results` that recorded them, by name."""
    patterns = ("generations/*/*", "forced/*", "phi/*")
    for path in sorted(path for pattern in patterns for path in results.glob(f"{pattern}.meta.json")):
        try:
            meta = read_json(path)
            spec = meta["spec"]
            length = tokens_of(spec["length"])
            for stage, units in _seconds(meta, spec["sequences_per_step"] * length if "steps" in spec else length):
                yield Work(str(path), stage, spec["backbone"]["name"], length, units)
        except (ArithmeticError, AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: has no usable timings of its job ({error!r}); delete it") from None


def _seconds(meta: dict[str, Any], tokens: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Yields the stage of a record and its seconds per unit; nothing where the job found its work done.

    Args:
        tokens: of a continuation's prefix, or of a training step.
    """
    if meta.get("decode_seconds") and meta.get("prefill_seconds"):
        prefill = meta["prefill_seconds"] / meta["prefill_tokens"]
        yield "generate", {"prompt token": prefill, "generated token": meta["decode_seconds"] / meta["decode_rows"]}
    elif meta.get("steps"):
        yield "train", {"token": meta["seconds"] * meta["processes"] / meta["steps"] / tokens}
    elif meta.get("rows_computed"):
        yield "force", {"continued token": meta["wall_seconds"] / meta["rows_computed"] / tokens}
