"""Milliseconds of the products of packed weights on a CPU, by rows of activations, beside torch's: CPU time, the least.

Weights are random, of the shapes of a model's linear layers, q, k, v and gate, up as one each, and no model is loaded.
Between two calls of a side all of its other layers are read, which evict one from the processor's caches.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from residual_mass.kernels import products
from residual_mass.kernels.library import Weights, load

GROUP = 32
"""Columns with a scale."""
BUDGET = 3e9
"""Products of numbers in a timed round, about: more rows are timed over fewer layers."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--qkv", type=int, default=960)
    parser.add_argument("--intermediate", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 32, 64, 256, 2048])
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    library = load()
    if library is None:
        raise SystemExit("there are no kernels here: install a C++ compiler, and then the package again")
    shapes = [
        (options.qkv, options.hidden), (options.hidden, options.hidden), (2 * options.intermediate, options.hidden),
        (options.hidden, options.intermediate),
    ]  # fmt: skip
    rows = {f"{count:,}": row_of_table(count, shapes, options) for count in options.rows}
    print(f"kernels: {library.target}; torch: {torch.backends.cpu.get_cpu_capability()}, {torch.__version__}\n")
    print(pd.DataFrame(rows).T.rename_axis("rows").to_markdown(disable_numparse=True))


def row_of_table(count: int, shapes: list[tuple[int, int]], options: argparse.Namespace) -> dict[str, str]:
    """Returns the milliseconds of all layers by each side, as they are printed."""
    size = sum(rows * columns for rows, columns in shapes)
    layers = max(1, min(options.layers, int(BUDGET / (size * count))))
    found = {}
    for name, make in sides(options.bits).items():
        calls = [make(rows, columns, count) for _ in range(layers) for rows, columns in shapes]
        taken = min(seconds(calls) for _ in range(options.rounds))
        found[name] = f"{1e3 * taken * options.layers / layers:.1f}"
    return found


def sides(bits: list[int]) -> dict[str, Callable[[int, int, int], Callable[[], object]]]:
    """Returns what makes the product of a layer, by side, for output and input features and rows of activations."""
    ours = {f"kernels, {each} bits": lambda *sizes, each=each: by_kernels(each, *sizes) for each in bits}
    torchs = {f"torch, {str(dtype)[6:]}": lambda *sizes, dtype=dtype: dense(dtype, *sizes) for dtype in DENSE}
    return ours | {"torch, 4 bits, bfloat16": four_bits_of_torch} | torchs


DENSE = (torch.float32, torch.bfloat16)


def by_kernels(bits: int, rows: int, columns: int, count: int) -> Callable[[], object]:
    codes = torch.randint(2**bits, (rows, columns), dtype=torch.uint8)
    kinds = 2 if bits == 4 else 1  # scales, and minimums
    scales = torch.rand(rows, columns // GROUP, kinds).half()
    packed = products.packed(codes, bits, scales, torch.zeros(rows, dtype=torch.int32))
    weights = Weights(*packed, rows, GROUP, 0 if kinds == 2 else 2 ** (bits - 1))
    x = torch.randn(count, columns)
    return lambda: products.multiply(x, *weights)


def four_bits_of_torch(rows: int, columns: int, count: int) -> Callable[[], object]:
    codes = torch.randint(16, (rows, columns), dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    scales = torch.rand(columns // GROUP, rows, 2).bfloat16()
    x = torch.randn(count, columns).bfloat16()
    return lambda: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, GROUP, scales)


def dense(dtype: torch.dtype, rows: int, columns: int, count: int) -> Callable[[], Tensor]:
    weight = torch.randn(rows, columns).to(dtype)
    x = torch.randn(count, columns).to(dtype)
    return lambda: F.linear(x, weight)


def seconds(calls: list[Callable[[], object]]) -> float:
    started = time.thread_time()
    for call in calls:
        call()
    return time.thread_time() - started


if __name__ == "__main__":
    main()
