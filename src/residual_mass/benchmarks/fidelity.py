"""Distances from full attention on given continuations, with intervals and paired tests by document.

The definitions are those of llama.cpp's `perplexity --kl-divergence`, except that tokens of a document do not
count as independent: documents are resampled, and arms are compared document by document.

Shape letters: A = arms, N = tokens of all documents, D = documents, R = resamples.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from residual_mass.files import csv_text, read_parquet, write_text
from residual_mass.metrics import (
    DELTA_P_RMS,
    FIRST,
    KEPT,
    KL,
    LOG_PPL_RATIO,
    NLL,
    QUANTILES,
    SAME_TOP,
)
from residual_mass.provenance import Record
from residual_mass.spec.columns import FIDELITY_COLUMNS, FORCED_COLUMNS, GREEDY
from residual_mass.spec.specs import FidelitySpec
from residual_mass.statistics import Means, means, resampled, sign_flip_p, skewed_interval

log = logging.getLogger(__name__)

PERMUTATIONS = 20_000
"""Random sign patterns for a p-value: many tests are corrected together, so each p-value must be fine enough."""
PLACE_COLUMNS = ["text", "continuation", "state"]
FORCED_ARM_COLUMNS = ["method", "budget_percent", "maps"]
BY_DOCUMENT = [metric.name for metric in (KL, SAME_TOP, LOG_PPL_RATIO, NLL, FIRST, KEPT)]
"""Metrics that are means over documents of means over tokens, in the order of the result's rows."""
UNCERTAINTIES = ["stderr", "ci_low", "ci_high", "gain_ci_low", "gain_ci_high", "gain_p"]
"""Columns that are unknown for a single document."""


def run(spec: FidelitySpec, forced: Path, out: Path) -> None:
    """The `fidelity` stage: a CSV row per text, task, arm, state and metric."""
    record = Record("fidelity", spec, [forced])
    tables: list[pd.DataFrame] = []
    tokens = _tokens(read_parquet(forced, FORCED_COLUMNS, "force"))
    for (text, continuation, state), rows in tokens.groupby(PLACE_COLUMNS, sort=False):
        tasks: dict[str, pd.DataFrame] = {}
        groups: list[tuple[str, dict[str, pd.DataFrame]]] = []
        for task, of_task in rows.groupby("task", sort=False):
            name = f"{text} {continuation} {task}"  # seeds the resampling
            tasks[name] = of_task
            groups.append((str(task), {name: of_task}))
        if min(part["index"].nunique() for part in tasks.values()) == 1:
            log.warning("%s, %s: one document only, so no interval and no test", text, continuation)
        if len(groups) == 1:
            groups = []
        for task, parts in [*groups, ("all", tasks)]:
            place = {"text": text, "continuation": continuation, "state": state, "task": task}
            tables.append(_table(spec, parts, over_tokens=task == "all").assign(**place))
    backbone = spec.backbone
    of_job = {
        "backbone": backbone.name,
        "length": spec.length,
        "study": spec.study,
        "model_id": backbone.model_id,
        "revision": backbone.revision,
        "weights": backbone.weights,
    }
    result = pd.concat(tables).assign(**of_job).reindex(columns=FIDELITY_COLUMNS)
    write_text(out, csv_text(FIDELITY_COLUMNS, result.map(_written).to_dict("records")))
    record.write(out)


def _tokens(forced: pd.DataFrame) -> pd.DataFrame:
    """Returns the tokens with their metrics and the number of their `arm`."""
    p = np.exp(-forced["nll"])
    delta_p = p - np.exp(-forced["full_nll"])
    arm = forced.groupby(FORCED_ARM_COLUMNS, sort=False, dropna=False).ngroup()
    tokens = forced.assign(arm=arm, delta_p=delta_p, delta_p_squared=delta_p**2)
    tokens["log_ppl_ratio"] = forced["nll"] - forced["full_nll"]
    # A token is kept if no earlier one of its continuation, nor itself, has another likeliest token under the arm.
    continuation = [*PLACE_COLUMNS, "task", "index", "arm"]
    changed = (~tokens["same_top"]).groupby([tokens[name] for name in continuation])
    tokens["kept"] = changed.cumsum() == 0
    return tokens


def _table(spec: FidelitySpec, tasks: Mapping[str, pd.DataFrame], over_tokens: bool) -> pd.DataFrame:
    """Returns a row per metric and arm over these tasks; `over_tokens` adds root mean squares and quantiles."""
    first = next(iter(tasks.values()))
    arms = first.groupby("arm")[[*FORCED_ARM_COLUMNS, "phi_sha"]].first()
    greedy = first["continuation"].iloc[0] == GREEDY  # only an answer of full attention can be kept
    metrics = [name for name in BY_DOCUMENT if greedy or name != KEPT.name]
    values = {task: _by_document(part, [*metrics, "k"]) for task, part in tasks.items()}
    lines = means(values, spec.bootstrap_resamples, spec.seed).frame
    arms["k_mean"] = lines.loc["k", "value"]
    lines = lines.drop(index="k").join(_gains(spec, values, metrics, arms))
    documents = [part.shape[-1] for part in values.values()]
    for arm in arms.index if min(documents) > 1 else ():
        kl = []
        for part in values.values():
            of_arm = part.loc[KL.name, arm]
            kl.append(of_arm.clip(0).to_numpy())  # rounding can make it negative
        lines.loc[(KL.name, arm), ["ci_low", "ci_high"]] = skewed_interval(kl)
    if over_tokens:
        lines = pd.concat([lines, *_over_tokens(spec, tasks, arms.index)])
    if min(documents) == 1:  # only the value is known
        lines[UNCERTAINTIES] = np.nan
    lines = lines.reset_index().join(arms, on="arm")
    of_full = lines["metric"].isin([NLL.name, FIRST.name])  # full has no distance from itself
    lines = lines[(lines["method"] != "full") | of_full]
    tokens = sum(len(part) for part in tasks.values()) // len(arms)
    return lines.sort_values("arm", kind="stable").assign(documents=sum(documents), tokens=tokens)


def _by_document(tokens: pd.DataFrame, names: list[str]) -> pd.DataFrame:
    """Returns means over the tokens of each document, with a row per metric and arm and a column per document."""
    documents = tokens.groupby(["index", "arm"])[names].mean()
    return documents.rename_axis(columns="metric").unstack("arm").T


def _gains(
    spec: FidelitySpec, values: Mapping[str, pd.DataFrame], metrics: list[str], arms: pd.DataFrame
) -> pd.DataFrame:
    """Returns the differences of methods with a residual estimate to topk at the same budget, where there is one."""
    is_topk = arms["method"] == "topk"
    topk = pd.Series(arms.index[is_topk], arms["budget_percent"][is_topk])
    paired = arms["budget_percent"][~is_topk].map(topk).dropna().astype(int)
    first = pd.MultiIndex.from_product([metrics, paired.index], names=["metric", "arm"])
    second = pd.MultiIndex.from_product([metrics, paired])
    differences = {}
    for task, part in values.items():
        of_topk = part.loc[second].to_numpy()
        differences[task] = part.loc[first] - of_topk
    gains = means(differences, spec.bootstrap_resamples, spec.seed).frame
    gains["p"] = sign_flip_p(differences, PERMUTATIONS, spec.seed)
    return gains.drop(columns="stderr").add_prefix("gain_").rename(columns={"gain_value": "gain"})


def _over_tokens(spec: FidelitySpec, tasks: Mapping[str, pd.DataFrame], arms: pd.Index) -> Iterator[pd.DataFrame]:
    """Yields the root mean square and the quantiles over the tokens of all documents."""
    resampling = spec.bootstrap_resamples, spec.seed
    by_document = {task: _by_document(part, ["delta_p_squared"]) for task, part in tasks.items()}
    squares = means(by_document, *resampling)
    unknown = np.full(len(arms), np.nan)
    roots = replace(squares, value=squares.value**0.5, stderr=unknown, draws=squares.draws**0.5)
    yield roots.frame.rename(index={"delta_p_squared": DELTA_P_RMS.name})
    counts = []
    for task, part in tasks.items():
        blocks = resampled(part["index"].nunique(), *resampling, task)
        counts.append(np.concatenate(list(blocks)))
    of_all_tasks = np.concatenate(counts, axis=1)  # [R, D]
    tokens = pd.concat(tasks.values())
    tokens["document"] = tokens.groupby(["task", "index"], sort=False).ngroup()
    for measure, shares in QUANTILES.items():
        metrics = [f"{measure}_{name}" for name in shares]
        for arm in arms:
            of_arm = tokens[tokens["arm"] == arm]
            values = of_arm[measure].to_numpy()
            document = of_arm["document"].to_numpy()
            found = token_quantiles(values, document, of_all_tasks, list(shares.values()))
            places = pd.MultiIndex.from_product([metrics, [arm]], names=["metric", "arm"])
            yield found.frame.set_axis(places)


def token_quantiles(values: np.ndarray, document: np.ndarray, counts: np.ndarray, shares: Sequence[float]) -> Means:
    """Returns quantiles over tokens, interpolated linearly between neighbours, with resampled documents; a row for each
    share.

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

    draws = []
    for share in shares:
        low = np.floor(share * last)
        below = at(low)
        above = at(np.minimum(low + 1, last))
        weight = share * last - low
        draws.append(below + weight * (above - below))
    unknown = np.full(len(shares), np.nan)
    return Means(np.quantile(values, shares), unknown, np.stack(draws))


def _written(value: Any) -> Any:
    """Formats numbers with six significant digits, as a KL may be 1e-6; unknown values are empty."""
    if isinstance(value, float):
        return "" if np.isnan(value) else f"{value + 0.0:.6g}"  # adding zero removes the sign of -0.0
    return value
