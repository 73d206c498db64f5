"""Times decode steps by prompt length on this machine, and says from which length on a method is faster."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import Cache, DynamicCache, PreTrainedModel

from residual_mass.decode.backends import loop_refusal
from residual_mass.decode.compiled import compile_refusal
from residual_mass.decode.generate import partial_decoding
from residual_mass.decode.packed_backend import PackedBackend, PackedCache
from residual_mass.decode.session import make_arm
from residual_mass.decode.verify import Pass
from residual_mass.files import require_writable, write_text
from residual_mass.measure.arguments import Arguments
from residual_mass.measure.choice import FASTER
from residual_mass.measure.models import find_device, find_model, load_packed
from residual_mass.methods import Method, method_named
from residual_mass.methods.arms import Arm
from residual_mass.methods.served import READ_WHOLE
from residual_mass.model.hook import Prefill
from residual_mass.model.layers import require_plain, text_config
from residual_mass.model.phi_maps import HeadShape, PhiMaps
from residual_mass.model.rotary import frequencies_of
from residual_mass.spec.settings import AnchorSpec, tokens_of
from residual_mass.timing import StepClock, Turn, take_turns

ROUND_STEPS = 8
"""Timed steps of a round."""
ROUNDS = 2
"""Rounds, in which sides take turns."""
LayerKeys = dict[int, tuple[Tensor, Tensor]]
"""Keys and values [1, Hkv, L, D] of a prompt by layer."""


@dataclass(frozen=True)
class Side:
    """A method at a share of the prompt, over a packed cache or over transformers' own.

    Attributes:
        compile: whether its steps are one graph of `torch.compile`.
    """

    method: Method
    budget: float | None
    packed: bool
    phi: PhiMaps | None = None
    compile: bool = False

    @property
    def plain(self) -> bool:
        """Whether this is transformers' own full attention."""
        return self.method.whole_prefix and not self.packed

    @property
    def name(self) -> str:
        if self.method.whole_prefix or self.method.selector.replaces_cache:
            return self.method.name
        return f"{self.method.name}, {100 * self.budget:g} %"


def measure_latency(args: Arguments) -> tuple[str, list[Path]]:
    """Times all sides at all lengths of `--latency`.

    Returns:
        The text of `latency_text`, and the files with its table and with the text. Columns: `side`, `tokens`, `seconds`
        (the median of a step), `fastest` and `kept_mib` (size of the cache).

    Raises:
        ValueError: the model or a method cannot be timed; names it.
    """
    device = find_device(args.device)
    files = [args.out / f"{file_name(args)}{suffix}" for suffix in (".csv", ".txt")]
    require_writable(*files)
    model = load_packed(find_model(args.model, args.assets, device), args, device).model
    require_plain(model)
    for length in map(tokens_of, args.latency):
        frequencies_of(model).require_growing([length], [ROUND_STEPS + 2])
    require_compiler(model, args)
    chosen = {"transformers" if side.plain else side.name: side for side in sides(model, args)}
    kept_mib: dict[tuple[str, int], float] = {}
    rows = []
    with tqdm(total=len(args.latency) * ROUNDS * len(chosen), unit="run") as progress:

        def take_turn(name: str, length: int) -> Turn:
            progress.set_postfix_str(f"{name}, {length:,} tokens")
            cache = prefilled_cache(model, chosen[name], random_keys(model, length))
            kept_mib[name, length] = bytes_of(cache) / 2**20
            seconds = timed(model, chosen[name], cache, ROUND_STEPS)
            progress.update()
            return seconds

        for length in map(tokens_of, args.latency):
            turns = take_turns({name: partial(take_turn, name, length) for name in chosen}, ROUNDS)
            for name, taken in turns.items():
                rows += [(name, length, kept_mib[name, length], seconds) for seconds in chain(*taken)]
    steps = pd.DataFrame(rows, columns=["side", "tokens", "kept_mib", "seconds"])
    groups = steps.groupby(["side", "tokens"], sort=False)
    table = groups.agg(seconds=("seconds", statistics.median), fastest=("seconds", "min"), kept_mib=("kept_mib", "max"))
    table = table.reset_index()
    write_text(files[0], table.to_csv(index=False, float_format="%.6g"))
    text = latency_text(args, table)
    write_text(files[1], text)
    return text, files


def sides(model: PreTrainedModel, args: Arguments) -> Iterator[Side]:
    """Yields transformers' full attention, then what the compiled kernels serve, then methods that run in torch."""
    full = method_named("full")
    own = [method_named(name) for name in args.methods if name != "full"]
    needing = [method.name for method in own if method.needs_maps]
    if needing:
        raise ValueError(f"--latency times methods without feature maps; leave {needing[0]} out of --methods")
    packed = {}
    for method in (full, *own):
        packed[method] = PackedBackend.refusal(model, Arm(method, None)) is None
    yield Side(full, None, False)
    if packed[full]:
        yield Side(full, None, True, compile=args.compile)
    for method in sorted(own, key=lambda rule: not packed[rule]):
        budgets = args.budgets[:1] if method.selector.replaces_cache else args.budgets
        yield from (Side(method, budget / 100, packed[method], compile=args.compile) for budget in budgets)


def require_compiler(model: PreTrainedModel, args: Arguments) -> None:
    """Raises ValueError if `--compile` is given and the steps of a model cannot be compiled here."""
    refusal = (loop_refusal(model) or compile_refusal(model)) if args.compile else None
    if refusal is not None:
        raise ValueError(f"--compile: {refusal}; leave it out")


def random_keys(model: PreTrainedModel, length: int) -> LayerKeys:
    """Draws keys and values in place of those of a prompt of `length` tokens; they do not change the time of a step."""
    shape = HeadShape.of(text_config(model))
    draw = torch.Generator().manual_seed(0)
    size = (2, 1, shape.kv_heads, length, shape.head_dim)
    layers = {}
    for index in range(shape.layers):
        drawn = torch.randn(size, generator=draw)
        keys, values = drawn.to(model.device, model.dtype).unbind()
        layers[index] = keys, values
    return layers


def prefilled_cache(model: PreTrainedModel, side: Side, layers: LayerKeys) -> Cache:
    """Returns the cache of a side that holds a prompt."""
    if side.packed:
        cache = PackedCache(model, side.method)
        arm = make_arm(side.method, side.budget)
        backend = PackedBackend(model, arm, AnchorSpec(), cache)
        backend.take(Prefill(layers))
        return cache
    cache = DynamicCache(config=model.config)
    for index, (keys, values) in sorted(layers.items()):
        cache.update(keys, values, index)
    return cache


def bytes_of(cache: Cache) -> int:
    """Returns the bytes of the keys and values in a cache."""
    if isinstance(cache, PackedCache):
        return cache.nbytes
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def timed(model: PreTrainedModel, side: Side, cache: Cache, steps: int) -> Turn:
    """Returns the seconds of `generate`'s decode steps. It reads one more token of the prompt before them."""
    ids = torch.full((1, cache.get_seq_length() + 1), 1, device=model.device)
    return timed_after(model, side, ids, cache, steps)


def timed_after(model: PreTrainedModel, side: Side, ids: Tensor, cache: Cache | None, steps: int) -> Turn:
    """Does so after a text [1, L], of which the cache holds the beginning; it reads all of it without one."""
    clock = StepClock()
    loop = {"streamer": clock} if side.plain else {"custom_generate": loop_of(side, streamer=clock)}
    generated(model, ids, cache, steps + 2, loop)
    return clock.steps


def timed_drafts(model: PreTrainedModel, side: Side, ids: Tensor, cache: Cache, drafts: int, tokens: int) -> list[Pass]:
    """Returns the passes in which full attention verifies drafts of a side, over so many tokens."""
    passes: list[Pass] = []
    loop = {"custom_generate": loop_of(side, verify=drafts, passes=passes)}
    generated(model, ids, cache, tokens, loop)
    return passes


def loop_of(side: Side, **options: Any) -> Callable[..., Any]:
    return partial_decoding(side.method, side.budget, side.phi, compile=side.compile, **options)


def generated(model: PreTrainedModel, ids: Tensor, cache: Cache | None, tokens: int, loop: dict[str, Any]) -> None:
    """Generates so many tokens greedily."""
    model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, do_sample=False,
        min_new_tokens=tokens, max_new_tokens=tokens, **loop,
    )  # fmt: skip


def faster_from(fastest: pd.DataFrame, side: str, other: str, faster: float = FASTER) -> int | None:
    """Returns the number of tokens from which on a side is faster than another at every length; None if at none.

    Args:
        fastest: seconds by side, with a column for each number of tokens, in ascending order.
        faster: share of the other's time from which on a side counts as faster.
    """
    first = None
    for tokens in reversed(fastest.columns):
        if fastest.loc[side, tokens] > faster * fastest.loc[other, tokens]:
            break
        first = int(tokens)
    return first


def file_name(args: Arguments) -> str:
    """Returns the name of the files without suffix; answers under other conditions have others."""
    weights = "" if args.weights is None else f"-weights{args.weights}"
    return f"{args.name}-latency{weights}{'-compiled' * args.compile}"


def conditions(args: Arguments) -> str:
    """Returns what flags make other than the user's own: weights of all sides, steps of all but transformers."""
    weights = "" if args.weights is None else f", weights of {args.weights} bits"
    return weights + (", steps compiled but transformers'" if args.compile else "")


def latency_text(args: Arguments, table: pd.DataFrame) -> str:
    """Returns the table of milliseconds, and the length from which a method is faster than each full read."""
    by_tokens = table.pivot(index="side", columns="tokens").loc[table["side"].unique()]
    fastest = by_tokens["fastest"]
    kept = by_tokens["kept_mib"]
    medians = by_tokens["seconds"]
    width = max(map(len, fastest.index))
    threads = torch.get_num_threads()
    machine = f"{threads} thread{'s' * (threads > 1)}"
    quantities = "milliseconds of a step, the median (fastest), and MiB of the cache, by tokens in it"
    heads = [f"{tokens:>24,}" for tokens in fastest.columns]
    lines = [f"{args.name}{conditions(args)}, {machine}: {quantities}\n", " " * width + "".join(heads)]
    for side in fastest.index:
        line = f"{side:{width}}"
        for tokens in fastest.columns:
            median = f"{1000 * medians.loc[side, tokens]:.0f}"
            best = f"{1000 * fastest.loc[side, tokens]:.0f}"
            cell = f"{median} ({best}), {kept.loc[side, tokens]:,.0f} MiB"
            line += f"{cell:>24}"
        lines.append(line)
    whole = [side for side in ("transformers", "full", READ_WHOLE) if side in fastest.index]
    lines.append("")
    selecting = [side for side in fastest.index if side not in whole]
    for side, other in product(selecting, whole):
        first = faster_from(fastest, side, other)
        when = "at none of these lengths" if first is None else f"from {first:,} tokens on"
        lines.append(f"{side} is faster than {other} {when}.")
    ends = "Faster: by 3 % or more in the fastest steps, which other work disturbs least. Keys and values were random."
    return "\n".join([*lines, "", ends])
