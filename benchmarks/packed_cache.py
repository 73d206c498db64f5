"""Costs of a decode step on a CPU by cache and method, and the distance of its next token from full attention.

Each prompt is read once, and every side continues it by the same tokens: held-out text by its own, a RULER prompt by
its answer. Prints a table by context length: milliseconds of a step of `model.generate` on the first prompt (the
median, and the fastest, which other work disturbs least; sides take turns), memory of the cache, the bytes that a step
reads of it, and by text the mean KL divergence in nats from full attention in float32, with the 9th decile over the
tokens of all texts. Methods under `transformers` run in torch, on exact keys and values in float32; their memory and
reads are counted as in a packed cache in bfloat16.

With `--synthetic`, keys and values are random, no context is read, and only costs are printed. With `--layer`, only one
layer's attention is timed, and no model is loaded.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import SMOL
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from residual_mass.benchmarks.ruler import assets_data, build_examples
from residual_mass.decode.backend import Backend, Prefill
from residual_mass.decode.packed_backend import PackedBackend
from residual_mass.decode.recording import prefill
from residual_mass.decode.terms import retrieved_by
from residual_mass.decode.text import Text
from residual_mass.decode.torch_backend import TorchBackend
from residual_mass.kernels import LayerCache, load
from residual_mass.measure.steps import Side, prefilled_cache, random_keys, timed
from residual_mass.methods import method_named
from residual_mass.methods.arms import arm_of
from residual_mass.methods.served import packing_of
from residual_mass.methods.step_bytes import kept_bytes, most_retrieved, step_bytes
from residual_mass.model.loading import Backbone, encode, load_backbone
from residual_mass.spec.settings import AnchorSpec
from residual_mass.texts.corpora import held_out_corpus
from residual_mass.timing import Turn, take_turns, time_in_turns

ANCHORS = AnchorSpec()
RULER_TASKS = ("niah_multivalue", "ruler_vt", "ruler_cwe")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--assets", type=Path, default=Path("results/assets"))
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8000])
    parser.add_argument("--texts", nargs="+", default=["books", "code", "wiki", "ruler"])
    parser.add_argument("--prompts", type=int, default=2, help="of each text; for RULER, of each of three tasks")
    parser.add_argument("--methods", nargs="+", default=["scan4_regression_64"])
    parser.add_argument("--budgets", type=float, nargs="+", default=[2.0, 4.0], help="percent")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds; 0 times nothing")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-torch", action="store_true", help="only packed caches and transformers' full attention")
    parser.add_argument("--synthetic", action="store_true", help="random keys and values, and only costs")
    parser.add_argument("--layer", action="store_true", help="only one layer's attention, on random keys and values")
    parser.add_argument("--heads", type=int, nargs=3, default=[9, 3, 64], help="for --layer: query heads, KV heads, D")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    full, cache8 = method_named("full"), method_named("cache8")
    sides = [Side(full, None, False), Side(full, None, True), Side(cache8, None, True)]
    arms = [(method_named(name), budget / 100) for name in options.methods for budget in options.budgets]
    sides += [Side(*arm, True) for arm in arms]
    if not options.no_torch:
        sides += [Side(method_named("cache4_rotated"), None, False), *(Side(*arm, False) for arm in arms)]
    if options.layer:
        return layers(sides, options)
    backbone = load_backbone(SMOL, options.assets, torch.device("cpu"))
    for length in options.lengths:
        table(backbone, length, sides, options)


def layers(sides: list[Side], options: Any) -> None:
    """Prints microseconds of one layer's attention by context length, the median and the fastest. Before every call,
    128 MiB of other numbers are read, which evict the layer from the processor's caches, and a short layer is run,
    which loads the code again.
    """
    head = ["cache", "method", *(f"{length:,}" for length in options.lengths)]
    print(f"{options.heads} query heads, KV heads and width, {options.threads} threads\n")
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    sides = [side for side in sides if side.packed or side.method.whole_prefix]
    seconds: dict[Side, list[list[float]]] = {side: [] for side in sides}
    others = torch.ones(2**25)
    for length in options.lengths:
        calls: dict[str, Callable[[], object]] = {}
        for side in sides:
            short = layer(side, 256, options.heads)
            calls[f"before {side}"] = lambda short=short: (others.sum(), short())
            calls[str(side)] = layer(side, length, options.heads)
        timings = time_in_turns(calls, options.rounds)
        for side in sides:
            seconds[side].append(timings[str(side)])
    for side in sides:
        cells = [f"{1e6 * statistics.median(took):.0f} ({1e6 * min(took):.0f})" for took in seconds[side]]
        print(f"| {' | '.join(['packed' if side.packed else 'SDPA, float32', side.name, *cells])} |")


def layer(side: Side, length: int, sizes: list[int]) -> Callable[[], object]:
    """Returns a function that runs a step of one layer over random keys and values."""
    query_heads, heads, width = sizes
    draw = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(1, heads, length, width, generator=draw) for _ in range(2))
    query = torch.randn(1, query_heads, width, generator=draw)
    packing, library = packing_of(side.method), load()
    if not side.packed:
        return partial(scaled_dot_product_attention, query.unsqueeze(2), keys, values, enable_gqa=True)
    if packing is None or library is None:
        raise ValueError(f"no kernels for {side}")
    cache = LayerCache(library, keys, values, [0], bits=packing.bits, clusters=packing.clusters)
    arm = arm_of(side.method, side.budget)
    cache.choose(lambda count: retrieved_by(arm, count, ANCHORS, None), side.method.own is not None)
    key, value = torch.randn(2, 1, heads, 1, width, generator=draw)

    def step() -> None:
        cache.step(query.unsqueeze(2), key, value, width**-0.5)
        cache.drop(1)  # so that every call reads as much

    return step


def table(backbone: Backbone, length: int, sides: list[Side], options: Any) -> None:
    """Prints the rows of one context length."""
    distances: dict[Side, dict[str, list[Tensor]]] = {side: {} for side in sides}
    costs: dict[Side, tuple[str, float, float]] = {}
    for name, (read, continued) in prompts(backbone, length, options):
        if not costs:
            costs = measured(backbone, read, sides, options.rounds)
        if options.synthetic:
            break
        reference = forced(backbone, continued, backend_of(backbone, read, sides[0]))
        for side in sides[1:]:
            estimate = forced(backbone, continued, backend_of(backbone, read, side))
            kl = (reference.exp() * (reference - estimate)).sum(-1)
            distances[side].setdefault(name, []).append(kl)
    columns = list(distances[sides[-1]])
    head = ["cache", "method", "ms a step (fastest)", "MiB kept", "MiB read a step"]
    head += [f"KL {name}" for name in columns]
    head += ["KL, 9 of 10 tokens below"] * bool(columns)
    print(f"\n{length} tokens, {options.threads} threads\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for side in sides:
        steps, kept, reads = costs[side]
        by_text = [torch.cat(distances[side][name]) if side is not sides[0] else torch.zeros(1) for name in columns]
        cells = ["packed" if side.packed else "transformers", side.name, steps]
        cells += [f"{kept / 2**20:.1f}", f"{reads / 2**20:.1f}"]
        cells += [f"{kl.mean():.1e}" for kl in by_text]
        if columns:
            cells.append(f"{torch.cat(by_text).quantile(0.9):.1e}")
        print(f"| {' | '.join(cells)} |", flush=True)


def prompts(backbone: Backbone, length: int, options: Any) -> Iterator[tuple[str, tuple[Prefill, Tensor]]]:
    """Yields the name of a text, the prefill of one of its prompts, and the tokens [1, T] that continue it; with
    `--synthetic`, random keys and values.
    """
    if options.synthetic:
        yield "", (Prefill(random_keys(backbone.model, length)), torch.empty(1, 0))
        return
    for name, ids, following in documents(backbone, length, options):
        yield name, (prefill(backbone.model, [ids]), torch.tensor([following]))


def documents(backbone: Backbone, length: int, options: Any) -> Iterator[tuple[str, list[int], list[int]]]:
    """Yields the name of a text, the tokens of one of its prompts, and up to `options.steps` that continue it."""
    for name in options.texts:
        if name == "ruler":
            data = assets_data(options.assets)
            for task in RULER_TASKS:
                for doc in build_examples(task, backbone.tokenizer, length, options.prompts, 0, data):
                    answer = " " + ", ".join(doc["outputs"])
                    ids = encode(backbone.tokenizer, f"{doc['input']} {doc.get('gen_prefix', '')}".rstrip())
                    following = backbone.tokenizer(answer, add_special_tokens=False).input_ids
                    yield name, ids, following[: options.steps]
        else:
            corpus = held_out_corpus(name, backbone.tokenizer, length + options.steps, 0, options.assets)
            for ids in corpus.disjoint(options.prompts):
                yield name, ids[:length], ids[length:]


def measured(backbone: Backbone, read: Prefill, sides: list[Side], rounds: int) -> dict[Side, tuple[str, float, float]]:
    """Returns by side the printed milliseconds of a step, the bytes kept, and the bytes read; sides take turns."""

    def take_turn(side: Side) -> Turn:
        return timed(backbone.model, side, prefilled_cache(backbone.model, side, read.layers), 16)

    turns = take_turns({side: partial(take_turn, side) for side in sides}, rounds)
    length = read.layers[0][0].shape[2]
    shape = backbone.shape
    costs = {}
    for side in sides:
        if side.packed:
            cache = prefilled_cache(backbone.model, side, read.layers)
            timed(backbone.model, side, cache, 1)  # sets the number of chosen tokens
            kept = cache.nbytes
            reads = sum(layer.packed.read_bytes(shape.group) for layer in cache.layers)
        else:
            k = retrieved_by(arm_of(side.method, side.budget), length, ANCHORS, None)
            step = shape.step(length, anchors=ANCHORS.sink + ANCHORS.tail)
            step = step._replace(retrieved=most_retrieved(side.method, k, step))
            heads = shape.layers * shape.kv_heads
            wide = 2 if side is sides[0] else 1  # full attention's cache is in float32
            kept = wide * heads * kept_bytes(side.method, step).total
            reads = wide * heads * step_bytes(side.method, step).total
        took = [1000 * seconds for turn in turns[side] for seconds in turn]
        costs[side] = f"{statistics.median(took):.1f} ({min(took):.1f})" if took else "", kept, reads
    return costs


def backend_of(backbone: Backbone, read: Prefill, side: Side) -> Backend:
    """Returns a backend that holds the prompt."""
    kind = PackedBackend if side.packed else TorchBackend
    backend = kind.open(backbone.model, arm_of(side.method, side.budget), ANCHORS, None, None, 0)
    backend.take(read)
    return backend


@torch.no_grad()
def forced(backbone: Backbone, tokens: Tensor, backend: Backend) -> Tensor:
    """Returns log probabilities [T, V] after each token, with the tokens [1, T] given to the model one by one."""
    text = Text(backbone.model, backend)
    return torch.stack([text.step(token)[0, -1].log_softmax(-1) for token in tokens.split(1, dim=1)])


if __name__ == "__main__":
    main()
