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
    "topk_phi_moments": Marked(rf"{PHI}, mass of moments"),
    "topk_moments": Marked(rf"{TOPK}+moments"),
    "topk_moments_4b": Marked(rf"{TOPK}+moments, 4 blocks"),
    "topk_moments_8": Marked(rf"{TOPK}+moments, 8 clusters"),
    "topk_moments_shared": Marked(rf"{TOPK}+moments, 64 clusters"),
    "topk_moments_rest": Marked(rf"{TOPK}+moments of the rest"),
    "topk_moments_bf16": Marked(rf"{TOPK}+moments, bfloat16"),
    "topk_centroids": Marked(rf"{TOPK}+centroids"),
    "topk_first_order": Marked(rf"{TOPK}+first order"),
    "topk_gaussian": Marked(rf"{TOPK}+Gaussian, no cut"),
    "topk_mean": Marked(rf"{TOPK}+mean"),
    "topk_sample": Marked(rf"{TOPK}+uniform sample"),
    "topk_importance": Marked(rf"{TOPK}+importance sample"),
    "topk_exact_mass": Marked(rf"{TOPK}+exact mass"),
    "scan4": Marked("4-bit scan"),
    "scan4_moments": Marked("4-bit scan+moments"),
    "scan4_moments_shared": Marked("4-bit scan+moments, 64 clusters"),
    "scan2_moments": Marked("2-bit scan+moments"),
    "pages": Marked("Pages"),
    "pages_centroids": Marked("Pages+centroids"),
    "pages_importance": Marked("Pages+importance sample"),
    "scan8": Marked("8-bit scan"),
    "scan4_regression": Marked("4-bit scan+regression"),
    "scan4_regression_64": Marked("4-bit scan+regression, 64 clusters"),
    "scan3_regression_32": Marked("3-bit scan+regression, 32 clusters"),
    "scan2_regression_64": Marked("2-bit scan+regression, 64 clusters"),
    "rerank2_regression_64": Marked("2-bit scan, re-ranked+regression, 64 clusters"),
    "group4": Marked("4-bit scan per group"),
    "group4_regression": Marked("4-bit scan per group+regression"),
    "group4_regression_64": Marked("4-bit scan per group+regression, 64 clusters"),
    "group2_regression_64": Marked("2-bit scan per group+regression, 64 clusters"),
    "cache4": Marked("4-bit cache"),
    "cache4_rotated": Marked("4-bit cache, rotated"),
    "channels": Marked("16 channels"),
    "channels_regression_64": Marked("16 channels+regression, 64 clusters"),
    "mean_pages": Marked("Pages by mean"),
    "mean_pages_centroids": Marked("Pages by mean+centroids"),
    "mean_pages_sums": Marked("Pages by mean+sums"),
    "mean_pages_moments": Marked("Pages by mean+moments of pages"),
    "clusters": Marked("Whole clusters"),
    "clusters_sums": Marked("Whole clusters+sums"),
    "clusters_moments": Marked("Whole clusters+moments of clusters"),
}
SELECTOR_TITLES = {
    "TopK": Marked(rf"{TOPK} by exact scores"),
    "QuantisedScan": Marked("scan of few bits"),
    "Pages": Marked("pages by bounds"),
    "Reranked": Marked("scan, re-ranked"),
    "PerGroup": Marked("scan per KV group"),
    "CacheOnly": Marked("quantised cache"),
    "Channels": Marked("principal channels"),
    "PagesByMean": Marked("pages by means"),
    "WholeClusters": Marked("whole clusters"),
}
"""Kinds of selectors, by their class."""
RESIDUAL_TITLES = {
    "NoneType": Marked("nothing added"),
    "Phi": Marked(r"$\phi$"),
    "PhiDirection": Marked(r"$\phi$, mass of moments"),
    "Moments": Marked("moments"),
    "Centroids": Marked("centroids"),
    "FirstOrder": Marked("first order"),
    "Gaussian": Marked("Gaussian, no cut"),
    "Mean": Marked("mean"),
    "UniformSample": Marked("uniform sample"),
    "ImportanceSample": Marked("importance sample"),
    "ExactMass": Marked("exact mass"),
    "ScanRegression": Marked("regression on the scan"),
    "QuantisedValues": Marked("quantised values"),
    "GroupSums": Marked("sums of pages or clusters"),
    "GroupMoments": Marked("moments of pages or clusters"),
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
