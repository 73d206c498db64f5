"""Reasons why a study's value is not comparable with the paper's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from residual_mass.benchmarks.decoding import decoding_settings
from residual_mass.core.settings import length_and_variant
from residual_mass.paper.published import EXAMPLES, MODELS
from residual_mass.paper.published.protocol import DECODING, PROTOCOL, VARIANTS, text_of
from residual_mass.paper.readers.runtime_file import PROTOTYPE
from residual_mass.paper.table import Cell, Place
from residual_mass.paper.tables import training_cost_table
from residual_mass.study.specs import ComparisonSpec

OTHER_BACKBONE = "other backbone"
GPU, GPUS = "H200", "8"
"""Hardware of the paper: one such GPU for latencies, this number of them for training."""
WITHOUT_MAPS = ("e_topk", "e_exact_nosub")
"""Quantities that do not depend on the feature maps of their row."""
SHAPE = ("phi.map.kind", "phi.map.d_emb", "phi.map.d_phi")
"""Settings of feature maps that affect latencies, which are measured with random weights."""
UNKNOWN = "unknown"


def obstacles(cell: Cell) -> Iterator[str]:
    """Yields why backbone, examples or hardware make a value incomparable."""
    if cell.model_id not in MODELS.values():
        yield OTHER_BACKBONE
    if cell.weights == "random":
        yield "random weights"
    if cell.n < EXAMPLES.get(cell.place.benchmark, 0):
        yield "subsampled"
    yield from (f"{kind} data" for kind in cell.data if kind != "original")
    yield from _other_conditions(cell.conditions)


def other_settings(cell: Cell, spec: ComparisonSpec) -> dict[str, str]:
    """Describes by key the settings that differ from the paper's: those recorded with the value, else the study's."""
    _, variant = length_and_variant(cell.place.maps or "")
    paper = _decoding_texts(DECODING.get(cell.place.benchmark, {}), cell.place)
    paper |= {key: text_of(each) for key, each in (PROTOCOL | VARIANTS.get(variant, {})).items()}
    recorded = decoding_settings(cell.decoding) if cell.decoding else {}
    ours = spec.settings | spec.variants.get(variant, {}) | _decoding_texts(recorded, cell.place)
    if "steps" in cell.conditions:
        ours["phi.steps"] = cell.conditions["steps"]
    given = {key: ours.get(key, UNKNOWN) for key in paper if _matters(key, cell.place)}
    return {key: f"{key} is {each}, {paper[key]} in the paper" for key, each in given.items() if each != paper[key]}


def _decoding_texts(settings: Mapping[str, Any], place: Place) -> dict[str, str]:
    """Formats decoding settings, with the keys of the configuration."""
    keys = {name: name if name == "truncate_to" else f"benchmarks.{place.benchmark}.{name}" for name in settings}
    return {keys[name]: text_of(each) for name, each in settings.items()}


def _matters(key: str, place: Place) -> bool:
    """Whether a value at this place depends on a setting."""
    if key.startswith("backbones."):
        return key == f"backbones.{place.backbone}.dtype" and not place.implementation  # latencies record their own
    if key.startswith("anchors.") or key.endswith(".budget_length"):
        return place.method != "full" and place.quantity not in training_cost_table.QUANTITIES
    if key.startswith("phi."):
        if place.implementation:
            return key in SHAPE and place.method.startswith("topk_phi")
        return place.maps is not None and place.quantity not in WITHOUT_MAPS
    return True


def _other_conditions(measured: Mapping[str, str]) -> Iterator[str]:
    """Yields conditions of a cost's measurement that differ from the paper's; scores have none."""
    if measured.get("implementation", PROTOTYPE) != PROTOTYPE:
        yield f"other implementation: {measured['implementation']}"
    if not measured.get("device", GPU).endswith(GPU):
        yield f"other device: {measured['device']}"
    if measured.get("dtype", "bfloat16") != "bfloat16":
        yield f"other precision: {measured['dtype']}"
    hardware, processes = measured.get("hardware", GPU), measured.get("processes", GPUS)
    if not hardware:
        yield "unknown hardware"
    elif not hardware.endswith(GPU) or processes != GPUS:
        yield f"other hardware: {processes} x {hardware}"
