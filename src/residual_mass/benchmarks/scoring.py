"""Scores of stored generations and paired differences of the arms, as one tidy CSV."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from residual_mass.benchmarks.catalogue import both_scores
from residual_mass.files import csv_text, read_csv, read_jsonl, write_text
from residual_mass.methods import names
from residual_mass.metrics import Metric, budget_text, metric_of_mean
from residual_mass.provenance import Record
from residual_mass.spec.arms import ArmSpec
from residual_mass.spec.columns import SCORE_COLUMNS
from residual_mass.spec.specs import ScoreSpec
from residual_mass.spec.tasks import task_named
from residual_mass.statistics import holm, means, minimal_detectable_effect, sign_flip_p
from residual_mass.texts.frozen_prompts import Prompt, load_manifest, load_prompts

log = logging.getLogger(__name__)

SIGNIFICANT = 0.05
DATA_ORDER = ("original", "simulated", "stand-in")
FULL = ArmSpec("full")
SCORERS = ["harness", "original"]
RESULT_STATISTICS = dict(
    value=("value", "harness"),
    stderr=("stderr", "harness"),
    ci_low=("ci_low", "harness"),
    ci_high=("ci_high", "harness"),
    original_value=("value", "original"),
    original_stderr=("stderr", "original"),
    original_ci_low=("ci_low", "original"),
    original_ci_high=("ci_high", "original"),
    gain=("value", "gain"),
    gain_ci_low=("ci_low", "gain"),
    gain_ci_high=("ci_high", "gain"),
    gain_p=("p", "gain"),
    mde=("mde", "gain"),
    full_gap=("value", "full_gap"),
    full_gap_p=("p", "full_gap"),
)
"""Columns of the result, each with its statistic and the quantity in `_compared` that it describes."""
SHARES = {"k": "k_mean", "k_zero": "k_zero_share", "cut": "cut_share"}
"""Columns of the rows, each with the column of the result that is its mean."""
COLLECTED_COLUMNS = ["task", "index", "arm", "k", "cut_tokens", "text", "phi_sha"]
RERUN = "run the generate stage again"
Place = tuple[str, ArmSpec, int]
"""Task, arm and example of a row."""


def run(spec: ScoreSpec, prompts: Path, generations: list[Path], out: Path) -> None:
    """The `score` stage: one CSV row per task and arm, then the rows over all tasks."""
    record = Record("score", spec, [prompts, *generations])
    manifest = load_manifest(prompts)
    examples = {}
    for task, entry in manifest["tasks"].items():
        count = min(spec.examples, entry["examples"])
        examples[task] = load_prompts(prompts, task, count)
    rows = collect(generations, examples, spec.arms)

    @cache  # ROUGE is slow, and many arms generate the same text
    def scores(task: str, index: int, text: str) -> tuple[float, float]:
        return both_scores(spec.benchmark, task, examples[task][index].doc, text)

    answers = zip(rows["task"], rows["index"], rows["text"], strict=True)
    rows[SCORERS] = [scores(*answer) for answer in answers]
    tables = []
    for task, of_task in rows.groupby("task", sort=False):
        tables.append(_table(spec, manifest, str(task), of_task))
    tables.append(_table(spec, manifest, "all", rows))
    write_text(out, csv_text(SCORE_COLUMNS, pd.concat(tables).to_dict("records")))
    record.write(out)


def join(results: Sequence[Path], out: Path) -> None:
    """The `join` stage: the rows of several result tables as one."""
    record = Record("join", {}, results)
    rows = pd.concat([read_csv(path, SCORE_COLUMNS, "score") for path in results])
    write_text(out, csv_text(SCORE_COLUMNS, rows.to_dict("records")))
    record.write(out)


def collect(
    generations: Sequence[Path], examples: Mapping[str, Sequence[Prompt]], arms: Sequence[ArmSpec] | None = None
) -> pd.DataFrame:
    """Returns the rows of all files, ordered by task, arm and example; a file may hold only some tasks or arms.

    Args:
        generations: the files.
        examples: frozen prompts by task.
        arms: the arms to collect; None for all.

    Raises:
        ValueError: a row comes from another prompt, comes twice, or is missing; names the file.
    """
    shas = {}
    for task, prompts in examples.items():
        for prompt in prompts:
            shas[task, prompt.index] = prompt.sha256
    rows: dict[Place, dict[str, Any]] = {}
    for file in generations:
        for row in read_jsonl(file):
            task, index = row["task"], row["index"]
            arm = ArmSpec(row["method"], row["budget_percent"], row["maps"])
            if arms is not None and arm not in arms:
                continue
            if shas.get((task, index)) != row["prompt_sha"]:
                what = f"{task} example {index} was generated from other prompts"
                raise ValueError(f"{file}: {what}; give those, or {RERUN}")
            if (task, arm, index) in rows:
                raise ValueError(f"{file}: a second row for {_name(task, arm)} example {index}; give each arm once")
            rows[task, arm, index] = row | {"arm": arm}
    found = {arm for _, arm, _ in rows}
    ordered = sorted(found.union(arms or ()), key=_canonical)
    places = []
    for task, arm in product(examples, ordered):
        count = len(examples[task])
        missing = [str(index) for index in range(count) if (task, arm, index) not in rows]
        if missing:
            listed = ", ".join(missing[:5])
            if len(missing) > 5:
                listed = f"{listed}, ..."
            searched = ", ".join(map(str, generations))
            what = f"{_name(task, arm)} lacks {len(missing)} of {count} examples ({listed})"
            raise ValueError(f"{searched}: {what}; {RERUN}")
        places += [(task, arm, index) for index in range(count)]
    return pd.DataFrame([rows[place] for place in places], columns=COLLECTED_COLUMNS)


def _canonical(arm: ArmSpec) -> tuple[int, float, str]:
    return names().index(arm.method), arm.budget_percent or 0.0, arm.maps or ""


def _name(task: str, arm: ArmSpec) -> str:
    budget = "" if arm.budget_percent is None else f"{budget_text(arm.budget_percent)}%"
    return " ".join(part for part in (task, arm.method, budget, arm.maps) if part)


def _table(spec: ScoreSpec, manifest: dict[str, Any], task: str, rows: pd.DataFrame) -> pd.DataFrame:
    """Returns a row per arm over the tasks of `rows`, as text; unknown values are empty."""
    codes, arms = rows["arm"].factorize()
    zero = rows["k"] == 0
    cut = rows["cut_tokens"] > 0
    rows = rows.assign(arm=codes, k_zero=zero, cut=cut)
    tasks = {}
    for name, of_task in rows.groupby("task", sort=False):
        tasks[str(name)] = _compared(of_task, list(arms))
    entries = [task_named(spec.benchmark, name) for name in tasks]
    metric = metric_of_mean(entry.metric for entry in entries)
    kinds = {entry.data(spec.data_source) for entry in entries}

    by_arm = _statistics(spec, tasks).unstack("what")
    numbers = pd.DataFrame(index=by_arm.index)
    for column, place in RESULT_STATISTICS.items():
        numbers[column] = by_arm.get(place, np.nan)
    shares = rows.groupby("arm")[[*SHARES]].mean()
    numbers = numbers.join(shares.rename(columns=SHARES))

    beating = _better_than_full(task, arms, numbers, metric)
    flags = []
    for arm, value in numbers["value"].items():
        words = metric.flags(value) | ({"beats_full"} if arm in beating else set())
        flags.append(" ".join(sorted(words)))
    backbone = spec.backbone
    of_arms = {
        "method": [arm.method for arm in arms],
        "budget_percent": [budget_text(arm.budget_percent) for arm in arms],
        "maps": [arm.maps or "" for arm in arms],
        "phi_sha": rows.groupby("arm")["phi_sha"].first(),
        "flags": flags,
        "n": rows.groupby("arm").size(),
    }
    of_table = {
        "benchmark": spec.benchmark,
        "backbone": backbone.name,
        "length": spec.length,
        "task": task,
        "metric": metric.name,
        "data": "+".join(kind for kind in DATA_ORDER if kind in kinds),
        "decoding": spec.decoding,
        "study": spec.study,
        "model_id": backbone.model_id,
        "revision": backbone.revision,
        "prompts_sha": manifest["sha256"],
        "weights": backbone.weights,
    }
    table = numbers.map(_number).assign(**of_arms, **of_table)
    if FULL in arms and all(entry.metric.right is not None for entry in entries):
        right = []
        for entry, of_task in zip(entries, tasks.values(), strict=True):
            right.append(entry.metric.is_right(of_task.loc["harness"]))
        turned = _turned_answers(right, list(arms).index(FULL))
        table = table.join(turned.astype(str))
    return table.fillna("")


def _statistics(spec: ScoreSpec, tasks: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Returns means, uncertainties, `mde` and `p` with a row per quantity of `_compared` and arm."""
    statistics = means(tasks, spec.bootstrap_resamples, spec.seed).frame
    statistics["mde"] = minimal_detectable_effect(statistics["stderr"])
    differences = {name: part.drop(index=SCORERS, level="what") for name, part in tasks.items()}
    p_values = sign_flip_p(differences, spec.bootstrap_resamples, spec.seed)
    of_differences = statistics.drop(index=SCORERS, level="what").index
    statistics["p"] = pd.Series(p_values, of_differences)
    return statistics


def _turned_answers(right: Sequence[pd.DataFrame], full: int) -> pd.DataFrame:
    """Returns how many answers of full each other arm turns from right to wrong, and the other way round (arXiv
    2407.09141).

    Args:
        right: for each task whether answers are right, with a row per arm and a column per example.
        full: row of the arm full.
    """
    lost = won = 0
    for answers in right:
        of_full = answers.loc[full]
        lost += (~answers & of_full).sum(axis=1)
        won += (answers & ~of_full).sum(axis=1)
    turned = pd.DataFrame({"right_to_wrong": lost, "wrong_to_right": won})
    return turned.drop(full)


def _compared(rows: pd.DataFrame, arms: list[ArmSpec]) -> pd.DataFrame:
    """Returns scores and paired differences of one task, with a row per quantity and number of the arm and a column per
    example. Quantities: `harness` and `original`, the scores of all arms; `gain`, the difference of methods with a
    residual estimate to topk at the same budget; `full_gap`, the difference of all other arms to full.
    """
    harness = rows.pivot(index="arm", columns="index", values="harness")
    original = rows.pivot(index="arm", columns="index", values="original")
    paired, topk = [], []
    for number, arm in enumerate(arms):
        if arm.method in ("full", "topk"):
            continue
        same_budget = ArmSpec("topk", arm.budget_percent)
        if same_budget in arms:
            paired.append(number)
            topk.append(arms.index(same_budget))
    # As an array: pandas would align rows by arm, and each pair has two arms.
    gain = harness.loc[paired] - harness.loc[topk].to_numpy()
    full_gap = harness[:0]
    if FULL in arms:
        full = arms.index(FULL)
        full_gap = (harness - harness.loc[full]).drop(full)
    tables = {"harness": harness, "original": original, "gain": gain, "full_gap": full_gap}
    return pd.concat(tables, names=["what", "arm"])


def _better_than_full(task: str, arms: Sequence[ArmSpec], numbers: pd.DataFrame, metric: Metric) -> set[int]:
    """Returns the numbers of the arms that are significantly better than full, Holm-adjusted over the partial arms of
    the task, and logs each.
    """
    gaps = numbers["full_gap"].dropna()
    p_values = numbers["full_gap_p"][gaps.index]
    adjusted = pd.Series(holm(p_values), gaps.index)
    side = "above" if metric.higher_is_better else "below"
    beating = set()
    for arm, gap in gaps.items():
        if metric.better(gap, 0) and adjusted[arm] < SIGNIFICANT:
            name = _name(task, arms[arm])
            unlikely = "more likely a mistake in the harness than a finding"
            log.warning("alarm: %s is %s full (adjusted p %.2g): %s", name, side, adjusted[arm], unlikely)
            beating.add(arm)
    return beating


def _number(number: float) -> str:
    return "" if np.isnan(number) else f"{round(number, 6) + 0.0:.6f}"  # adding zero removes the sign of -0.0
