"""Memory that is freed while a prompt is read, and afterwards (glibc alone)."""

from __future__ import annotations

import resource
import subprocess
import sys

import torch
from tests.needs import GLIBC, needs

from residual_mass.model.memory import kept_memory

PAGES = 2**26 // resource.getpagesize()
"""Of a tensor here, 64 MiB, for which glibc otherwise asks the system anew each time."""
LEAVES_MEMORY = """
import torch
from residual_mass.model.memory import kept_memory
def resident():
    return int(open("/proc/self/statm").read().split()[1])
before = resident()
with kept_memory():
    pieces = [torch.ones(2**23) for _ in range(8)]  # of 32 MiB
    with kept_memory():
        del pieces[::2]
    inner = resident()
    del pieces
    within = resident()
print(before, inner, within, resident())
"""


def faults(tensors: int) -> int:
    """Returns for how many pages the system had to find memory, while tensors were made one after the other."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(tensors):
        torch.ones(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@needs(GLIBC)
def test_within_the_context_memory_is_used_again() -> None:
    with kept_memory():
        assert faults(16) < 5 * PAGES  # some lie beside a piece that is a little too small for them


@needs(GLIBC)
def test_after_the_last_context_freed_memory_is_the_systems() -> None:
    done = subprocess.run([sys.executable, "-c", LEAVES_MEMORY], capture_output=True, text=True, check=True)
    before, inner, within, after = map(int, done.stdout.split())
    assert within - before > 0.9 * 4 * PAGES
    assert inner >= within
    assert after - before < 0.2 * 4 * PAGES
