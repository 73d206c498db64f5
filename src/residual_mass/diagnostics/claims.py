"""The paper's statements about its diagnostics, each with a number that decides it: a statement holds if its number is
positive.

A claim is a function whose docstring is the statement. It takes a `Sample`, or all samples if it is about all settings.
It returns [B], or [B, any] where the least or the largest of several numbers counts. Undefined numbers are NaN; without
anything to compare, the array is empty. Gains, losses and differences of a head are means over its queries and packs.

Shape letters: B = resamples, H = heads, that is (layer, query head).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from residual_mass.diagnostics.samples import Sample, ratio
from residual_mass.spec.texts import PROMPT_PACKS

ROUNDING_ERROR = 1e-6
"""Relative errors below this are rounding."""


@dataclass(frozen=True)
class Claim:
    """A statement, which is the docstring of its function."""

    number: Callable[[Any], np.ndarray]
    shown_in: str  # label of the figure or table that shows it
    statistic: str  # what the number is, in a few words
    extreme: Literal["least", "largest"] = "least"  # which one counts of several numbers
    one_budget: bool = True  # whether it is about a single budget
    about: Literal["text", "cwe", "any", "all"] = "any"  # the kind of packs; "all" for all settings together
    decimals: str = "z.6f"  # format of the number

    @property
    def name(self) -> str:
        return self.number.__name__

    @property
    def statement(self) -> str:
        return " ".join(str(self.number.__doc__).split())

    def applies(self, sample: Sample) -> bool:
        """Whether the statement is about this setting."""
        corpus = sample.facts["corpus"]
        kind = corpus if corpus in PROMPT_PACKS else "text"
        return self.about in ("any", kind)


PAPER_CLAIMS: list[Claim] = []


def claim(shown_in: str, statistic: str, **more: Any) -> Callable[[Callable], Callable]:
    """Adds a function to PAPER_CLAIMS."""

    def add(number: Callable) -> Callable:
        PAPER_CLAIMS.append(Claim(number, shown_in, statistic, **more))
        return number

    return add


# ---- about one setting -----------------------------------------------------------------------------------------------


@claim("entropy_gain", "least lead in mean gain of the highest entropy quartile over another")
def gain_largest_at_high_entropy(s: Sample) -> np.ndarray:
    """Completion lowers the error most on the heads of highest mid-region entropy."""
    gain = s.over_quartiles(s.by_head("gain"))
    return gain[:, -1:] - gain[:, :-1]


@claim("entropy_gain", "rank correlation of entropy and gain over heads")
def gain_rises_with_entropy(s: Sample) -> np.ndarray:
    """A head's gain from completion tends to rise with its mid-region entropy."""
    return s.spearman("h_mid", "gain")


@claim("entropy_gain", "mean loss of the heads that lose, lowest entropy quartile minus the others")
def losses_at_low_entropy(s: Sample) -> np.ndarray:
    """Where completion raises the error, it does so by most on heads of low mid-region entropy."""
    gain = s.by_head("gain")
    sizes = [len(group) for group in s.quartiles]
    losing = s.over_quartiles(gain < 0) * sizes
    lost = s.over_quartiles(np.maximum(-gain, 0)) * sizes
    of_lowest = ratio(lost[:, 0], losing[:, 0])
    of_others = ratio(lost[:, 1:].sum(axis=1), losing[:, 1:].sum(axis=1))
    return of_lowest - of_others


@claim("entropy_gain", "share of heads with a loss, lowest entropy quartile minus the other heads")
def losses_more_frequent_at_low_entropy(s: Sample) -> np.ndarray:
    """Completion raises the error more often on heads of low mid-region entropy than on others."""
    losing = s.over_quartiles(s.by_head("gain") < 0)
    sizes = np.array([len(group) for group in s.quartiles])
    of_others = (losing[:, 1:] * sizes[1:]).sum(axis=1)
    return losing[:, 0] - of_others / sizes[1:].sum()


@claim("quartile_error", "least mean gain over quartiles and K", one_budget=False)
def completion_helps_in_every_quartile(s: Sample) -> np.ndarray:
    """Completion lowers the mean error in every entropy quartile at every K."""
    gains = [s.over_quartiles(s.by_head("gain", budget)) for budget in s.ks]
    return np.concatenate(gains, axis=1)


@claim("quartile_error", "rank correlation of entropy and error of TopK over heads")
def topk_error_rises_with_entropy(s: Sample) -> np.ndarray:
    """The error of TopK tends to rise with mid-region entropy."""
    return s.spearman("h_mid", "e_topk")


@claim("quartile_error", "rank correlation of entropy and error of Sub over heads")
def completion_error_rises_with_entropy(s: Sample) -> np.ndarray:
    """The error with completion tends to rise with mid-region entropy."""
    return s.spearman("h_mid", "e_sub")


@claim("quartile_error", "least fall of the mean error between neighbouring K, over both methods", one_budget=False)
def errors_fall_with_k(s: Sample) -> np.ndarray:
    """More retrieved tokens lower the error of TopK and of completion."""
    by_k = sorted((k, budget) for budget, k in s.ks.items())
    budgets = dict(by_k).values()  # those of the same K count once
    falls = []
    for name in ("e_topk", "e_sub"):
        errors = [s.mean(name, budget) for budget in budgets]
        falls.append(-np.diff(np.stack(errors, axis=1), axis=1))
    return np.concatenate(falls, axis=1)


@claim("mass_curves", "least lead in mass recovery of the lowest over the highest quartile, up to the table's K")
def mass_recovered_faster_at_low_entropy(s: Sample) -> np.ndarray:
    """Few tokens hold more of the mid-region's mass on heads of low entropy than on heads of high entropy."""
    grid = s.mass.index.unique("k")
    largest = max(s.ks[s.budget], grid[0])
    leads = []
    for k in grid[grid <= largest]:
        shares = s.over_quartiles(s.mass_at(k))
        leads.append(shares[:, 0] - shares[:, -1])
    return np.stack(leads, axis=1)


@claim("entropy_heatmap", "rank correlation of entropy and estimated residual share over heads")
def residual_share_rises_with_entropy(s: Sample) -> np.ndarray:
    """The estimated residual tends to take a larger share of the denominator on heads of higher entropy."""
    return s.spearman("h_mid", "residual_share_hat")


@claim("logz_calibration", "minus the mean log-Z error", about="text")
def residual_underestimated(s: Sample) -> np.ndarray:
    """The feature maps underestimate the residual mass on average."""
    return -s.log_z_error()


@claim("fullsub_nosub_delta", "share of heads that favour NoSub, minus one half", about="text")
def nosub_wins_on_most_heads(s: Sample) -> np.ndarray:
    """Without subtraction the error is lower on more than half of the heads."""
    return s.over_heads(s.by_head("delta") > 0) - 0.5


@claim("fullsub_nosub_delta", "share of heads that favour Sub, minus one half", about="cwe")
def sub_wins_on_most_heads(s: Sample) -> np.ndarray:
    """With subtraction the error is lower on more than half of the heads."""
    return s.over_heads(s.by_head("delta") < 0) - 0.5


@claim("fullsub_nosub_delta", "mean difference on heads that favour Sub minus that on heads that favour NoSub")
def subtraction_wins_by_more(s: Sample) -> np.ndarray:
    """Heads that favour subtraction favour it by more than the others favour its absence."""
    delta = s.by_head("delta")
    return s.mean_where(-delta, delta < 0) - s.mean_where(delta, delta > 0)


@claim("fullsub_nosub_delta", "mean error of NoSub minus that of Sub")
def subtraction_better_on_average(s: Sample) -> np.ndarray:
    """Subtraction lowers the mean error."""
    return -s.mean("delta")


@claim("fullsub_nosub_delta", "mean log-Z error of heads that favour Sub minus that of heads that favour NoSub")
def nosub_wins_where_underestimated(s: Sample) -> np.ndarray:
    """Heads that favour NoSub are those whose residual mass is underestimated more, or overestimated less."""
    defined = s.by_head("log_z_defined")
    delta = s.by_head("delta")
    error = np.nan_to_num(ratio(s.by_head("log_z_error"), defined))
    favour_sub = (delta < 0) & (defined > 0)
    favour_nosub = (delta > 0) & (defined > 0)
    return s.mean_where(error, favour_sub) - s.mean_where(error, favour_nosub)


# ---- about all settings ----------------------------------------------------------------------------------------------


@claim("logz_calibration", "largest of minus the mean log-Z errors of the settings", extreme="largest", about="all")
def residual_underestimated_somewhere(samples: Sequence[Sample]) -> np.ndarray:
    """In some setting the feature maps underestimate the residual mass."""
    return -residual_overestimated_somewhere(samples)


@claim("logz_calibration", "largest of the mean log-Z errors of the settings", extreme="largest", about="all")
def residual_overestimated_somewhere(samples: Sequence[Sample]) -> np.ndarray:
    """In some setting the feature maps overestimate the residual mass, so that its error has no universal sign."""
    return np.stack([s.log_z_error() for s in samples], axis=1)


@claim("exact_accounting", "least lead of Sub over TopK and NoSub in mean error, over settings", about="all")
def sub_lowest_everywhere(samples: Sequence[Sample]) -> np.ndarray:
    """Completion with subtraction has the lowest mean error of the approximate methods in every setting."""
    leads = []
    for s in samples:
        leads += [s.mean(name) - s.mean("e_sub") for name in ("e_topk", "e_nosub")]
    return np.stack(leads, axis=1)


@claim(
    "exact_accounting", f"{ROUNDING_ERROR:g} minus the largest mean error of ExactSub, over settings and K",
    one_budget=False, about="all", decimals=".3e",
)  # fmt: skip
def exact_sub_is_exact(samples: Sequence[Sample]) -> np.ndarray:
    """With the true residual, subtraction recovers full attention up to rounding."""
    errors = [s.mean("e_exact_sub", budget) for s in samples for budget in s.ks]
    return ROUNDING_ERROR - np.stack(errors, axis=1)


@claim(
    "exact_accounting", "largest lead of ExactNoSub over Sub in mean error, over settings", extreme="largest",
    about="all",
)  # fmt: skip
def exact_nosub_lower_somewhere(samples: Sequence[Sample]) -> np.ndarray:
    """Counting the retrieved tokens twice, but with the true masses, has a lower error than completion somewhere."""
    leads = [s.mean("e_sub") - s.mean("e_exact_nosub") for s in samples]
    return np.stack(leads, axis=1)
