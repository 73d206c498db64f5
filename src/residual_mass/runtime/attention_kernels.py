"""torch's kernels for full attention: which one is fastest depends on the GPU, the shape and the versions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

log = logging.getLogger(__name__)

Result = TypeVar("Result")
LAST = "math"
"""Separate operations: takes every shape and dtype, and much more time and memory than the others."""
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    LAST: SDPBackend.MATH,
}


def kernels_on(device: torch.device) -> tuple[str, ...]:
    """Names of the kernels to choose among; none on a CPU, where torch's own choice is taken."""
    return tuple(KERNELS) if device.type == "cuda" else ()


def with_each(names: Iterable[str], work: Callable[[], Result]) -> dict[str, Result | None]:
    """Returns what some work with attention gives under each of these kernels alone; None where one refuses."""
    results: dict[str, Result | None] = {}
    for name in names:
        try:
            with sdpa_kernel(KERNELS[name]):
                results[name] = work()
        except (torch.OutOfMemoryError, torch.AcceleratorError):  # is no refusal
            raise
        except RuntimeError as refusal:
            log.info("attention kernel %s is not available: %s", name, str(refusal).partition("\n")[0])
            results[name] = None
    return results
