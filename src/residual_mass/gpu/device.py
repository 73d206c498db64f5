"""Where Triton's kernels run, and the sizes that they have tiles for."""

from __future__ import annotations

import functools
from importlib.util import find_spec

import torch

MOST_HEADS = 16
"""Query heads of a KV head that the kernel scores with packed keys, in one tile of a tensor core."""


def kernels_run_on(device: torch.device) -> bool:
    """Returns whether `device` is the current GPU, on which kernels are launched, and Triton is installed."""
    if device.type != "cuda" or device.index != torch.cuda.current_device():
        return False
    return _has_triton()


@functools.cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def tiles_fit(*widths: int) -> bool:
    """Returns whether the kernels have tiles for vectors of these lengths, powers of two from 16 to 128."""
    return all(16 <= width <= 128 and width & (width - 1) == 0 for width in widths)
