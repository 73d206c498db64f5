"""Distances from full attention on given continuations, with intervals and paired tests by document.

The definitions are those of llama.cpp's `perplexity --kl-divergence`, except that tokens of a document are not taken
for independent: documents are resampled, and arms are compared document by document.

Shape letters: A = arms, N = tokens of all documents, D = documents, R = resamples.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from residual_mass.benchmarks.columns import FIDELITY, FORCED, GREEDY
from residual_mass.benchmarks.statistics import (
    Comparison,
    MeanScore,
    compare_arms,
    compare_over_tasks,
    estimate_arms,
    estimate_over_tasks,
    resampled,
    skewed_interval,
)
from residual_mass.files import csv_text, read_parquet, write_text
from residual_mass.methods.arms import ArmSpec
from residual_mass.metrics import DELTA_P_RMS, FIRST, KEPT, KL, LOG_PPL_RATIO, NLL, QUANTILES, SAME_TOP, Metric
from residual_mass.provenance import Record
from residual_mass.study.specs import FidelitySpec

log = logging.getLogger(__name__)

PERMUTATIONS = 20_000
"""Random signs behind a p-value: many tests are corrected together, so single ones must be fine."""
FULL = ArmSpec("full")


@dataclass(frozen=True)
class Tokens:
    """The tokens of a task's or a corpus's documents under all arms, which see the same ones.

    Attributes:
        arms: in the order of the rows.
        starts: [D], where each document begins.
        measures: by name, [A, N].
        facts: of the arms' rows: `phi_sha`, and the mean over documents of `k`, [A].
    """

    arms: list[ArmSpec]
    starts: np.ndarray
    measures: dict[str, np.ndarray]
    facts: dict[str, list[Any]]

    @classmethod
    def of(cls, frame: pd.DataFrame) -> Tokens:
        """Takes the rows of one task in one state."""
        by_arm = {
            ArmSpec(str(method), None if np.isnan(budget) else float(budget), str(maps) or None): rows
            for (method, budget, maps), rows in frame.groupby(
                ["method", "budget_percent", "maps"], sort=False, dropna=False
            )
        }
        starts = np.flatnonzero(next(iter(by_arm.values()))["position"] == 0)
        measures = {name: np.stack([rows[name] for rows in by_arm.values()]).astype(float) for name in MEASURES}
        facts = {
            "k": [rows["k"].iloc[starts].mean() for rows in by_arm.values()],
            "phi_sha": [rows["phi_sha"].iloc[0] for rows in by_arm.values()],
        }
        return cls(list(by_arm), starts, measures, facts)

    @property
    def lengths(self) -> np.ndarray:
        """[D], tokens of each document."""
        return np.diff([*self.starts, self.measures["kl"].shape[1]])

    @property
    def delta_p(self) -> np.ndarray:
        """[A, N], how the probability of each token changes."""
        return np.exp(-self.measures["nll"]) - np.exp(-self.measures["full_nll"])

    def means(self, values: np.ndarray) -> np.ndarray:
        """[A, N] -> [A, D], the mean of each document."""
        return np.add.reduceat(values, self.starts, axis=1) / self.lengths


MEASURES = ("nll", "full_nll", "kl", "same_top", "first")
BY_DOCUMENT: dict[Metric, Callable[[Tokens], np.ndarray]] = {
    KL: lambda tokens: tokens.means(tokens.measures["kl"]),
    SAME_TOP: lambda tokens: tokens.means(tokens.measures["same_top"]),
    LOG_PPL_RATIO: lambda tokens: tokens.means(tokens.measures["nll"] - tokens.measures["full_nll"]),
    NLL: lambda tokens: tokens.means(tokens.measures["nll"]),
    FIRST: lambda tokens: tokens.means(tokens.measures["first"]),
    KEPT: lambda tokens: tokens.means(_before_the_first(tokens.measures["same_top"] == 0, tokens.starts)),
}
"""Values [A, D] of each metric that is a mean over documents."""


def run(spec: FidelitySpec, forced: Path, out: Path) -> None:
    """The `fidelity` stage: a CSV row per text, task, arm, state and metric."""
    record = Record("fidelity", spec, [forced])
    frame = read_parquet(forced, FORCED, "force")
    lines: list[dict[str, Any]] = []
    for (text, continuation, state), rows in frame.groupby(["text", "continuation", "state"], sort=False):
        place = {"text": text, "continuation": continuation, "state": state}
        tasks = {str(task): Tokens.of(part) for task, part in rows.groupby("task", sort=False)}
        if min(len(each.starts) for each in tasks.values()) == 1:
            log.warning("%s, %s: one document only, so no interval and no test", text, continuation)
        name = f"{text} {continuation}"
        for task, tokens in tasks.items() if len(tasks) > 1 else ():
            lines += _lines(spec, place | {"task": task}, {task: tokens}, name)
        lines += _lines(spec, place | {"task": "all"}, tasks, name, quantiles=True)
    write_text(out, csv_text(FIDELITY, map(_written, lines)))
    record.write(out)


def _lines(
    spec: FidelitySpec, place: Mapping[str, str], tasks: Mapping[str, Tokens], name: str, quantiles: bool = False
) -> Iterator[dict[str, Any]]:
    """The rows of all arms over these tasks, and with `quantiles` those over tokens as well."""
    some, backbone = next(iter(tasks.values())), spec.backbone
    alone = min(len(tokens.starts) for tokens in tasks.values()) == 1  # nothing can be said beyond the value
    # Only an answer of full attention can be kept.
    metrics = [metric for metric in BY_DOCUMENT if metric != KEPT or place["continuation"] == GREEDY]
    estimates = {metric.name: _over(spec, tasks, name, BY_DOCUMENT[metric]) for metric in metrics}
    gains = {metric.name: _gains(spec, tasks, name, BY_DOCUMENT[metric]) for metric in metrics}
    if quantiles:
        estimates |= _token_estimates(spec, tasks, name)
    about = place | {
        "backbone": backbone.name, "length": spec.length, "study": spec.study, "model_id": backbone.model_id,
        "revision": backbone.revision, "weights": backbone.weights,
        "documents": sum(len(tokens.starts) for tokens in tasks.values()),
        "tokens": sum(tokens.measures["kl"].shape[1] for tokens in tasks.values()),
    }  # fmt: skip
    kl = [BY_DOCUMENT[KL](tokens).clip(min=0) for tokens in tasks.values()]  # rounding can leave less than 0
    for a, arm in enumerate(some.arms):
        of_arm = {
            "method": arm.method,
            "budget_percent": "" if arm.budget_percent is None else f"{arm.budget_percent:g}",
            "maps": arm.maps or "",
            "phi_sha": some.facts["phi_sha"][a],
            "k_mean": float(np.mean([tokens.facts["k"][a] for tokens in tasks.values()])),
        }
        for metric, of_metric in estimates.items():
            if arm == FULL and metric not in (NLL.name, FIRST.name):
                continue  # its distance from itself
            row = about | of_arm | {"metric": metric} | _mean(of_metric[a], "value", "", alone)
            if metric == KL.name and not alone:
                row["ci_low"], row["ci_high"] = skewed_interval([of_task[a] for of_task in kl])
            if gain := gains.get(metric, {}).get(arm):
                row |= _mean(gain.mean, "gain", "gain_", alone) | {"gain_p": None if alone else gain.p}
                del row["gain_stderr"]
            yield row


def _mean(mean: MeanScore, value: str, prefix: str, alone: bool) -> dict[str, float | None]:
    low, high = (None, None) if alone else mean.interval
    return {
        value: mean.value,
        f"{prefix}stderr": None if alone else mean.stderr,
        f"{prefix}ci_low": low,
        f"{prefix}ci_high": high,
    }


def _over(
    spec: FidelitySpec, tasks: Mapping[str, Tokens], name: str, values: Callable[[Tokens], np.ndarray]
) -> list[MeanScore]:
    """The mean over documents and then over tasks, for each arm."""
    by_task = [
        estimate_arms(values(tokens), spec.bootstrap_resamples, spec.seed, f"{name} {task}")
        for task, tokens in tasks.items()
    ]
    return [estimate_over_tasks(of_arm) for of_arm in zip(*by_task, strict=True)]


def _token_estimates(spec: FidelitySpec, tasks: Mapping[str, Tokens], name: str) -> dict[str, list[MeanScore]]:
    """By metric, the root mean square and the quantiles over the tokens of all documents, for each arm."""
    squares = _over(spec, tasks, name, lambda tokens: tokens.means(tokens.delta_p**2))
    found = {DELTA_P_RMS.name: [MeanScore(each.value**0.5, None, each.draws**0.5) for each in squares]}
    counts = np.concatenate(
        [
            np.concatenate(list(resampled(len(tokens.starts), spec.bootstrap_resamples, spec.seed, f"{name} {task}")))
            for task, tokens in tasks.items()
        ],
        axis=1,
    )
    document = np.repeat(np.arange(counts.shape[1]), np.concatenate([tokens.lengths for tokens in tasks.values()]))
    pooled = {
        "kl": np.concatenate([tokens.measures["kl"] for tokens in tasks.values()], axis=1),
        "delta_p": np.concatenate([tokens.delta_p for tokens in tasks.values()], axis=1),
    }
    for measure, shares in QUANTILES.items():
        by_arm = [token_quantiles(values, document, counts, list(shares.values())) for values in pooled[measure]]
        for q, end in enumerate(shares):
            found[f"{measure}_{end}"] = [of_arm[q] for of_arm in by_arm]
    return found


def token_quantiles(
    values: np.ndarray, document: np.ndarray, counts: np.ndarray, shares: Sequence[float]
) -> list[MeanScore]:
    """Quantiles over tokens, interpolated linearly between neighbours, with resampled documents.

    Args:
        values: [N]; document: [N], the number of each token's document.
        counts: [R, D], how often each document is drawn.
    """
    order = values.argsort(kind="stable")
    ordered = values[order]
    reached = counts[:, document[order]].cumsum(axis=1)  # [R, N], tokens up to each one in a resample
    last = reached[:, -1] - 1

    def at(rank: np.ndarray) -> np.ndarray:
        return ordered[(reached <= rank[:, None]).sum(axis=1)]

    found = []
    for share in shares:
        low = np.floor(share * last)
        below, above = at(low), at(np.minimum(low + 1, last))
        draws = below + (share * last - low) * (above - below)
        found.append(MeanScore(float(np.quantile(values, share)), None, draws))
    return found


def _gains(
    spec: FidelitySpec, tasks: Mapping[str, Tokens], name: str, values: Callable[[Tokens], np.ndarray]
) -> dict[ArmSpec, Comparison]:
    """The difference of each arm with a residual estimate to topk at the same budget, where there is one."""
    arms = next(iter(tasks.values())).arms
    pairs = [(arm, ArmSpec("topk", arm.budget_percent)) for arm in arms if arm.method not in ("full", "topk")]
    pairs = [pair for pair in pairs if pair[1] in arms]
    by_task = []
    for task, tokens in tasks.items():
        of_arm = dict(zip(tokens.arms, values(tokens), strict=True))
        differences = np.array([of_arm[a] - of_arm[b] for a, b in pairs]).reshape(len(pairs), len(tokens.starts))
        resampling = spec.bootstrap_resamples, spec.seed, f"{name} {task}"
        by_task.append(compare_arms(differences, *resampling, permutations=PERMUTATIONS))
    compared = [compare_over_tasks(of_pair) for of_pair in zip(*by_task, strict=True)]
    return {arm: each for (arm, _), each in zip(pairs, compared, strict=True)}


def _before_the_first(flags: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """[A, N] bool -> [A, N] float, 1 for the tokens of a document before its first flagged one."""
    parts = np.split(flags, starts[1:], axis=1)
    return np.concatenate([np.cumsum(part, axis=1) == 0 for part in parts], axis=1).astype(float)


def _written(row: Mapping[str, Any]) -> dict[str, str]:
    return {name: f"{_rounded(value)}" for name, value in row.items()}


def _rounded(value: Any) -> Any:
    """Six significant digits, for a KL may be as small as 1e-6."""
    if value is None:
        return ""
    return f"{value + 0.0:.6g}" if isinstance(value, float) else value  # adding zero removes the sign of -0.0
