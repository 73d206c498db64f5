"""What keeps a study's value from being compared with the paper's."""

from __future__ import annotations

from collections.abc import Iterator

from residual_mass.paper.published import EXAMPLES, MODELS
from residual_mass.paper.table_file import Measured

OTHER_BACKBONE = "other backbone"
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
