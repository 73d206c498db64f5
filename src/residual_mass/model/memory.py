"""Memory of the process: what is freed and not yet the system's, and pages for what every step reads."""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt`: bytes of what is kept at the end of the heap, and of what is mapped by itself."""
KEEPING = {TRIM_THRESHOLD: 2**28, MMAP_THRESHOLD: 2**27}
"""While memory is kept."""
SETTLED = {TRIM_THRESHOLD: 2**26, MMAP_THRESHOLD: 2**25}
"""What glibc itself comes to as tensors grow; once told, it does not change the values any more."""
HUGE_PAGE = 2**21
"""Bytes of a huge page on x86, and on ARM with pages of 4 KiB."""
LINE = 64
"""Bytes at whose multiples buffers start."""


def give_back_memory() -> None:
    """Returns freed memory to the system where the C library keeps it: glibc holds on to hundreds of MiB here."""
    trim = _of_libc("malloc_trim")
    if trim is not None:
        trim(0)


def _of_libc(name: str) -> Callable[..., int] | None:
    """Returns a function of glibc; None where the C library is another."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None


_keeping = 0
"""How many contexts of `kept_memory` run, in all threads."""
_counting = threading.Lock()


@contextmanager
def kept_memory() -> Iterator[None]:
    """Keeps memory that is freed within the context for what is allocated next, up to some hundreds of MiB. Contexts
    may overlap; after the last one freed memory is the system's again.

    Otherwise glibc gives large tensors back as soon as they are freed, and the system clears all pages of the next
    one, which takes longer than most operations on it. In threads other than the main one, glibc maps tensors of more
    than 64 MiB in any case. Hours in such a context would cost memory: before 2.38, glibc cannot put an aligned tensor
    in the place of one of the same size.
    """
    global _keeping
    with _counting:
        _keeping += 1
        if _keeping == 1:
            _set(KEEPING)
    try:
        yield
    finally:
        with _counting:
            _keeping -= 1
            if _keeping == 0:
                _set(SETTLED)
                give_back_memory()


def _set(options: dict[int, int]) -> None:
    """Sets what glibc keeps, in the whole process."""
    set_option = _of_libc("mallopt")
    if set_option is not None:
        for option, value in options.items():
            set_option(option, value)


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
