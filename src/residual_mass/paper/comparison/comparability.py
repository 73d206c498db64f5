"""What keeps a study's value from being compared with the paper's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from residual_mass.paper.published import EXAMPLES, MODELS
from residual_mass.paper.readers.runtime_file import PROTOTYPE
from residual_mass.paper.tables.table_file import Measured

OTHER_BACKBONE = "other backbone"
GPU, GPUS, STEPS = "H200", "8", "200000"
"""What the paper measures latencies on, one of them, and trains on, and how many steps it trains."""
ANSWERS_CUT = "past the references"
"""What the words on decoding hold where answers are cut shorter than by the harness."""


def obstacles(value: Measured) -> Iterator[str]:
    """In words; none where backbone, examples and answers are as in the paper."""
    if value.model_id not in MODELS.values():
        yield OTHER_BACKBONE
    if value.weights == "random":
        yield "random weights"
    if value.n < EXAMPLES.get(value.place.benchmark, 0):
        yield "subsampled"
    yield from (f"{kind} data" for kind in value.data if kind != "original")
    if ANSWERS_CUT in value.decoding:
        yield "answers cut short"
    yield from _other_conditions(value.conditions)


def _other_conditions(measured: Mapping[str, str]) -> Iterator[str]:
    """Of costs: how theirs were measured; a score has no such conditions."""
    if measured.get("implementation", PROTOTYPE) != PROTOTYPE:
        yield f"other implementation: {measured['implementation']}"
    if not measured.get("device", GPU).endswith(GPU):
        yield f"other device: {measured['device']}"
    if measured.get("dtype", "bfloat16") != "bfloat16":
        yield f"other precision: {measured['dtype']}"
    if measured.get("steps", STEPS) != STEPS:
        yield f"other number of steps: {measured['steps']}"
    hardware, processes = measured.get("hardware", GPU), measured.get("processes", GPUS)
    if not hardware:
        yield "unknown hardware"
    elif not hardware.endswith(GPU) or processes != GPUS:
        yield f"other hardware: {processes} x {hardware}"
