"""The frozen teacher: its queries, keys and values on a text, the targets computed from them, and the text and query
positions that a step trains on.

A pass runs one sequence through the teacher. Without replay every step has its own pass (`FreshPasses`). With replay a
step draws one of the newest passes (`ReplayedPasses`). Everything is a function of (seed, step), so a resumed run sees
the same data as an uninterrupted one.

Shape letters: Hq / Hkv = query / KV heads, G = Hq / Hkv, Q = sampled query positions, L = keys, D = head dimension, S =
supports.
"""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from residual_mass.core.accounting import promoted
from residual_mass.core.output_matching import Targets, Window, exact_targets
from residual_mass.core.selection import retrieved_count
from residual_mass.decode.backend import LayerCall
from residual_mass.decode.recording import Recording
from residual_mass.decode.text import Text
from residual_mass.files import sha256_text
from residual_mass.model.layers import require_plain
from residual_mass.model.loading import Backbone
from residual_mass.spec.settings import AnchorSpec, tokens_of
from residual_mass.spec.specs import TrainSpec
from residual_mass.texts.corpora import Cycle

ON_OUTPUTS = ("lolcats", "residual")
"""Objectives that need values and the teacher's targets."""
SCORES_AT_ONCE = {"cpu": 2**20, "cuda": 2**27}
"""Query-key pairs scored at once for the targets."""


@dataclass(frozen=True)
class LayerTrace:
    """Queries [Hq, Q, D], keys and values [Hkv, L, D] of one layer after rotary embedding, in the backbone's dtype. A
    query sees the keys up to its entry in `positions` [Q]. Objectives in ON_OUTPUTS also need targets.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    positions: Tensor
    scale: float
    targets: Targets | None = None

    def at(self, chosen: Tensor) -> LayerTrace:
        """Selects query positions, given as indices [q]."""
        targets = None if self.targets is None else self.targets.at(chosen)
        queries = self.queries[:, chosen]
        positions = self.positions[chosen]
        return replace(self, queries=queries, positions=positions, targets=targets)

    def widened(self) -> LayerTrace:
        """Converts half precision to float32, which is exact."""
        return replace(self, queries=promoted(self.queries), keys=promoted(self.keys), values=promoted(self.values))

    def to(self, device: torch.device) -> LayerTrace:
        """Moves the trace to a device."""
        targets = None
        if self.targets is not None:
            targets = Targets(*(x.to(device) for x in self.targets))
        queries = self.queries.to(device)
        keys = self.keys.to(device)
        values = self.values.to(device)
        positions = self.positions.to(device)
        return LayerTrace(queries, keys, values, positions, self.scale, targets)


Consume = Callable[[int, LayerTrace], None]
"""Gets the number of a layer and its trace."""


class _LastLayerDone(Exception):
    """Ends the forward pass at the last layer's attention."""


@torch.no_grad()
def stream_traces(backbone: Backbone, ids: Sequence[int], positions: Tensor, consume: Consume) -> None:
    """Runs the teacher over `ids` and calls `consume` with each layer's trace as soon as its attention is reached.

    Attention itself is not replaced. The pass ends at the last layer's queries and keys, without logits. The teacher
    runs without gradients; `consume` may compute gradients.
    """
    last = backbone.shape.layers - 1
    require_plain(backbone.model)

    def observe(call: LayerCall) -> None:
        trace = LayerTrace(call.query[0, :, positions], call.key[0], call.value[0], positions, call.scale)
        with torch.enable_grad():
            consume(call.index, trace)
        if call.index == last:
            raise _LastLayerDone

    with suppress(_LastLayerDone):
        Text(backbone.model, Recording(observe)).read(torch.tensor([list(ids)], device=backbone.device))


def record_traces(
    backbone: Backbone, ids: Sequence[int], positions: Tensor, prepare: Callable[[LayerTrace], LayerTrace]
) -> list[LayerTrace]:
    """Returns the traces of all layers in one pass, each transformed by `prepare`."""
    traces: list[LayerTrace] = []
    stream_traces(backbone, ids, positions, lambda _, trace: traces.append(prepare(trace)))
    return traces


def with_targets(trace: LayerTrace, anchors: AnchorSpec, budgets: Sequence[float]) -> LayerTrace:
    """Adds the teacher's targets for the supports of these budgets (percent of the keys that each query sees)."""
    # No query sees a later key.
    seen = int(trace.positions.max()) + 1
    scores_of_query = trace.queries.shape[0] * seen
    at_once = max(1, SCORES_AT_ONCE[trace.keys.device.type] // scores_of_query)
    widened = trace.widened()
    keys = widened.keys[:, :seen]
    values = widened.values[:, :seen]
    places = torch.arange(len(trace.positions), device=trace.positions.device)
    parts = []
    for block in places.split(at_once):
        positions = trace.positions[block]
        queries = by_kv_head(widened.queries[:, block], len(keys))
        _, num_positions, group, _ = queries.shape
        # One product for all queries of a KV head: [Hkv, q G, L], then [Hkv, q, G, L].
        scores = queries.flatten(1, 2) @ keys.transpose(-1, -2) * trace.scale
        scores = scores.unflatten(1, (num_positions, group))
        window = Window(positions, anchors.sink, anchors.tail)
        k = retrieved(positions, anchors, budgets)
        parts.append(exact_targets(scores, values, window, k))
    # `trace`, not `widened`: in half precision recorded passes take half the memory.
    return replace(trace, targets=Targets.joined(parts))


def retrieved(positions: Tensor, anchors: AnchorSpec, budgets: Sequence[float]) -> Tensor:
    """Returns K, the number of retrieved tokens, of each support for queries at `positions`: [Q, S]."""
    num_anchors = anchors.sink + anchors.tail
    counts = []
    for position in positions.tolist():
        counts.append([retrieved_count(budget, position + 1, num_anchors) for budget in budgets])  # a query sees itself
    k = torch.tensor(counts, dtype=torch.long, device=positions.device)
    return k.view(len(counts), len(budgets))  # also without budgets


def by_kv_head(x: Tensor, kv_heads: int) -> Tensor:
    """Groups query heads by KV head: [Hq, Q, C] -> [Hkv, Q, G, C]."""
    return x.unflatten(0, (kv_heads, -1)).transpose(1, 2)


class Passes(ABC):
    """Teacher passes for one of the parallel sequences of a step.

    The text of a pass and its query positions follow from its index, `slot` and the seed.
    """

    def __init__(self, spec: TrainSpec, backbone: Backbone, corpus: Cycle, slot: int):
        self.spec = spec
        self.backbone = backbone
        self.corpus = corpus
        self.slot = slot

    @abstractmethod
    def run(self, step: int, consume: Consume) -> float:
        """Calls `consume` with every layer's trace of the step, in any order; returns the seconds that this took."""

    def first(self) -> list[LayerTrace]:
        """Returns the traces of the first pass, for initial values of the maps."""
        return self.recorded(0)

    def recorded(self, index: int) -> list[LayerTrace]:
        """Returns the traces of a new pass."""
        ids, positions = self.text(index)
        return record_traces(self.backbone, ids, positions, self.prepared)

    def text(self, index: int) -> tuple[list[int], Tensor]:
        """Returns the tokens of a pass and distinct query positions for all steps that use it. The positions are drawn
        uniformly from the last share `query_window` of the tokens.
        """
        spec = self.spec
        ids = self.corpus.sequence(index)[: tokens_of(spec.length)]
        window = max(1, round(len(ids) * spec.query_window))
        window = min(len(ids), window)
        places = torch.randperm(window, generator=self.random("positions", index))
        # From places in the window to positions in the text, whose last tokens are the window.
        positions = places[: spec.queries_per_step * spec.replay.reuse] + len(ids) - window
        return ids, positions.to(self.backbone.device)

    def prepared(self, trace: LayerTrace) -> LayerTrace:
        """Adds targets if an objective needs them; otherwise drops the values, which are not used then."""
        objectives = {variant.objective.name for variant in self.spec.variants}
        if not objectives.isdisjoint(ON_OUTPUTS):
            return with_targets(trace, self.spec.anchors, training_budgets(self.spec))
        none = trace.values[:, :0].clone()  # a view would keep all values alive
        return replace(trace, values=none)

    def random(self, what: str, index: int) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed(what, index))

    def seed(self, what: str, index: int) -> int:
        """Returns a 60-bit seed that is the same on every machine and in every process."""
        # A number for each sequence over all steps and slots: no two share random numbers.
        global_index = index * self.spec.sequences_per_step + self.slot
        digest = sha256_text(f"{self.spec.seed}/{what}/{global_index}")
        return int(digest[:15], 16)  # a hex digit has 4 bits, and a generator takes at most 64


class FreshPasses(Passes):
    """One pass for each step. The trace of a layer is consumed within the forward pass, when the teacher reaches its
    attention, so that only one trace is in memory.
    """

    def run(self, step: int, consume: Consume) -> float:
        seconds = 0.0

        def timed(layer: int, trace: LayerTrace) -> None:
            nonlocal seconds
            prepared = self.prepared(trace)
            # Forward pass and targets are shared by all variants and not timed.
            started = time.perf_counter()
            consume(layer, prepared)
            seconds += time.perf_counter() - started

        ids, positions = self.text(step)
        stream_traces(self.backbone, ids, positions, timed)
        return seconds


class ReplayedPasses(Passes):
    """Every step draws one of the newest passes and some of its query positions, and consumes its layers in parallel.

    Attributes:
        pool: the newest passes by index, each with every layer's trace.
    """

    pool: Mapping[int, list[LayerTrace]] = {}

    def run(self, step: int, consume: Consume) -> float:
        traces = self._sampled_pass(step)
        device = self.backbone.device
        order = torch.randperm(len(traces[0].positions), generator=self.random("queries", step))
        chosen = order[: self.spec.queries_per_step].to(device)
        started = time.perf_counter()
        parallel_layers(len(traces), lambda layer: consume(layer, traces[layer].at(chosen)), device)
        return time.perf_counter() - started

    def first(self) -> list[LayerTrace]:
        return self._sampled_pass(0)

    def _sampled_pass(self, step: int) -> list[LayerTrace]:
        # A new pass enters every `reuse` steps, and the oldest of `pool` leaves.
        newest = step // self.spec.replay.reuse
        oldest = max(0, newest - self.spec.replay.pool + 1)
        kept = range(oldest, newest + 1)
        # After a resume this records the whole pool again: a pass follows from its index alone.
        self.pool = {index: self.pool.get(index) or self.recorded(index) for index in kept}
        generator = random.Random(self.seed("pass", step))
        return self.pool[generator.choice(kept)]


def training_budgets(spec: TrainSpec) -> tuple[float, ...]:
    """Returns the budgets of all supports that any variant trains on, in ascending order."""
    budgets: set[float] = set()
    for variant in spec.variants:
        if variant.objective.name == "residual":
            budgets.update(variant.objective.budgets or spec.eval_budgets)
    return tuple(sorted(budgets))


def parallel_layers(count: int, work: Callable[[int], None], device: torch.device) -> None:
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
            list(pool.map(work, range(count)))  # `map` raises errors only when its results are read
    finally:
        torch.set_num_threads(cores)  # a thread's setting partly applies to the whole process
