"""Bytes that a decode step reads of a prompt, and bytes that are kept of a prompt, by method.

What the CPU kernels read of a packed cache is counted by `kernels.layout`.
"""

from __future__ import annotations

from typing import NamedTuple

from residual_mass.methods.interface import BFLOAT16, FLOAT32, Method, Step
from residual_mass.methods.selectors import PerGroup


class StepBytes(NamedTuple):
    """Bytes per KV head and layer, with keys and values in bfloat16. Weights, generated tokens and small vectors are
    left out.
    """

    scan: float  # to select
    rows: float  # of the tokens that are read exactly: keys and values, or values if the selector has read all keys
    summary: float  # to estimate the unread tokens

    @property
    def total(self) -> float:
        return sum(self)


class KeptBytes(NamedTuple):
    """Bytes per KV head and layer that are kept of a prompt between steps, without weights and generated tokens."""

    cache: float  # keys and values in bfloat16 of the tokens that a step may read exactly
    state: float  # summaries of selector and residual: codes packed at their bits, other numbers as a step reads them

    @property
    def total(self) -> float:
        return sum(self)


def full_bytes(step: Step) -> int:
    """Returns the bytes that a step of full attention reads: all keys and values."""
    return 2 * BFLOAT16 * step.tokens * step.width


def step_bytes(method: Method, step: Step) -> StepBytes:
    """Returns the bytes that a step of a method reads of one KV head in one layer."""
    if method.selector is None:
        return StepBytes(0, full_bytes(step), 0)
    chosen = method.selector.tail if method.selector.replaces_cache else step.retrieved
    rows = BFLOAT16 * step.width * (step.anchors + chosen)
    if not method.selector.reads_keys:  # keys of the chosen tokens, beside their values
        rows = 2 * rows
    if method.own is None:
        summary = _maps_bytes(method, step, step.retrieved)
    else:
        summary = method.own.summary_bytes(step)
    return StepBytes(method.selector.scan_bytes(step), rows, summary)


def kept_bytes(method: Method, step: Step) -> KeptBytes:
    """Returns the bytes that a method keeps of a prompt for one KV head in one layer; `step.retrieved` is not used."""
    if method.selector is None:
        return KeptBytes(full_bytes(step), 0)
    exact = step.tokens
    if method.selector.replaces_cache:
        exact = min(step.anchors + method.selector.tail, exact)
    cache = full_bytes(step._replace(tokens=exact))
    if method.own is None:
        rest = _maps_bytes(method, step, step.tokens)
    else:
        rest = method.own.kept_bytes(step)
    return KeptBytes(cache, method.selector.kept_bytes(step) + rest)


def _maps_bytes(method: Method, step: Step, tokens: float) -> float:
    """Returns the bytes of the summary of learned maps and of the features of `tokens` tokens; 0 without maps."""
    if not method.needs_maps:
        return 0
    summary = FLOAT32 * step.features * (step.width + 1)
    return summary + feature_bytes(method, step, tokens)


def feature_bytes(method: Method, step: Step, tokens: float) -> float:
    """Returns the bytes of the features of `tokens` tokens. A method that subtracts keeps the features of all tokens
    and reads those of the retrieved tokens.
    """
    return FLOAT32 * step.features * tokens if method.subtracts else 0


def most_retrieved(method: Method, k: int, step: Step) -> int:
    """Returns the most distinct tokens that the query heads of a KV head can retrieve with K each."""
    if not isinstance(method.selector, PerGroup):
        k = k * step.heads
    return min(step.tokens - step.anchors, k)
