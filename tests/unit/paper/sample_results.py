"""Result CSVs and diagnostics of the right format and with chosen values."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from residual_mass.specs import METHODS, TableSpec

TEMPLATES = Path(__file__).parents[3] / "paper_tables" / "templates"
COLUMNS = (
    "benchmark backbone length task method budget_percent metric value stderr ci_low ci_high n k_mean k_zero_share "
    "study model_id revision phi_sha prompts_sha weights"
).split()
BUDGETS = (2.0, 4.0, 8.0)
ARMS = [("full", None), *((method, budget) for method in METHODS[1:] for budget in BUDGETS)]
Rows = list[dict[str, Any]]


def table_spec(label: str = "ruler_sweep", **changes: Any) -> TableSpec:
    fields: dict[str, Any] = {
        "study": "mini", "label": label, "backbones": ("smol",), "lengths": ("1k",), "budgets": BUDGETS,
        "benchmarks": ("ruler",),
    }  # fmt: skip
    return TableSpec(**fields | changes)


def result_rows(values: dict[tuple[str, float | None], float] | None = None, **facts: Any) -> Rows:
    """Rows of two tasks, all of value 0.25, and of their summary, of value 0.5 where `values` names no other."""
    base = {
        "benchmark": "ruler", "backbone": "smol", "length": "1k", "metric": "string_match", "stderr": "0.1", "n": 8,
        "k_mean": 21, "k_zero_share": 0, "study": "mini", "model_id": "org/Small-LM", "revision": "r1",
        "prompts_sha": "cd" * 32, "weights": "pretrained",
    }  # fmt: skip
    rows = []
    for task in ("niah", "vt", "all"):
        for method, budget in ARMS:
            value = (values or {}).get((method, budget), 0.5) if task == "all" else 0.25
            score = {"value": f"{value:.6f}", "ci_low": f"{value - 0.1:.6f}", "ci_high": f"{value + 0.15:.6f}"}
            phi = "ab" * 32 if method.startswith("topk_phi") else ""
            arm = {"method": method, "budget_percent": "" if budget is None else f"{budget:g}", "phi_sha": phi}
            rows.append({**base, "task": task, **arm, **score, **facts})
    return rows


def write_rows(path: Path, rows: Rows) -> Path:
    with open(path, "w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


def diagnostics(layers: int = 2, heads: int = 3, packs: int = 2, queries: int = 4) -> pd.DataFrame:
    """Random errors and entropies for K = 1 and 21, in shuffled order, with the columns of the capture stage."""
    generator = np.random.default_rng(7)
    index = pd.MultiIndex.from_product(
        [range(packs), range(layers), range(heads), range(queries), (1, 21)],
        names=["pack", "layer", "head", "query", "k"],
    )
    frame = index.to_frame(index=False)
    frame["budget_percent"] = frame["k"].map({1: 2.0, 21: 4.0})
    errors = "e_topk e_sub e_nosub e_exact_sub e_exact_nosub".split()
    for name in [*errors, *"log_z_hat log_z_true residual_share_hat residual_share h_mid c_mid".split()]:
        frame[name] = generator.random(len(frame))
    frame["clamped"] = False
    return frame.sample(frac=1, random_state=1, ignore_index=True)
