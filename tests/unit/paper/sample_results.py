"""Result CSVs and diagnostics of the right format and with chosen values."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from tests.records import recorded

from residual_mass.benchmarks.columns import RESULTS
from residual_mass.study.labels import METHODS

BUDGETS = (2.0, 4.0, 8.0)
Row = dict[str, Any]
Rows = list[Row]
Arm = tuple[str, float | None, str]


def sweep_arms(budgets: Iterable[float] = BUDGETS) -> list[Arm]:
    """Every method at every budget, with maps trained at 2k."""
    arms = [(method, budget, "2k" if "phi" in method else "") for method in METHODS[1:] for budget in budgets]
    return [("full", None, ""), *arms]


def result_rows(
    values: dict[tuple[Any, ...], float] | None = None,
    arms: Iterable[Arm] | None = None,
    tasks: tuple[str, ...] = ("niah", "vt"),
    **facts: Any,
) -> Rows:
    """Rows of single tasks, of value 0.25, and of their summary, of value 0.5, where `values` names no other: by method
    and budget for the summary, by maps in addition, or by task, method and budget.
    """
    base = {
        "benchmark": "ruler", "backbone": "smol", "length": "1k", "metric": "string_match", "stderr": "0.100000",
        "n": 8, "k_mean": 21, "k_zero_share": 0, "study": "mini", "model_id": "org/Small-LM", "revision": "r1",
        "prompts_sha": "cd" * 32, "weights": "pretrained", "data": "original", "flags": "", "cut_share": "0.000000",
        "decoding": "greedy",
    }  # fmt: skip
    rows = []
    for task in (*tasks, "all"):
        for method, budget, maps in sweep_arms() if arms is None else arms:
            names = [(task, method, budget), *([(method, budget), (method, budget, maps)] if task == "all" else [])]
            value = next((values[name] for name in names if values and name in values), 0.5 if task == "all" else 0.25)
            score = {"value": f"{value:.6f}", "ci_low": f"{value - 0.1:.6f}", "ci_high": f"{value + 0.15:.6f}"}
            score |= {"original_value": score["value"]}
            arm = {"method": method, "budget_percent": "" if budget is None else f"{budget:g}", "maps": maps}
            arm |= {"phi_sha": f"{maps:x<64}" if maps else ""}
            rows.append({**base, "task": task, **arm, **score, **_tests_of(method), **facts})
    return rows


def _tests_of(method: str) -> Row:
    """Comparisons of an arm, in which nothing is found."""
    gain = {"gain": "0.010000", "gain_ci_low": "-0.1", "gain_ci_high": "0.1", "gain_p": "0.800000", "mde": "0.200000"}
    full = {"full_gap": "-0.050000", "full_gap_p": "0.500000", "right_to_wrong": "3", "wrong_to_right": "1"}
    return {"full": {}, "topk": full}.get(method, gain | full)


def write_rows(path: Path, rows: Rows) -> Path:
    with open(path, "w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, RESULTS, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return recorded(path, stage="score")


def diagnostics(layers: int = 2, heads: int = 3, packs: int = 2, queries: int = 4, **facts: str) -> pd.DataFrame:
    """Random errors and entropies for K = 1 and 21, in shuffled order, with the columns of the capture stage; `facts`
    replace what is constant in a file."""
    generator = np.random.default_rng(7)
    index = pd.MultiIndex.from_product(
        [range(packs), range(layers), range(heads), range(queries), (1, 21)],
        names=["pack", "layer", "head", "query", "k"],
    )
    frame = index.to_frame(index=False)
    constant = {
        "backbone": "smol", "corpus": "wiki", "length": "1k", "maps": "1k", "study": "mini",
        "model_id": "org/Small-LM", "revision": "r1", "weights": "pretrained", "phi_sha": "ab" * 32,
    } | facts  # fmt: skip
    frame = frame.assign(**{name: pd.Categorical([value] * len(frame)) for name, value in constant.items()})
    frame["budget_percent"] = frame["k"].map({1: 2.0, 21: 4.0})
    measures = (
        "e_topk e_sub e_nosub e_exact_sub e_exact_nosub log_z_hat log_z_true residual_share_hat residual_share c_mid"
    ).split()
    for name in measures:
        frame[name] = generator.random(len(frame), dtype=np.float32)
    rows = frame.groupby(["pack", "layer", "head", "query"]).ngroup()
    frame["h_mid"] = generator.random(len(frame), dtype=np.float32)[rows]  # the same at every K
    frame["clamped"] = False
    return frame.sample(frac=1, random_state=1, ignore_index=True)
