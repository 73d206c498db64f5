"""The answer to what was measured: the cheapest method that meets the target, and what the measurement cannot tell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from residual_mass.measure.distances import Line, Measured
from residual_mass.methods import method_named
from residual_mass.paper.titles import model_name

FEW = 8
"""Documents below which a bootstrap interval is too narrow to be relied on."""
COPIES = 0.2
"""Share of tokens that end a pair of the prompt's below which a text hardly tests retrieval."""


@dataclass(frozen=True)
class Choice:
    """A method at a budget over all texts.

    Attributes:
        share: mean over texts of the bytes that a step reads, in units of full attention's.
        high: largest upper end of an interval; infinite where a text has a single document.
    """

    method: str
    budget_percent: float
    share: float
    high: float

    @property
    def code(self) -> str:
        """How to use it."""
        return f'partial_kv(model, method="{self.method}", budget={self.budget_percent / 100:g})'


def choices(measured: Measured) -> list[Choice]:
    """All methods at all budgets, from the fewest bytes to the most."""
    lines: defaultdict[tuple[str, float], list[Line]] = defaultdict(list)
    for line in measured.lines:
        lines[line.method, line.budget_percent].append(line)
    found = [
        Choice(
            method,
            budget,
            sum(each.reading.share for each in some) / len(some),
            max(float("inf") if each.high is None else each.high for each in some),
        )
        for (method, budget), some in lines.items()
    ]
    return sorted(found, key=lambda choice: choice.share)


def recommended(measured: Measured) -> Choice | None:
    """The choice of the fewest bytes whose intervals end at or below the target on every text."""
    return next((choice for choice in choices(measured) if choice.high <= measured.asked.target_kl), None)


def verdict(measured: Measured) -> str:
    """The answer in a sentence or two."""
    target, choice = measured.asked.target_kl, recommended(measured)
    if choice is not None:
        texts = "this text" if len(measured.texts) == 1 else "every text"
        return (
            f"{choice.method} with {choice.budget_percent:g} % of the prompt read exactly is the cheapest that stays "
            f"below {target:g} nats on {texts}: a step reads {100 * choice.share:.0f} % of the bytes that full "
            f"attention reads, and the interval of its KL ends at {choice.high:.2g}."
        )
    nearest = min(choices(measured), key=lambda each: each.high)
    if nearest.high == float("inf"):
        return "Nothing is recommended: a single document has no interval. Give more text."
    return (
        f"None of the methods stays below {target:g} nats. The nearest is {nearest.method} at "
        f"{nearest.budget_percent:g} %, whose interval ends at {nearest.high:.2g}. Try larger --budgets, more "
        "--documents for narrower intervals, or another --target-kl."
    )


def limits(measured: Measured) -> Iterator[str]:
    """What the measurement cannot tell."""
    asked = measured.asked
    if measured.backbone.context > 2 * asked.length_in_tokens:
        yield (
            f"Prompts had {asked.length} tokens, and the model was made for up to {measured.backbone.context:,}. At "
            "other lengths other shares are needed, as a rule smaller ones for longer prompts: measure at yours with "
            "--length."
        )
    for text in measured.texts:
        count = len(text.sequences)
        if count < asked.documents:
            yield f"{text.name} has {count} documents and not {asked.documents}: it holds no more text."
        if count < FEW:
            yield f"{text.name}: intervals of {count} documents are rough: they miss the mean more often than 5 %."
        if text.sources < count:
            yield (
                f"{text.name}: {count} documents come from {text.sources} files. Parts of one file are alike, so the "
                "interval is about these files and too narrow for others."
            )
    for name, share in measured.copied.items():
        if share < COPIES:
            yield (
                f"{name}: {100 * share:.0f} % of the tokens end a pair of tokens that stands in their prompt, and "
                f"{100 * measured.new[name]:.0f} % do not occur in it. Such a text hardly tests whether a fact is "
                "found again; measure on prompts with answers for that."
            )
    yield (f"Measured are the first {asked.tokens} tokens after a prompt. Over longer outputs errors may add up.")
    if (choice := recommended(measured)) and not method_named(choice.method).fused:
        yield (
            f"Bytes are what a decode step has to read. partial_kv shows what {choice.method} does to the output; this "
            "library has no fast step for it yet."
        )
    yield (
        f"The recommendation is the best of {len(choices(measured))} on the same documents, so a little optimistic: "
        "confirm it on other text."
    )


def printed(measured: Measured) -> str:
    """The tables and the answer for a terminal."""
    asked, choice = measured.asked, recommended(measured)
    parts = [
        f"{model_name(measured.backbone.model_id)}, prompts of {asked.length} tokens, {asked.tokens} tokens after "
        "each; KL(full attention || method) of the next token in nats, mean and 95 % interval"
    ]
    width = max(len(line.method) for line in measured.lines)
    for text in measured.texts:
        parts.append(f"\n{text.name}, {len(text.sequences)} documents")
        parts.append(f"  {'method':{width}}  read exactly  bytes read  {'KL':27}  same top token")
        for line in measured.lines:
            if line.text == text.name:
                chosen = choice and (choice.method, choice.budget_percent) == (line.method, line.budget_percent)
                parts.append(
                    f"{'>' if chosen else ' '} {line.method:{width}}  {line.budget_percent:>10g} %  "
                    f"{100 * line.reading.share:>8.1f} %  {distance(line):27}  {100 * line.same_top:>12.1f} %"
                )
    parts.append(f"\n{verdict(measured)}")
    if choice is not None:
        parts.append(f"\n    with {choice.code}:\n        output = model.generate(**inputs)")
    parts.append("\nWhat this cannot tell:")
    parts += (f"* {each}" for each in limits(measured))
    return "\n".join(parts) + "\n"


def distance(line: Line) -> str:
    """KL with its interval."""
    ends = "" if line.low is None or line.high is None else f" [{line.low:.2g}, {line.high:.2g}]"
    return f"{line.kl:.2g}{ends}"
