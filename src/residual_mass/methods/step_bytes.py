"""Bytes that a decode step reads of a prompt, and bytes that are kept of a prompt, by method; bytes that a step of the
CPU kernels reads of their packed caches.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

from residual_mass.methods.interface import BFLOAT16, FLOAT32, Method, Step
from residual_mass.methods.residuals import QuantisedValues, ScanRegression
from residual_mass.methods.selectors import CacheOnly, PerGroup, QuantisedScan


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
    return StepBytes(
        method.selector.scan_bytes(step),
        rows if method.selector.reads_keys else 2 * rows,
        _maps_bytes(method, step, step.retrieved) if method.own is None else method.own.summary_bytes(step),
    )


def kept_bytes(method: Method, step: Step) -> KeptBytes:
    """Returns the bytes that a method keeps of a prompt for one KV head in one layer; `step.retrieved` is not used."""
    if method.selector is None:
        return KeptBytes(full_bytes(step), 0)
    exact = step.anchors + method.selector.tail if method.selector.replaces_cache else step.tokens
    cache = full_bytes(step._replace(tokens=min(exact, step.tokens)))
    rest = _maps_bytes(method, step, step.tokens) if method.own is None else method.own.kept_bytes(step)
    return KeptBytes(cache, method.selector.kept_bytes(step) + rest)


def _maps_bytes(method: Method, step: Step, tokens: float) -> float:
    """Returns the bytes of the summary of learned maps and of the features of `tokens` tokens; 0 without maps."""
    summary = FLOAT32 * step.features * (step.width + 1) if method.needs_maps else 0
    return summary + feature_bytes(method, step, tokens)


def feature_bytes(method: Method, step: Step, tokens: float) -> float:
    """Returns the bytes of the features of `tokens` tokens. A method that subtracts keeps the features of all tokens
    and reads those of the retrieved tokens.
    """
    return FLOAT32 * step.features * tokens if method.subtracts else 0


def bytes_per_verified_token(share: float, differences: float, most: int) -> tuple[float, int]:
    """Returns the bytes per token that self-speculative decoding reads, as a share of those of full attention, and the
    draft length n that minimises them:

        min over n of (n b + 1) h / (1 - (1 - h)^(n + 1)).

    A method drafts n tokens, and one step of full attention verifies them all. A draft gives the tokens before its
    first difference and one more.

    Args:
        share: b, the bytes that a draft step reads, as a share of those of full attention.
        differences: h, first differences per drafted token.
        most: largest n, such as the length of the drafts that h was measured on. n = 0, no draft, gives 1.
    """
    agree = 1 - differences
    tokens = itertools.accumulate(range(1, most + 1), lambda before, n: before + agree**n, initial=1.0)
    return min(((n * share + 1) / expected, n) for n, expected in enumerate(tokens))


def most_retrieved(method: Method, k: int, step: Step) -> int:
    """Returns the most distinct tokens that the query heads of a KV head can retrieve with K each."""
    return min(step.tokens - step.anchors, k if isinstance(method.selector, PerGroup) else k * step.heads)


# ---- packed caches of the CPU kernels --------------------------------------------------------------------------------

BLOCK = 64
"""Tokens of a block, which share the scales of keys."""


@dataclass(frozen=True)
class Packing:
    """Format of a packed cache: bits of keys and number of clusters, as in `LayerCache`."""

    bits: int
    clusters: int = 64


def packing_of(method: Method) -> Packing | None:
    """Returns the format of a method's packed cache, None for a method that the kernels do not support.

    They support full attention in bfloat16 and over an 8-bit cache, and the 4-bit scan, alone or with regression.
    """
    selector, residual = method.selector, method.own
    if method.whole_prefix:
        return Packing(16)
    if selector == CacheOnly(QuantisedScan(8)) and residual == QuantisedValues(8):
        return Packing(8)
    if selector == QuantisedScan(4) and not method.needs_maps:
        if residual is None:
            return Packing(4)
        if isinstance(residual, ScanRegression):
            return Packing(4, residual.clusters)
    return None


def packed_bytes(packing: Packing, step: Step, generated: int = 0) -> int:
    """Returns the bytes that a step reads of one KV head in one layer, as `LayerCache.read_bytes` counts them: whole
    blocks or, with planes, scan, chosen rows and the residual's summary; anchors and generated tokens in float32.
    """
    width, ends = step.width, 8 * step.width * (step.anchors + generated)
    blocks = -(-(step.tokens - step.anchors) // BLOCK)
    if packing.bits == 16:
        return ends + blocks * BLOCK * 4 * width
    if packing.bits == 8:
        return ends + blocks * (BLOCK * (2 * width + 4) + 4 * width)
    scan = blocks * (BLOCK * width // 2 + 4 * width)
    rows = step.heads * step.retrieved * (3 * width // 2 + 2)
    return ends + scan + rows + packing.clusters * (2 * width + 8) + 2 * width * width + 4 * width
