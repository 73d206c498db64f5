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
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from residual_mass.core.accounting import promoted
from residual_mass.core.output_matching import Targets, Window, exact_targets
from residual_mass.core.selection import retrieved_count
from residual_mass.files import sha256_text
from residual_mass.model.hook import attention_hook, exact_attention
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
        return replace(self, queries=self.queries[:, chosen], positions=self.positions[chosen], targets=targets)

    def widened(self) -> LayerTrace:
        """Converts half precision to float32, which is exact."""
        queries, keys, values = (promoted(x) for x in (self.queries, self.keys, self.values))
        return replace(self, queries=queries, keys=keys, values=values)

    def to(self, device: torch.device) -> LayerTrace:
        """Moves the trace to a device."""
        targets = None if self.targets is None else Targets(*(x.to(device) for x in self.targets))
        queries, keys, values = (x.to(device) for x in (self.queries, self.keys, self.values))
        return LayerTrace(queries, keys, values, self.positions.to(device), self.scale, targets)


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

    def handler(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        trace = LayerTrace(q[0, :, positions], k[0], v[0], positions, scale)
        with torch.enable_grad():
            consume(module.layer_idx, trace)
        if module.layer_idx == last:
            raise _LastLayerDone
        return exact_attention(module, q, k, v, mask, scale)

    inputs = torch.tensor([list(ids)], device=backbone.device)
    try:
        with attention_hook(backbone.model, handler):
            backbone.model.get_decoder()(inputs, use_cache=False)
    except _LastLayerDone:
        pass


def record_traces(
    backbone: Backbone, ids: Sequence[int], positions: Tensor, prepare: Callable[[LayerTrace], LayerTrace]
) -> list[LayerTrace]:
    """Returns the traces of all layers in one pass, each transformed by `prepare`."""
    traces: list[LayerTrace] = []
    stream_traces(backbone, ids, positions, lambda _, trace: traces.append(prepare(trace)))
    return traces


def with_targets(trace: LayerTrace, anchors: AnchorSpec, budgets: Sequence[float]) -> LayerTrace:
    """Adds the teacher's targets for the supports of these budgets (percent of the keys that each query sees)."""
    seen, parts = int(trace.positions.max()) + 1, []
    at_once = max(1, SCORES_AT_ONCE[trace.keys.device.type] // (trace.queries.shape[0] * seen))
    widened = trace.widened()
    keys, values = widened.keys[:, :seen], widened.values[:, :seen]
    for block in torch.arange(len(trace.positions), device=trace.positions.device).split(at_once):
        queries, positions = by_kv_head(widened.queries[:, block], len(keys)), trace.positions[block]
        scores = (queries.flatten(1, 2) @ keys.transpose(-1, -2) * trace.scale).unflatten(1, queries.shape[1:3])
        window = Window(positions, anchors.sink, anchors.tail)
        parts.append(exact_targets(scores, values, window, retrieved(positions, anchors, budgets)))
    return replace(trace, targets=Targets.joined(parts))


def retrieved(positions: Tensor, anchors: AnchorSpec, budgets: Sequence[float]) -> Tensor:
    """Returns K, the number of retrieved tokens, of each support for queries at `positions`: [Q, S]."""
    num_anchors = anchors.sink + anchors.tail
    counts = [[retrieved_count(budget, p + 1, num_anchors) for budget in budgets] for p in positions.tolist()]
    return torch.tensor(counts, dtype=torch.long, device=positions.device).view(len(counts), len(budgets))


def by_kv_head(x: Tensor, kv_heads: int) -> Tensor:
    """Groups query heads by KV head: [Hq, Q, C] -> [Hkv, Q, G, C]."""
    return x.unflatten(0, (kv_heads, -1)).transpose(1, 2)


class Passes(ABC):
    """Teacher passes for one of the parallel sequences of a step.

    The text of a pass and its query positions follow from its index, `slot` and the seed.
    """

    def __init__(self, spec: TrainSpec, backbone: Backbone, corpus: Cycle, slot: int):
        self.spec, self.backbone, self.corpus, self.slot = spec, backbone, corpus, slot

    @abstractmethod
    def run(self, step: int, consume: Consume) -> float:
        """Calls `consume` with every layer's trace of the step, in any order; returns the seconds that this took."""

    def first(self) -> list[LayerTrace]:
        """Returns the traces of the first pass, for initial values of the maps."""
        return self.recorded(0)

    def recorded(self, index: int) -> list[LayerTrace]:
        """Returns the traces of a new pass."""
        return record_traces(self.backbone, *self.text(index), self.prepared)

    def text(self, index: int) -> tuple[list[int], Tensor]:
        """Returns the tokens of a pass and distinct query positions for all steps that use it. The positions are drawn
        uniformly from the last share `query_window` of the tokens.
        """
        spec, length = self.spec, self.spec.length
        if spec.curriculum is not None and index * spec.replay.reuse < round(spec.curriculum.share * spec.steps):
            length = spec.curriculum.length
        ids = self.corpus.sequence(index)[: tokens_of(length)]
        window = min(len(ids), max(1, round(len(ids) * spec.query_window)))
        drawn = torch.randperm(window, generator=self.random("positions", index))
        positions = drawn[: spec.queries_per_step * spec.replay.reuse] + len(ids) - window
        return ids, positions.to(self.backbone.device)

    def prepared(self, trace: LayerTrace) -> LayerTrace:
        """Adds targets if an objective needs them; otherwise drops the values, which are not used then."""
        if any(variant.objective.name in ON_OUTPUTS for variant in self.spec.variants):
            return with_targets(trace, self.spec.anchors, training_budgets(self.spec))
        return replace(trace, values=trace.values[:, :0].clone())  # a view would keep all values alive

    def random(self, what: str, index: int) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed(what, index))

    def seed(self, what: str, index: int) -> int:
        """Returns a 60-bit seed that is the same on every machine and in every process."""
        global_index = index * self.spec.sequences_per_step + self.slot
        return int(sha256_text(f"{self.spec.seed}/{what}/{global_index}")[:15], 16)


class FreshPasses(Passes):
    """One pass for each step. The trace of a layer is consumed within the forward pass, when the teacher reaches its
    attention, so that only one trace is in memory.
    """

    def run(self, step: int, consume: Consume) -> float:
        seconds = 0.0

        def timed(layer: int, trace: LayerTrace) -> None:
            nonlocal seconds
            prepared, started = self.prepared(trace), time.perf_counter()
            consume(layer, prepared)
            seconds += time.perf_counter() - started

        stream_traces(self.backbone, *self.text(step), timed)
        return seconds


class ReplayedPasses(Passes):
    """Every step draws one of the newest passes and some of its query positions, and consumes its layers in parallel.

    Attributes:
        pool: the newest passes by index, each with every layer's trace.
    """

    pool: Mapping[int, list[LayerTrace]] = {}

    def run(self, step: int, consume: Consume) -> float:
        traces, device = self._drawn(step), self.backbone.device
        chosen = torch.randperm(len(traces[0].positions), generator=self.random("queries", step))
        chosen = chosen[: self.spec.queries_per_step].to(device)
        started = time.perf_counter()
        parallel_layers(len(traces), lambda layer: consume(layer, traces[layer].at(chosen)), device)
        return time.perf_counter() - started

    def first(self) -> list[LayerTrace]:
        return self._drawn(0)

    def _drawn(self, step: int) -> list[LayerTrace]:
        newest = step // self.spec.replay.reuse
        wanted = range(max(0, newest - self.spec.replay.pool + 1), newest + 1)
        self.pool = {index: self.pool.get(index) or self.recorded(index) for index in wanted}
        return self.pool[random.Random(self.seed("pass", step)).choice(wanted)]


def training_budgets(spec: TrainSpec) -> tuple[float, ...]:
    """Returns the budgets of all supports that any variant trains on, in ascending order."""
    residual = [v.objective for v in spec.variants if v.objective.name == "residual"]
    return tuple(sorted({b for objective in residual for b in objective.budgets or spec.eval_budgets}))


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
            list(pool.map(work, range(count)))
    finally:
        torch.set_num_threads(cores)  # a thread's setting partly applies to the whole process
