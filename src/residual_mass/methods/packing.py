"""Which methods the CPU kernels serve, and how they hold a cache for each."""

from __future__ import annotations

from dataclasses import dataclass

from residual_mass.methods.interface import Method, Step
from residual_mass.methods.residuals import QuantisedValues, ScanRegression
from residual_mass.methods.selectors import CacheOnly, QuantisedScan

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
