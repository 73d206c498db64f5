"""Memory of the process that is freed and not yet the system's."""

from __future__ import annotations

import ctypes
import sys


def give_back_memory() -> None:
    """Returns freed memory to the system where the C library keeps it: glibc holds on to hundreds of MiB here."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
