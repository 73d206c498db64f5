"""The paper's statements about its diagnostics, each with the number that decides it: it holds where that is positive.

Numbers of statements about one setting take a `Sample`, those about all settings take all samples. Each is [B], or
[B, any] where the least or the largest of several numbers counts; NaN where it is not defined. Gains, losses and
differences of a head are means over its queries and packs.

Shape letters: B = resamples, H = heads, that is (layer, query head).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from residual_mass.diagnostics import PROMPT_PACKS
from residual_mass.diagnostics.resampling import CapturedSetting, Sample, ratio

EXACT = 1e-6
"""Relative errors below this are rounding."""


@dataclass(frozen=True)
class Claim:
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
    number: Callable[[Any], np.ndarray]
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


def rises_with_entropy(name: str) -> Callable[[Sample], np.ndarray]:
    """Rank correlation of entropy and a cell over heads."""
    return lambda sample: sample.spearman(sample.by_head("h_mid"), sample.by_head(name))


def gain_of_top_quartile(sample: Sample) -> np.ndarray:
    gain = sample.over_quartiles(sample.by_head("gain"))
    return gain[:, -1:] - gain[:, :-1]


def losses_of_low_entropy(sample: Sample) -> np.ndarray:
    """Not defined where one of the two groups has no head with a loss."""
    gain, sizes = sample.by_head("gain"), sample.setting.quartile_sizes
    losing = sample.over_quartiles(gain < 0) * sizes
    lost = sample.over_quartiles(np.maximum(-gain, 0)) * sizes
    return ratio(lost[:, 0], losing[:, 0]) - ratio(lost[:, 1:].sum(axis=1), losing[:, 1:].sum(axis=1))


def frequency_of_losses(sample: Sample) -> np.ndarray:
    losing, sizes = sample.over_quartiles(sample.by_head("gain") < 0), sample.setting.quartile_sizes
    return losing[:, 0] - (losing[:, 1:] * sizes[1:]).sum(axis=1) / sizes[1:].sum()


def gains_of_quartiles(sample: Sample) -> np.ndarray:
    gains = [sample.over_quartiles(sample.by_head("gain", budget)) for budget in sample.setting.ks]
    return np.concatenate(gains, axis=1)


def falls_with_k(sample: Sample) -> np.ndarray:
    """From each K to the next larger one; budgets with the same K count once."""
    budgets = dict(sorted((k, budget) for budget, k in sample.setting.ks.items())).values()
    errors = [np.stack([sample.mean(name, budget) for budget in budgets]) for name in ("e_topk", "e_sub")]
    return -np.diff(errors, axis=1).reshape(-1, errors[0].shape[1]).T


def mass_recovered_first(sample: Sample) -> np.ndarray:
    grid = sorted(k for k in sample.setting.mass if k >= 1)
    largest = max(sample.setting.ks[sample.budget], grid[0])
    shares = [sample.over_quartiles(sample.over_packs(sample.setting.mass[k])) for k in grid if k <= largest]
    return np.stack([share[:, 0] - share[:, -1] for share in shares], axis=1)


def subtraction_by_more(sample: Sample) -> np.ndarray:
    """Not defined where all heads are on one side."""
    delta = sample.by_head("delta")
    return sample.mean_where(-delta, delta < 0) - sample.mean_where(delta, delta > 0)


def underestimated_by_more(sample: Sample) -> np.ndarray:
    """Heads without any defined log-Z error are on neither side; not defined where no head is on one of them."""
    count, delta = sample.by_head("log_z_count"), sample.by_head("delta")
    error = np.nan_to_num(ratio(sample.by_head("log_z_sum"), count))
    return sample.mean_where(error, (delta < 0) & (count > 0)) - sample.mean_where(error, (delta > 0) & (count > 0))


CLAIMS = (
    Claim(
        "gain_largest_at_high_entropy",
        "Completion lowers the error most on the heads of highest mid-region entropy.",
        "entropy_gain", "least lead in mean gain of the highest entropy quartile over another",
        gain_of_top_quartile, extreme="least",
    ),
    Claim(
        "gain_rises_with_entropy",
        "A head's gain from completion tends to rise with its mid-region entropy.",
        "entropy_gain", "rank correlation of entropy and gain over heads",
        rises_with_entropy("gain"),
    ),
    Claim(
        "losses_at_low_entropy",
        "Where completion raises the error, it does so by most on heads of low mid-region entropy.",
        "entropy_gain", "mean loss of the heads that lose, lowest entropy quartile minus the others",
        losses_of_low_entropy,
    ),
    Claim(
        "losses_more_frequent_at_low_entropy",
        "Completion raises the error more often on heads of low mid-region entropy than on others.",
        "entropy_gain", "share of heads with a loss, lowest entropy quartile minus the other heads",
        frequency_of_losses,
    ),
    Claim(
        "completion_helps_in_every_quartile",
        "Completion lowers the mean error in every entropy quartile at every K.",
        "quartile_error", "least mean gain over quartiles and K",
        gains_of_quartiles, extreme="least", one_budget=False,
    ),
    Claim(
        "topk_error_rises_with_entropy",
        "The error of TopK tends to rise with mid-region entropy.",
        "quartile_error", "rank correlation of entropy and error of TopK over heads",
        rises_with_entropy("e_topk"),
    ),
    Claim(
        "completion_error_rises_with_entropy",
        "The error with completion tends to rise with mid-region entropy.",
        "quartile_error", "rank correlation of entropy and error of Sub over heads",
        rises_with_entropy("e_sub"),
    ),
    Claim(
        "errors_fall_with_k",
        "More retrieved tokens lower the error of TopK and of completion.",
        "quartile_error", "least fall of the mean error between neighbouring K, over both methods",
        falls_with_k, extreme="least", one_budget=False, needs_several_k=True,
    ),
    Claim(
        "mass_recovered_faster_at_low_entropy",
        "Few tokens hold more of the mid-region's mass on heads of low entropy than on heads of high entropy.",
        "mass_curves", "least lead in mass recovery of the lowest over the highest quartile, up to the table's K",
        mass_recovered_first, extreme="least",
    ),
    Claim(
        "residual_share_rises_with_entropy",
        "The estimated residual tends to take a larger share of the denominator on heads of higher entropy.",
        "entropy_heatmap", "rank correlation of entropy and estimated residual share over heads",
        rises_with_entropy("residual_share_hat"),
    ),
    Claim(
        "residual_underestimated",
        "The feature maps underestimate the residual mass on average.",
        "logz_calibration", "minus the mean log-Z error",
        lambda sample: -sample.log_z_error(), about="text",
    ),
    Claim(
        "nosub_wins_on_most_heads",
        "Without subtraction the error is lower on more than half of the heads.",
        "fullsub_nosub_delta", "share of heads that favour NoSub, minus one half",
        lambda sample: sample.over_heads(sample.by_head("delta") > 0) - 0.5, about="text",
    ),
    Claim(
        "sub_wins_on_most_heads",
        "With subtraction the error is lower on more than half of the heads.",
        "fullsub_nosub_delta", "share of heads that favour Sub, minus one half",
        lambda sample: sample.over_heads(sample.by_head("delta") < 0) - 0.5, about="cwe",
    ),
    Claim(
        "subtraction_wins_by_more",
        "Heads that favour subtraction favour it by more than the others favour its absence.",
        "fullsub_nosub_delta", "mean difference on heads that favour Sub minus that on heads that favour NoSub",
        subtraction_by_more,
    ),
    Claim(
        "subtraction_better_on_average",
        "Subtraction lowers the mean error.",
        "fullsub_nosub_delta", "mean error of NoSub minus that of Sub",
        lambda sample: -sample.mean("delta"),
    ),
    Claim(
        "nosub_wins_where_underestimated",
        "Heads that favour NoSub are those whose residual mass is underestimated more, or overestimated less.",
        "fullsub_nosub_delta", "mean log-Z error of heads that favour Sub minus that of heads that favour NoSub",
        underestimated_by_more,
    ),
)  # fmt: skip
"""About one setting."""


def log_z_errors(samples: Sequence[Sample]) -> np.ndarray:
    return np.stack([sample.log_z_error() for sample in samples], axis=1)


def leads_of_sub(samples: Sequence[Sample]) -> np.ndarray:
    leads = [sample.mean(name) - sample.mean("e_sub") for sample in samples for name in ("e_topk", "e_nosub")]
    return np.stack(leads, axis=1)


def margins_of_exact_sub(samples: Sequence[Sample]) -> np.ndarray:
    errors = [sample.mean("e_exact_sub", budget) for sample in samples for budget in sample.setting.ks]
    return EXACT - np.stack(errors, axis=1)


def leads_of_exact_nosub(samples: Sequence[Sample]) -> np.ndarray:
    return np.stack([sample.mean("e_sub") - sample.mean("e_exact_nosub") for sample in samples], axis=1)


JOINT_CLAIMS = (
    Claim(
        "residual_underestimated_somewhere",
        "In some setting the feature maps underestimate the residual mass.",
        "logz_calibration", "largest of minus the mean log-Z errors of the settings",
        lambda samples: -log_z_errors(samples), extreme="largest",
    ),
    Claim(
        "residual_overestimated_somewhere",
        "In some setting the feature maps overestimate the residual mass, so that its error has no universal sign.",
        "logz_calibration", "largest of the mean log-Z errors of the settings",
        log_z_errors, extreme="largest",
    ),
    Claim(
        "sub_lowest_everywhere",
        "Completion with subtraction has the lowest mean error of the approximate methods in every setting.",
        "exact_accounting", "least lead of Sub over TopK and NoSub in mean error, over settings",
        leads_of_sub, extreme="least",
    ),
    Claim(
        "exact_sub_is_exact",
        "With the true residual, subtraction recovers full attention up to rounding.",
        "exact_accounting", f"{EXACT:g} minus the largest mean error of ExactSub, over settings and K",
        margins_of_exact_sub, extreme="least", one_budget=False, decimals=".3e",
    ),
    Claim(
        "exact_nosub_lower_somewhere",
        "Counting the retrieved tokens twice, but with the true masses, has a lower error than completion somewhere.",
        "exact_accounting", "largest lead of ExactNoSub over Sub in mean error, over settings",
        leads_of_exact_nosub, extreme="largest",
    ),
)  # fmt: skip
"""About all settings."""
