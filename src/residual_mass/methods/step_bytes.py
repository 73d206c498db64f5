"""Bytes that a decode step reads of a prompt, and bytes that are kept of it, by method."""

from __future__ import annotations

from collections.abc import Callable
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


class KeptBytes(NamedTuple):
    """Bytes per KV head and layer that are kept of a prompt between steps, without weights and generated tokens."""

    cache: float
    """Keys and values in bfloat16 of the tokens that a step may read exactly."""
    state: float
    """What selector and residual keep besides, packed: codes at their bits, the rest as wide as it is read."""

    @property
    def total(self) -> float:
        return sum(self)


def kept_bytes(method: Method, step: Step) -> KeptBytes:
    """Returns what a method keeps of a prompt for one KV head in one layer. Of the step, `retrieved` has no part.

    Selectors and residuals keep what they read in a step, unless their `kept_bytes` says otherwise.
    """
    if method.selector is None:
        return KeptBytes(full_bytes(step), 0)
    replaced = getattr(method.selector, "replaces_cache", False)
    cache = 2 * BFLOAT16 * step.width * step.anchors if replaced else full_bytes(step)
    state = 0.0 if method.selector.reads_keys else _kept(method.selector, step, method.selector.scan_bytes)
    if method.own is not None:
        state += _kept(method.own, step, method.own.summary_bytes)
    if method.needs_maps:
        state += FLOAT32 * step.features * (step.width + 1) + feature_bytes(method, step, step.tokens)
    return KeptBytes(cache, state)


def feature_bytes(method: Method, step: Step, tokens: float) -> float:
    """Returns the size of so many tokens' features of learned maps: a method that subtracts keeps those of all tokens
    and reads those of the retrieved ones.
    """
    subtracts = method.subtracts or isinstance(method.own, PhiDirection)
    return FLOAT32 * step.features * tokens if subtracts else 0


def _kept(part: object, step: Step, read: Callable[[Step], float]) -> float:
    return getattr(part, "kept_bytes", read)(step)


def most_retrieved(method: Method, k: int, step: Step) -> int:
    """Returns the most distinct tokens that the query heads of a KV head can retrieve with K each."""
    return min(step.tokens - step.anchors, k if isinstance(method.selector, PerGroup) else k * step.heads)


def _summary_bytes(method: Method, step: Step) -> float:
    size = 0.0 if method.own is None else method.own.summary_bytes(step)
    if method.needs_maps:
        size += FLOAT32 * step.features * (step.width + 1) + feature_bytes(method, step, step.retrieved)
    return size
