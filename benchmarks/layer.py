"""Microseconds of one layer's attention in a decode step on a CPU, by method and context length: the median (fastest).

Keys and values are random, and no model is loaded. Before every call 128 MiB of other numbers are read, which evict the
layer from the processor's caches, and a short layer is run, which loads the code again.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import pandas as pd
import torch
from torch.nn.functional import scaled_dot_product_attention

from residual_mass.decode.terms import retrieved_by
from residual_mass.kernels import LayerCache, load
from residual_mass.methods import method_named
from residual_mass.methods.arms import Arm
from residual_mass.methods.served import packing_of
from residual_mass.spec.settings import AnchorSpec
from residual_mass.timing import time_in_turns

SHORT = 256
"""Tokens of the layer that runs before every call."""
OTHERS = 2**25
"""Numbers of float32 that are read before every call."""
SDPA = "SDPA, float32"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--methods", nargs="+", default=["scan4_regression_64"])
    parser.add_argument("--budgets", type=float, nargs="+", default=[2.0, 4.0], help="percent")
    parser.add_argument("--heads", type=int, nargs=3, default=[9, 3, 64], help="query heads, KV heads, width")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    arms = {"full, bfloat16": Arm(method_named("full"), None), "cache8": Arm(method_named("cache8"), 1.0)}
    for method in options.methods:
        for budget in options.budgets:
            arms[f"{method} {budget:g} %"] = Arm(method_named(method), budget)
    cells = {f"{length:,}": cells_at(arms, length, options) for length in options.lengths}
    print(f"{options.heads} query heads, KV heads and width, {options.threads} threads\n")
    print(pd.DataFrame(cells).to_markdown(disable_numparse=True))


def cells_at(arms: dict[str, Arm], length: int, options: argparse.Namespace) -> dict[str, str]:
    """Returns the microseconds of each side at one length, as they are printed; sides take turns."""
    others = torch.ones(OTHERS)
    calls: dict[str, Callable[[], object]] = {}
    for name, arm in {SDPA: None, **arms}.items():
        short = layer(arm, SHORT, options.heads)
        calls[f"before {name}"] = lambda short=short: (others.sum(), short())
        calls[name] = layer(arm, length, options.heads)
    taken = time_in_turns(calls, options.rounds)
    return {
        name: f"{1e6 * statistics.median(taken[name]):.0f} ({1e6 * min(taken[name]):.0f})" for name in (SDPA, *arms)
    }


def layer(arm: Arm | None, length: int, sizes: list[int]) -> Callable[[], object]:
    """Returns a function that runs a step of one layer over random keys and values.

    Args:
        arm: what the kernels compute; None stands for torch's attention.
        sizes: query heads, KV heads and width of a head.
    """
    query_heads, heads, width = sizes
    draw = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(1, heads, length, width, generator=draw) for _ in range(2))
    query = torch.randn(1, query_heads, 1, width, generator=draw)
    if arm is None:
        return partial(scaled_dot_product_attention, query, keys, values, enable_gqa=True)
    packing = packing_of(arm.rule)
    library = load()
    if packing is None or library is None:
        raise SystemExit(f"no kernels serve {arm.rule.name} here")
    cache = LayerCache(library, keys, values, [0], bits=packing.bits, clusters=packing.clusters)
    cache.choose(lambda count: retrieved_by(arm, count, AnchorSpec(), None), arm.rule.own is not None)
    key, value = torch.randn(2, 1, heads, 1, width, generator=draw)

    def step() -> None:
        cache.step(query, key, value, width**-0.5)
        cache.drop(1)  # so that every call reads as much

    return step


if __name__ == "__main__":
    main()
