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

from residual_mass.benchmarks.catalogue import both_scores, task_named
from residual_mass.benchmarks.columns import RESULTS
from residual_mass.benchmarks.statistics import holm, means, minimal_detectable_effect, sign_flip_p
from residual_mass.files import csv_text, read_csv, read_jsonl, write_text
from residual_mass.methods import names
from residual_mass.methods.arms import ArmSpec
from residual_mass.metrics import Metric, metric_of_mean
from residual_mass.provenance import Record
from residual_mass.study.specs import ScoreSpec
from residual_mass.texts.frozen_prompts import Prompt, load_manifest, load_prompts

logger = logging.getLogger(__name__)

SIGNIFICANT = 0.05
DATA_ORDER = ("original", "simulated", "stand-in")
FULL = ArmSpec("full")
TURNED = ["right_to_wrong", "wrong_to_right"]
"""Numbers of answers that full has right and the arm wrong, and the other way round (arXiv 2407.09141)."""
GAIN = {"value": "gain", "ci_low": "gain_ci_low", "ci_high": "gain_ci_high", "p": "gain_p", "mde": "mde"}
FULL_GAP = {"value": "full_gap", "p": "full_gap_p"}
SHARES = {"k": "k_mean", "k_zero": "k_zero_share", "cut": "cut_share"}
"""Columns of the result by those that they are made of."""
SCORERS = ["harness", "original"]
GENERATED = ["task", "index", "arm", "k", "cut_tokens", "text", "phi_sha"]
RERUN = "run the generate stage again"


def run(spec: ScoreSpec, prompts: Path, generations: list[Path], out: Path) -> None:
    """The `score` stage: one CSV row per task and arm, then the rows over all tasks."""
    record = Record("score", spec, [prompts, *generations])
    manifest = load_manifest(prompts)
    examples = {
        task: load_prompts(prompts, task, min(spec.examples, entry["examples"]))
        for task, entry in manifest["tasks"].items()
    }
    rows = collect(generations, examples, spec.arms)

    @cache  # ROUGE is slow, and many arms say the same
    def scores(task: str, index: int, text: str) -> tuple[float, float]:
        return both_scores(spec.benchmark, task, examples[task][index].doc, text)

    rows[SCORERS] = [scores(*each) for each in zip(rows["task"], rows["index"], rows["text"], strict=True)]
    tables = [_table(spec, manifest, str(task), of_task) for task, of_task in rows.groupby("task", sort=False)]
    tables.append(_table(spec, manifest, "all", rows))
    write_text(out, csv_text(RESULTS, pd.concat(tables).to_dict("records")))
    record.write(out)


def join(results: Sequence[Path], out: Path) -> None:
    """The `join` stage: the rows of several result tables as one."""
    record = Record("join", {}, results)
    rows = pd.concat([read_csv(path, RESULTS, "score") for path in results])
    write_text(out, csv_text(RESULTS, rows.to_dict("records")))
    record.write(out)


def collect(
    generations: Sequence[Path], examples: Mapping[str, Sequence[Prompt]], arms: Sequence[ArmSpec] | None = None
) -> pd.DataFrame:
    """Returns the rows of all files, ordered by task, arm and example; a file may hold some tasks or arms only.

    Args:
        generations: the files.
        examples: frozen prompts by task.
        arms: the arms to collect; None for all.

    Raises:
        ValueError: a row comes from another prompt, comes twice, or is missing; names the file.
    """
    shas = {(task, prompt.index): prompt.sha256 for task, prompts in examples.items() for prompt in prompts}
    rows: dict[tuple[str, ArmSpec, int], dict[str, Any]] = {}
    for file, row in ((path, row) for path in generations for row in read_jsonl(path)):
        task, index, arm = row["task"], row["index"], ArmSpec(row["method"], row["budget_percent"], row["maps"])
        if arms is not None and arm not in arms:
            continue
        if shas.get((task, index)) != row["prompt_sha"]:
            raise ValueError(f"{file}: {task} example {index} was generated from other prompts; give those, or {RERUN}")
        if (task, arm, index) in rows:
            raise ValueError(f"{file}: a second row for {_name(task, arm)} example {index}; give each arm once")
        rows[task, arm, index] = row | {"arm": arm}
    ordered = sorted({*(arm for _, arm, _ in rows), *(arms or ())}, key=_canonical)
    for task, arm in product(examples, ordered):
        count = len(examples[task])
        if missing := [str(i) for i in range(count) if (task, arm, i) not in rows]:
            listed, searched = ", ".join(missing[:5]) + ", ..." * (len(missing) > 5), ", ".join(map(str, generations))
            what = f"{_name(task, arm)} lacks {len(missing)} of {count} examples ({listed})"
            raise ValueError(f"{searched}: {what}; {RERUN}")
    places = ((task, arm, i) for task in examples for arm in ordered for i in range(len(examples[task])))
    return pd.DataFrame([rows[place] for place in places], columns=GENERATED)


def _canonical(arm: ArmSpec) -> tuple[int, float, str]:
    return names().index(arm.method), arm.budget_percent or 0.0, arm.maps or ""


def _name(task: str, arm: ArmSpec) -> str:
    budget = "" if arm.budget_percent is None else f"{arm.budget_percent:g}%"
    return " ".join(part for part in (task, arm.method, budget, arm.maps) if part)


def _table(spec: ScoreSpec, manifest: dict[str, Any], task: str, rows: pd.DataFrame) -> pd.DataFrame:
    """Returns the lines of all arms over the tasks of `rows`, as text; what is not known is empty.

    Methods with a residual estimate are compared with topk at the same budget, and all arms with full.
    """
    arms = {arm: number for number, arm in enumerate(dict.fromkeys(rows["arm"]))}
    rows = rows.assign(arm=rows["arm"].map(arms), k_zero=rows["k"] == 0, cut=rows["cut_tokens"] > 0)
    tasks = {str(name): part for name, part in rows.groupby("task", sort=False)}
    scores = {name: part[SCORERS].to_numpy().T.reshape(2, len(arms), -1) for name, part in tasks.items()}
    entries = [task_named(spec.benchmark, name) for name in scores]
    metric, kinds = metric_of_mean(entry.metric for entry in entries), {e.data(spec.data_source) for e in entries}

    estimates = [(arm, ArmSpec("topk", arm.budget_percent)) for arm in arms if arm.method not in ("full", "topk")]
    gains = [(arms[arm], arms[topk]) for arm, topk in estimates if topk in arms]
    gaps = [(number, arms[FULL]) for arm, number in arms.items() if FULL in arms and arm != FULL]
    first, second = np.array([*gains, *gaps], dtype=int).reshape(-1, 2).T
    differences = {name: of_task[0, first] - of_task[0, second] for name, of_task in scores.items()}
    stacked = {name: np.concatenate([*scores[name], differences[name]]) for name in scores}
    found = means(stacked, spec.bootstrap_resamples, spec.seed).frame
    compared = found[2 * len(arms) :].set_index(first)
    compared["p"] = sign_flip_p(differences, spec.bootstrap_resamples, spec.seed)
    compared["mde"] = minimal_detectable_effect(compared["stderr"])
    gap = compared[len(gains) :].rename(columns=FULL_GAP)[[*FULL_GAP.values()]]

    table = found[: len(arms)].join([
        found[len(arms) : 2 * len(arms)].reset_index(drop=True).add_prefix("original_"),
        compared[: len(gains)].rename(columns=GAIN)[[*GAIN.values()]],
        gap,
        rows.groupby("arm")[["k", "k_zero", "cut"]].mean().rename(columns=SHARES),
    ])  # fmt: skip
    beating = _better_than_full(task, gap.set_index(pd.Index(arms)[gap.index]), metric)
    flags = [metric.flags(value) for value in table["value"]]
    table = table.map(_number).assign(
        method=[arm.method for arm in arms],
        budget_percent=["" if arm.budget_percent is None else f"{arm.budget_percent:g}" for arm in arms],
        maps=[arm.maps or "" for arm in arms],
        phi_sha=rows.groupby("arm")["phi_sha"].first(),
        flags=[
            " ".join(sorted(each | {"beats_full"} if arm in beating else each))
            for arm, each in zip(arms, flags, strict=True)
        ],
        n=rows.groupby("arm").size(),
        benchmark=spec.benchmark, backbone=spec.backbone.name, length=spec.length, task=task, metric=metric.name,
        data="+".join(kind for kind in DATA_ORDER if kind in kinds), decoding=spec.decoding, study=spec.study,
        model_id=spec.backbone.model_id, revision=spec.backbone.revision, prompts_sha=manifest["sha256"],
        weights=spec.backbone.weights,
    )  # fmt: skip
    if gaps and all(entry.metric.right is not None for entry in entries):
        right = [entry.metric.is_right(of_task[0]) for entry, of_task in zip(entries, scores.values(), strict=True)]
        full = arms[FULL]
        table["right_to_wrong"] = sum((each[full] & ~each).sum(axis=1) for each in right)
        table["wrong_to_right"] = sum((each & ~each[full]).sum(axis=1) for each in right)
        table = table.astype({name: object for name in TURNED})
        table.loc[full, TURNED] = ""
    return table.fillna("")


def _better_than_full(task: str, gaps: pd.DataFrame, metric: Metric) -> set[ArmSpec]:
    """Returns the arms significantly better than full, Holm-adjusted over the partial arms of the task; each is
    reported.
    """
    adjusted = pd.Series(holm(gaps["full_gap_p"]), gaps.index)
    beating = {arm for arm in gaps.index if metric.better(gaps["full_gap"][arm], 0) and adjusted[arm] < SIGNIFICANT}
    for arm in sorted(beating, key=_canonical):
        logger.warning(
            "alarm: %s is %s full (adjusted p %.2g): more likely a mistake in the harness than a finding",
            _name(task, arm), "above" if metric.higher_is_better else "below", adjusted[arm],
        )  # fmt: skip
    return beating


def _number(number: float) -> str:
    return "" if np.isnan(number) else f"{round(number, 6) + 0.0:.6f}"  # adding zero removes the sign of -0.0
