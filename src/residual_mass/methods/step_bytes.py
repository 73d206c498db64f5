"""Bytes that a decode step reads of a prompt, by method."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from residual_mass.methods.combined import PerGroup
from residual_mass.methods.interface import BFLOAT16, FLOAT32, Step
from residual_mass.methods.phi import PhiDirection

if TYPE_CHECKING:
    from residual_mass.methods import Method


class StepBytes(NamedTuple):
    """Bytes per KV head and layer, with keys and values in bfloat16. Weights, generated tokens and small vectors are
    left out.
    """

    scan: float
    """To select."""
    rows: float
    """Keys and values of the tokens that are read exactly; values alone where the selector has read every key."""
    summary: float
    """What stands for the rest."""

    @property
    def total(self) -> float:
        return sum(self)


def full_bytes(step: Step) -> int:
    """Returns what full attention reads: all keys and values."""
    return 2 * BFLOAT16 * step.tokens * step.width


def step_bytes(method: Method, step: Step) -> StepBytes:
    """Returns what a step of a method reads of one KV head in one layer."""
    if method.selector is None:
        return StepBytes(0, full_bytes(step), 0)
    rows = BFLOAT16 * step.width * (step.anchors + step.retrieved)
    return StepBytes(
        method.selector.scan_bytes(step),
        rows if method.selector.reads_keys else 2 * rows,
        _summary_bytes(method, step),
    )


def most_retrieved(method: Method, k: int, step: Step) -> int:
    """Returns the most distinct tokens that the query heads of a KV head can retrieve with K each."""
    return min(step.tokens - step.anchors, k if isinstance(method.selector, PerGroup) else k * step.heads)


def _summary_bytes(method: Method, step: Step) -> float:
    size = 0.0 if method.own is None else method.own.summary_bytes(step)
    if method.needs_maps:
        size += FLOAT32 * step.features * (step.width + 1)
        if method.subtracts or isinstance(method.own, PhiDirection):
            size += FLOAT32 * step.features * step.retrieved  # the features of retrieved tokens
    return size
