"""Estimates the cost of a study from the rates of its finished jobs; imports nothing heavy.

A finished job records its tokens and seconds in its `.meta.json`. Generation is estimated with the prompt and decode
rates of the finished job of the same backbone with the nearest length, training with the seconds per step of the
nearest finished training, in proportion to length and number of variants, and forced decoding with the seconds per
continuation and arm of the nearest finished job, in proportion to length. Estimates are too low for lengths far above
the measured one, where attention dominates, and too high if answers end early. A backbone without finished jobs gets
its amount of work but no hours, because rates of another model or machine would be a guess.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from residual_mass.benchmarks.catalogue import task_named, tasks_of
from residual_mass.core.settings import tokens_of
from residual_mass.files import read_json
from residual_mass.study.jobs import TRAIN, Job, read_studies
from residual_mass.study.specs import ForceSpec
from residual_mass.study.values import parsed


@dataclass(frozen=True)
class PlannedJob:
    """The work of one job that trains or decodes."""

    target: str
    stage: Literal["train", "generate", "force"]
    backbone: str
    length: str
    examples: int = 0
    """Prompts, over all tasks of the job, and documents."""
    decoded: int = 0
    """Most generated or forced tokens, over all prompts and arms."""
    rows: int = 0
    """Most forced continuations, over all arms and states."""
    sequences: int = 0
    """Sequences of a training over all steps, per variant, as if each were trained alone."""
    variants: int = 0


@dataclass(frozen=True)
class Finished:
    """Work and time of one finished job."""

    path: Path
    stage: str
    backbone: str
    length: int
    device: str
    prefill_rate: float = 0.0
    """Prompt tokens per second."""
    decode_rate: float = 0.0
    """Generated tokens per second, over all examples and arms of a batch."""
    step_seconds: float = 0.0
    """Seconds of one training step of one variant."""
    row_seconds: float = 0.0
    """Seconds of one forced continuation under one arm, everything that the job did shared out."""


def run(jobs: Path, results: Path) -> None:
    """Prints one line per result of each study, and the remaining hours by backbone and stage.

    Args:
        jobs: jobs of the studies, as `study.start` writes them.
    """
    for study in read_studies(jobs):
        print_costs(study.name, list(filter(None, map(planned, study.jobs))), list(finished_jobs(results)))


def print_costs(study: str, work: Iterable[PlannedJob], finished: Sequence[Finished]) -> None:
    lines = [("result", "present", "prompt tokens", "decoded, at most", "hours, about")]
    left: dict[tuple[str, str], list[float | None]] = {}
    used: dict[str, None] = {}
    for target, jobs in by_result(work).items():
        rates = [nearest_job(job, finished) for job in jobs]
        hours = [None if rate is None else estimate_hours(job, rate) for job, rate in zip(jobs, rates, strict=True)]
        used |= {describe(rate): None for rate in rates if rate is not None}
        missing = [not Path(job.target).exists() for job in jobs]
        for job, missed, cost in zip(jobs, missing, hours, strict=True):
            if missed:
                left.setdefault((job.backbone, job.stage), []).append(cost)
        present = "no" if all(missing) else "partly" if any(missing) else "yes"
        prompts = sum(job.examples * tokens_of(job.length) for job in jobs)
        known = [cost for cost in hours if cost is not None]
        shown = f"{sum(known):.2f}" if len(known) == len(jobs) else "no rate yet"
        lines.append((target, present, f"{prompts:,}", f"{sum(job.decoded for job in jobs):,}", shown))
    print("\n".join(aligned(lines)))
    print(f"\nLeft to do in study {study}:")
    print("\n".join(summary(left, finished)) or "nothing that trains or decodes")
    print("\nRates: " + ("; ".join(used) or "none measured yet"))


def time_left(jobs: Iterable[Job], results: Path) -> str:
    """Says in one line how many of the jobs train or decode, and how long that takes one job after the other."""
    work, finished = list(filter(None, map(planned, jobs))), list(finished_jobs(results))
    rates = [nearest_job(job, finished) for job in work]
    hours = [estimate_hours(job, rate) for job, rate in zip(work, rates, strict=True) if rate is not None]
    what = f"{len(work)} jobs that train or decode"
    if not hours:
        return f"{what}, no rate measured here yet" if work else "nothing to train or to decode"
    without = f" without the {len(work) - len(hours)} that have no rate measured here yet" * (len(hours) < len(work))
    return f"{what}, about {sum(hours):.2f} hours{without}"


def by_result(jobs: Iterable[PlannedJob]) -> dict[str, list[PlannedJob]]:
    """Groups jobs by line: the tasks of a benchmark at one length together, every training separately."""
    results: dict[str, list[PlannedJob]] = {}
    for job in jobs:
        results.setdefault(str(Path(job.target).parent) if job.stage == "generate" else job.target, []).append(job)
    return results


def finished_jobs(results: Path) -> Iterator[Finished]:
    """Yields every finished job under `results` that recorded its rate."""
    patterns = ("generations/*/*", "forced/*", "phi/*")
    for path in sorted(path for pattern in patterns for path in results.glob(f"{pattern}.meta.json")):
        try:
            yield from _measured(path, read_json(path))
        except (ArithmeticError, AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: has no usable timings of its job ({error!r}); delete it") from None


def _measured(path: Path, meta: dict[str, Any]) -> Iterator[Finished]:
    spec = meta["spec"]
    common = {"path": path, "backbone": spec["backbone"]["name"], "length": tokens_of(spec["length"])}
    if meta.get("decode_seconds") and meta.get("prefill_seconds"):
        prefill = meta["prefill_tokens"] / meta["prefill_seconds"]
        decode = meta["decode_rows"] / meta["decode_seconds"]
        yield Finished(**common, stage="generate", device=meta["device"], prefill_rate=prefill, decode_rate=decode)
    elif meta.get("steps"):
        seconds = meta["seconds"] * meta["processes"] / meta["steps"] / spec["sequences_per_step"]
        yield Finished(**common, stage="train", device=meta["device"], step_seconds=seconds)
    elif meta.get("rows_computed"):
        seconds = meta["wall_seconds"] / meta["rows_computed"]
        yield Finished(**common, stage="force", device=meta["device"], row_seconds=seconds)


def nearest_job(job: PlannedJob, finished: Iterable[Finished]) -> Finished | None:
    """Returns the finished job of the same backbone and stage with the nearest length; of equals the last by name."""
    fitting = [f for f in finished if (f.backbone, f.stage) == (job.backbone, job.stage)]
    length = tokens_of(job.length)
    return min(reversed(fitting), key=lambda f: abs(math.log(f.length / length)), default=None)


def estimate_hours(job: PlannedJob, rate: Finished) -> float:
    """Estimates the hours of `job` from the rates of a finished one."""
    length = tokens_of(job.length)
    if job.stage == "train":
        return job.sequences * job.variants * rate.step_seconds * length / rate.length / 3600
    if job.stage == "force":
        return job.rows * rate.row_seconds * length / rate.length / 3600
    return (job.examples * length / rate.prefill_rate + job.decoded / rate.decode_rate) / 3600


def describe(rate: Finished) -> str:
    at = f"{rate.backbone} at {rate.length} tokens on {rate.device}"
    if rate.stage == "train":
        return f"{at}: {rate.step_seconds:.2f} s per training sequence and variant"
    if rate.stage == "force":
        return f"{at}: {rate.row_seconds:.2f} s per forced continuation and arm"
    return f"{at}: {rate.prefill_rate:.0f} prompt and {rate.decode_rate:.0f} generated tokens per second"


def summary(left: dict[tuple[str, str], list[float | None]], finished: Iterable[Finished]) -> Iterator[str]:
    on_gpu = {f.backbone for f in finished if f.device.startswith("cuda")}
    for (backbone, stage), hours in left.items():
        known = [h for h in hours if h is not None]
        if len(known) < len(hours):
            yield (
                f"  {backbone}, {stage}: {len(hours)} jobs, no rate measured yet; finish a small one first, "
                "for one with --config examples=2"
            )
        else:
            unit = "GPU-hours" if backbone in on_gpu else "hours"
            yield f"  {backbone}, {stage}: {len(hours)} jobs, about {sum(known):.2f} {unit}"


def aligned(rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        yield "  ".join([first.ljust(widths[0]), *(o.rjust(w) for o, w in zip(others, widths[1:], strict=True))])


def planned(job: Job) -> PlannedJob | None:
    """Returns the work of a job; None unless it trains or decodes."""
    if job.rule == "force":
        return _forced(parsed(ForceSpec, job.spec), job.outputs[0])
    if job.rule not in TRAIN and job.rule != "generate":
        return None
    spec, target = job.spec, job.outputs[0]
    backbone, length = spec["backbone"]["name"], spec["length"]
    if job.rule in TRAIN:
        sequences = spec["steps"] * spec["sequences_per_step"]
        return PlannedJob(target, "train", backbone, length, sequences=sequences, variants=len(spec["variants"]))
    limits = [task_named(spec["benchmark"], task).max_new_tokens for task in spec["tasks"]]
    decoded = spec["examples"] * len(spec["arms"]) * sum(limits)
    return PlannedJob(target, "generate", backbone, length, spec["examples"] * len(spec["tasks"]), decoded)


def _forced(spec: ForceSpec, target: str) -> PlannedJob:
    documents = len(spec.corpora) * spec.documents
    prompts = sum(asked.examples * len(tasks_of(asked.benchmark, tokens_of(spec.length))) for asked in spec.asked)
    # A prompt is continued twice, by its right answer and by the greedy one.
    rows = documents * len(spec.rows_of_document) + 2 * prompts * len(spec.rows_of_answer)
    where = {"target": target, "backbone": spec.backbone.name, "length": spec.length}
    return PlannedJob(stage="force", **where, examples=documents + prompts, decoded=rows * spec.tokens, rows=rows)
