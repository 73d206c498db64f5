"""What tables call benchmarks, tasks, methods and variants of the feature maps."""

from __future__ import annotations

import re

from residual_mass.benchmarks.catalogue import task_named
from residual_mass.core.settings import length_and_variant
from residual_mass.metrics import METRICS, QA_F1, ROUGE
from residual_mass.paper.marked import Marked, marked
from residual_mass.paper.table import ALL_TASKS, Place
from residual_mass.study.specs import TableSpec

BENCHMARK_TITLES = {"ruler": "RULER", "babilong": "BABILong", "longbench": "LongBench"}
CORPUS_TITLES = {
    "wiki": "Wikipedia", "wikitext": "WikiText", "books": "Books", "code": "Code", "cwe": "CWE",
    "needles": "Needles",
}  # fmt: skip
FULL, TOPK, PHI = Marked("Full"), Marked("Top-$K$"), Marked(r"Top-$K{+}\phi$")
METHOD_TITLES = {
    "full": FULL,
    "topk": TOPK,
    "topk_phi": PHI,
    "topk_phi_nosub": Marked(rf"{PHI} (NoSub)"),
    "topk_moments": Marked(rf"{TOPK}+moments"),
    "topk_moments_8": Marked(rf"{TOPK}+moments, 8 clusters"),
    "topk_moments_shared": Marked(rf"{TOPK}+moments, 64 clusters"),
    "topk_centroids": Marked(rf"{TOPK}+centroids"),
    "topk_mean": Marked(rf"{TOPK}+mean"),
    "topk_importance": Marked(rf"{TOPK}+importance sample"),
    "topk_exact_mass": Marked(rf"{TOPK}+exact mass"),
    "scan4": Marked("4-bit scan"),
    "scan4_moments": Marked("4-bit scan+moments"),
    "pages": Marked("Pages"),
    "scan4_regression_64": Marked("4-bit scan+regression, 64 clusters"),
    "scan3_regression_32": Marked("3-bit scan+regression, 32 clusters"),
    "group4_regression_64": Marked("4-bit scan per group+regression, 64 clusters"),
    "cache4": Marked("4-bit cache"),
    "cache4_rotated": Marked("4-bit cache, rotated"),
    "channels_regression_64": Marked("16 channels+regression, 64 clusters"),
    "clusters_sums": Marked("Whole clusters+sums"),
}
SELECTOR_TITLES = {
    "TopK": Marked(rf"{TOPK} by exact scores"),
    "QuantisedScan": Marked("scan of few bits"),
    "Pages": Marked("pages by bounds"),
    "PerGroup": Marked("scan per KV group"),
    "CacheOnly": Marked("quantised cache"),
    "Channels": Marked("principal channels"),
    "WholeClusters": Marked("whole clusters"),
}
"""Kinds of selectors, by their class."""
RESIDUAL_TITLES = {
    "NoneType": Marked("nothing added"),
    "Phi": Marked(r"$\phi$"),
    "Moments": Marked("moments"),
    "Centroids": Marked("centroids"),
    "Mean": Marked("mean"),
    "ImportanceSample": Marked("importance sample"),
    "ExactMass": Marked("exact mass"),
    "ScanRegression": Marked("regression on the scan"),
    "QuantisedValues": Marked("quantised values"),
    "GroupSums": Marked("sums of pages or clusters"),
}
"""Kinds of residuals, by their class."""
OURS = Marked("Ours")
"""The feature maps of a study's own recipe."""
OWN_ROW = Marked(r"$^{*}$")
"""Marks the title of a row that the paper's table lacks."""
VARIANT_TITLES = {
    "hedgehog_map": Marked("Hedgehog-style map"),
    "lolcats_loss": Marked("LoLCATs-style loss"),
    "kl_only": Marked("KL only"),
    "aux_only": Marked("Auxiliary only"),
    "residual_loss": Marked("Residual objective"),
}
FAMILIES = {ROUGE: "Summarisation", QA_F1: "Question answering"}
"""LongBench's tasks by their metric."""


def model_name(model_id: str) -> str:
    """A model's name on the hub, without its organisation."""
    return model_id.split("/")[-1]


def backbone_title(spec: TableSpec, backbone: str, model_id: str) -> str:
    """The backbone's title in the spec, or else the model's name."""
    return spec.backbone_titles.get(backbone, model_name(model_id))


def method_title(method: str) -> Marked:
    """A method's title, or its name where it has none."""
    return METHOD_TITLES.get(method, marked(method))


def title_parts(method: str) -> tuple[Marked, Marked]:
    """What a method's title calls its selector, and its residual; the second is empty where it adds nothing."""
    selector, _, residual = method_title(method).replace("{+}", "$+$").partition("+")
    return Marked(selector), Marked(residual)


def benchmark_title(benchmark: str) -> str:
    return BENCHMARK_TITLES.get(benchmark, benchmark)


def corpus_title(corpus: str) -> str:
    return CORPUS_TITLES.get(corpus, corpus)


def task_title(benchmark: str, task: str) -> str:
    """The catalogue's title of a task; the benchmark's for the mean over its tasks."""
    return benchmark_title(benchmark) if task == ALL_TASKS else task_named(benchmark, task).title


def family_title(place: Place) -> str:
    """The kind of task that a score is counted under: a LongBench task's family, otherwise its benchmark. Values of
    another metric than the benchmark's own are counted apart.
    """
    if place.quantity in METRICS:
        return f"{benchmark_title(place.benchmark)}, {place.metric.title}"
    if place.benchmark == "longbench" and place.task != ALL_TASKS:
        return FAMILIES[place.metric]
    return benchmark_title(place.benchmark)


def trained_at_title(maps: str) -> Marked:
    """Names feature maps by the length that they were trained at."""
    _, variant = length_and_variant(maps)
    return Marked(f"{PHI} ({marked(maps)})" if variant else f"{PHI} ({marked(maps)}-trained)")


def variant_title(maps: str) -> Marked:
    """Names feature maps by how they were made: by the variant's title, or its label where it has none."""
    _, variant = length_and_variant(maps)
    if width := re.fullmatch(r"dphi_(\d+)", variant):
        return width_title(int(width[1]))
    return VARIANT_TITLES.get(variant, marked(maps)) if variant else OURS


def width_title(d_phi: int) -> Marked:
    return Marked(rf"$d_\phi{{=}}{d_phi}$")
