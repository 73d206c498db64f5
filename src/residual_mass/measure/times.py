"""Times the steps of all arms on one prompt, then what the choice among them decides: longer prompts, and drafts.

The fastest of several steps counts, because other work only slows steps down. Sides take turns, so that what disturbs
one disturbs all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from residual_mass.decode.verify import Pass
from residual_mass.measure.arguments import Arguments
from residual_mass.measure.choice import ARM_COLUMNS, FASTER, TORCH, below_target, fastest_of
from residual_mass.measure.served import WHOLE_PERCENT, Served, arm_name, requested_arms
from residual_mass.measure.steps import (
    LayerKeys,
    Side,
    bytes_of,
    prefilled_cache,
    random_keys,
    timed_after,
    timed_drafts,
)
from residual_mass.methods import method_named
from residual_mass.methods.served import READ_WHOLE
from residual_mass.model.hook import prefill
from residual_mass.model.layers import device_of, require_plain, text_config
from residual_mass.model.phi_maps import HeadShape, PhiMaps
from residual_mass.model.rotary import frequencies_of
from residual_mass.timing import Turn, fastest, scatter_of, take_turns, timed

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
DRAFTS = 4
"""Drafts of a pass."""
DRAFTED_TEXT = 33
"""Tokens of the text that passes write."""
FULL_ATTENTION = "full attention"
FULL_AS_LOADED = "full attention, as loaded"
FULL_SIDE = Side(method_named("full"), None, False)
"""Transformers' own full attention."""


@dataclass(frozen=True)
class Timing:
    """Seconds of the fastest step, and MiB of the cache that it reads, before generated tokens."""

    seconds: float
    cache_mib: float


@dataclass(frozen=True)
class Drafts:
    """Drafts of the arm `name` that full attention verifies: means over passes, and seconds of a token of the text."""

    name: str
    seconds: float
    drafted: float
    accepted: float


@dataclass(frozen=True)
class Times:
    """Times of steps.

    Attributes:
        full: of transformers' own full attention.
        loaded: of the same over the model as it was loaded, if its weights are packed here.
        whole: of the 8-bit cache that is read whole; None where no fast step serves it.
        arms: a row for each method and budget: ARM_COLUMNS, `seconds`, `cache_mib` and `backend`.
        turns: of every side but those that torch alone serves.
        scatter: by how much the fastest step of a side's second-best turn is slower than that of its best, the median
            over sides that take several turns.
        longer: seconds by side, with a column for each number of tokens, the prompts' first; None without a fast step.
        selecting: the side of `longer` that selects tokens; empty if there is none.
        drafts: None where no method with a fast step drafts.
    """

    full: Timing
    loaded: Timing | None
    whole: Timing | None
    arms: pd.DataFrame
    turns: int = MIN_TURNS
    scatter: float = 0.0
    longer: pd.DataFrame | None = None
    selecting: str = ""
    drafts: Drafts | None = None

    @property
    def faster(self) -> float:
        """Share of another's time from which on a step counts as faster here."""
        return min(FASTER, 1 / (1 + self.scatter))


class Run:
    """One side at one length, whose steps are timed.

    Args:
        ids: [1, L], the prompt; a cache is filled with `layers`, which hold the tokens before the last.
        reads: whether every turn reads the prompt instead, for a backend that keeps no cache of ours.
    """

    def __init__(self, model: PreTrainedModel, side: Side, ids: Tensor, layers: LayerKeys, reads: bool = False) -> None:
        self.model = model
        self.side = side
        self.ids = ids
        self.cache = None if reads or not layers else prefilled_cache(model, side, layers)
        self.mib = math.nan
        if self.cache is not None:
            self.mib = bytes_of(self.cache) / 2**20

    def take_turn(self, steps: int = TURN_STEPS) -> Turn:
        held = 0 if self.cache is None else self.cache.get_seq_length()
        generated = max(0, held + 1 - self.ids.shape[1])  # the cache holds the tokens of earlier turns
        ids = torch.nn.functional.pad(self.ids, (0, generated), value=1)
        return timed_after(self.model, self.side, ids, self.cache, steps)


def turns_of(runs: Mapping[Any, Run], rounds: int, most: int) -> dict[Any, list[Turn]]:
    """Lets runs take turns: `rounds` of them, and up to `most` while times scatter."""
    sides = {name: run.take_turn for name, run in runs.items()}
    return take_turns(sides, rounds, most, scatter=1 / FASTER - 1)


def keys_of(model: PreTrainedModel, ids: Tensor) -> LayerKeys:
    """Returns the keys and values of a prompt [1, L] without its last token, which is read before the steps."""
    before = ids[:, :-1].tolist()
    return prefill(model, before).layers if before[0] else {}


def fits(model: PreTrainedModel, length: int) -> bool:
    """Returns whether random keys of so many tokens are worth their memory, and stand for those of the model, whose
    rotary frequencies stay the same in the steps after them.
    """
    shape = HeadShape.of(text_config(model))
    numbers = 2 * shape.layers * shape.kv_heads * shape.head_dim
    size = numbers * length * model.dtype.itemsize
    try:
        require_plain(model)
    except ValueError:
        return False
    return size <= MAX_BYTES and frequencies_of(model).same([length, length + TIMED_TOKENS])


class Timer:
    """Times steps of one model.

    Args:
        loaded: the model before its weights were packed; None if they were not.
        phi: feature maps, for methods that need them.
    """

    def __init__(
        self,
        args: Arguments,
        model: PreTrainedModel,
        loaded: PreTrainedModel | None,
        served: Served,
        phi: PhiMaps | None,
    ) -> None:
        self.args = args
        self.model = model
        self.loaded = loaded
        self.served = served
        self.phi = phi

    def prompt(self, document: Sequence[int]) -> Tensor:
        """Returns the token ids [1, L] of a document's prompt."""
        prompt = document[: self.args.prompt_tokens]
        return torch.tensor([prompt], device=device_of(self.model))

    def side(self, method: str, budget_percent: float) -> Side:
        return self.served.side(self.args, method, budget_percent, self.phi)

    def run(self, side: Side, ids: Tensor, layers: LayerKeys) -> Run:
        """Returns a side to be timed; the Triton backend reads the prompt into buffers of its own."""
        backend = self.served.backends.get(side.method.name)
        return Run(self.model, side, ids, layers, reads=backend == "triton")

    @torch.no_grad()
    def times(self, document: Sequence[int]) -> Times:
        """Times full attention, the 8-bit cache and all arms after the prompt of a document."""
        ids = self.prompt(document)
        layers = keys_of(self.model, ids)
        runs = {FULL_ATTENTION: self.run(FULL_SIDE, ids, layers)}
        if self.loaded is not None:
            as_loaded = keys_of(self.loaded, ids)
            runs[FULL_AS_LOADED] = Run(self.loaded, FULL_SIDE, ids, as_loaded)
        arms = requested_arms(self.args)
        for method, budget in dict.fromkeys([(READ_WHOLE, WHOLE_PERCENT), *arms]):
            if self.served.fast(method):
                side = self.side(method, budget)
                runs[method, budget] = self.run(side, ids, layers)
        turns = turns_of(runs, MIN_TURNS, MAX_TURNS)
        slow = [arm for arm in arms if arm not in runs]
        for method, budget in tqdm(slow, desc="decode steps in torch", unit="arm"):
            run = self.run(self.side(method, budget), ids, layers)
            turns[method, budget] = [run.take_turn(TURN_STEPS // 2)]
            run.cache = None  # such a cache is large
            runs[method, budget] = run
        timings = {name: Timing(fastest(turns[name]), run.mib) for name, run in runs.items()}
        return self._found(timings, len(turns[FULL_ATTENTION]), scatter_of(turns.values()))

    def _found(self, timings: dict[Any, Timing], turns: int, scatter: float) -> Times:
        rows = []
        for method, budget in requested_arms(self.args):
            timing = timings[method, budget]
            backend = self.served.backends[method]
            rows.append((method, budget, timing.seconds, timing.cache_mib, backend))
        arms = pd.DataFrame(rows, columns=[*ARM_COLUMNS, "seconds", "cache_mib", "backend"])
        whole = timings[READ_WHOLE, WHOLE_PERCENT] if self.served.fast(READ_WHOLE) else None
        return Times(timings[FULL_ATTENTION], timings.get(FULL_AS_LOADED), whole, arms, turns, scatter)

    @torch.no_grad()
    def with_choice(
        self, times: Times, choice: pd.Series | None, documents: Sequence[Sequence[int]], table: pd.DataFrame
    ) -> Times:
        """Adds what is timed of the recommended arm alone, if there is one.

        Args:
            documents: one of each text.
            table: as `Measured.table`.
        """
        if choice is None:
            return times
        met = below_target(table, self.args.target_kl)
        met = met[met["backend"] != TORCH]
        selecting = choice
        if choice.method == READ_WHOLE:
            selecting = fastest_of(met[met["method"] != READ_WHOLE])
        drafter = fastest_of(met[met["method"].isin(self.served.drafting)])
        name = "" if selecting is None else arm_name(selecting)
        drafts = None if drafter is None else self.drafts(drafter, documents)
        return replace(times, longer=self.longer(times, selecting), selecting=name, drafts=drafts)

    def longer(self, times: Times, arm: pd.Series | None) -> pd.DataFrame:
        """Times full attention, the 8-bit cache and the arm that selects tokens over more tokens, with random keys."""
        sides = {FULL_ATTENTION: FULL_SIDE}
        found = {FULL_ATTENTION: {self.args.prompt_tokens: times.full.seconds}}
        if times.whole is not None:
            sides[READ_WHOLE] = self.side(READ_WHOLE, WHOLE_PERCENT)
            found[READ_WHOLE] = {self.args.prompt_tokens: times.whole.seconds}
        if arm is not None:
            sides[arm_name(arm)] = self.side(arm.method, arm.budget_percent)
            found[arm_name(arm)] = {self.args.prompt_tokens: arm.seconds}
        for length in LONGER:
            if length <= self.args.prompt_tokens or not fits(self.model, length):
                continue
            steps, seconds = timed(partial(self._at_length, length, sides))
            for name in sides:
                found[name][length] = steps[name]
            if seconds > MAX_SECONDS:
                break
        return pd.DataFrame.from_dict(found, orient="index")

    def _at_length(self, length: int, sides: dict[str, Side]) -> dict[str, float]:
        """Returns the seconds of the fastest step of each side after `length` random keys."""
        layers = random_keys(self.model, length - 1)
        ids = torch.ones(1, length, dtype=torch.long, device=device_of(self.model))
        runs = {name: self.run(side, ids, layers) for name, side in sides.items()}
        turns = turns_of(runs, MIN_TURNS - 1, MIN_TURNS + 1)
        return {name: fastest(taken) for name, taken in turns.items()}

    def drafts(self, arm: pd.Series, documents: Sequence[Sequence[int]]) -> Drafts:
        """Lets an arm draft after the prompt of each document. The fastest draft step and the fastest pass of full
        attention count, with the mean number of drafts that it accepts.
        """
        side = self.side(arm.method, arm.budget_percent)
        passes: list[Pass] = []
        for document in documents:
            ids = self.prompt(document)
            cache = prefilled_cache(self.model, side, keys_of(self.model, ids))
            passes += timed_drafts(self.model, side, ids, cache, DRAFTS, DRAFTED_TEXT)
        passes = [each for each in passes if each.drafted]
        drafted = sum(each.drafted for each in passes) / len(passes)
        accepted = sum(each.accepted for each in passes) / len(passes)
        step = min(each.drafting / each.drafted for each in passes)
        verifying = min(each.verifying for each in passes)
        seconds = (drafted * step + verifying) / (accepted + 1)
        return Drafts(arm_name(arm), seconds, drafted, accepted)
