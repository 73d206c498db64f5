"""The paper's statements about its diagnostics, each with the number that decides it: it holds where that is positive.

Numbers of statements about one setting take a `Sample`, those about all settings take all samples. Each is [B], or
[B, any] where the least or the largest of several numbers counts; NaN where it is not defined. Gains, losses and
differences of a head are means over its queries and packs.

Shape letters: B = resamples, H = heads, that is (layer, query head).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal

import numpy as np

from residual_mass.diagnostics import PROMPT_PACKS
from residual_mass.diagnostics.resampling import Sample, Samples, ratio
from residual_mass.diagnostics.settings import CapturedSetting

EXACT = 1e-6
"""Relative errors below this are rounding."""


@dataclass(frozen=True)
class Claim(Generic[Samples]):
    """A statement about one setting (`number` takes a `Sample`) or about all of them (it takes all samples).

    Attributes:
        shown_in: label of the figure or table that shows it.
        statistic: what the number is, in a few words.
        extreme: which one counts of several numbers.
        one_budget: whether it is about a single budget.
        about: the kind of packs that it is about.
        needs_several_k: whether it compares different K.
        decimals: format of the number.
    """

    name: str
    statement: str
    shown_in: str
    statistic: str
    number: Callable[[Samples], np.ndarray]
    extreme: Literal["least", "largest"] | None = None
    one_budget: bool = True
    about: Literal["text", "cwe", "any"] = "any"
    needs_several_k: bool = False
    decimals: str = "z.6f"

    def applies(self, setting: CapturedSetting) -> bool:
        """Whether the statement is about this setting."""
        if self.needs_several_k and len(set(setting.ks.values())) < 2:
            return False
        corpus = setting.facts["corpus"]
        return self.about in ("any", corpus if corpus in PROMPT_PACKS else "text")


def states(
    statement: str, shown_in: str, statistic: str, **others: Any
) -> Callable[[Callable[[Samples], np.ndarray]], Claim[Samples]]:
    """Makes a claim of the function below, which computes its number and gives its name."""
    return lambda number: Claim(number.__name__, statement, shown_in, statistic, number, **others)


# ---- about one setting -----------------------------------------------------------------------------------------------


@states(
    "Completion lowers the error most on the heads of highest mid-region entropy.",
    "entropy_gain",
    "least lead in mean gain of the highest entropy quartile over another",
    extreme="least",
)
def gain_largest_at_high_entropy(sample: Sample) -> np.ndarray:
    gain = sample.over_quartiles(sample.by_head("gain"))
    return gain[:, -1:] - gain[:, :-1]


@states(
    "A head's gain from completion tends to rise with its mid-region entropy.",
    "entropy_gain",
    "rank correlation of entropy and gain over heads",
)
def gain_rises_with_entropy(sample: Sample) -> np.ndarray:
    return _rises_with_entropy(sample, "gain")


@states(
    "Where completion raises the error, it does so by most on heads of low mid-region entropy.",
    "entropy_gain",
    "mean loss of the heads that lose, lowest entropy quartile minus the others",
)
def losses_at_low_entropy(sample: Sample) -> np.ndarray:
    """Not defined where one of the two groups has no head with a loss."""
    gain = sample.by_head("gain")
    losing = sample.over_quartiles(gain < 0) * _sizes(sample)
    lost = sample.over_quartiles(np.maximum(-gain, 0)) * _sizes(sample)
    return ratio(lost[:, 0], losing[:, 0]) - ratio(lost[:, 1:].sum(axis=1), losing[:, 1:].sum(axis=1))


@states(
    "Completion raises the error more often on heads of low mid-region entropy than on others.",
    "entropy_gain",
    "share of heads with a loss, lowest entropy quartile minus the other heads",
)
def losses_more_frequent_at_low_entropy(sample: Sample) -> np.ndarray:
    losing, sizes = sample.over_quartiles(sample.by_head("gain") < 0), _sizes(sample)
    return losing[:, 0] - (losing[:, 1:] * sizes[1:]).sum(axis=1) / sizes[1:].sum()


@states(
    "Completion lowers the mean error in every entropy quartile at every K.",
    "quartile_error",
    "least mean gain over quartiles and K",
    extreme="least",
    one_budget=False,
)
def completion_helps_in_every_quartile(sample: Sample) -> np.ndarray:
    return np.concatenate(
        [sample.over_quartiles(sample.by_head("gain", budget)) for budget in sample.setting.ks], axis=1
    )


@states(
    "The error of TopK tends to rise with mid-region entropy.",
    "quartile_error",
    "rank correlation of entropy and error of TopK over heads",
)
def topk_error_rises_with_entropy(sample: Sample) -> np.ndarray:
    return _rises_with_entropy(sample, "e_topk")


@states(
    "The error with completion tends to rise with mid-region entropy.",
    "quartile_error",
    "rank correlation of entropy and error of Sub over heads",
)
def completion_error_rises_with_entropy(sample: Sample) -> np.ndarray:
    return _rises_with_entropy(sample, "e_sub")


@states(
    "More retrieved tokens lower the error of TopK and of completion.",
    "quartile_error",
    "least fall of the mean error between neighbouring K, over both methods",
    extreme="least",
    one_budget=False,
    needs_several_k=True,
)
def errors_fall_with_k(sample: Sample) -> np.ndarray:
    """From each K to the next larger one; budgets with the same K count once."""
    budgets = dict(sorted((k, budget) for budget, k in sample.setting.ks.items())).values()
    errors = [np.stack([sample.mean(name, budget) for budget in budgets]) for name in ("e_topk", "e_sub")]
    return -np.diff(errors, axis=1).reshape(-1, errors[0].shape[1]).T


@states(
    "Few tokens hold more of the mid-region's mass on heads of low entropy than on heads of high entropy.",
    "mass_curves",
    "least lead in mass recovery of the lowest over the highest quartile, up to the table's K",
    extreme="least",
)
def mass_recovered_faster_at_low_entropy(sample: Sample) -> np.ndarray:
    grid = sorted(k for k in sample.setting.mass if k >= 1)
    largest = max(sample.setting.ks[sample.budget], grid[0])
    shares = [sample.over_quartiles(sample.over_packs(sample.setting.mass[k])) for k in grid if k <= largest]
    return np.stack([share[:, 0] - share[:, -1] for share in shares], axis=1)


@states(
    "The estimated residual tends to take a larger share of the denominator on heads of higher entropy.",
    "entropy_heatmap",
    "rank correlation of entropy and estimated residual share over heads",
)
def residual_share_rises_with_entropy(sample: Sample) -> np.ndarray:
    return _rises_with_entropy(sample, "residual_share_hat")


@states(
    "The feature maps underestimate the residual mass on average.",
    "logz_calibration",
    "minus the mean log-Z error",
    about="text",
)
def residual_underestimated(sample: Sample) -> np.ndarray:
    return -sample.log_z_error()


@states(
    "Without subtraction the error is lower on more than half of the heads.",
    "fullsub_nosub_delta",
    "share of heads that favour NoSub, minus one half",
    about="text",
)
def nosub_wins_on_most_heads(sample: Sample) -> np.ndarray:
    return sample.over_heads(sample.by_head("delta") > 0) - 0.5


@states(
    "With subtraction the error is lower on more than half of the heads.",
    "fullsub_nosub_delta",
    "share of heads that favour Sub, minus one half",
    about="cwe",
)
def sub_wins_on_most_heads(sample: Sample) -> np.ndarray:
    return sample.over_heads(sample.by_head("delta") < 0) - 0.5


@states(
    "Heads that favour subtraction favour it by more than the others favour its absence.",
    "fullsub_nosub_delta",
    "mean difference on heads that favour Sub minus that on heads that favour NoSub",
)
def subtraction_wins_by_more(sample: Sample) -> np.ndarray:
    """Not defined where all heads are on one side."""
    delta = sample.by_head("delta")
    return _mean_where(sample, -delta, delta < 0) - _mean_where(sample, delta, delta > 0)


@states(
    "Subtraction lowers the mean error.",
    "fullsub_nosub_delta",
    "mean error of NoSub minus that of Sub",
)
def subtraction_better_on_average(sample: Sample) -> np.ndarray:
    return -sample.mean("delta")


@states(
    "Heads that favour NoSub are those whose residual mass is underestimated more, or overestimated less.",
    "fullsub_nosub_delta",
    "mean log-Z error of heads that favour Sub minus that of heads that favour NoSub",
)
def nosub_wins_where_underestimated(sample: Sample) -> np.ndarray:
    """Heads without any defined log-Z error are on neither side; not defined where no head is on one of them."""
    count = sample.by_head("log_z_count")
    error = np.nan_to_num(ratio(sample.by_head("log_z_sum"), count))
    delta = sample.by_head("delta")
    return _mean_where(sample, error, (delta < 0) & (count > 0)) - _mean_where(sample, error, (delta > 0) & (count > 0))


# ---- about all settings ----------------------------------------------------------------------------------------------


@states(
    "In some setting the feature maps underestimate the residual mass.",
    "logz_calibration",
    "largest of minus the mean log-Z errors of the settings",
    extreme="largest",
)
def residual_underestimated_somewhere(samples: Sequence[Sample]) -> np.ndarray:
    return -np.stack([sample.log_z_error() for sample in samples], axis=1)


@states(
    "In some setting the feature maps overestimate the residual mass, so that its error has no universal sign.",
    "logz_calibration",
    "largest of the mean log-Z errors of the settings",
    extreme="largest",
)
def residual_overestimated_somewhere(samples: Sequence[Sample]) -> np.ndarray:
    return np.stack([sample.log_z_error() for sample in samples], axis=1)


@states(
    "Completion with subtraction has the lowest mean error of the approximate methods in every setting.",
    "exact_accounting",
    "least lead of Sub over TopK and NoSub in mean error, over settings",
    extreme="least",
)
def sub_lowest_everywhere(samples: Sequence[Sample]) -> np.ndarray:
    leads = [sample.mean(name) - sample.mean("e_sub") for sample in samples for name in ("e_topk", "e_nosub")]
    return np.stack(leads, axis=1)


@states(
    "With the true residual, subtraction recovers full attention up to rounding.",
    "exact_accounting",
    f"{EXACT:g} minus the largest mean error of ExactSub, over settings and K",
    extreme="least",
    one_budget=False,
    decimals=".3e",
)
def exact_sub_is_exact(samples: Sequence[Sample]) -> np.ndarray:
    errors = [sample.mean("e_exact_sub", budget) for sample in samples for budget in sample.setting.ks]
    return EXACT - np.stack(errors, axis=1)


@states(
    "Counting the retrieved tokens twice, but with the true masses, has a lower error than completion somewhere.",
    "exact_accounting",
    "largest lead of ExactNoSub over Sub in mean error, over settings",
    extreme="largest",
)
def exact_nosub_lower_somewhere(samples: Sequence[Sample]) -> np.ndarray:
    return np.stack([sample.mean("e_sub") - sample.mean("e_exact_nosub") for sample in samples], axis=1)


def _rises_with_entropy(sample: Sample, name: str) -> np.ndarray:
    return sample.spearman(sample.by_head("h_mid"), sample.by_head(name))


def _sizes(sample: Sample) -> np.ndarray:
    """Heads in each quartile."""
    return np.array([len(group) for group in sample.setting.quartiles])


def _mean_where(sample: Sample, values: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """The mean of [B, H] over the drawn heads that are chosen, NaN without any."""
    return ratio(sample.over_heads(values * chosen), sample.over_heads(chosen))


CLAIMS: tuple[Claim[Sample], ...] = (
    gain_largest_at_high_entropy,
    gain_rises_with_entropy,
    losses_at_low_entropy,
    losses_more_frequent_at_low_entropy,
    completion_helps_in_every_quartile,
    topk_error_rises_with_entropy,
    completion_error_rises_with_entropy,
    errors_fall_with_k,
    mass_recovered_faster_at_low_entropy,
    residual_share_rises_with_entropy,
    residual_underestimated,
    nosub_wins_on_most_heads,
    sub_wins_on_most_heads,
    subtraction_wins_by_more,
    subtraction_better_on_average,
    nosub_wins_where_underestimated,
)
JOINT_CLAIMS: tuple[Claim[Sequence[Sample]], ...] = (
    residual_underestimated_somewhere,
    residual_overestimated_somewhere,
    sub_lowest_everywhere,
    exact_sub_is_exact,
    exact_nosub_lower_somewhere,
)
