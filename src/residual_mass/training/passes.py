"""Teacher passes: which text a step trains on, and at which query positions.

A pass runs one sequence through the teacher. Without replay, every step has its own pass and stores nothing: the maps
of a layer train as soon as the teacher reaches it. With replay, each step draws a pass from a pool of the newest ones.
Everything is a function of (seed, step), so a resumed run sees the same data as an uninterrupted one.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from residual_mass.backbones.loading import Backbone
from residual_mass.core.settings import tokens_of
from residual_mass.files import sha256_text
from residual_mass.study.sections.training import ReplaySpec
from residual_mass.study.specs import TrainSpec
from residual_mass.texts.corpora import Cycle
from residual_mass.training.losses import ON_OUTPUTS, with_targets
from residual_mass.training.side_by_side import side_by_side
from residual_mass.training.teacher import LayerTrace, record_traces, stream_traces

Traces = list[LayerTrace]
"""Every layer's trace of one teacher pass."""
Consume = Callable[[int, LayerTrace], None]


class Passes:
    """The passes of one of a step's parallel sequences."""

    def __init__(self, spec: TrainSpec, backbone: Backbone, corpus: Cycle, slot: int):
        self.spec, self.backbone, self.corpus, self.slot = spec, backbone, corpus, slot
        self.pool: dict[int, Traces] = {}
        self.tokens = 0
        """Number of tokens that the teacher has read."""

    def run(self, step: int, consume: Consume) -> float:
        """Calls `consume` with every layer's trace of the step; replayed traces in parallel, so in any order.

        Returns:
            Wall-clock seconds spent in `consume`.
        """
        if not self._replays():
            return self._streamed(step, consume)
        traces = self._replayed(step)
        rng = torch.Generator().manual_seed(self._seed("queries", step))
        chosen = torch.randperm(len(traces[0].positions), generator=rng)[: self.spec.queries_per_step]
        chosen = chosen.to(self.backbone.device)
        started = time.perf_counter()

        def one(layer: int) -> None:
            consume(layer, traces[layer].at(chosen))

        side_by_side(len(traces), one, self.backbone.device)
        return time.perf_counter() - started

    def first(self) -> Traces:
        """Returns the first pass, for initial values."""
        return self._replayed(0) if self._replays() else self._recorded(0, 0)

    def length(self, step: int) -> int:
        """Returns the number of tokens used of a sequence at this step."""
        early = self.spec.curriculum
        if early is not None and step < round(early.share * self.spec.steps):
            return tokens_of(early.length)
        return tokens_of(self.spec.length)

    def _streamed(self, step: int, consume: Consume) -> float:
        seconds = 0.0

        def timed(layer: int, trace: LayerTrace) -> None:
            nonlocal seconds
            trace = self._prepared(trace)
            started = time.perf_counter()
            consume(layer, trace)
            seconds += time.perf_counter() - started

        positions = self._positions(step, step, self.spec.queries_per_step)
        stream_traces(self.backbone, self._sequence(step, step), positions, timed)
        return seconds

    def _replays(self) -> bool:
        return self.spec.replay != ReplaySpec(pool=1, reuse=1)

    def _wanted(self, step: int) -> range:
        """Returns the indices of the passes in the pool."""
        newest = step // self.spec.replay.reuse
        return range(max(0, newest - self.spec.replay.pool + 1), newest + 1)

    def _replayed(self, step: int) -> Traces:
        wanted = self._wanted(step)
        for index in wanted:
            if index not in self.pool:
                self.pool[index] = self._recorded(index, index * self.spec.replay.reuse)
        self.pool = {index: self.pool[index] for index in wanted}
        return self.pool[random.Random(self._seed("pass", step)).choice(wanted)]

    def _recorded(self, index: int, step: int) -> Traces:
        count = self.spec.queries_per_step * self.spec.replay.reuse
        sequence, positions = self._sequence(index, step), self._positions(index, step, count)
        return record_traces(self.backbone, sequence, positions, self._prepared)

    def _sequence(self, index: int, step: int) -> list[int]:
        ids = self.corpus.sequence(index)[: self.length(step)]
        self.tokens += len(ids)
        return ids

    def _positions(self, index: int, step: int, count: int) -> Tensor:
        """Draws distinct query positions of a pass, uniformly over the final share of the sequence."""
        length = self.length(step)
        window = min(length, max(1, round(length * self.spec.query_window)))
        rng = torch.Generator().manual_seed(self._seed("positions", index))
        return (torch.randperm(window, generator=rng)[:count] + length - window).to(self.backbone.device)

    def _prepared(self, trace: LayerTrace) -> LayerTrace:
        """Adds targets if an objective needs them, otherwise drops the values, which are then unused."""
        if any(variant.objective.name in ON_OUTPUTS for variant in self.spec.variants):
            return with_targets(trace, self.spec.anchors, training_budgets(self.spec))
        return replace(trace, values=trace.values[:, :0].clone())  # a view would keep all values alive

    def _seed(self, what: str, index: int) -> int:
        """Returns a 60-bit seed that is the same on every machine and in every process."""
        global_index = index * self.spec.sequences_per_step + self.slot
        return int(sha256_text(f"{self.spec.seed}/{what}/{global_index}")[:15], 16)


def training_budgets(spec: TrainSpec) -> tuple[float, ...]:
    """Returns all budgets whose supports a variant trains on, in ascending order."""
    residual = [v.objective for v in spec.variants if v.objective.name == "residual"]
    return tuple(sorted({b for objective in residual for b in objective.budgets or spec.eval_budgets}))
