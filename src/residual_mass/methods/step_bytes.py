"""Bytes that a decode step reads of a prompt and bytes that are kept of it, by method; likewise of the caches that the
CPU kernels hold, for the methods that they serve.
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
    rows: float  # of the tokens that are read exactly: keys and values, or values where the selector has read all keys
    summary: float  # what stands for the rest

    @property
    def total(self) -> float:
        return sum(self)


class KeptBytes(NamedTuple):
    """Bytes per KV head and layer that are kept of a prompt between steps, without weights and generated tokens."""

    cache: float  # keys and values in bfloat16 of the tokens that a step may read exactly
    state: float  # what selector and residual keep besides, packed: codes at their bits, the rest as wide as it is read

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
        _maps_bytes(method, step, step.retrieved) if method.own is None else method.own.summary_bytes(step),
    )


def kept_bytes(method: Method, step: Step) -> KeptBytes:
    """Returns what a method keeps of a prompt for one KV head in one layer. Of the step, `retrieved` has no part."""
    if method.selector is None:
        return KeptBytes(full_bytes(step), 0)
    cache = 2 * BFLOAT16 * step.width * step.anchors if method.selector.replaces_cache else full_bytes(step)
    rest = _maps_bytes(method, step, step.tokens) if method.own is None else method.own.kept_bytes(step)
    return KeptBytes(cache, method.selector.kept_bytes(step) + rest)


def _maps_bytes(method: Method, step: Step, tokens: float) -> float:
    """Returns the summary of learned maps and the features of so many tokens; 0 without maps."""
    summary = FLOAT32 * step.features * (step.width + 1) if method.needs_maps else 0
    return summary + feature_bytes(method, step, tokens)


def feature_bytes(method: Method, step: Step, tokens: float) -> float:
    """Returns the size of so many tokens' features of learned maps: a method that subtracts keeps those of all tokens
    and reads those of the retrieved ones.
    """
    return FLOAT32 * step.features * tokens if method.subtracts else 0


def bytes_per_verified_token(share: float, differences: float, most: int) -> tuple[float, int]:
    """Returns what self-speculative decoding reads for a token of full attention, relative to what full attention
    reads, and the length n of drafts that makes it least:

        min over n of (n b + 1) h / (1 - (1 - h)^(n + 1)).

    A method drafts n tokens, a step of full attention reads them all at once, and every draft gives the tokens before
    its first difference and one more.

    Args:
        share: b, what a draft step reads, as a share of what full attention reads.
        differences: h, first differences per drafted token.
        most: the longest draft, such as those that h was measured on. Without a draft, n = 0, the result is 1.
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
    """How the kernels hold a cache: bits of keys and clusters, as `LayerCache`."""

    bits: int
    clusters: int = 64


def packing_of(method: Method) -> Packing | None:
    """Returns how the kernels hold the cache of a method, None for a method that they do not serve.

    They serve full attention in bfloat16 and over an 8-bit cache, and the 4-bit scan, alone or with regression.
    """
    selector, residual = method.selector, method.own
    if method.whole_prefix:
        return Packing(16)
    if isinstance(selector, CacheOnly) and selector.scan == QuantisedScan(8) and residual == QuantisedValues(8):
        return Packing(8)
    if selector == QuantisedScan(4) and not method.needs_maps:
        if residual is None:
            return Packing(4)
        if isinstance(residual, ScanRegression):
            return Packing(4, residual.clusters)
    return None


def packed_bytes(packing: Packing, step: Step, generated: int = 0) -> int:
    """Returns what a step reads of one KV head in one layer, as `LayerCache.read_bytes` counts it: blocks whole, or the
    scan of planes, rows of the tokens that query heads choose, and what estimates the others; ends in float32.
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
