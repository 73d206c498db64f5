"""What a decode step costs on a CPU by cache and method, and how far its next token is from full attention's.

One prompt of held-out text is read once; every side continues it by the same tokens, in turn. Prints a row a side:
milliseconds of a step (median over rounds, all of the model included), memory of the cache and of what a step reads
beside it, and the mean KL divergence in nats from full attention in float32. KL is left out beyond the model's context.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from training_pass import SMOL
from transformers import DynamicCache

from residual_mass import PackedCache, partial_kv
from residual_mass.core.settings import AnchorSpec
from residual_mass.methods import Method, method_named
from residual_mass.model.hook import Prefill, prefill
from residual_mass.model.loading import Backbone, encode, load_backbone
from residual_mass.model.packed import PackedSession
from residual_mass.model.partial import make_arm
from residual_mass.texts.corpora import read_documents

FULL = method_named("full")
CACHE8 = method_named("cache8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--assets", type=Path, default=Path("results/assets"))
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 8000])
    parser.add_argument("--text", default="books")
    parser.add_argument("--budgets", type=float, nargs="+", default=[2.0, 4.0], help="percent")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--torch", action="store_true", help="the methods in torch too, over transformers' cache")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    backbone = load_backbone(SMOL, options.assets, torch.device("cpu"))
    text = "\n\n".join(read_documents(options.text, options.assets))
    ids = encode(backbone.tokenizer, text[: 8 * max(options.lengths) + 10_000])
    methods: list[tuple[Method, float | None]] = [(FULL, None), (CACHE8, 0.01)]
    methods += [
        (method_named(name), budget / 100) for name in ("scan4", "scan4_regression_64") for budget in options.budgets
    ]
    for length in options.lengths:
        table(backbone, ids[: length + options.steps], methods, options)


def table(backbone: Backbone, ids: list[int], methods: list[tuple[Method, float | None]], options: Any) -> None:
    """Prints the rows of one context length."""
    length = len(ids) - options.steps
    started = time.perf_counter()
    read = prefill(backbone.model, [ids[:length]])
    print(
        f"{length} tokens of {options.text}, {options.threads} threads; prefill {time.perf_counter() - started:.1f} s"
    )
    continued = torch.tensor([ids[length:]])
    sides: dict[tuple[str, str], Any] = {("transformers, float32", "full"): (FULL, None, False)}
    for method, budget in methods:
        name = f"{method.name} {100 * budget:g} %" if method not in (FULL, CACHE8) else method.name
        sides["packed", name] = (method, budget, True)
        if options.torch and method is not FULL:
            sides["transformers, float32", name] = (method, budget, False)
    steps: dict[tuple[str, str], list[float]] = {side: [] for side in sides}
    packing, memory, logits = {}, {}, {}
    for round_ in range(options.rounds):
        for side, (method, budget, packed) in sides.items():
            cache, packing[side] = filled(backbone, read, method, budget, packed)
            times, found = run(backbone, continued, method, budget, cache)
            steps[side] += times
            if not round_:
                memory[side], logits[side] = size(cache), found
    full = logits["transformers, float32", "full"]
    for side in sides:
        kl = (full.exp() * (full - logits[side])).sum(-1).mean() if length < SMOL.context else float("nan")
        milliseconds = 1000 * statistics.median(steps[side])
        print(
            f"  {side[0]:22s} {side[1]:24s} {milliseconds:8.1f} ms  {memory[side] / 2**20:7.1f} MiB"
            f"  packed in {packing[side]:5.2f} s  KL {kl:.1e}"
        )


def filled(backbone: Backbone, read: Prefill, method: Method, budget: float | None, packed: bool) -> tuple[Any, float]:
    """A cache that holds the prompt, and the seconds that packing took."""
    started = time.perf_counter()
    if packed:
        cache = PackedCache(backbone.model, method)
        session = PackedSession(make_arm(method, budget), AnchorSpec(), cache)
        for index, (key, value) in read.layers.items():
            cache.layers[index].packed, cache.layers[index].tokens = session._packed(key, value, None), key.shape[2]
        return cache, time.perf_counter() - started
    cache = DynamicCache(config=backbone.model.config)
    for index, (key, value) in read.layers.items():
        cache.update(key, value, index)
    return cache, 0.0


@torch.no_grad()
def run(
    backbone: Backbone, tokens: Tensor, method: Method, budget: float | None, cache: Any
) -> tuple[list[float], Tensor]:
    """Seconds of each step after the first, and the log probabilities after each."""
    packed = cache if isinstance(cache, PackedCache) else None
    seconds, logits = [], []
    with partial_kv(backbone.model, method, budget, cache=packed) as session:
        if packed is None:  # as if the prompt had been read here
            for index, layer in enumerate(cache.layers):
                session._real[index] = torch.ones(1, layer.get_seq_length(), dtype=torch.bool)
                session._filled[index] = session._columns[index] = layer.get_seq_length()
        for step in range(tokens.shape[1]):
            started = time.perf_counter()
            output = backbone.model(tokens[:, step : step + 1], past_key_values=cache, use_cache=True)
            seconds.append(time.perf_counter() - started)
            logits.append(output.logits[0, -1].log_softmax(-1))
    return seconds[1:], torch.stack(logits)


def size(cache: Any) -> int:
    """Bytes of a cache."""
    if isinstance(cache, PackedCache):
        return cache.nbytes
    return sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))


if __name__ == "__main__":
    main()
