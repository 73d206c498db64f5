"""Scores of stored generations, and how the arms differ on the same examples, as one tidy CSV."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from residual_mass.benchmarks.catalogue import CEILING, FLOOR, task_named
from residual_mass.benchmarks.columns import RESULTS
from residual_mass.benchmarks.scorers import both_scores
from residual_mass.benchmarks.statistics import (
    Comparison,
    Estimate,
    compare_arms,
    compare_over_tasks,
    estimate_arms,
    estimate_over_tasks,
)
from residual_mass.benchmarks.store import Row, wrong_field
from residual_mass.core.estimators import NAMES
from residual_mass.files import csv_text, read_csv, read_jsonl, write_text
from residual_mass.frozen_prompts import Prompt, load_manifest, load_prompts
from residual_mass.holm import holm
from residual_mass.provenance import Record
from residual_mass.specs import ArmSpec, ScoreSpec

logger = logging.getLogger(__name__)

SIGNIFICANT = 0.05
DATA_ORDER = ("original", "simulated", "stand-in")
FULL = ArmSpec("full")
RERUN = "run the generate stage again"
OTHER_PROMPTS = f"give the prompts that it was generated from, or {RERUN}"
RESCORE = "delete it and run the score stage again"

Cells = dict[tuple[str, ArmSpec], list[Row]]
"""Generation rows by task and arm, in the order of the examples."""
Line = dict[str, str]


@dataclass(frozen=True)
class Score:
    """What one line of the result table says of an arm on a task or over all.

    Attributes:
        value: by the harness's scorer.
        original: by the scorer of the benchmark's authors.
        gain: difference to topk at the same budget; None for full and for topk itself, or where topk is not there.
        full_gap: difference to full; None for full itself, or where it is not there.
        ks: exact keys beyond the anchors, per example.
        cuts: tokens by which the prompt was cut to the context, per example.
    """

    value: Estimate
    original: Estimate
    gain: Comparison | None
    full_gap: Comparison | None
    ks: list[int]
    cuts: list[int]


Scores = dict[ArmSpec, Score]


def run(spec: ScoreSpec, prompts: Path, generations: list[Path], out: Path) -> None:
    """Writes one row per task and arm, then the rows over all tasks."""
    record = Record("score", spec, [prompts, *generations])
    manifest = load_manifest(prompts)
    examples = {task: load_prompts(prompts, task, entry["examples"]) for task, entry in manifest["tasks"].items()}
    cells = collect(generations, examples, spec.arms)
    arms = list(dict.fromkeys(arm for _, arm in cells))
    phi = {arm: _phi_sha(generations, cells, arm) for arm in arms}
    scores = {
        task: _score_task(spec, task, examples[task], {arm: cells[task, arm] for arm in arms}) for task in examples
    }
    scores["all"] = {arm: _over_tasks([of_task[arm] for of_task in scores.values()]) for arm in arms}
    lines = []
    for task, of_task in scores.items():
        about, above = _about(spec, manifest, task), _above_full(task, of_task)
        lines += [
            {**about, **_arm_fields(arm, phi[arm]), **_numbers(score), "flags": _flags(score, arm in above)}
            for arm, score in of_task.items()
        ]
    write_text(out, csv_text(RESULTS, lines))
    record.write(out)


def join(files: Sequence[Path], out: Path) -> None:
    """Writes the rows of several result tables as one.

    Raises:
        ValueError: a file is missing, cut, or has other columns; names it.
    """
    record = Record("join", {}, files)
    write_text(out, csv_text(RESULTS, (line for path in files for line in _read_table(path))))
    record.write(out)


def collect(
    generations: Sequence[Path], examples: Mapping[str, Sequence[Prompt]], arms: Sequence[ArmSpec] | None = None
) -> Cells:
    """The rows of all files by task and arm; a file may hold some of the tasks or some of the arms.

    Args:
        generations: the files.
        examples: frozen prompts by task.
        arms: the arms to collect; None collects all there are.

    Raises:
        ValueError: a row is malformed, twice there, of no frozen prompt, or missing; names the file.
    """
    found: dict[tuple[str, ArmSpec], dict[int, Row]] = {}
    file_of: dict[str | ArmSpec | tuple[str, ArmSpec], Path] = {}
    for path in generations:
        for number, row in enumerate(read_jsonl(path), start=1):
            arm = _checked_arm(row, examples, f"{path}:{number}")
            if arms is not None and arm not in arms:
                continue
            task, index = row["task"], row["index"]
            if index in (cell := found.setdefault((task, arm), {})):
                raise ValueError(f"{path}:{number}: a second row for {_name(task, arm)} example {index}")
            cell[index] = row
            file_of |= {task: path, arm: path, (task, arm): path}
    searched = ", ".join(map(str, generations))
    ordered = sorted({arm for _, arm in found} | set(arms or ()), key=_canonical)
    for task in examples:
        if task not in file_of:
            raise ValueError(f"{searched}: no rows for task {task}; {RERUN}")
        for arm in ordered:
            file = file_of.get((task, arm), file_of.get(arm, searched))
            _check_complete(found.get((task, arm), {}), len(examples[task]), f"{file}: {_name(task, arm)}")
    return {(t, arm): [found[t, arm][i] for i in range(len(examples[t]))] for t in examples for arm in ordered}


def _canonical(arm: ArmSpec) -> tuple[int, float, str]:
    return NAMES.index(arm.method), arm.budget_percent or 0.0, arm.maps or ""


def _checked_arm(row: Row, examples: Mapping[str, Sequence[Prompt]], where: str) -> ArmSpec:
    if key := wrong_field(row):
        raise ValueError(f"{where}: {key} is {row.get(key, 'missing')!r}; delete the file and {RERUN}")
    if row["method"] not in NAMES:
        raise ValueError(f"{where}: unknown method {row['method']!r}; known are {', '.join(NAMES)}; {RERUN}")
    if row["task"] not in examples:
        raise ValueError(f"{where}: task {row['task']!r} is not among the prompts; {OTHER_PROMPTS}")
    if not 0 <= row["index"] < len(examples[row["task"]]):
        raise ValueError(f"{where}: {row['task']} has no example {row['index']} among the prompts; {OTHER_PROMPTS}")
    if row["prompt_sha"] != examples[row["task"]][row["index"]].sha256:
        raise ValueError(f"{where}: {row['task']} example {row['index']} was generated from another prompt; {RERUN}")
    if row["cut_tokens"] < 0:
        raise ValueError(f"{where}: cut_tokens is {row['cut_tokens']}; delete the file and {RERUN}")
    try:
        return ArmSpec(row["method"], row["budget_percent"], row["maps"])
    except ValueError as error:
        raise ValueError(f"{where}: {error}; delete the file and {RERUN}") from None


def _check_complete(cell: dict[int, Row], examples: int, where: str) -> None:
    if missing := [str(i) for i in range(examples) if i not in cell]:
        listed = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise ValueError(f"{where} lacks {len(missing)} of {examples} examples ({listed}); {RERUN}")


def _name(task: str, arm: ArmSpec) -> str:
    budget = "" if arm.budget_percent is None else f"{arm.budget_percent:g}%"
    return " ".join(part for part in (task, arm.method, budget, arm.maps) if part)


def _phi_sha(generations: Sequence[Path], cells: Cells, arm: ArmSpec) -> str:
    used = {row["phi_sha"] for (_, other), rows in cells.items() if other == arm for row in rows}
    if len(used) > 1:
        files = ", ".join(map(str, generations))
        raise ValueError(f"{files}: rows of {_name('', arm)} with {len(used)} different phi files; {RERUN} with one")
    return used.pop() or ""


def _score_task(spec: ScoreSpec, task: str, prompts: Sequence[Prompt], rows: dict[ArmSpec, list[Row]]) -> Scores:
    harness, original = _example_scores(spec.benchmark, task, prompts, list(rows.values()))
    values = dict(zip(rows, harness, strict=True))
    pairs = [(arm, other) for arm in rows for other in (_baseline(arm), FULL) if other in rows and other != arm]
    resampling = spec.bootstrap_resamples, spec.seed, task
    estimates = estimate_arms(np.concatenate([harness, original]), *resampling)
    differences = np.array([values[arm] - values[other] for arm, other in pairs]).reshape(len(pairs), len(prompts))
    compared = dict(zip(pairs, compare_arms(differences, *resampling), strict=True))
    return {
        arm: Score(
            value=estimates[number],
            original=estimates[len(rows) + number],
            gain=compared.get((arm, _baseline(arm))),
            full_gap=compared.get((arm, FULL)),
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
    """What the gain of an arm that estimates the residual is measured against."""
    return ArmSpec("topk", arm.budget_percent) if arm.method not in ("full", "topk") else None


def _over_tasks(tasks: Sequence[Score]) -> Score:
    gains = [task.gain for task in tasks if task.gain is not None]
    gaps = [task.full_gap for task in tasks if task.full_gap is not None]
    return Score(
        value=estimate_over_tasks([task.value for task in tasks]),
        original=estimate_over_tasks([task.original for task in tasks]),
        gain=compare_over_tasks(gains) if gains else None,
        full_gap=compare_over_tasks(gaps) if gaps else None,
        ks=[k for task in tasks for k in task.ks],
        cuts=[cut for task in tasks for cut in task.cuts],
    )


def _above_full(task: str, scores: Scores) -> set[ArmSpec]:
    """The arms significantly above full, Holm-adjusted over the partial arms of the task; each is reported."""
    gaps = {arm: score.full_gap for arm, score in scores.items() if score.full_gap is not None}
    adjusted = dict(zip(gaps, holm([gap.p for gap in gaps.values()]), strict=True))
    above = {arm for arm, gap in gaps.items() if gap.estimate.value > 0 and adjusted[arm] < SIGNIFICANT}
    for arm in sorted(above, key=_canonical):
        logger.warning(
            "alarm: %s is above full (adjusted p %.2g): more likely a mistake in the harness than a finding",
            _name(task, arm),
            adjusted[arm],
        )
    return above


def _flags(score: Score, above_full: bool) -> str:
    raised = {
        "beats_full": above_full,
        "ceiling": score.value.value >= CEILING,
        "floor": score.value.value <= FLOOR,
    }
    return " ".join(sorted(flag for flag, is_raised in raised.items() if is_raised))


def _about(spec: ScoreSpec, manifest: dict[str, Any], task: str) -> Line:
    """What all lines of a task, or of `all`, have in common."""
    covered = [task_named(spec.benchmark, name) for name in (manifest["tasks"] if task == "all" else [task])]
    metrics = {entry.metric or "string_match" for entry in covered}
    kinds = {entry.data(spec.data_source) for entry in covered}
    return {
        "benchmark": spec.benchmark,
        "backbone": spec.backbone.name,
        "length": spec.length,
        "task": task,
        "metric": metrics.pop() if len(metrics) == 1 else "mean",
        "data": "+".join(kind for kind in DATA_ORDER if kind in kinds),
        "decoding": spec.decoding,
        "study": spec.study,
        "model_id": spec.backbone.model_id,
        "revision": spec.backbone.revision,
        "prompts_sha": manifest["sha256"],
        "weights": spec.backbone.weights,
    }


def _arm_fields(arm: ArmSpec, phi_sha: str) -> Line:
    budget = "" if arm.budget_percent is None else f"{arm.budget_percent:g}"
    return {"method": arm.method, "budget_percent": budget, "maps": arm.maps or "", "phi_sha": phi_sha}


def _numbers(score: Score) -> Line:
    numbers = {
        **_estimate_fields("", score.value),
        **_estimate_fields("original_", score.original),
        "k_mean": np.mean(score.ks),
        "k_zero_share": np.mean([k == 0 for k in score.ks]),
        "cut_share": np.mean([cut > 0 for cut in score.cuts]),
    }
    if score.gain:
        low, high = score.gain.estimate.interval
        numbers |= {"gain": score.gain.estimate.value, "gain_ci_low": low, "gain_ci_high": high}
        numbers |= {"gain_p": score.gain.p, "mde": score.gain.detectable}
    if score.full_gap:
        numbers |= {"full_gap": score.full_gap.estimate.value, "full_gap_p": score.full_gap.p}
    return {"n": str(len(score.ks)), **{name: _number(number) for name, number in numbers.items()}}


def _estimate_fields(prefix: str, estimate: Estimate) -> dict[str, float | None]:
    low, high = estimate.interval
    fields = {"value": estimate.value, "stderr": estimate.stderr, "ci_low": low, "ci_high": high}
    return {prefix + name: number for name, number in fields.items()}


def _number(number: float | None) -> str:
    return "" if number is None else f"{round(number, 6) + 0.0:.6f}"  # adding zero takes the sign of -0.0


def _read_table(path: Path) -> list[Line]:
    lines = read_csv(path, RESULTS, "score")
    counts = Counter(line["task"] for line in lines)
    if not counts["all"] or len(set(counts.values())) > 1:  # the rows over all tasks come last
        raise ValueError(f"{path}: cut short, not every task has a row for every arm; {RESCORE}")
    if set(lines[0]) != set(RESULTS):
        raise ValueError(f"{path}: has columns that are not those of this version's result tables; {RESCORE}")
    return lines
