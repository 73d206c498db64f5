"""Times of decode steps: for the `runtime` stage, `measure` and the benchmarks.

Other work only slows steps down. Sides that are compared therefore take turns, so that what disturbs one disturbs all,
and the fastest step or the median counts, never the mean over turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

Clock = Callable[[], float]
"""Returns seconds since some time."""
Turn = list[float]
"""Seconds of the steps of a turn."""
Result = TypeVar("Result")
SideName = TypeVar("SideName", bound=Hashable)


def device_clock(device: torch.device, clock: Clock = time.perf_counter) -> Clock:
    """Returns a clock of the host that waits for the work of `device` before it is read."""
    if device.type != "cuda":
        return clock

    def synchronised() -> float:
        torch.cuda.synchronize(device)
        return clock()

    return synchronised


def timed(work: Callable[[], Result], clock: Clock = time.perf_counter) -> tuple[Result, float]:
    """Returns the result of `work` and its seconds."""
    started = clock()
    result = work()
    return result, clock() - started


class StepClock(BaseStreamer):
    """A streamer that times the steps of `generate`, which hands it the prompt and then every new token."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.clock = clock
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(self.clock())

    def end(self) -> None:
        pass

    @property
    def steps(self) -> Turn:
        """Seconds of the steps. The first token comes from reading the prompt, and the first step summarises it: both
        are left out.
        """
        tokens = self.times[2:]
        return [later - sooner for sooner, later in pairwise(tokens)]


def take_turns(
    sides: Mapping[SideName, Callable[[], Turn]], rounds: int, most: int | None = None, scatter: float = 0.0
) -> dict[SideName, list[Turn]]:
    """Lets sides take turns; returns what each returned.

    Args:
        rounds: turns of each side.
        most: with it, up to so many turns while times scatter by more than `scatter`.
    """
    turns: dict[SideName, list[Turn]] = {name: [] for name in sides}
    for taken in range(rounds if most is None else most):
        if taken >= rounds and scatter_of(turns.values()) <= scatter:
            break
        for name, take_turn in sides.items():
            turns[name].append(take_turn())
    return turns


def time_in_turns(
    sides: Mapping[SideName, Callable[[], object]], rounds: int, clock: Clock = time.perf_counter
) -> dict[SideName, list[float]]:
    """Returns the seconds of each side's work by round, after a round to warm up."""

    def seconds_of(work: Callable[[], object]) -> Turn:
        _, seconds = timed(work, clock)
        return [seconds]

    workers = {name: partial(seconds_of, work) for name, work in sides.items()}
    turns = take_turns(workers, rounds + 1)
    return {name: [seconds for (seconds,) in taken[1:]] for name, taken in turns.items()}


def fastest(turns: Iterable[Turn]) -> float:
    """Returns the seconds of the fastest step of all turns."""
    return min(map(min, turns))


def scatter_of(sides: Iterable[Sequence[Turn]]) -> float:
    """Returns by how much the fastest step of a side's second-best turn is slower than that of its best: the median
    over the sides that took several turns.
    """
    found = []
    for turns in sides:
        if len(turns) > 1:
            first, second, *_ = sorted(map(min, turns))
            found.append(second / first - 1)
    return statistics.median(found)
