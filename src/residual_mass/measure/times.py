"""Times the decode steps of `generate`: of all sides on one prompt, then what the choice among them decides, longer
prompts.

The fastest of several steps counts, because other work only slows steps down. Sides take turns, so that what disturbs
one disturbs all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import Cache, DynamicCache, PreTrainedModel

from residual_mass.decode.backend import Prefill
from residual_mass.decode.backends import ANCHORS
from residual_mass.decode.generate import Decoding
from residual_mass.decode.packed_backend import PackedBackend, PackedCache
from residual_mass.decode.recording import prefill
from residual_mass.decode.torch_backend import buffered_cache
from residual_mass.measure.distances import ARM_COLUMNS
from residual_mass.measure.models import TORCH, TRANSFORMERS, WHOLE_PERCENT, Served, Side
from residual_mass.methods import method_named
from residual_mass.model.layers import device_of, longest_text, require_plain, text_config
from residual_mass.model.phi_maps import HeadShape
from residual_mass.model.rotary import frequencies_of
from residual_mass.timing import StepClock, Turn, fastest, scatter_of, take_turns, timed

FASTER = 0.97
"""A step counts as faster if it takes at most this share of the other's time, or less where times scatter more."""
TURN_STEPS = 8
"""Timed steps of a turn. What torch alone serves has half a turn."""
MIN_TURNS = 3
MAX_TURNS = 10
"""Turns of a side; more are taken while times scatter more than a step may be slower than an equal one."""
TIMED_TOKENS = MAX_TURNS * (TURN_STEPS + 2)
"""Most tokens that follow a prompt while its steps are timed."""
LONGER = (4096, 16384)
"""Lengths of random keys beside the prompts' own."""
MAX_BYTES = 2 * 2**30
"""Largest keys and values of such a length, in the dtype of the model."""
MAX_SECONDS = 20
"""After a length that took longer, with its preparation, no longer one is timed."""
POSITION_NAMES = ("wpe", "embed_positions", "positions_embed")
"""Names of transformers' embeddings of positions."""
FULL_SIDE = Side(method_named("full"), WHOLE_PERCENT, TRANSFORMERS)
"""Transformers' own full attention."""
AS_LOADED = ("full, as loaded", WHOLE_PERCENT)
"""In place of its key, over the model before its weights were packed."""


@dataclass(frozen=True)
class Times:
    """Times of steps after a prompt.

    Attributes:
        steps: by ARM_COLUMNS, `seconds` of the fastest step, `cache_mib`, the MiB of the cache that it reads before
            generated tokens, and the `backend`; also of FULL_SIDE, and of AS_LOADED if weights are packed.
        whole: key of the 8-bit cache that is read whole; None where no fast step serves it.
        turns: of every side but those that torch alone serves.
        scatter: by how much the fastest step of a side's second-best turn is slower than that of its best, the median
            over sides that take several turns.
        longer: seconds by `arm_name`, with a column for each number of tokens, the prompts' first; None without a fast
            step.
        selecting: the side of `longer` that selects tokens; empty if there is none.
    """

    steps: pd.DataFrame
    whole: tuple[str, float] | None
    turns: int = MIN_TURNS
    scatter: float = 0.0
    longer: pd.DataFrame | None = None
    selecting: str = ""

    @property
    def full(self) -> pd.Series:
        """Transformers' own full attention."""
        return self.steps.loc[FULL_SIDE.key]

    @property
    def faster(self) -> float:
        """Share of another's time from which on a step counts as faster here."""
        # With scatter s, equal steps can differ by the factor 1 + s.
        return min(FASTER, 1 / (1 + self.scatter))


class Run:
    """One side at one length, whose steps are timed.

    Args:
        ids: [1, L], the prompt; a cache is filled with the keys that were read of the tokens before the last. The
            Triton backend keeps no cache of ours, so that every turn reads the prompt.
    """

    def __init__(self, model: PreTrainedModel, side: Side, ids: Tensor, read: Prefill) -> None:
        self.model = model
        self.side = side
        self.ids = ids
        self.cache: Cache | None = None
        self.mib = math.nan
        if read.layers and side.backend != "triton":
            self.cache = prefilled_cache(model, side, read, ids)
            self.mib = bytes_of(self.cache) / 2**20

    def take_turn(self, steps: int = TURN_STEPS) -> Turn:
        """Returns the seconds of `generate`'s decode steps. It reads one more token of the prompt before them, or of
        the text of earlier turns, which the cache holds.
        """
        held = 0 if self.cache is None else self.cache.get_seq_length()
        generated = max(0, held + 1 - self.ids.shape[1])
        ids = torch.nn.functional.pad(self.ids, (0, generated), value=1)  # any token: no time depends on it
        clock = StepClock()
        loop: dict[str, Any] = {"streamer": clock}
        if self.side.backend != TRANSFORMERS:
            decoding = Decoding(self.side.arm, ANCHORS, self.side.phi, self.side.compile)
            loop = {"custom_generate": decoding.with_streamer(clock)}
        # Two more tokens: StepClock leaves out the first, and the step that prepares the method.
        self.model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=self.cache, do_sample=False,
            min_new_tokens=steps + 2, max_new_tokens=steps + 2, **loop,
        )  # fmt: skip
        return clock.steps


def prefilled_cache(model: PreTrainedModel, side: Side, read: Prefill, ids: Tensor) -> Cache:
    """Returns the cache of a side that holds a prompt.

    Args:
        ids: [1, L], the prompt; the cache holds the tokens before the last.
    """
    if side.backend == PackedBackend.name:
        backend = PackedBackend.open(model, side.arm, ANCHORS, None, None, 0)
        backend.take(read)
        return backend.cache
    if side.backend != TRANSFORMERS:
        cache = buffered_cache(model)
        for index, (keys, values) in sorted(read.layers.items()):
            cache.layers[index].update(keys, values)
        return cache
    cache = DynamicCache(config=model.config)
    if caches_otherwise(model):
        model(ids[:, :-1], past_key_values=cache, use_cache=True, logits_to_keep=1)
        return cache
    for index, (keys, values) in sorted(read.layers.items()):
        cache.update(keys, values, index)
    return cache


def caches_otherwise(model: PreTrainedModel) -> bool:
    """Returns whether transformers' cache holds something else than keys and values of every layer and head: latents
    of all heads, or nothing in layers that share those of others.
    """
    config = text_config(model)
    return bool(getattr(config, "kv_lora_rank", None) or getattr(config, "num_kv_shared_layers", None))


def bytes_of(cache: Cache) -> int:
    """Returns the bytes of the keys and values in a cache."""
    if isinstance(cache, PackedCache):
        return cache.nbytes
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers if layer.keys is not None)


@torch.no_grad()
def times_of(model: PreTrainedModel, loaded: PreTrainedModel | None, served: Served, prompt: list[int]) -> Times:
    """Times full attention, the 8-bit cache and all sides after a prompt.

    Args:
        loaded: the model before its weights were packed; None if they were not.
    """
    ids = torch.tensor([prompt], device=device_of(model))
    read = read_before(model, ids)
    runs = {FULL_SIDE.key: Run(model, FULL_SIDE, ids, read)}
    if loaded is not None:
        runs[AS_LOADED] = Run(loaded, FULL_SIDE, ids, read_before(loaded, ids))
    whole = [] if served.whole is None else [served.whole]
    slow = []
    for side in (*whole, *served.sides):
        if side.backend == TORCH:
            slow.append(side)
        elif side.key not in runs:
            runs[side.key] = Run(model, side, ids, read)
    turns = turns_of(runs, MIN_TURNS, MAX_TURNS)
    scatter = scatter_of(turns.values())
    for side in tqdm(slow, desc="decode steps in torch", unit="arm"):
        run = Run(model, side, ids, read)
        turns[side.key] = [run.take_turn(TURN_STEPS // 2)]
        run.cache = None  # such a cache is large
        runs[side.key] = run
    rows = [(*key, fastest(turns[key]), run.mib, run.side.backend) for key, run in runs.items()]
    steps = pd.DataFrame(rows, columns=[*ARM_COLUMNS, "seconds", "cache_mib", "backend"]).set_index(ARM_COLUMNS)
    return Times(steps, served.whole and served.whole.key, len(turns[FULL_SIDE.key]), scatter)


def turns_of(runs: Mapping[Any, Run], rounds: int, most: int) -> dict[Any, list[Turn]]:
    """Lets runs take turns: `rounds` of them, and up to `most` while times scatter."""
    sides = {name: run.take_turn for name, run in runs.items()}
    # The largest scatter with which `Times.faster` is still FASTER.
    return take_turns(sides, rounds, most, scatter=1 / FASTER - 1)


def read_before(model: PreTrainedModel, ids: Tensor) -> Prefill:
    """Reads a prompt [1, L] without its last token, which is read before the steps."""
    before = ids[:, :-1].tolist()
    return prefill(model, before) if before[0] else Prefill({})


# ---- longer prompts --------------------------------------------------------------------------------------------------


@torch.no_grad()
def with_longer(times: Times, model: PreTrainedModel, served: Served, prompt_tokens: int, arm: Side | None) -> Times:
    """Adds the times of full attention, the 8-bit cache and an arm that selects tokens over more tokens, with random
    keys.

    Args:
        arm: None if no arm selects tokens.
    """
    sides = {side_name(*side.key): side for side in (FULL_SIDE, served.whole, arm) if side is not None}
    found = {name: {prompt_tokens: times.steps["seconds"][side.key]} for name, side in sides.items()}
    for length in LONGER:
        if length <= prompt_tokens or not fits(model, length):
            continue
        steps, seconds = timed(partial(_at_length, model, length, sides))
        for name in sides:
            found[name][length] = steps[name]
        if seconds > MAX_SECONDS:
            break
    longer = pd.DataFrame.from_dict(found, orient="index")
    return replace(times, longer=longer, selecting="" if arm is None else side_name(*arm.key))


def side_name(method: str, budget_percent: float) -> str:
    """Returns a side as it is written in tables."""
    if method == FULL_SIDE.rule.name:
        return "full attention"
    return method if budget_percent == WHOLE_PERCENT else f"{method} at {budget_percent:g} %"


def _at_length(model: PreTrainedModel, length: int, sides: dict[str, Side]) -> dict[str, float]:
    """Returns the seconds of the fastest step of each side after `length` random keys."""
    read = random_keys(model, length - 1)
    ids = torch.ones(1, length, dtype=torch.long, device=device_of(model))
    runs = {name: Run(model, side, ids, read) for name, side in sides.items()}
    turns = turns_of(runs, MIN_TURNS - 1, MIN_TURNS + 1)
    return {name: fastest(taken) for name, taken in turns.items()}


def random_keys(model: PreTrainedModel, length: int) -> Prefill:
    """Draws keys and values in place of those of a prompt of `length` tokens; they do not change the time of a step."""
    shape = HeadShape.of(text_config(model))
    draw = torch.Generator().manual_seed(0)
    size = (2, 1, shape.kv_heads, length, shape.head_dim)
    layers = {}
    for index in range(shape.layers):
        # By layer, so that only one of them is in float32 at a time.
        drawn = torch.randn(size, generator=draw)
        keys, values = drawn.to(device_of(model), model.dtype).unbind()
        layers[index] = keys, values
    return Prefill(layers)


def fits(model: PreTrainedModel, length: int) -> bool:
    """Returns whether random keys of so many tokens are worth their memory, and stand for what the model caches, which
    has positions for the steps after them and keeps its rotary frequencies.
    """
    shape = HeadShape.of(text_config(model))
    numbers = 2 * shape.layers * shape.kv_heads * shape.head_dim
    size = numbers * length * model.dtype.itemsize
    try:
        require_plain(model)
    except ValueError:
        return False
    end = length + TIMED_TOKENS
    if caches_otherwise(model) or end > positions_of(model):
        return False
    return size <= MAX_BYTES and frequencies_of(model).same([length, end])


def positions_of(model: PreTrainedModel) -> float:
    """Returns the tokens for which a model with an embedding of positions has one; infinity for any other, such as one
    with rotary positions.
    """
    for name, module in model.get_decoder().named_modules():
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in POSITION_NAMES:
            return min(longest_text(text_config(model)), module.num_embeddings)
    return math.inf
