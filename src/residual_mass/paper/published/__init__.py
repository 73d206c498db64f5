"""The paper's own values, one CSV per table with the printed text of each cell and whether it was bold."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from residual_mass.benchmarks.catalogue import BENCHMARKS
from residual_mass.core.settings import length_and_variant, maps_label
from residual_mass.paper.table import ALL_TASKS, Place
from residual_mass.paper.titles import model_name

MODELS = {"1b": "meta-llama/Llama-3.2-1B-Instruct", "3b": "meta-llama/Llama-3.2-3B-Instruct"}
"""The paper's backbones by their name in the CSVs."""
MAIN_MAPS = "64k"
"""Label of the feature maps of score tables that name none."""
EXAMPLES = {"ruler": 13 * 500, "babilong": 4996, "longbench": 200}
"""Examples per score: of RULER's 13 tasks and of BABILong's QA1 to QA5 together, of each LongBench task separately."""
DRAWN_ANEW = ("ruler",)
"""Benchmarks whose examples come from a generator, so that a study's differ from the paper's; other benchmarks have a
fixed set of examples.
"""
IMPLIED = {
    "ruler_sweep": {"benchmark": "ruler"},
    "babilong_sweep": {"benchmark": "babilong"},
    "natural_main": {"benchmark": "longbench", "length": "64k"},
    "cross_length_mismatch": {"benchmark": "ruler", "backbone": "1b"},
    "dphi_ablation": {"backbone": "1b", "trained_length": "4k"},
    "loss_ablation": {"backbone": "1b", "trained_length": "4k"},
    "exact_accounting": {"backbone": "1b", "trained_length": "64k", "budget_percent": "1"},
}
"""Values that are constant in a table, which has no column for them."""
OWN_VARIANTS = ("ours", "dphi_64")
"""Names in the ablations for maps of the paper's own recipe, whose label has no variant."""
TASKS = {task.title: task.name for task in BENCHMARKS["longbench"]}


@dataclass(frozen=True)
class Fact:
    """One published score."""

    place: Place
    text: str
    bold: bool


def labels() -> list[str]:
    """Returns the labels of the stored tables."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.csv"))


def model_title(backbone: str) -> str:
    """Returns the model's name of a backbone in the CSVs."""
    return model_name(MODELS[backbone])


def variants_of(label: str) -> set[str]:
    """Returns the variants of feature maps in the paper's score table `label`, "" for maps of its own recipe."""
    labels = (fact.place.maps for fact in load(label))
    return {length_and_variant(maps)[1] for maps in labels if maps is not None}


def load(label: str) -> list[Fact]:
    """Reads all cells of the paper's score table `label`, in its order; errors as for `rows_of`."""
    return [_fact(row) for row in rows_of(label)]


def rows_of(label: str) -> list[dict[str, str]]:
    """Reads the CSV of the paper's table `label` and adds the table's constant values.

    Raises:
        ValueError: no published values are stored for that table.
    """
    path = Path(__file__).with_name(f"{label}.csv")
    if not path.is_file():
        raise ValueError(f"no published values for table {label!r}; stored are {', '.join(labels())}")
    with open(path, encoding="utf-8", newline="") as stream:
        return [IMPLIED.get(label, {}) | row for row in csv.DictReader(stream)]


def _fact(row: dict[str, str]) -> Fact:
    variant = row.get("variant", "")
    method = row["method"] if not variant else variant if variant in ("full", "topk") else "topk_phi"
    place = Place(
        benchmark=row["benchmark"],
        length=row["length"],
        backbone=row["backbone"],
        method=method,
        # Tables with one budget repeat it in the rows of full attention.
        budget_percent=None if method == "full" else float(row["budget_percent"]),
        task=TASKS[row["task"]] if "task" in row else ALL_TASKS,
        maps=_maps(row["trained_length"], variant) if method == "topk_phi" and "trained_length" in row else None,
    )
    return Fact(place, row["value"], row["bold"] == "1")


def _maps(trained_length: str, variant: str) -> str:
    """Returns the label that a study would give to the feature maps."""
    return maps_label(trained_length, "" if variant in OWN_VARIANTS else variant)
