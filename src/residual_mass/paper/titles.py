"""What tables call benchmarks, tasks, methods and variants of the feature maps."""

from __future__ import annotations

import re

from residual_mass.benchmarks.catalogue import task_named
from residual_mass.core.settings import length_and_variant
from residual_mass.paper.cells import ALL_TASKS, Point
from residual_mass.paper.latex import Latex, escape
from residual_mass.study.specs import TableSpec

BENCHMARK_TITLES = {"ruler": "RULER", "babilong": "BABILong", "longbench": "LongBench"}
FULL, TOPK, PHI = Latex("Full"), Latex("Top-$K$"), Latex(r"Top-$K{+}\phi$")
METHOD_TITLES = {"full": FULL, "topk": TOPK, "topk_phi": PHI, "topk_phi_nosub": Latex(rf"{PHI} (NoSub)")}
OURS = Latex("Ours")
"""The feature maps of a study's own recipe."""
OWN_ROW = Latex(r"$^{*}$")
"""Behind the title of a row that the paper's table does not have."""
VARIANT_TITLES = {
    "hedgehog_map": Latex("Hedgehog-style map"),
    "lolcats_loss": Latex("LoLCATs-style loss"),
    "kl_only": Latex("KL only"),
    "aux_only": Latex("Auxiliary only"),
    "residual_loss": Latex("Residual objective"),
}
FAMILIES = {"rouge_score": "Summarisation", "qa_f1_score": "Question answering"}
"""What LongBench's tasks have in common, by their metric."""


def model_name(model_id: str) -> str:
    """A model's name on the hub, without who published it."""
    return model_id.split("/")[-1]


def backbone_title(spec: TableSpec, backbone: str, model_id: str) -> str:
    """What a table calls a backbone: as its spec says, or else by the model's name."""
    return spec.backbone_titles.get(backbone, model_name(model_id))


def benchmark_title(benchmark: str) -> str:
    return BENCHMARK_TITLES.get(benchmark, benchmark)


def task_title(benchmark: str, task: str) -> str:
    """The catalogue's title of a task; the benchmark's for the mean over its tasks."""
    return benchmark_title(benchmark) if task == ALL_TASKS else task_named(benchmark, task).title


def family_title(point: Point) -> str:
    """The kind of task that a point is counted under: a LongBench task's family, otherwise its benchmark."""
    if point.benchmark == "longbench" and point.task != ALL_TASKS:
        return FAMILIES[str(task_named(point.benchmark, point.task).metric)]
    return benchmark_title(point.benchmark)


def trained_at_title(maps: str) -> Latex:
    """A row of feature maps told apart by the length that they were trained at."""
    _, variant = length_and_variant(maps)
    return Latex(f"{PHI} ({escape(maps)})" if variant else f"{PHI} ({escape(maps)}-trained)")


def variant_title(maps: str) -> Latex:
    """A row of feature maps told apart by how they were made; a variant without a title prints its label."""
    _, variant = length_and_variant(maps)
    if width := re.fullmatch(r"dphi_(\d+)", variant):
        return width_title(int(width[1]))
    return VARIANT_TITLES.get(variant, escape(maps)) if variant else OURS


def width_title(d_phi: int) -> Latex:
    return Latex(rf"$d_\phi{{=}}{d_phi}$")
