"""Fast decode: the same attention as `core.accounting`, from static buffers and in one pass over what is read.

`torch_path` runs anywhere; `triton_path` has kernels for GPUs. Both are checked against the slow reference.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

from residual_mass.core.fused import torch_path
from residual_mass.core.fused.cache import DecodeCache, build_cache, with_summary

__all__ = ["DecodeCache", "build_cache", "decode_attention_for", "with_summary"]


def decode_attention_for(device: torch.device, head_dim: int) -> Callable[..., Tensor]:
    """`decode_attention` for tensors on `device`: kernels on a GPU where Triton is there, torch elsewhere."""
    if device.type == "cuda" and find_spec("triton") is not None and _power_of_two(head_dim):
        from residual_mass.core.fused import triton_path

        return triton_path.decode_attention
    return torch_path.decode_attention


def _power_of_two(width: int) -> bool:
    """Of at least 16, as the kernels' tiles are."""
    return width >= 16 and width & (width - 1) == 0
