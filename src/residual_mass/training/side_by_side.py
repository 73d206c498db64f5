"""Runs layers in parallel with one CPU core each: their matrices are too small to split over cores."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch


def side_by_side(count: int, work: Callable[[int], None], device: torch.device) -> None:
    """Calls `work` with 0 to `count - 1` in any order; raises the error of the first call that fails.

    Each call runs on one core, so results do not depend on the number of cores. On a GPU, calls run one after another.
    """
    cores = torch.get_num_threads()
    if device.type != "cpu" or cores == 1:
        for index in range(count):
            work(index)
        return
    try:
        with ThreadPoolExecutor(cores, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            list(pool.map(work, range(count)))
    finally:
        torch.set_num_threads(cores)  # a thread's setting partly applies to the whole process
