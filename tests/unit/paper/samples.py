"""Rows of results with chosen values, from the paper's own tables or from scratch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from tests.records import recorded

from residual_mass.paper import document, published
from residual_mass.paper.frames import cells_csv, typed
from residual_mass.paper.tables import find
from residual_mass.spec.specs import TableSpec

ROOT = Path(__file__).parents[3]
TEMPLATES = ROOT / "paper_tables" / "templates"
FACTS = {
    "study": "paper", "revision": "r1", "weights": "pretrained", "source": "scores.csv", "n": 6500,
    "data": "original", "decoding": "greedy; budgets of the nominal length; cut to 64k", "packs": 8, "repeats": 3,
}  # fmt: skip


def study_rows(label: str = "ruler_sweep", **facts: Any) -> tuple[pd.DataFrame, TableSpec]:
    """The paper's values as if a study had them, each with an interval of 0.02 to either side, no gain, and these
    facts.
    """
    frames, spec = published.results(label)
    (rows,) = frames.values()
    rows = rows.assign(**{"model_id": rows["backbone"].map(published.MODELS), **FACTS, **facts})
    if "value" in rows:
        rows = rows.assign(ci_low=rows["value"] - 0.02, ci_high=rows["value"] + 0.02)
    return rows, replace(spec, study="paper")


def made(label: str, rows: pd.DataFrame, spec: TableSpec) -> pd.DataFrame:
    return find(label).cells({published.stage_of(label): typed(rows)}, spec)


def template(label: str) -> Path:
    return TEMPLATES / f"{'runtime' if label.startswith('runtime') else label}.tex.j2"


def latex(cells: pd.DataFrame) -> str:
    return document.latex(cells, template(cells["table"].iloc[0]))


def written(folder: Path, cells: pd.DataFrame) -> Path:
    """The cells as the table stage writes them."""
    path = folder / f"{cells['table'].iloc[0]}.csv"
    path.write_text(cells_csv(cells, find(cells["table"].iloc[0]).digits), encoding="utf-8")
    return recorded(path)
