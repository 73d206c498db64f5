"""Memory of the process: what is freed and not yet the system's, and pages for what every step reads."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Sequence

import torch
from torch import nn

HUGE_PAGE = 2**21
"""Bytes of a huge page on x86, and on ARM with pages of 4 KiB."""
LINE = 64
"""Bytes at whose multiples buffers start."""


def give_back_memory() -> None:
    """Returns freed memory to the system where the C library keeps it: glibc holds on to hundreds of MiB here."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def move_to_huge_pages(modules: Sequence[nn.Module]) -> None:
    """Moves the buffers of modules to one piece of memory in huge pages, where Linux has them.

    A step reads all weights once, and a processor knows the places of some thousand pages alone. How much that costs
    with pages of 4 KiB depends on how the system laid them: from nothing to a third of a step.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    places = [(module, name) for module in modules for name, buffer in module.named_buffers() if buffer.nbytes]
    sizes = [-(-module.get_buffer(name).nbytes // LINE) * LINE for module, name in places]
    try:
        memory = mmap.mmap(-1, sum(sizes) + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without them, or a limit on the memory of the process
        return
    offset = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % HUGE_PAGE
    for (module, name), size in zip(places, sizes, strict=True):
        buffer = module.get_buffer(name)
        # Each has a storage of its own, which keeps the memory, so that it is copied and saved as any other.
        moved = torch.frombuffer(memory, dtype=buffer.dtype, count=buffer.numel(), offset=offset)
        setattr(module, name, moved.view(buffer.shape).copy_(buffer))
        offset += size
