"""Scores of stored generations by the harness's own functions, as one tidy CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from residual_mass.benchmarks.catalogue import scorer_of
from residual_mass.benchmarks.prompts import Prompt, load_manifest, load_prompts
from residual_mass.benchmarks.statistics import Estimate, estimate_over_tasks, estimate_task
from residual_mass.files import read_jsonl, write_meta, write_text
from residual_mass.specs import METHODS, ScoreSpec, to_json

COLUMNS = (
    "benchmark backbone length task method budget_percent metric value stderr ci_low ci_high n k_mean k_zero_share "
    "study model_id revision phi_sha prompts_sha weights"
).split()
RERUN = "run the generate stage again"
ROW_TYPES: dict[str, type | tuple[type, ...]] = {
    "task": str,
    "index": int,
    "method": str,
    "budget_percent": (int, float, type(None)),
    "k": int,
    "text": str,
    "phi_sha": (str, type(None)),
    "prompt_sha": str,
}

Arm = tuple[str, float | None]
Row = dict[str, Any]
Cells = dict[tuple[str, Arm], list[Row]]
"""Generation rows by task and arm, in the order of the examples."""


@dataclass(frozen=True)
class Score:
    """What one line of the result table says of an arm on a task or over all."""

    estimate: Estimate
    ks: list[int]


def run(spec: ScoreSpec, prompts: Path, generations: list[Path], out: Path) -> None:
    """Writes one row per (task, method, budget), then the rows over all tasks."""
    manifest = load_manifest(prompts)
    examples = {task: load_prompts(prompts, task, entry["examples"]) for task, entry in manifest["tasks"].items()}
    cells = collect(generations, examples)
    arms = list(dict.fromkeys(arm for _, arm in cells))
    scores = {(task, arm): _score(spec, task, examples[task], rows) for (task, arm), rows in cells.items()}
    for arm in arms:
        of_arm = [scores[task, arm] for task in examples]
        scores["all", arm] = Score(estimate_over_tasks([s.estimate for s in of_arm]), [k for s in of_arm for k in s.ks])
    lines = [
        _line(spec, task, arm, scores[task, arm], _phi_sha(cells, arm), manifest["sha256"])
        for task in (*examples, "all")
        for arm in arms
    ]
    write_text(out, _csv(lines))
    write_meta(out, spec=json.loads(to_json(spec)), generations=[str(path) for path in generations])


def collect(generations: Sequence[Path], examples: dict[str, list[Prompt]]) -> Cells:
    """The rows of all files by task and arm.

    Raises:
        ValueError: a row is malformed, twice there, of no frozen prompt, or missing; names the file.
    """
    found: dict[tuple[str, Arm], dict[int, Row]] = {}
    file_of: dict[str, Path] = {}
    for path in generations:
        for number, row in enumerate(read_jsonl(path), start=1):
            _check_row(row, examples, f"{path}:{number}")
            arm = row["method"], row["budget_percent"]
            if row["index"] in (cell := found.setdefault((row["task"], arm), {})):
                raise ValueError(f"{path}:{number}: a second row for {_name(row['task'], arm)} example {row['index']}")
            cell[row["index"]] = row
            file_of[row["task"]] = path
    arms = list(dict.fromkeys(arm for _, arm in found))
    for task in examples:
        if task not in file_of:
            raise ValueError(f"{', '.join(map(str, generations))}: no rows for task {task}; {RERUN}")
        for arm in arms:
            _check_complete(found.get((task, arm), {}), len(examples[task]), f"{file_of[task]}: {_name(task, arm)}")
    return {(task, arm): [found[task, arm][i] for i in range(len(examples[task]))] for task in examples for arm in arms}


def _check_row(row: Row, examples: dict[str, list[Prompt]], where: str) -> None:
    for key, types in ROW_TYPES.items():
        if key not in row or not isinstance(row[key], types) or isinstance(row[key], bool):
            raise ValueError(f"{where}: {key} is {row.get(key, 'missing')!r}; delete the file and {RERUN}")
    if row["method"] not in METHODS:
        raise ValueError(f"{where}: unknown method {row['method']!r}")
    if row["task"] not in examples:
        raise ValueError(f"{where}: task {row['task']!r} is not among the prompts")
    if not 0 <= row["index"] < len(examples[row["task"]]):
        raise ValueError(f"{where}: {row['task']} has no example {row['index']} among the prompts")
    if row["prompt_sha"] != examples[row["task"]][row["index"]].sha256:
        raise ValueError(f"{where}: {row['task']} example {row['index']} was generated from another prompt; {RERUN}")


def _check_complete(cell: dict[int, Row], examples: int, where: str) -> None:
    if missing := [str(i) for i in range(examples) if i not in cell]:
        listed = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise ValueError(f"{where} lacks {len(missing)} of {examples} examples ({listed}); {RERUN}")


def _name(task: str, arm: Arm) -> str:
    return f"{task} {arm[0]}" + ("" if arm[1] is None else f" {arm[1]:g}%")


def harness_score(scorer: str, doc: dict[str, Any], text: str) -> float:
    """The harness's metric of one generation; it files it under the example's nominal length."""
    from lm_eval.tasks.ruler import common_utils

    process_results: Callable[[dict[str, Any], list[str]], dict[str, float]] = getattr(common_utils, scorer)
    return process_results(doc, [text])[str(doc["max_length"])]


def _score(spec: ScoreSpec, task: str, prompts: Iterable[Prompt], rows: Sequence[Row]) -> Score:
    scorer = scorer_of(spec.benchmark, task)
    scores = [harness_score(scorer, prompt.doc, row["text"]) for prompt, row in zip(prompts, rows, strict=True)]
    return Score(estimate_task(scores, spec.bootstrap_resamples, spec.seed, task), [row["k"] for row in rows])


def _phi_sha(cells: Cells, arm: Arm) -> str:
    used = {row["phi_sha"] for (_, other), rows in cells.items() if other == arm for row in rows}
    if len(used) > 1:
        raise ValueError(f"{arm[0]}: rows of {len(used)} different phi files; {RERUN} with one")
    return used.pop() or ""


def _line(spec: ScoreSpec, task: str, arm: Arm, score: Score, phi_sha: str, prompts_sha: str) -> dict[str, str]:
    low, high = score.estimate.interval
    numbers = {
        "value": score.estimate.value,
        "stderr": score.estimate.stderr,
        "ci_low": low,
        "ci_high": high,
        "k_mean": np.mean(score.ks),
        "k_zero_share": np.mean([k == 0 for k in score.ks]),
    }
    return {
        "benchmark": spec.benchmark,
        "backbone": spec.backbone.name,
        "length": spec.length,
        "task": task,
        "method": arm[0],
        "budget_percent": "" if arm[1] is None else f"{arm[1]:g}",
        "metric": "string_match",
        **{name: "" if number is None else f"{number:.6f}" for name, number in numbers.items()},
        "n": str(len(score.ks)),
        "study": spec.study,
        "model_id": spec.backbone.model_id,
        "revision": spec.backbone.revision,
        "phi_sha": phi_sha,
        "prompts_sha": prompts_sha,
        "weights": spec.backbone.weights,
    }


def _csv(lines: Iterable[dict[str, str]]) -> str:
    stream = io.StringIO()
    writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return stream.getvalue()
