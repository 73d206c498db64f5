"""Scores of stored generations and paired differences of the arms, as one tidy CSV."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from residual_mass.benchmarks.catalogue import Task, task_named
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


@dataclass(frozen=True)
class Flips:
    """Answers that an arm turns, relative to full on the same examples (arXiv 2407.09141)."""

    right_to_wrong: int
    wrong_to_right: int


@dataclass(frozen=True)
class ArmScore:
    """The score of an arm on a task or over all tasks: one line of the result table.

    Attributes:
        value: by the harness's scorer.
        original: by the scorer of the benchmark's authors.
        gain: difference to topk at the same budget; None for full and topk, or without topk.
        full_gap: difference to full; None for full, or without it.
        flips: None as `full_gap`, and where answers are not right or wrong.
        ks: exact keys beyond the anchors, per example.
        cuts: tokens cut off the prompt, per example.
    """

    value: MeanScore
    original: MeanScore
    gain: Comparison | None
    full_gap: Comparison | None
    flips: Flips | None
    ks: list[int]
    cuts: list[int]


def run(spec: ScoreSpec, prompts: Path, generations: list[Path], out: Path) -> None:
    """The `score` stage: one CSV row per task and arm, then the rows over all tasks."""
    record = Record("score", spec, [prompts, *generations])
    manifest = load_manifest(prompts)
    examples = {
        task: load_prompts(prompts, task, min(spec.examples, entry["examples"]))
        for task, entry in manifest["tasks"].items()
    }
    cells = collect(generations, examples, spec.arms)
    arms = list(dict.fromkeys(arm for _, arm in cells))
    phi = {arm: rows[0]["phi_sha"] or "" for (_, arm), rows in cells.items()}
    scores = {
        task: _score_task(spec, task, examples[task], {arm: cells[task, arm] for arm in arms}) for task in examples
    }
    scores["all"] = {arm: _over_tasks([of_task[arm] for of_task in scores.values()]) for arm in arms}
    lines = []
    for task, of_task in scores.items():
        metric = metric_of_mean(entry.metric for entry in _covered(spec, manifest, task))
        about, beating = _about(spec, manifest, task, metric), _better_than_full(task, of_task, metric)
        lines += [
            {**about, **_arm_fields(arm, phi[arm]), **_numbers(score), "flags": _flags(score, metric, arm in beating)}
            for arm, score in of_task.items()
        ]
    write_text(out, csv_text(RESULTS, lines))
    record.write(out)


def join(results: Sequence[Path], out: Path) -> None:
    """The `join` stage: the rows of several result tables as one."""
    record = Record("join", {}, results)
    write_text(out, csv_text(RESULTS, (line for path in results for line in read_csv(path, RESULTS, "score"))))
    record.write(out)


def collect(
    generations: Sequence[Path], examples: Mapping[str, Sequence[Prompt]], arms: Sequence[ArmSpec] | None = None
) -> dict[tuple[str, ArmSpec], list[Row]]:
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
        _check_complete(found.get((task, arm), {}), len(examples[task]), generations, _name(task, arm))
    return {(t, arm): [found[t, arm][i] for i in range(len(examples[t]))] for t in examples for arm in ordered}


def _canonical(arm: ArmSpec) -> tuple[int, float, str]:
    return names().index(arm.method), arm.budget_percent or 0.0, arm.maps or ""


def _check_complete(cell: dict[int, Row], examples: int, files: Sequence[Path], name: str) -> None:
    if missing := [str(i) for i in range(examples) if i not in cell]:
        listed = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        searched = ", ".join(map(str, files))
        raise ValueError(f"{searched}: {name} lacks {len(missing)} of {examples} examples ({listed}); {RERUN}")


def _name(task: str, arm: ArmSpec) -> str:
    budget = "" if arm.budget_percent is None else f"{arm.budget_percent:g}%"
    return " ".join(part for part in (task, arm.method, budget, arm.maps) if part)


def _score_task(
    spec: ScoreSpec, task: str, prompts: Sequence[Prompt], rows: dict[ArmSpec, list[Row]]
) -> dict[ArmSpec, ArmScore]:
    harness, original = _example_scores(spec.benchmark, task, prompts, list(rows.values()))
    values, metric = dict(zip(rows, harness, strict=True)), task_named(spec.benchmark, task).metric
    pairs = [(arm, other) for arm in rows for other in (_baseline(arm), FULL) if other in rows and other != arm]
    resampling = spec.bootstrap_resamples, spec.seed, task
    estimates = estimate_arms(np.concatenate([harness, original]), *resampling)
    differences = np.array([values[arm] - values[other] for arm, other in pairs]).reshape(len(pairs), len(prompts))
    compared = dict(zip(pairs, compare_arms(differences, *resampling), strict=True))
    return {
        arm: ArmScore(
            value=estimates[number],
            original=estimates[len(rows) + number],
            gain=compared.get((arm, _baseline(arm))),
            full_gap=compared.get((arm, FULL)),
            flips=_flips(metric, values[FULL], values[arm]) if (arm, FULL) in compared else None,
            ks=[row["k"] for row in rows[arm]],
            cuts=[row["cut_tokens"] for row in rows[arm]],
        )
        for number, arm in enumerate(rows)
    }


def _example_scores(
    benchmark: str, task: str, prompts: Sequence[Prompt], arms: Sequence[Sequence[Row]]
) -> tuple[np.ndarray, np.ndarray]:
    """Scores by the harness and by the benchmark's authors, each (arms, examples)."""
    scores = np.empty((2, len(arms), len(prompts)))
    for index, prompt in enumerate(prompts):
        texts = [rows[index]["text"] for rows in arms]
        of_text = {text: both_scores(benchmark, task, prompt.doc, text) for text in dict.fromkeys(texts)}
        scores[:, :, index] = np.array([of_text[text] for text in texts]).T
    return scores[0], scores[1]


def _baseline(arm: ArmSpec) -> ArmSpec | None:
    """The arm that the gain of an arm with a residual estimate is measured against."""
    return ArmSpec("topk", arm.budget_percent) if arm.method not in ("full", "topk") else None


def _flips(metric: Metric, of_full: np.ndarray, of_arm: np.ndarray) -> Flips | None:
    if metric.right is None:
        return None
    right = [(metric.is_right(before), metric.is_right(after)) for before, after in zip(of_full, of_arm, strict=True)]
    return Flips(right.count((True, False)), right.count((False, True)))


def _sum(flips: Sequence[Flips]) -> Flips:
    return Flips(sum(each.right_to_wrong for each in flips), sum(each.wrong_to_right for each in flips))


def _over_tasks(tasks: Sequence[ArmScore]) -> ArmScore:
    gains = [task.gain for task in tasks if task.gain is not None]
    gaps = [task.full_gap for task in tasks if task.full_gap is not None]
    flips = [task.flips for task in tasks if task.flips is not None]
    return ArmScore(
        value=estimate_over_tasks([task.value for task in tasks]),
        original=estimate_over_tasks([task.original for task in tasks]),
        gain=compare_over_tasks(gains) if gains else None,
        full_gap=compare_over_tasks(gaps) if gaps else None,
        flips=_sum(flips) if len(flips) == len(tasks) else None,
        ks=[k for task in tasks for k in task.ks],
        cuts=[cut for task in tasks for cut in task.cuts],
    )


def _better_than_full(task: str, scores: Mapping[ArmSpec, ArmScore], metric: Metric) -> set[ArmSpec]:
    """The arms significantly better than full, Holm-adjusted over the partial arms of the task; each is reported."""
    gaps = {arm: score.full_gap for arm, score in scores.items() if score.full_gap is not None}
    adjusted = dict(zip(gaps, holm([gap.p for gap in gaps.values()]), strict=True))
    beating = {arm for arm, gap in gaps.items() if metric.better(gap.mean.value, 0) and adjusted[arm] < SIGNIFICANT}
    for arm in sorted(beating, key=_canonical):
        logger.warning(
            "alarm: %s is %s full (adjusted p %.2g): more likely a mistake in the harness than a finding",
            _name(task, arm),
            metric.better_side,
            adjusted[arm],
        )
    return beating


def _flags(score: ArmScore, metric: Metric, beats_full: bool) -> str:
    return " ".join(sorted({*metric.flags(score.value.value), *["beats_full"] * beats_full}))


def _covered(spec: ScoreSpec, manifest: dict[str, Any], task: str) -> list[Task]:
    return [task_named(spec.benchmark, name) for name in (manifest["tasks"] if task == "all" else [task])]


def _about(spec: ScoreSpec, manifest: dict[str, Any], task: str, metric: Metric) -> dict[str, str]:
    """The columns that all lines of a task, or of `all`, have in common."""
    kinds = {entry.data(spec.data_source) for entry in _covered(spec, manifest, task)}
    return {
        "benchmark": spec.benchmark,
        "backbone": spec.backbone.name,
        "length": spec.length,
        "task": task,
        "metric": metric.name,
        "data": "+".join(kind for kind in DATA_ORDER if kind in kinds),
        "decoding": spec.decoding,
        "study": spec.study,
        "model_id": spec.backbone.model_id,
        "revision": spec.backbone.revision,
        "prompts_sha": manifest["sha256"],
        "weights": spec.backbone.weights,
    }


def _arm_fields(arm: ArmSpec, phi_sha: str) -> dict[str, str]:
    budget = "" if arm.budget_percent is None else f"{arm.budget_percent:g}"
    return {"method": arm.method, "budget_percent": budget, "maps": arm.maps or "", "phi_sha": phi_sha}


def _numbers(score: ArmScore) -> dict[str, str]:
    numbers = {
        **_mean_fields("", score.value),
        **_mean_fields("original_", score.original),
        "k_mean": np.mean(score.ks),
        "k_zero_share": np.mean([k == 0 for k in score.ks]),
        "cut_share": np.mean([cut > 0 for cut in score.cuts]),
    }
    if score.gain:
        low, high = score.gain.mean.interval
        numbers |= {"gain": score.gain.mean.value, "gain_ci_low": low, "gain_ci_high": high}
        numbers |= {"gain_p": score.gain.p, "mde": score.gain.detectable}
    if score.full_gap:
        numbers |= {"full_gap": score.full_gap.mean.value, "full_gap_p": score.full_gap.p}
    counts = {"n": len(score.ks)} | (vars(score.flips) if score.flips else {})
    return {name: _number(number) for name, number in numbers.items()} | {name: str(n) for name, n in counts.items()}


def _mean_fields(prefix: str, mean: MeanScore) -> dict[str, float | None]:
    low, high = mean.interval
    fields = {"value": mean.value, "stderr": mean.stderr, "ci_low": low, "ci_high": high}
    return {prefix + name: number for name, number in fields.items()}


def _number(number: float | None) -> str:
    return "" if number is None else f"{round(number, 6) + 0.0:.6f}"  # adding zero removes the sign of -0.0
