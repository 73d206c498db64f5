"""The paper's own values, one CSV per table with the printed text of each cell, as rows that the tables are made of."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from residual_mass.benchmarks.catalogue import BENCHMARKS, metric_of
from residual_mass.core.settings import length_and_variant, maps_label
from residual_mass.study.labels import PUBLISHED
from residual_mass.study.specs import TableSpec

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
CONSTANT = {
    "ruler_sweep": {"benchmark": "ruler"},
    "babilong_sweep": {"benchmark": "babilong"},
    "natural_main": {"benchmark": "longbench", "length": "64k"},
    "cross_length_mismatch": {"benchmark": "ruler", "backbone": "1b"},
    "dphi_ablation": {"backbone": "1b", "trained_length": "4k"},
    "loss_ablation": {"backbone": "1b", "trained_length": "4k"},
    "exact_accounting": {"backbone": "1b", "maps": MAIN_MAPS, "budget_percent": "1"},
    "phi_param_count": {"maps": MAIN_MAPS, "kind": "rezero", "d_emb": "512"},
}
"""Values that are constant in a table, which has no column for them."""
OWN_VARIANTS = ("ours", "dphi_64")
"""Names in the ablations for maps of the paper's own recipe, whose label has no variant."""
COLUMNS = {
    "topk": "e_topk", "topk_phi_nosub": "e_nosub", "topk_phi": "e_sub", "exact_nosub": "e_exact_nosub",
    "mean_log_z_error": "log_z_error",
}  # fmt: skip
"""Quantities of the accounting table by the column of a study's file."""


def labels() -> list[str]:
    """Labels of the stored tables."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.csv"))


def rows(label: str) -> pd.DataFrame:
    """The CSV of table `label` with its constant values. Raises ValueError when the paper has no such table."""
    path = Path(__file__).with_name(f"{label}.csv")
    if not path.is_file():
        raise ValueError(f"the paper has no table {label!r}; it has {', '.join(labels())}")
    found = pd.read_csv(path, dtype=str, keep_default_na=False)
    return found.assign(**CONSTANT.get(label, {}), study=PUBLISHED)


def variants_of(label: str) -> set[str]:
    """Variants of feature maps in the score table `label`, "" for maps of its own recipe."""
    return {length_and_variant(maps)[1] for maps in _scores(rows(label))["maps"] if maps}


def results(label: str) -> tuple[dict[str, pd.DataFrame], TableSpec]:
    """The values in the shape of a study's results, and what the table shows."""
    found = rows(label)
    if label == "exact_accounting":
        found = found.assign(quantity=found["quantity"].map(COLUMNS))
        index = ["corpus", "length", "k", "backbone", "budget_percent", "maps", "study"]
        wide = found.pivot(index=index, columns="quantity", values="value").reset_index()
        order = list(dict.fromkeys(found["corpus"]))
        frames = {"accounting": wide.sort_values("corpus", key=lambda names: names.map(order.index), kind="stable")}
    elif label == "phi_param_count":
        frames = {"maps": found.rename(columns={"q_heads": "query_heads"})}
    elif label == "training_cost_64k":
        frames = {"train": found}
    elif label.startswith("runtime_"):
        found = found.assign(implementation="prototype", batch="1", budget_percent="1")
        found.loc[found["method"] == "full", ["budget_percent", "k"]] = ""
        frames = {"runtime": found.assign(length=found["context"])}
    else:
        found = _scores(found)
        frames = {"score": found}
    return frames, _shown(label, found)


def _scores(found: pd.DataFrame) -> pd.DataFrame:
    if "variant" in found:
        found["method"] = found["variant"].where(found["variant"].isin(["full", "topk"]), "topk_phi")
        variants = found["variant"].where(~found["variant"].isin(OWN_VARIANTS), "")
        found["maps"] = [maps_label(*each) for each in zip(found["trained_length"], variants, strict=True)]
    elif "trained_length" in found:
        found["maps"] = found["trained_length"]
    found["maps"] = found.get("maps", pd.Series(MAIN_MAPS, found.index)).where(
        found["method"].str.startswith("topk_phi"), ""
    )
    tasks = {task.title: task.name for task in BENCHMARKS["longbench"]}
    found["task"] = found["task"].map(tasks) if "task" in found else "all"
    # Tables with one budget repeat it in the rows of full attention.
    found["budget_percent"] = found["budget_percent"].where(found["method"] != "full", "")
    tasks_of = zip(found["benchmark"], found["task"], strict=True)
    metrics = [metric_of(name, None if task == "all" else task).name for name, task in tasks_of]
    return found.assign(metric=metrics, **dict.fromkeys(("gain", "gain_p", "flags", "data"), ""))


def _shown(label: str, found: pd.DataFrame) -> TableSpec:
    def distinct(name: str) -> tuple[str, ...]:
        return tuple(text for text in dict.fromkeys(found[name]) if text) if name in found else ()

    return TableSpec(
        study=PUBLISHED,
        label=label,
        backbones=distinct("backbone"),
        lengths=distinct("context" if "context" in found else "length"),
        budgets=tuple(map(float, distinct("budget_percent"))),
        benchmarks=distinct("benchmark"),
        maps=distinct("maps"),
        backbone_titles={name: MODELS[name].split("/")[-1] for name in distinct("backbone")},
    )
