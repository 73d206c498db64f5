"""A method at a budget."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from fractions import Fraction

from residual_mass.methods import Method, method_named

LEAST_PERCENT = 0.5
"""The smallest budget of the paper."""


class HasMethod:
    """Properties of an arm that follow from its method, `rule`."""

    @property
    def is_full(self) -> bool:
        return self.rule.whole_prefix

    @property
    def needs_maps(self) -> bool:
        return self.rule.needs_maps


@dataclass(frozen=True)
class Arm(HasMethod):
    """A method at an exact-support budget."""

    rule: Method
    budget_percent: float | None
    """Percent of the prefix in (0, 100], anchors included; None for the whole prefix."""


def arm_of(method: str | Method, budget: float | str | None) -> Arm:
    """Returns a method at a budget.

    Args:
        budget: share of the prompt's tokens, in (0, 1]; None for a method that chooses no tokens.

    Raises:
        ValueError: the method is unknown; the budget is missing or out of range.

    Warns:
        UserWarning: the budget means nothing, because the method reads all tokens.
    """
    rule = method_named(method)
    if rule.chooses and budget is None:
        raise ValueError(f"method {rule.name} chooses tokens: give a budget, such as budget=0.02 for 2 % of the prompt")
    percent = None if budget is None else percent_of_share(budget)
    if not rule.chooses and percent not in (None, 100):
        warnings.warn(f"method {rule.name} reads all tokens: a budget means nothing, leave it out", stacklevel=3)
    return Arm(rule, percent if rule.chooses else None)


def percent_of_share(budget: float | str | None) -> float:
    """Converts a budget from a share of the prompt's tokens, in (0, 1], to percent.

    Raises:
        ValueError: the budget is not a number, is out of range, or is the integer 1, which may mean 1 %.
    """
    written = str(budget)
    if written == "1":
        raise ValueError("budget=1 may mean 1 % or the whole prompt: write 0.01 or 1.0")
    try:
        number = Fraction(written.removesuffix("%"))
    except (ValueError, ZeroDivisionError):
        number = Fraction(0)
    in_percent = number > 1 or written.endswith("%")
    if in_percent or number <= 0:
        meant = number if in_percent and 0 < number <= 100 else 2
        example = f"for {float(meant):g} % write {float(meant) / 100:g}"
        raise ValueError(f"budget={budget!r} is not a share of the prompt's tokens in (0, 1]: {example}")
    return float(100 * number)  # exact: in floats 100 * 0.07 is a little above 7, and the budget's formula rounds up


def percent_written(text: str) -> float:
    """Parses a budget in percent of the prompt's tokens, as command lines take it: "2", "0.5" or "2%".

    Raises:
        ValueError: it is not a number in (0, 100], or is below LEAST_PERCENT without a percent sign (probably a share).
    """
    number = text.removesuffix("%").strip()
    try:
        percent = float(number)
    except ValueError:
        percent = float("nan")
    if not 0 < percent <= 100:
        raise ValueError(f"budget {text!r} is not a number of percent in (0, 100], such as 2")
    if percent < LEAST_PERCENT and number == text.strip():
        likely = f"{100 * percent:g}"
        raise ValueError(f"budget {text} may mean {likely} % or {percent:g} %: write {likely} or {percent:g}%")
    return percent
