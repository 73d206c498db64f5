"""Scores, residual errors, distances and a training log with chosen values in the format of the stages."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.records import recorded

from residual_mass.diagnostics.residual_errors import RESIDUAL_ERROR_COLUMNS
from residual_mass.files import csv_text
from residual_mass.methods import method_named
from residual_mass.spec.columns import FIDELITY_COLUMNS, SCORE_COLUMNS

ABOUT = {"study": "mini", "backbone": "smol", "model_id": "org/Small-LM", "revision": "r1", "weights": "pretrained"}
MAPS = {"maps": "2k", "phi_sha": "a" * 64}
STAGES = {"residual_errors": RESIDUAL_ERROR_COLUMNS, "fidelity": FIDELITY_COLUMNS, "ruler": SCORE_COLUMNS}
"""Columns of files by the beginning of their names; the stage of the last is `score`."""
Row = dict[str, Any]


def error_row(method: str, budget: float, **facts: Any) -> Row:
    """Of a method at a budget on Wikipedia at 1k, unless `facts` say otherwise."""
    of_maps = MAPS | {"training_steps": 200} if method_named(method).needs_maps else {}
    return (
        ABOUT
        | of_maps
        | {
            "corpus": "wiki", "length": "1k", "method": method, "budget_percent": f"{budget:g}", "k": 7, "error": 0.5,
            "over_topk": "0.5", "recall": 0.9, "tokens_read": 30, "scan_bytes": 4096, "row_bytes": 7680,
            "summary_bytes": 1024, "step_share": 0.05, "state_bytes": 16640, "state_share": 0.0634766, "packs": 8,
            "heads": 270, "rows": 17280,
        }
        | facts
    )  # fmt: skip


def distance_row(method: str, budget: float, **facts: Any) -> Row:
    """The KL divergence of a method's next token at a budget, likewise."""
    row = {
        "text": "wiki", "length": "1k", "task": "all", "continuation": "following", "state": "own", "method": method,
        "budget_percent": f"{budget:g}", "metric": "kl", "value": 0.1, "documents": 12, "tokens": 384,
    }  # fmt: skip
    return ABOUT | (MAPS if method_named(method).needs_maps else {}) | row | facts


def score_row(task: str, method: str, budget: float | None, **facts: Any) -> Row:
    """The score of a RULER task, likewise; no test found anything."""
    row = {
        "benchmark": "ruler", "task": task, "length": "1k", "method": method, "metric": "string_match",
        "budget_percent": "" if budget is None else f"{budget:g}", "value": 0.25, "n": 8, "data": "original",
        "decoding": "greedy",
    }  # fmt: skip
    return ABOUT | (MAPS if method_named(method).needs_maps else {}) | row | facts


def write_rows(folder: Path, name: str, rows: Iterable[Row], length: str = "1k") -> Path:
    """Rows of `STAGES` as the stage's file."""
    path = folder / f"{name}_smol_{length}.csv"
    path.write_text(csv_text(STAGES[name], rows))
    return recorded(path, stage="score" if name == "ruler" else name, spec={})


def write_log(folder: Path) -> Path:
    """The log of a training at 2k."""
    log = folder / "training_smol_2k.csv"
    log.write_text("recipe,variant,seed,step,seconds\nstudy,ours,0,0,0\nstudy,ours,0,200,230.886\n")
    backbone = ABOUT | {"name": "smol", "source": "hub"}
    spec = {"backbone": backbone, "length": "2k", "steps": 200, "sequences_per_step": 1, "replay": {"reuse": 1}}
    return recorded(log, stage="train", spec=spec)
