"""Alternating measurements of two ways to do one thing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def alternate(sides: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each side per round, after one unmeasured round; sides take turns, so that drift hits both."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for round_ in range(rounds + 1):
        for name, run in sides.items():
            started = time.perf_counter()
            run()
            if round_:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def report(title: str, seconds: dict[str, list[float]]) -> None:
    """One line per side (median and range, milliseconds) and the ratio of the first to the last side's median."""
    print(title)
    medians = {}
    for name, values in seconds.items():
        medians[name] = statistics.median(values)
        print(f"  {name:34s} {1e3 * medians[name]:10.1f} ms   ({1e3 * min(values):.1f} .. {1e3 * max(values):.1f})")
    slow, *_, fast = medians.values()
    print(f"  ratio {slow / fast:.2f}")
