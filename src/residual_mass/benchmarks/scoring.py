"""Scores of stored generations and paired differences of the arms, as one tidy CSV."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from residual_mass.benchmarks.catalogue import task_named
from residual_mass.benchmarks.columns import RESULTS
from residual_mass.benchmarks.scorers import both_scores
from residual_mass.benchmarks.statistics import (
    Comparison,
    MeanScore,
    compare_arms,
    compare_over_tasks,
    estimate_arms,
    estimate_over_tasks,
)
from residual_mass.benchmarks.store import Row
from residual_mass.files import csv_text, read_csv, read_jsonl, write_text
from residual_mass.frozen_prompts import Prompt, load_manifest, load_prompts
from residual_mass.holm import holm
from residual_mass.methods import names
from residual_mass.methods.arms import ArmSpec
from residual_mass.metrics import Metric, metric_of_mean
from residual_mass.provenance import Record
from residual_mass.study.specs import ScoreSpec

logger = logging.getLogger(__name__)

SIGNIFICANT = 0.05
DATA_ORDER = ("original", "simulated", "stand-in")
FULL = ArmSpec("full")
RERUN = "run the generate stage again"


def run(spec: ScoreSpec, prompts: Path, generations: list[Path], out: Path) -> None:
    """The `score` stage: one CSV row per task and arm, then the rows over all tasks."""
    record = Record("score", spec, [prompts, *generations])
    manifest = load_manifest(prompts)
    examples = {
        task: load_prompts(prompts, task, min(spec.examples, entry["examples"]))
        for task, entry in manifest["tasks"].items()
    }
    answers = collect(generations, examples, spec.arms)
    scores = {task: _score_task(spec, task, examples[task], answers[task]) for task in examples}
    lines = [line for task in examples for line in _lines(spec, manifest, task, {task: scores[task]})]
    lines += _lines(spec, manifest, "all", scores)
    write_text(out, csv_text(RESULTS, lines))
    record.write(out)


def join(results: Sequence[Path], out: Path) -> None:
    """The `join` stage: the rows of several result tables as one."""
    record = Record("join", {}, results)
    write_text(out, csv_text(RESULTS, (line for path in results for line in read_csv(path, RESULTS, "score"))))
    record.write(out)


def collect(
    generations: Sequence[Path], examples: Mapping[str, Sequence[Prompt]], arms: Sequence[ArmSpec] | None = None
) -> dict[str, dict[ArmSpec, list[Row]]]:
    """The rows of all files by task and arm, in the order of the examples; a file may hold some tasks or arms only.

    Args:
        generations: the files.
        examples: frozen prompts by task.
        arms: the arms to collect; None for all.

    Raises:
        ValueError: a row comes from another prompt, comes twice, or is missing; names the file.
    """
    found: dict[tuple[str, ArmSpec], dict[int, Row]] = {}
    for path in generations:
        for row in read_jsonl(path):
            task, index, arm = row["task"], row["index"], ArmSpec(row["method"], row["budget_percent"], row["maps"])
            if arms is not None and arm not in arms:
                continue
            prompts = examples.get(task, ())
            if index >= len(prompts) or row["prompt_sha"] != prompts[index].sha256:
                raise ValueError(
                    f"{path}: {task} example {index} was generated from other prompts; give those, or {RERUN}"
                )
            if index in (cell := found.setdefault((task, arm), {})):
                raise ValueError(f"{path}: a second row for {_name(task, arm)} example {index}; give each arm once")
            cell[index] = row
    ordered = sorted({arm for _, arm in found} | set(arms or ()), key=_canonical)
    for task, arm in product(examples, ordered):
        count = len(examples[task])
        if missing := [str(i) for i in range(count) if i not in found.get((task, arm), {})]:
            listed, searched = ", ".join(missing[:5]) + ", ..." * (len(missing) > 5), ", ".join(map(str, generations))
            what = f"{_name(task, arm)} lacks {len(missing)} of {count} examples ({listed})"
            raise ValueError(f"{searched}: {what}; {RERUN}")
    return {
        task: {arm: [found[task, arm][i] for i in range(len(prompts))] for arm in ordered}
        for task, prompts in examples.items()
    }


def _canonical(arm: ArmSpec) -> tuple[int, float, str]:
    return names().index(arm.method), arm.budget_percent or 0.0, arm.maps or ""


def _name(task: str, arm: ArmSpec) -> str:
    budget = "" if arm.budget_percent is None else f"{arm.budget_percent:g}%"
    return " ".join(part for part in (task, arm.method, budget, arm.maps) if part)


@dataclass(frozen=True)
class TaskScores:
    """The scores of all arms on a task.

    Attributes:
        rows: generations of each arm.
        value: by the harness's scorer.
        original: by the scorer of the benchmark's authors.
        gain: differences to topk at the same budget, of arms with a residual estimate where there is a topk.
        full_gap: differences to full, of the other arms where there is full.
        turned: answers that full has right and the arm wrong, and the other way round (arXiv 2407.09141); of arms with
            a `full_gap`, where answers are right or wrong.
    """

    rows: dict[ArmSpec, list[Row]]
    value: dict[ArmSpec, MeanScore]
    original: dict[ArmSpec, MeanScore]
    gain: dict[ArmSpec, Comparison]
    full_gap: dict[ArmSpec, Comparison]
    turned: dict[ArmSpec, tuple[int, int]]


def _score_task(spec: ScoreSpec, task: str, prompts: Sequence[Prompt], rows: dict[ArmSpec, list[Row]]) -> TaskScores:
    arms, metric = list(rows), task_named(spec.benchmark, task).metric
    scores = np.empty((2, len(arms), len(prompts)))  # by the harness and by the authors
    for index, prompt in enumerate(prompts):
        texts = [of_arm[index]["text"] for of_arm in rows.values()]
        of_text = {text: both_scores(spec.benchmark, task, prompt.doc, text) for text in dict.fromkeys(texts)}
        scores[:, :, index] = np.array([of_text[text] for text in texts]).T
    harness = dict(zip(arms, scores[0], strict=True))
    pairs = [(arm, ArmSpec("topk", arm.budget_percent)) for arm in arms if arm.method not in ("full", "topk")]
    pairs = [pair for pair in pairs if pair[1] in rows] + [(arm, FULL) for arm in arms if FULL in rows and arm != FULL]
    differences = np.array([harness[arm] - harness[other] for arm, other in pairs]).reshape(len(pairs), len(prompts))
    resampling = spec.bootstrap_resamples, spec.seed, task
    estimates = estimate_arms(scores.reshape(-1, len(prompts)), *resampling)
    compared = dict(zip(pairs, compare_arms(differences, *resampling), strict=True))
    right = {} if metric.right is None else {arm: np.array([metric.is_right(x) for x in harness[arm]]) for arm in arms}
    return TaskScores(
        rows,
        dict(zip(arms, estimates[: len(arms)], strict=True)),
        dict(zip(arms, estimates[len(arms) :], strict=True)),
        {arm: each for (arm, other), each in compared.items() if other != FULL},
        {arm: each for (arm, other), each in compared.items() if other == FULL},
        {
            arm: (int((right[FULL] & ~right[arm]).sum()), int((~right[FULL] & right[arm]).sum()))
            for arm, other in pairs if other == FULL and right
        },
    )  # fmt: skip


def _lines(
    spec: ScoreSpec, manifest: dict[str, Any], task: str, scores: Mapping[str, TaskScores]
) -> Iterator[dict[str, str]]:
    """The rows of all arms over the tasks of `scores`."""
    entries, tasks = [task_named(spec.benchmark, name) for name in scores], list(scores.values())
    metric, kinds = metric_of_mean(entry.metric for entry in entries), {e.data(spec.data_source) for e in entries}
    about = {
        "benchmark": spec.benchmark, "backbone": spec.backbone.name, "length": spec.length, "task": task,
        "metric": metric.name, "data": "+".join(kind for kind in DATA_ORDER if kind in kinds),
        "decoding": spec.decoding, "study": spec.study, "model_id": spec.backbone.model_id,
        "revision": spec.backbone.revision, "prompts_sha": manifest["sha256"], "weights": spec.backbone.weights,
    }  # fmt: skip
    gaps = {arm: compare_over_tasks([of_task.full_gap[arm] for of_task in tasks]) for arm in tasks[0].full_gap}
    beating = _better_than_full(task, gaps, metric)
    for arm in tasks[0].rows:
        rows = [row for of_task in tasks for row in of_task.rows[arm]]
        value = estimate_over_tasks([of_task.value[arm] for of_task in tasks])
        numbers = _mean("", value) | _mean("original_", estimate_over_tasks([each.original[arm] for each in tasks]))
        numbers |= {
            "k_mean": np.mean([row["k"] for row in rows]),
            "k_zero_share": np.mean([row["k"] == 0 for row in rows]),
            "cut_share": np.mean([row["cut_tokens"] > 0 for row in rows]),
        }
        if arm in tasks[0].gain:
            gain = compare_over_tasks([of_task.gain[arm] for of_task in tasks])
            low, high = gain.mean.interval
            numbers |= {"gain": gain.mean.value, "gain_ci_low": low, "gain_ci_high": high}
            numbers |= {"gain_p": gain.p, "mde": gain.detectable}
        if arm in gaps:
            numbers |= {"full_gap": gaps[arm].mean.value, "full_gap_p": gaps[arm].p}
        counts = {"n": len(rows)}
        if turned := [of_task.turned[arm] for of_task in tasks if arm in of_task.turned]:
            if len(turned) == len(tasks):
                counts["right_to_wrong"], counts["wrong_to_right"] = (sum(each) for each in zip(*turned, strict=True))
        yield {
            **about,
            "method": arm.method,
            "budget_percent": "" if arm.budget_percent is None else f"{arm.budget_percent:g}",
            "maps": arm.maps or "",
            "phi_sha": rows[0]["phi_sha"] or "",
            "flags": " ".join(sorted({*metric.flags(value.value), *["beats_full"] * (arm in beating)})),
            **{name: _number(number) for name, number in numbers.items()},
            **{name: str(count) for name, count in counts.items()},
        }


def _better_than_full(task: str, gaps: Mapping[ArmSpec, Comparison], metric: Metric) -> set[ArmSpec]:
    """The arms significantly better than full, Holm-adjusted over the partial arms of the task; each is reported."""
    adjusted = dict(zip(gaps, holm([gap.p for gap in gaps.values()]), strict=True))
    beating = {arm for arm, gap in gaps.items() if metric.better(gap.mean.value, 0) and adjusted[arm] < SIGNIFICANT}
    for arm in sorted(beating, key=_canonical):
        logger.warning(
            "alarm: %s is %s full (adjusted p %.2g): more likely a mistake in the harness than a finding",
            _name(task, arm), metric.better_side, adjusted[arm],
        )  # fmt: skip
    return beating


def _mean(prefix: str, mean: MeanScore) -> dict[str, float | None]:
    low, high = mean.interval
    fields = {"value": mean.value, "stderr": mean.stderr, "ci_low": low, "ci_high": high}
    return {prefix + name: number for name, number in fields.items()}


def _number(number: float | None) -> str:
    return "" if number is None else f"{round(number, 6) + 0.0:.6f}"  # adding zero removes the sign of -0.0
