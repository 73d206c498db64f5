"""Weights of a model on a CPU in float32, bfloat16, 8 bits and 4 bits: what they cost in KL, in seconds and in memory.

Prints a table by weights: MiB of the model; milliseconds of all products of one token; seconds of prompts; and by text
the mean KL divergence in nats of the next token from the model in float32, over the last positions of each prompt, with
the 9th decile over all texts. Beside them, the same distance of a method over weights in float32: tokens that continue
the prompts are given one by one. Times are the fastest of several rounds, in which the sides take turns: with one
thread its own time, which other work disturbs least, and with more by the clock.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import SMOL
from packed_cache import backend_of, documents, forced
from torch import Tensor, nn
from transformers import PreTrainedModel

from residual_mass import pack_weights
from residual_mass.decode.recording import prefill
from residual_mass.measure.steps import Side
from residual_mass.methods import method_named
from residual_mass.model.loading import Backbone, load_backbone
from residual_mass.model.packed_weights import PackedLinear, bytes_of
from residual_mass.timing import time_in_turns

WEIGHTS = ("float32", "bfloat16", "8 bits", "4 bits")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--assets", type=Path, default=Path("results/assets"))
    parser.add_argument("--texts", nargs="+", default=["books", "code", "wiki", "ruler"])
    parser.add_argument("--prompts", type=int, default=2, help="of each text; for RULER, of each of three tasks")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--steps", type=int, default=32, help="tokens that continue a prompt under the method")
    parser.add_argument("--scored", type=int, default=512, help="last positions of a prompt that are scored")
    parser.add_argument("--method", default="scan4_regression_64")
    parser.add_argument("--budget", type=float, default=4.0, help="percent")
    parser.add_argument("--lengths", type=int, nargs="*", default=[2048, 8000], help="of prompts that are timed")
    parser.add_argument("--rounds", type=int, default=3, help="0 times nothing")
    parser.add_argument("--group", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    backbones = {weights: loaded(weights, options) for weights in WEIGHTS}
    times = timed(backbones, options) if options.rounds else {}
    side = Side(method_named(options.method), options.budget / 100, True)
    distances = distances_of(backbones, side, options)
    columns = [f"prompt of {length:,}, s" for length in options.lengths] if times else []
    head = ["weights", "MiB", *(["products of a token, ms"] if times else []), *columns]
    head += [f"KL {text}" for text in options.texts] + ["KL, 9 of 10 tokens below"]
    print(f"{options.threads} threads, fastest of {options.rounds} rounds\n")
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for name in (*WEIGHTS, side.name):
        model = backbones[name if name in WEIGHTS else "float32"].model
        cells = [name if name in WEIGHTS else f"float32, {name}", f"{bytes_of(model.modules()) / 2**20:.0f}"]
        cells += times.get(name, [""] * (len(head) - len(cells) - len(options.texts) - 1))
        by_text = distances.get(name, {text: torch.zeros(1) for text in options.texts})
        cells += [f"{by_text[text].mean():.1e}" for text in options.texts]
        cells.append(f"{torch.cat(list(by_text.values())).quantile(0.9):.1e}")
        print(f"| {' | '.join(cells)} |", flush=True)
    for weights in WEIGHTS[2:]:
        print(f"\n{backbones[weights].model.packed_weights}")


def loaded(weights: str, options: Any) -> Backbone:
    dtype = "bfloat16" if weights == "bfloat16" else "float32"
    backbone = load_backbone(replace(SMOL, dtype=dtype), options.assets, torch.device("cpu"))
    if weights not in ("float32", "bfloat16"):
        pack_weights(backbone.model, int(weights[0]), options.group)
    return backbone


def timed(backbones: dict[str, Backbone], options: Any) -> dict[str, list[str]]:
    """Returns by weights the cells of one token's products and of prompts."""
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    cells: dict[str, list[str]] = {weights: [] for weights in backbones}
    sides = {weights: partial(each_product, backbone.model) for weights, backbone in backbones.items()}
    for weights, seconds in time_in_turns(sides, 10 * options.rounds, clock).items():
        cells[weights].append(f"{1000 * min(seconds):.1f}")
    for length in options.lengths:
        ids = torch.randint(5, 40000, (1, length), generator=torch.Generator().manual_seed(0))
        for weights, seconds in time_in_turns(prompt_sides(backbones, ids), options.rounds, clock).items():
            cells[weights].append(f"{min(seconds):.1f}")
    return cells


def prompt_sides(backbones: dict[str, Backbone], ids: Tensor) -> dict[str, Callable[[], object]]:
    return {weights: partial(log_p, backbone.model, ids, 1) for weights, backbone in backbones.items()}


@torch.no_grad()
def each_product(model: PreTrainedModel) -> None:
    """Multiplies one row by every linear layer's weight."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear | PackedLinear):
            layer(torch.ones(1, layer.in_features, dtype=model.dtype))


@torch.no_grad()
def log_p(model: PreTrainedModel, ids: Tensor, last: int) -> Tensor:
    """Returns log probabilities [last, V] after the last tokens."""
    return model(ids, use_cache=False, logits_to_keep=last).logits[0].float().log_softmax(-1)


def distances_of(backbones: dict[str, Backbone], side: Side, options: Any) -> dict[str, dict[str, Tensor]]:
    """Returns KL divergences from float32 by weights and text, of all scored positions; those of the method, by its
    name, after the tokens that continue the prompts.
    """
    found: dict[str, dict[str, Tensor]] = {name: {} for name in (*WEIGHTS[1:], side.name)}
    exact = backbones["float32"]
    for text, ids, following in documents(exact, options.length, options):
        whole = torch.tensor([ids + following])
        reference = log_p(exact.model, whole, options.scored)
        estimates = {weights: log_p(backbones[weights].model, whole, options.scored) for weights in WEIGHTS[1:]}
        backend = backend_of(exact, prefill(exact.model, [ids]), side)
        estimates[side.name] = forced(exact, torch.tensor([following]), backend)
        for name, estimate in estimates.items():
            last = reference[-len(estimate) :]
            kl = (last.exp() * (last - estimate)).sum(-1)
            found[name][text] = torch.cat((found[name].get(text, kl[:0]), kl))
    return found


if __name__ == "__main__":
    main()
