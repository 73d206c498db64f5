"""Fast decode: the attention of `core.accounting` in one pass over static buffers.

`torch_path` runs anywhere, `triton_path` on GPUs. Tests check both against the slow reference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

from residual_mass.core.feature_maps import FoldedMap
from residual_mass.core.fused import torch_path
from residual_mass.core.fused.cache import (
    DecodeCache,
    MethodRows,
    build_cache,
    with_moments,
    with_scan,
    with_summary,
)

MOST_HEADS = 16
"""Query heads of a KV head that the Triton kernel scores with packed keys, in one tile of a tensor core."""

__all__ = [
    "DecodeCache",
    "MethodRows",
    "build_cache",
    "decode_attention_for",
    "kernels_run_on",
    "query_map_for",
    "tiles_fit",
    "with_moments",
    "with_scan",
    "with_summary",
]


def decode_attention_for(cache: DecodeCache, query_heads: int) -> Callable[..., Tensor]:
    """Returns Triton's `decode_attention` on a GPU if Triton is installed and its tiles fit, otherwise torch's. With a
    scan, the tiles hold at most MOST_HEADS query heads of a KV head.
    """
    widths = [cache.keys.shape[-1]] + ([] if cache.features is None else [cache.features.shape[-1]])
    widths += [] if cache.scan is None else cache.scan.codes.shape[-2:]  # D / 2, and the columns of a block
    if not kernels_run_on(cache.keys.device) or not tiles_fit(*widths):
        return torch_path.decode_attention
    if cache.scan is not None and query_heads // cache.keys.shape[1] > MOST_HEADS:
        return torch_path.decode_attention
    from residual_mass.core.fused import triton_path

    return triton_path.decode_attention


def kernels_run_on(device: torch.device) -> bool:
    """Returns whether `device` is the current GPU, on which kernels are launched, and Triton is installed."""
    return device.type == "cuda" and device.index == torch.cuda.current_device() and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def tiles_fit(*widths: int) -> bool:
    """Returns whether the kernels have tiles for vectors of these lengths, powers of two from 16 to 128."""
    return all(16 <= width <= 128 and width & (width - 1) == 0 for width in widths)


def query_map_for(
    attention: Callable[..., Tensor], feature_map: object, dtype: torch.dtype
) -> Callable[[Tensor], Tensor] | None:
    """Returns a kernel that computes log phi_q of [B, Hq, D] for Triton's `decode_attention`, if the map has one."""
    if attention is torch_path.decode_attention or not isinstance(feature_map, FoldedMap):
        return None
    from residual_mass.core.fused.triton_path import QueryMap

    return QueryMap(feature_map, dtype)
