"""The paper's own values, one CSV per table with the printed text of each cell, in the columns of a study's results."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from residual_mass.paper.frames import read_frame
from residual_mass.spec.labels import PUBLISHED
from residual_mass.spec.settings import length_and_variant
from residual_mass.spec.specs import TableSpec

MODELS = {"1b": "meta-llama/Llama-3.2-1B-Instruct", "3b": "meta-llama/Llama-3.2-3B-Instruct"}
"""The paper's backbones by their name in the CSVs."""
MAIN_MAPS = "64k"
"""Label of the feature maps in score tables that do not name any."""
EXAMPLES = {"ruler": 13 * 500, "babilong": 4996, "longbench": 200}
"""Examples per score: of RULER's 13 tasks and of BABILong's QA1 to QA5 together, of each LongBench task separately."""
DRAWN_ANEW = ("ruler",)
"""Benchmarks whose examples come from a generator, so that a study's differ from the paper's; other benchmarks have a
fixed set of examples.
"""
PUBLISHED_STAGES = {"exact_accounting": "findings", "phi_param_count": "maps", "training_cost_64k": "train"}
"""Stages that make a study's values of tables other than scores and latencies."""


def labels() -> list[str]:
    """Returns the labels of the stored tables."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.csv"))


def rows(label: str) -> pd.DataFrame:
    """Returns the CSV of table `label`. Raises ValueError when the paper has no such table."""
    path = Path(__file__).with_name(f"{label}.csv")
    if not path.is_file():
        raise ValueError(f"the paper has no table {label!r}; it has {', '.join(labels())}")
    return read_frame(path).assign(study=PUBLISHED)


def variants_of(label: str) -> set[str]:
    """Returns variants of feature maps in the score table `label`, "" for maps of the paper's own recipe."""
    labels_of_maps = [maps for maps in rows(label)["maps"] if maps]
    return {length_and_variant(maps)[1] for maps in labels_of_maps}


def stage_of(label: str) -> str:
    """Returns the stage that makes a study's values of table `label`."""
    if label.startswith("runtime_"):
        return "runtime"
    return PUBLISHED_STAGES.get(label, "score")


def results(label: str) -> tuple[dict[str, pd.DataFrame], TableSpec]:
    """Returns the values in the shape of a study's results, by stage, and what the table shows."""
    found = rows(label)
    stage = stage_of(label)
    if stage == "findings":
        index = [name for name in found if name not in ("quantity", "value", "bold")]
        values = found.pivot(index=index, columns="quantity", values="value").reset_index()
        found = found[index].drop_duplicates().merge(values, on=index)
    if stage == "score":
        found = found.assign(gain=float("nan"), gain_p=float("nan"), flags="", data="")

    def distinct(name: str) -> tuple[str, ...]:
        texts = dict.fromkeys(found.get(name, ()))
        return tuple(text for text in texts if text)

    budgets = found["budget_percent"].dropna() if "budget_percent" in found else ()
    backbones = distinct("backbone")
    titles = {name: MODELS[name].split("/")[-1] for name in backbones}
    length = "context" if stage == "runtime" else "length"
    spec = TableSpec(
        study=PUBLISHED,
        label=label,
        backbones=backbones,
        lengths=distinct(length),
        budgets=tuple(dict.fromkeys(budgets)),
        benchmarks=distinct("benchmark"),
        maps=distinct("maps"),
        backbone_titles=titles,
    )
    return {stage: found}, spec
