"""The answer to a measurement: which arm to take here, what it costs, and what that stands on, in sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from residual_mass.measure.distances import ARM_COLUMNS
from residual_mass.measure.models import TORCH, WHOLE_PERCENT
from residual_mass.measure.request import Request
from residual_mass.measure.texts import Documents
from residual_mass.measure.times import AS_LOADED, FASTER, FULL_SIDE, LONGER, TURN_STEPS, Times, side_name
from residual_mass.methods import method_named
from residual_mass.methods.served import READ_WHOLE

NOISY = 0.1
"""Scatter of times above which they are to be measured again."""
FEW = 16
"""Number of documents below which heavy tails may be missed and intervals are wide."""
FULL_ATTENTION = side_name(*FULL_SIDE.key)


@dataclass(frozen=True)
class Measured:
    """What was measured.

    Attributes:
        title: names the model and the prompts.
        folder: of the answer.
        settings: those that repeat the measurement.
        tokens: as `token_distances` returns them.
        table: a row per text, method and budget: `text`, `method`, `budget_percent` (100 for a cache that is read
            whole); `kl` with the ends `ci_low` and `ci_high` (NaN for a single document) and `kl_over_topk`, over that
            of topk at the same budget; `kl_tail`; `same_top`; `read` and `kept`, the bytes that a step reads and that
            are kept of the prompt, as shares of full attention's in bfloat16; `seconds` of a step and `cache_mib`, the
            MiB of its cache, both over all texts; the `backend` that serves the method here; and whether the row is
            `recommended`, 0 or 1.
        tail: name of the statistic in `kl_tail`.
        refusals: why methods that are served elsewhere have no fast step here.
        times: of what no row has.
        weights: what packed weights cost by text, as `weights_cost` returns it; None for those of the model.
        setup: facts on model, machine and versions, by name.
    """

    request: Request
    title: str
    folder: Path
    settings: dict[str, Any]
    texts: list[Documents]
    tokens: pd.DataFrame
    table: pd.DataFrame
    tail: str
    refusals: dict[str, str]
    times: Times
    weights: pd.DataFrame | None
    setup: dict[str, str]


# ---- the choice ------------------------------------------------------------------------------------------------------


def arm_means(table: pd.DataFrame) -> pd.DataFrame:
    """Returns a row for each method and budget over all texts, in ascending order of bytes read.

    Args:
        table: as `Measured.table`.

    Returns:
        The columns of an arm, its `kl` and `read` as means over texts, `seconds`, `cache_mib` and `backend`; `high`,
        the largest upper end of an interval, infinite for a single document; and `over_topk`, the largest ratio.
    """
    high = table["ci_high"].fillna(math.inf)
    rows = table.assign(high=high).groupby(ARM_COLUMNS, sort=False)
    arms = rows.agg(
        kl=("kl", "mean"),
        read=("read", "mean"),
        high=("high", "max"),
        over_topk=("kl_over_topk", "max"),
        seconds=("seconds", "first"),  # of an arm over all texts, so the same in all its rows
        cache_mib=("cache_mib", "first"),
        backend=("backend", "first"),
    )
    return arms.reset_index().sort_values("read", kind="stable")


def below_target(table: pd.DataFrame, target: float) -> pd.DataFrame:
    """Returns the arms whose intervals end at or below the target on every text and that read fewer bytes than full
    attention, in ascending order of bytes.
    """
    arms = arm_means(table)
    return arms[(arms["high"] <= target) & (arms["read"] < 1)]


def recommended(table: pd.DataFrame, target: float, faster: float = FASTER) -> pd.Series | None:
    """Returns the arm with the fastest step among those below the target that a fast step serves here; of steps that
    take equally long within the scatter of times, the one with the smallest KL. None if there is none.

    Args:
        faster: share of another's time from which on a step counts as faster.
    """
    served = below_target(table, target)
    served = served[served["backend"] != TORCH]
    if served.empty:
        return None
    # A longer step is slower: the fastest takes less than the share `faster` of its time.
    longest = served["seconds"].min() / faster
    equal = served[served["seconds"] <= longest]
    return equal.sort_values("kl", kind="stable").iloc[0]


def fewest_bytes(table: pd.DataFrame, target: float) -> pd.Series | None:
    """Returns the arm below the target that reads the fewest bytes, whatever serves it; None if there is none."""
    arms = below_target(table, target)
    return None if arms.empty else arms.iloc[0]


def selecting(table: pd.DataFrame, target: float, choice: pd.Series) -> pd.Series | None:
    """Returns the recommended arm if it selects tokens; else the fastest that does, among those below the target that a
    fast step serves here; None if there is none.
    """
    if choice.method != READ_WHOLE:
        return choice
    served = below_target(table, target)
    served = served[(served["backend"] != TORCH) & (served["method"] != READ_WHOLE)]
    return None if served.empty else served.sort_values("seconds", kind="stable").iloc[0]


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


# ---- the answer ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """What is printed, and what the page shows.

    Attributes:
        question: in one line.
        lead: a sentence or two; the first says so if nothing is faster here than full attention.
        facts: name and text of each.
        steps: milliseconds by length: a head, then a row for each side; empty if longer prompts were not timed.
        recipe: lines of Python that use it; empty if nothing can be.
        limits: what the measurement cannot show.
        basis: what the answer stands on, name and text of each.
    """

    question: str
    lead: str
    facts: list[tuple[str, str]]
    steps: list[list[str]]
    recipe: str
    limits: list[str]
    basis: list[tuple[str, str]]


def answer_of(measured: Measured) -> Answer:
    target = measured.request.target_kl
    choice = recommended(measured.table, target, measured.times.faster)
    fewest = fewest_bytes(measured.table, target)
    lead = nothing(measured) if choice is None else lead_of(measured, choice)
    facts = [] if choice is None else list(facts_of(measured, choice))
    facts.append(("fewest bytes", fewest_text(measured, choice, fewest)))
    if measured.weights is not None:
        facts.append(("weights cost", weights_text(measured)))
    question = f"which step is the fastest here within {target:g} nats of full attention?"
    usable = fewest if choice is None else choice
    return Answer(
        question=f"{measured.title} tokens: {question}",
        lead=lead,
        facts=facts,
        steps=steps_of(measured),
        recipe="" if usable is None else recipe(measured, usable),
        limits=list(limits(measured)),
        basis=list(basis(measured)),
    )


def name_of(arm: Any) -> str:
    """Returns the method and budget of a row as they are written."""
    return side_name(arm.method, arm.budget_percent)


def ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


def kl_text(row: Any) -> str:
    """Returns the KL of a row with its interval, if it has one."""
    if math.isnan(row.ci_low):
        return f"{row.kl:.2g}"
    return f"{row.kl:.2g} [{row.ci_low:.2g}, {row.ci_high:.2g}]"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


# ---- what to take ----------------------------------------------------------------------------------------------------


def lead_of(measured: Measured, choice: pd.Series) -> str:
    """Returns the recommendation; where it is no faster than full attention, that comes first."""
    full = measured.times.full
    name = name_of(choice)
    texts = "this text" if len(measured.texts) == 1 else "every text"
    end = f"the interval ends at {choice.high:.2g} nats"
    below = f"its KL stays below {measured.request.target_kl:g} nats on {texts} ({end})"
    if choice.seconds <= measured.times.faster * full.seconds:
        ratio = full.seconds / choice.seconds
        gain = f"where full attention takes {ms(full.seconds)} ({ratio:.2f} times as fast)"
        return f"Take {name}: {ms(choice.seconds)} a token here, {gain}, and {below}."
    saves = "it saves memory and no time"
    if choice.seconds < full.seconds:
        saves = f"it saves memory, and no more time than such times scatter ({percent(measured.times.scatter)})"
    fastest = f"{name} is the fastest with {ms(choice.seconds)}"
    return (
        f"Nothing is faster here than full attention, {ms(full.seconds)} a token. Of the methods with a fast step, "
        f"{fastest}: {saves}; {below}."
    )


def nothing(measured: Measured) -> str:
    """Returns why nothing is recommended."""
    target = measured.request.target_kl
    arms = arm_means(measured.table)
    fast = arms[arms["backend"] != TORCH]
    sentences = []
    if fast.empty:
        reasons = list(dict.fromkeys(measured.refusals.values()))
        reason = reasons[0] if reasons else "this library has no fast step for them"
        sentences.append(f"Nothing is faster here than full attention: torch alone serves these methods ({reason}).")
    nearest = (arms if fast.empty else fast).sort_values("high").iloc[0]
    if math.isinf(nearest.high):
        sentences.append("Nothing is recommended: a single document has no interval. Give more text.")
    elif nearest.high > target:
        which = "of the methods" if fast.empty else "of the methods with a fast step here"
        end = f"whose interval ends at {nearest.high:.2g}"
        sentences += [
            f"None {which} stays below {target:g} nats. The nearest is {name_of(nearest)}, {end}.",
            "Try larger --budgets, more --documents for narrower intervals, or another --target-kl.",
        ]
    elif below_target(measured.table, target).empty:
        sentences.append(
            f"Nothing is recommended: what stays below {target:g} nats reads no fewer bytes than full attention. "
            "Try smaller --budgets or a longer --length."
        )
    return " ".join(sentences)


def recipe(measured: Measured, arm: pd.Series) -> str:
    """Returns lines of Python that decode with an arm, for a `model` and its `inputs`."""
    packs = measured.request.weights is not None
    arguments = [f'method="{arm.method}"']
    if method_named(arm.method).chooses:
        share = f"{arm.budget_percent / 100:g}" if arm.budget_percent < WHOLE_PERCENT else "1.0"
        arguments.append(f"budget={share}")
    lines = [f"pack_weights(model, bits={measured.request.weights})"] if packs else []
    if measured.request.compile and arm.backend != TORCH:
        arguments.append("compile=True")
    lines.append(f"output = model.generate(**inputs, custom_generate=partial_decoding({', '.join(arguments)}))")
    imported = "pack_weights, partial_decoding" if packs else "partial_decoding"
    return "\n".join([f"from residual_mass import {imported}", "", *lines])


# ---- facts -----------------------------------------------------------------------------------------------------------


def facts_of(measured: Measured, choice: pd.Series) -> Iterator[tuple[str, str]]:
    """Yields what one gets from the recommended arm."""
    rows = measured.table[(measured.table[ARM_COLUMNS] == choice[ARM_COLUMNS]).all(axis=1)]
    kls = [f"{row.text} {kl_text(row)}" for row in rows.itertuples()]
    over = "" if math.isnan(choice.over_topk) else f"; at most {choice.over_topk:.2g} of topk's"
    yield "KL", f"{', '.join(kls)} nats, with 95 % intervals over documents{over}"
    yield "memory", memory_text(measured, choice, rows["kept"].mean())
    yield "a token", seconds_text(measured, choice)
    yield "pays", pays_text(measured, choice)


def memory_text(measured: Measured, choice: pd.Series, kept: float) -> str:
    full = measured.times.full.cache_mib
    if math.isnan(choice.cache_mib) or math.isnan(full):
        return f"{percent(kept)} of the bytes of full attention's cache in bfloat16"
    share = percent(choice.cache_mib / full)
    tokens = f"{measured.request.prompt_tokens:,} tokens"
    return f"{choice.cache_mib:.3g} MiB of cache for {tokens}, {share} of the {full:.3g} MiB that transformers keeps"


def seconds_text(measured: Measured, choice: pd.Series) -> str:
    times = measured.times
    parts = [ms(choice.seconds), f"{FULL_ATTENTION} by transformers {ms(times.full.seconds)}"]
    if measured.weights is not None:
        parts.append(f"the same over the model as loaded {ms(times.steps['seconds'][AS_LOADED])}")
    if choice.method != READ_WHOLE:
        own = "not served here" if times.whole is None else ms(times.steps["seconds"][times.whole])
        parts.append(f"{READ_WHOLE} {own}")
    how = f"fastest of {TURN_STEPS * times.turns} steps, in turns that differ by {percent(times.scatter)}"
    compiled = "; steps of methods compiled, transformers' not" if measured.request.compile else ""
    return f"{'; '.join(parts)} ({how}{compiled})"


def pays_text(measured: Measured, choice: pd.Series) -> str:
    """Returns from which length on the recommended arm is faster than full attention, and than the 8-bit cache."""
    longer = measured.times.longer
    lengths = ", ".join(f"{tokens:,}" for tokens in longer.columns)
    name = name_of(choice)
    parts = [f"{name} {_from(measured, name, FULL_ATTENTION)}"]
    selecting = measured.times.selecting
    if selecting and READ_WHOLE in longer.index:
        parts.append(f"{selecting} {_from(measured, selecting, READ_WHOLE)}")
    end = "" if longer.columns[-1] >= LONGER[-1] else "; longer ones were not timed"
    return f"{'; '.join(parts)} (measured at {lengths} tokens{end})"


def _from(measured: Measured, side: str, other: str) -> str:
    first = faster_from(measured.times.longer, side, other, measured.times.faster)
    if first is None:
        return f"is faster than {other} at none of these lengths"
    return f"is faster than {other} from {first:,} tokens on"


def fewest_text(measured: Measured, choice: pd.Series | None, fewest: pd.Series | None) -> str:
    """Returns the arm that reads the fewest bytes, with what serves it."""
    if fewest is None:
        return f"no method that stays below {measured.request.target_kl:g} nats reads fewer bytes than full attention"
    reads = f"{name_of(fewest)} reads {percent(fewest.read)} of full attention's bytes a step"
    if choice is not None and name_of(choice) == name_of(fewest):
        return f"{reads}: the same method"
    if fewest.backend == TORCH:
        return f"{reads}, KL up to {fewest.high:.2g}; by torch only, no faster here ({ms(fewest.seconds)} a token)"
    return f"{reads}, KL up to {fewest.high:.2g}, {ms(fewest.seconds)} a token"


def weights_text(measured: Measured) -> str:
    """Returns what packed weights cost, apart from the methods."""
    parts = [f"{row.text} {kl_text(row)}" for row in measured.weights.itertuples()]
    rounding = measured.weights["rounding"].max()
    cost = f"{measured.request.weights} bits cost {', '.join(parts)} nats of KL from the model as loaded"
    return (
        f"{cost}, under full attention. Methods are measured from full attention with the same packed weights: their "
        "KL is on top of that, and contains the rounding of activations, up to "
        f"{rounding:.2g} nats for full attention itself"
    )


def steps_of(measured: Measured) -> list[list[str]]:
    longer = measured.times.longer
    if longer is None or len(longer.columns) < 2:
        return []
    rows = [["ms a token, by tokens in the cache", *(f"{tokens:,}" for tokens in longer.columns)]]
    for name, seconds in longer.iterrows():
        cells = [f"{1000 * value:.3g}" for value in seconds]
        rows.append([str(name), *cells])
    return rows


# ---- what it stands on -----------------------------------------------------------------------------------------------


def basis(measured: Measured) -> Iterator[tuple[str, str]]:
    counts = {text.name: len(text.sequences) for text in measured.texts}
    of_texts = ", ".join(f"{name} {count}" for name, count in counts.items())
    total = sum(counts.values())
    texts = "1 text" if len(counts) == 1 else f"{len(counts)} texts"
    tokens = f"{total * measured.request.tokens:,} tokens after prompts of {measured.request.prompt_tokens:,}"
    yield "stands on", f"{total} documents of {texts} ({of_texts}), {tokens}"
    yield from measured.setup.items()


def limits(measured: Measured) -> Iterator[str]:
    """Yields what the measurement cannot show, one sentence or two each."""
    request = measured.request
    yield (
        f"Prompts had {request.length} tokens. Other lengths need other shares, as a rule smaller ones for longer "
        "prompts: measure at yours with --length."
    )
    yield "Times are of this machine with what else ran on it; keys beyond the prompts' length were random."
    if measured.times.scatter > NOISY:
        yield (
            f"Other work disturbed the times: turns of the same steps differ by {percent(measured.times.scatter)}, and "
            "what differs less counts as equal. Measure again when the machine is idle; distances are not repeated."
        )
    yield from limits_of_texts(measured)
    if min(len(text.sequences) for text in measured.texts) < FEW:
        yield f"If one document in ten is far worse, so few may not include it: decide on --documents {FEW} or more."
    yield "The ratio to topk's KL differs less between texts than the nats do: it is what to expect on another text."
    yield "Running text hardly tests whether a fact is found again: measure on prompts with answers for that."
    yield f"Measured are the first {request.tokens} tokens after a prompt; over hundreds the ratio to topk's KL grows."
    yield (
        f"The recommendation is the best of {len(arm_means(measured.table))} on the same documents, so a little "
        "optimistic: confirm it on other text."
    )


def limits_of_texts(measured: Measured) -> Iterator[str]:
    request = measured.request
    for text in measured.texts:
        count = len(text.sequences)
        if count < request.documents:
            yield f"{text.name} has {count} of {request.documents} documents: it holds no more text."
        if text.sources < count:
            files = "one file" if text.sources == 1 else f"{text.sources} files"
            yield (
                f"{text.name}: {count} documents come from {files}. Parts of a file are alike, so the interval is "
                f"about {files} and too narrow for others."
            )
        if text.read < 1:
            yield (
                f"{text.name}: documents were taken from {100 * text.read:.2g} % of its characters, at places spread "
                "evenly from its beginning to its end."
            )
        if text.special:
            how = (
                "as these tokens" if request.special_tokens else "as text; --special-tokens reads them as these tokens"
            )
            yield f"{text.name}: names of special tokens in it, such as {text.special}, were read {how}."
