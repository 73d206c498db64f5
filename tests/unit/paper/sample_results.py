"""Result CSVs of the right format and with chosen values."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.records import recorded

from residual_mass.benchmarks.columns import RESULTS
from residual_mass.files import csv_text
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
    """Rows of single tasks, of value 0.25, and of their summary, of value 0.5, where `values` has no other for a task,
    method and budget.
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
            value = (values or {}).get((task, method, budget), 0.5 if task == "all" else 0.25)
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
    path.write_text(csv_text(RESULTS, (dict.fromkeys(RESULTS, "") | row for row in rows)))
    return recorded(path, stage="score")
