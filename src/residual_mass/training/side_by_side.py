"""Layers at the same time, one CPU core each: their matrices are too small for several cores to share one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch


def side_by_side(count: int, work: Callable[[int], None], device: torch.device) -> None:
    """Calls `work` with 0 to `count - 1`, which must not depend on each other; raises what the first failing one does.

    The results are the same for every number of cores, for each call runs on one. A GPU gets them one after another.
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
        torch.set_num_threads(cores)  # some of a thread's setting holds for the whole process
