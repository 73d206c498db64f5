"""Times decode steps by prompt length on this machine, and says from which length on a method is faster."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from residual_mass.decode.generate import partial_decoding
from residual_mass.decode.packed_backend import PackedBackend, PackedCache
from residual_mass.decode.session import make_arm
from residual_mass.files import require_writable, write_text
from residual_mass.measure.arguments import Arguments
from residual_mass.measure.distances import find_device, find_model
from residual_mass.methods import Method, method_named
from residual_mass.methods.arms import Arm
from residual_mass.model.hook import Prefill
from residual_mass.model.layers import require_plain
from residual_mass.model.loading import load_backbone
from residual_mass.model.phi_maps import HeadShape
from residual_mass.spec.settings import AnchorSpec, tokens_of

STEPS, ROUNDS = 8, 2
"""Timed steps of a round, and number of rounds, in which sides take turns."""
FASTER = 0.97
"""A method counts as faster if it takes at most this share of the other's time, because times scatter."""


@dataclass(frozen=True)
class Side:
    """A method at a share of the prompt, over a packed cache or over transformers' own."""

    method: Method
    budget: float | None
    packed: bool

    @property
    def plain(self) -> bool:
        """Whether this is transformers' own full attention."""
        return self.method.whole_prefix and not self.packed

    @property
    def name(self) -> str:
        whole = self.method.whole_prefix or self.method.selector.replaces_cache
        return self.method.name if whole else f"{self.method.name}, {100 * self.budget:g} %"


class Clock(BaseStreamer):
    """Records when `generate` returned tokens, those of the prompt first."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def measure(args: Arguments) -> tuple[str, list[Path]]:
    """Times all sides at all lengths of `--latency`.

    Returns:
        The text of `printed`, and the files with its table and with the text. Columns: `side`, `tokens`, `seconds` (the
        median of a step), `fastest` and `kept_mib` (size of the cache).

    Raises:
        ValueError: the model or a method cannot be timed; names it.
    """
    device = find_device(args.device)
    files = [args.out / f"{args.name}-latency{suffix}" for suffix in (".csv", ".txt")]
    require_writable(*files)
    model = load_backbone(find_model(args.model, args.assets, device), args.assets, device).model
    require_plain(model)
    chosen, steps = list(sides(model, args)), []
    with tqdm(total=len(args.latency) * ROUNDS * len(chosen), unit="run") as progress:
        for label, _, side in product(args.latency, range(ROUNDS), chosen):
            name = "transformers" if side.plain else side.name
            progress.set_postfix_str(f"{name}, {label} tokens")
            cache = filled(model, side, tokens_of(label))
            size = (
                cache.nbytes if side.packed else sum(x.nbytes for one in cache.layers for x in (one.keys, one.values))
            )
            steps += [(name, tokens_of(label), size / 2**20, seconds) for seconds in timed(model, side, cache, STEPS)]
            progress.update()
    rows = pd.DataFrame(steps, columns=["side", "tokens", "kept_mib", "seconds"])
    groups = rows.groupby(["side", "tokens"], sort=False)
    table = groups.agg(seconds=("seconds", statistics.median), fastest=("seconds", "min"), kept_mib=("kept_mib", "max"))
    table = table.reset_index()
    write_text(files[0], table.to_csv(index=False, float_format="%.6g"))
    text = printed(args, table)
    write_text(files[1], text)
    return text, files


def sides(model: PreTrainedModel, args: Arguments) -> Iterator[Side]:
    """Yields transformers' full attention, then what the compiled kernels serve, then methods that run in torch."""
    full, own = method_named("full"), [method_named(name) for name in args.methods if name != "full"]
    if needing := next((method.name for method in own if method.needs_maps), None):
        raise ValueError(f"--latency times methods without feature maps; leave {needing} out of --methods")
    packed = {method: PackedBackend.refusal(model, Arm(method, None)) is None for method in (full, *own)}
    yield Side(full, None, False)
    if packed[full]:
        yield Side(full, None, True)
    for method in sorted(own, key=lambda rule: not packed[rule]):
        budgets = args.budgets[:1] if method.selector.replaces_cache else args.budgets
        yield from (Side(method, budget / 100, packed[method]) for budget in budgets)


def filled(model: PreTrainedModel, side: Side, length: int) -> Cache:
    """Returns a cache with random keys and values instead of a prompt's, which do not change the time of a step."""
    shape, draw = HeadShape.of(model.config), torch.Generator().manual_seed(0)
    size = (2, 1, shape.kv_heads, length, shape.head_dim)
    layers = (torch.randn(size, generator=draw).to(model.device, model.dtype).unbind() for _ in range(shape.layers))
    if side.packed:
        cache = PackedCache(model, side.method)
        backend = PackedBackend(model, make_arm(side.method, side.budget), AnchorSpec(), cache)
        backend.take(Prefill(dict(enumerate(layers))))
        return cache
    cache = DynamicCache(config=model.config)
    for index, layer in enumerate(layers):
        cache.update(*layer, index)
    return cache


def timed(model: PreTrainedModel, side: Side, cache: Cache, steps: int) -> list[float]:
    """Returns the seconds of `generate`'s decode steps. It reads one more token of the prompt before them. The first
    step, which summarises the prompt, is left out.
    """
    clock = Clock()
    ids = torch.full((1, cache.get_seq_length() + 1), 1, device=model.device)
    if side.plain:
        loop = {"streamer": clock}
    else:
        loop = {"custom_generate": partial_decoding(side.method, side.budget, streamer=clock)}
    model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, do_sample=False,
        min_new_tokens=steps + 2, max_new_tokens=steps + 2, **loop,
    )  # fmt: skip
    return [later - sooner for sooner, later in pairwise(clock.times[2:])]


def printed(args: Arguments, table: pd.DataFrame) -> str:
    """Returns the table of milliseconds, and the length from which a method is faster than each full read."""
    fastest = table.pivot(index="side", columns="tokens", values="fastest").loc[table["side"].unique()]
    kept = table.pivot(index="side", columns="tokens", values="kept_mib").loc[fastest.index]
    medians = table.pivot(index="side", columns="tokens", values="seconds").loc[fastest.index]
    width, threads = max(map(len, fastest.index)), torch.get_num_threads()
    lines = [
        f"{args.name}, {threads} thread{'s' * (threads > 1)}: milliseconds of a step, the median "
        "(fastest), and MiB of the cache, by tokens in it\n",
        " " * width + "".join(f"{tokens:>24,}" for tokens in fastest.columns),
    ]
    for side in fastest.index:
        cells = (
            f"{1000 * medians.loc[side, n]:.0f} ({1000 * fastest.loc[side, n]:.0f}), {kept.loc[side, n]:,.0f} MiB"
            for n in fastest.columns
        )
        lines.append(f"{side:{width}}" + "".join(f"{cell:>24}" for cell in cells))
    whole = [side for side in ("transformers", "full", "cache8") if side in fastest.index]
    lines.append("")
    for side, other in product((side for side in fastest.index if side not in whole), whole):
        slower = [
            tokens for tokens in fastest.columns if fastest.loc[side, tokens] > FASTER * fastest.loc[other, tokens]
        ]
        after = [tokens for tokens in fastest.columns if not slower or tokens > max(slower)]
        when = f"from {after[0]:,} tokens on" if after else "at none of these lengths"
        lines.append(f"{side} is faster than {other} {when}.")
    ends = "Faster: by 3 % or more in the fastest steps, which other work disturbs least. Keys and values were random."
    return "\n".join([*lines, "", ends])
