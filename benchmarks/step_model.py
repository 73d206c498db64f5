"""A model of decode steps on a GPU, made without one: launches that are counted, bytes, and the time that both explain.

Launches are counted, not estimated: the decoder of the runtime stage runs a step on torch's `meta` device, where
tensors have shapes and no values, and every operation of torch that is a kernel on a GPU is counted, as is every launch
of `core.fused.triton_path`, behind a stand-in for Triton that compiles nothing. Bytes are those of `runtime.traffic`.
The time of a step is its bytes at --rate plus --gap for each launch. Neither arithmetic nor a kernel that is
slower than its bytes is part of it: the model is a lower bound that says where to look first, and no measurement.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import metrics
from torch.utils._python_dispatch import TorchDispatchMode
from training_pass import LLAMA
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from residual_mass.backbones import static_decode
from residual_mass.backbones.phi_maps import HeadShape, PhiMaps
from residual_mass.backbones.static_decode import StaticDecoder
from residual_mass.core import fused
from residual_mass.core.fused import build_cache
from residual_mass.core.settings import AnchorSpec, MapSpec, tokens_of
from residual_mass.core.support import retrieved_count
from residual_mass.runtime.measure import STEPS
from residual_mass.runtime.traffic import step_traffic
from residual_mass.study import labels

SHAPES = {"1b": LLAMA["llama-3.2-1b"], "3b": LLAMA["llama-3.2-3b"]}
CONTEXTS, BATCHES = ("4k", "16k", "64k"), (1, 8)
METHODS = (*labels.METHODS, "topk_moments", "scan4_moments")
ANCHORS, MAP, BUDGET = AnchorSpec(), MapSpec(), 1.0
RATE = 4.3e12
"""Bytes a second, read and written, of a large copy on an H200, whose memory is specified at 4.8e12."""
GAP = 1.3e-6
"""Seconds from one small kernel of a CUDA graph to the next, as reported for an H100 (Hazy Research, 2025)."""
ATTENTION, SPLIT_KERNELS = "attention of Full", 2
"""Flash decoding splits the keys among programs and then combines their sums: assumed, for no GPU is asked."""
NO_KERNEL = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "_reshape_alias",
    "detach", "lift_fresh",
}  # fmt: skip
"""Operations that only allocate or name memory, beside those that torch itself calls views."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=RATE, help="bytes per second (the check's ceilings measure it)")
    parser.add_argument("--gap", type=float, default=GAP, help="seconds per launch")
    options = parser.parse_args()
    for line in page(options.rate, options.gap):
        print(line)


def page(rate: float, gap: float) -> Iterator[str]:
    yield "# A model of decode steps on a GPU"
    yield ""
    yield "Made by `python benchmarks/step_model.py`, without a GPU: **a model, never a measurement**. Launches are"
    yield "counted, bytes computed, and a step is taken to last as long as its bytes do at the speed of a large copy,"
    yield "with a gap for every launch. What arithmetic or uneven kernels add is not in it: `make gpu-check`"
    yield "measures."
    yield ""
    yield f"Assumed: {rate / 1e12:g} TB/s; {1e6 * gap:g} microseconds from one kernel of a CUDA graph to the next;"
    yield f"{SPLIT_KERNELS} kernels for a layer's attention of Full. Budget {BUDGET:g} %, bfloat16."
    yield ""
    places = [(shape, context, batch) for shape in SHAPES for context in CONTEXTS for batch in BATCHES]
    rows = [(*place, method) for place in places for method in METHODS]
    counted = {row: launches(SHAPES[row[0]], row[3], row[1], row[2]) for row in rows}
    yield "## Launches"
    yield ""
    yield f"At {CONTEXTS[-1]}: of a layer outside its attention, of a layer in it (of these Triton's by name), and once"
    yield "a step."
    yield ""
    yield "| backbone | batch | method | outside, a layer | attention, a layer | of these Triton's | once | of a step |"
    yield "|---|---|---|---|---|---|---|---|"
    for (shape, context, batch, method), one in counted.items():
        if context == CONTEXTS[-1]:
            triton = ", ".join(name + (f" ({count})" if count > 1 else "") for name, count in one.kernels.items())
            cells = [shape, batch, method, one.body, one.attention, triton or "--", one.once]
            yield "| " + " | ".join(map(str, [*cells, one.of_step(SHAPES[shape].num_hidden_layers)])) + " |"
    yield ""
    yield "## Time by part"
    yield ""
    yield "Milliseconds of a step. *Rest* stands for cached features, summaries, moments and the weights of feature"
    yield "maps, *scores* for writing and reading them once, *launches* for gaps outside the attention and in it. The"
    yield "last column names the largest part and, where that is the weights, which every method reads, the next one."
    yield ""
    titles = ["weights", "keys", "values", "rest", "scores", "launches outside", "launches in attention"]
    head = ["backbone", "context", "batch", "method", "MB a layer beside weights", *titles]
    yield "| " + " | ".join([*head, "model", "floor", "model / floor", "limited by"]) + " |"
    yield "|---" * (len(head) + 4) + "|"
    models = {shape: on_meta(config) for shape, config in SHAPES.items()}
    with torch.device("meta"):
        maps = {shape: PhiMaps(HeadShape.of(config), MAP) for shape, config in SHAPES.items()}
    for (shape, context, batch, method), launched in counted.items():
        one = step_time(models[shape], maps[shape], launched, method, context, batch, rate, gap)
        ordered = sorted(zip(one.parts, titles, strict=True), reverse=True)
        limits = [title for _, title in ordered][: 2 if ordered[0][1] == "weights" else 1]
        numbers = [f"{ms:.3f}" for ms in (*one.parts, one.total, one.floor)]
        place = [shape, context, str(batch), method, f"{one.layer_bytes / 1e6:.1f}"]
        yield "| " + " | ".join([*place, *numbers, f"{one.total / one.floor:.2f}", ", ".join(limits)]) + " |"
    yield ""
    yield "## With a compiled model"
    yield ""
    body = compiled_body()
    yield f"Where torch compiles what the model computes between attentions, {body} launches of a layer are left"
    yield "outside the attention, products included; counted on what it generates for a CPU, not for a GPU."
    yield ""
    yield "| backbone | context | batch | method | of a step | model, ms | floor, ms | model / floor |"
    yield "|---|---|---|---|---|---|---|---|"
    for (shape, context, batch, method), launched in counted.items():
        if context == CONTEXTS[-1]:
            less = replace(launched, body=body)
            one = step_time(models[shape], maps[shape], less, method, context, batch, rate, gap)
            numbers = [f"{one.total:.3f}", f"{one.floor:.3f}", f"{one.total / one.floor:.2f}"]
            cells = [shape, context, batch, method, less.of_step(SHAPES[shape].num_hidden_layers), *numbers]
            yield "| " + " | ".join(map(str, cells)) + " |"


@dataclass(frozen=True)
class Launches:
    """Kernels that a step launches.

    Attributes:
        body: of a layer, outside its attention.
        attention: of a layer in its attention, from writing the new key to the output.
        kernels: Triton's among these, by name.
        once: of a step, whatever its number of layers.
    """

    body: int
    attention: int
    kernels: dict[str, int]
    once: int

    def of_step(self, layers: int) -> int:
        return layers * (self.body + self.attention) + self.once


@dataclass(frozen=True)
class StepTime:
    """Milliseconds of a step.

    Attributes:
        parts: weights, keys, values, rest, scores, launches outside the attention and in it.
        layer_bytes: bytes of a layer beside its weights.
    """

    parts: tuple[float, ...]
    floor: float
    layer_bytes: float

    @property
    def total(self) -> float:
        return sum(self.parts)


def step_time(
    model: PreTrainedModel,
    phi: PhiMaps,
    counted: Launches,
    method: str,
    context: str,
    batch: int,
    rate: float,
    gap: float,
) -> StepTime:
    length, layers = tokens_of(context), model.config.num_hidden_layers
    k = retrieved_count(BUDGET, length, ANCHORS.sink + ANCHORS.tail)
    traffic = step_traffic(
        model, phi, "fused", method, batch=batch, length=length, k=k, anchors=ANCHORS, generated=STEPS // 2
    )
    named = asdict(traffic)
    by_bytes = [named.pop(name) for name in ("weights", "keys", "values")]
    scores = named.pop("scores")
    outside = layers * counted.body + counted.once
    parts = [1e3 * count / rate for count in (*by_bytes, sum(named.values()), scores)]
    parts += [1e3 * count * gap for count in (outside, layers * counted.attention)]
    return StepTime(tuple(parts), 1e3 * traffic.total / rate, (traffic.total - traffic.weights) / layers)


def launches(config: LlamaConfig, method: str, context: str = "4k", batch: int = 1) -> Launches:
    """Counts a step's launches in models of one and two layers, whose difference is a layer."""
    one, two = (_counted(config, method, context, batch, layers) for layers in (1, 2))
    body, attention = (two[where].total() - one[where].total() for where in ("body", "attention"))
    kernels = {name: two["triton"][name] - one["triton"][name] for name in two["triton"]}
    once = one["body"].total() - body + one["attention"].total() - attention
    return Launches(body, attention, kernels, once)


def compiled_body() -> int:
    """Counts the launches of a layer outside its attention where torch compiles them: all layers share their code."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)
    keys, first = torch.zeros(1, 2, 64, 16, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int32)
    caches = [build_cache(keys, keys, first, first + 64, 1) for _ in range(config.num_hidden_layers)]
    metrics.reset()
    StaticDecoder(model, caches, "topk", 1, ANCHORS, None, 1, compiled=True).run(first.long())
    products = sum(isinstance(module, nn.Linear) for module in model.model.layers[0].modules())
    return metrics.generated_kernel_count + products


def _counted(config: LlamaConfig, method: str, context: str, batch: int, layers: int) -> dict[str, Counter[str]]:
    """Launches of one step by what launched them: in the body or in the attention, and there Triton's once more."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = layers
    model, shape = on_meta(config), HeadShape.of(config)
    length = tokens_of(context)
    counts = {where: Counter[str]() for where in ("body", "attention", "triton")}

    def launched(name: str) -> None:
        counts["attention"][name] += 1
        counts["triton"][name] += 1

    with stand_in_for_triton(launched) as path:
        phi = PhiMaps(shape, MAP).to("meta").requires_grad_(False)
        keys = torch.empty(batch, shape.kv_heads, length, shape.head_dim, dtype=torch.bfloat16, device="meta")
        first = torch.empty(batch, dtype=torch.int32, device="meta")
        caches = [build_cache(keys, keys, first, first, 1) for _ in range(layers)]
        k = retrieved_count(BUDGET, length, ANCHORS.sink + ANCHORS.tail)
        with mock.patch.object(static_decode, "decode_attention_for", lambda *_: path.decode_attention):
            decoder = _CountedDecoder(model, caches, method, k, ANCHORS, phi, 1)
        with mock.patch.object(F, "scaled_dot_product_attention", decoder.full), decoder.counter(counts):
            decoder.run(decoder.token[:, 0])
    return counts


class _CountedDecoder(StaticDecoder):
    """The decoder, which tells its counter when it is in the attention."""

    def counter(self, counts: dict[str, Counter[str]]) -> TorchDispatchMode:
        self.mode = _Kernels(counts)
        return self.mode

    def full(self, query: Tensor, *rest: object, **options: object) -> Tensor:
        self.mode.counts["attention"][ATTENTION] += SPLIT_KERNELS
        return torch.empty_like(query)

    def __call__(self, module: nn.Module, query: Tensor, *rest: Any) -> Tensor:
        self.mode.where = "attention"
        output = super().__call__(module, query, *rest)
        self.mode.where = "body"
        return output


class _Kernels(TorchDispatchMode):
    """Counts operations that are kernels on a GPU."""

    def __init__(self, counts: dict[str, Counter[str]]) -> None:
        super().__init__()
        self.counts, self.where = counts, "body"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and name not in NO_KERNEL and func.namespace == "aten":
            self.counts[self.where][name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def stand_in_for_triton(launched: Callable[[str], None]) -> Iterator[types.ModuleType]:
    """Yields `core.fused.triton_path` with kernels that only tell their name when they are launched."""

    class Kernel:
        def __init__(self, function: Callable[..., None]) -> None:
            self.name = function.__name__

        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *arguments, **settings: launched(self.name)

    class Constant:
        def __init__(self, value: Any) -> None:
            self.value = value

    def jit(function: Callable[..., None] | None = None, **options: object) -> Any:
        return Kernel if function is None else Kernel(function)

    triton, language = _Lenient("triton"), _Lenient("triton.language")
    triton.jit, triton.JITFunction, triton.language, language.constexpr = jit, Kernel, language, Constant
    triton.cdiv = lambda a, b: -(-a // b)
    triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()
    held = _forgotten()
    with mock.patch.dict(sys.modules, {"triton": triton, "triton.language": language}):
        try:
            yield importlib.import_module(f"{fused.__name__}.triton_path")
        finally:
            _forgotten()
            sys.modules.update(held)
            for name, module in held.items():
                setattr(fused, name.rpartition(".")[2], module)


def _forgotten() -> dict[str, types.ModuleType]:
    """Lets Python forget the modules that need Triton, so that they are imported anew; returns those that it knew."""
    known = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith(f"{fused.__name__}.triton")}
    for name in known:
        delattr(fused, name.rpartition(".")[2])
    return known


class _Lenient(types.ModuleType):
    """A module whose other attributes are all `_Anything`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, one := _Anything())  # the same at every call, as a key of dictionaries
        return one


class _Anything:
    """A type, a setting, or a decorator that returns what it is given."""

    def __call__(self, *given: Any, **settings: Any) -> Any:
        return given[0] if len(given) == 1 and not settings else self


def on_meta(config: LlamaConfig) -> PreTrainedModel:
    """A model of a shape without values."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)


if __name__ == "__main__":
    main()
