"""The paper's statements about its diagnostics, with what decides each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from residual_mass.diagnostics import claim_statistics
from residual_mass.diagnostics.claim_statistics import EXACT
from residual_mass.diagnostics.resampling import Sample

Data = TypeVar("Data")


@dataclass(frozen=True)
class Claim(Generic[Data]):
    """A statement about one setting (`Data` is a `Sample`) or about all together (the samples of all).

    Attributes:
        shown_in: label of the figure or table that shows it.
        statistic: what the number is, in a few words; the statement says that it is positive.
        number: [B], one per draw.
        one_budget: whether the statement is about a single budget.
        applies: whether it is a statement about these data.
        decimals: format of the number.
    """

    name: str
    statement: str
    shown_in: str
    statistic: str
    number: Callable[[Data], np.ndarray]
    one_budget: bool = True
    applies: Callable[[Data], bool] = lambda data: True
    decimals: str = "z.6f"


CLAIMS: tuple[Claim[Sample], ...] = (
    Claim(
        "gain_largest_at_high_entropy",
        "Completion lowers the error most on the heads of highest mid-region entropy.",
        "entropy_gain",
        "mean gain, highest entropy quartile minus the best other quartile",
        claim_statistics.gain_largest_at_high_entropy,
    ),
    Claim(
        "gain_rises_with_entropy",
        "A head's gain from completion tends to rise with its mid-region entropy.",
        "entropy_gain",
        "rank correlation of entropy and gain over heads",
        claim_statistics.gain_rises_with_entropy,
    ),
    Claim(
        "losses_at_low_entropy",
        "Where completion raises the error, it does so by most on heads of low mid-region entropy.",
        "entropy_gain",
        "mean loss, lowest entropy quartile minus the other heads",
        claim_statistics.losses_at_low_entropy,
    ),
    Claim(
        "losses_more_frequent_at_low_entropy",
        "Completion raises the error more often on heads of low mid-region entropy than on others.",
        "entropy_gain",
        "share of heads with a loss, lowest entropy quartile minus the other heads",
        claim_statistics.losses_more_frequent_at_low_entropy,
    ),
    Claim(
        "completion_helps_in_every_quartile",
        "Completion lowers the mean error in every entropy quartile at every K.",
        "quartile_error",
        "least mean gain over quartiles and K",
        claim_statistics.completion_helps_in_every_quartile,
        one_budget=False,
    ),
    Claim(
        "topk_error_rises_with_entropy",
        "The error of TopK rises from each entropy quartile to the next.",
        "quartile_error",
        "least rise of the mean error of TopK between neighbouring quartiles",
        claim_statistics.topk_error_rises_with_entropy,
    ),
    Claim(
        "completion_error_rises_with_entropy",
        "The error with completion rises from each entropy quartile to the next.",
        "quartile_error",
        "least rise of the mean error of Sub between neighbouring quartiles",
        claim_statistics.completion_error_rises_with_entropy,
    ),
    Claim(
        "errors_fall_with_k",
        "More retrieved tokens lower the error of TopK and of completion.",
        "quartile_error",
        "least fall of the mean error between neighbouring K, over both methods",
        claim_statistics.errors_fall_with_k,
        one_budget=False,
        applies=lambda sample: len(set(sample.setting.ks.values())) > 1,
    ),
    Claim(
        "mass_recovered_faster_at_low_entropy",
        "Few tokens hold more of the mid-region's mass on heads of low entropy than on heads of high entropy.",
        "mass_curves",
        "least lead in mass recovery of the lowest over the highest quartile, up to the table's K",
        claim_statistics.mass_recovered_faster_at_low_entropy,
    ),
    Claim(
        "residual_share_rises_with_entropy",
        "The estimated residual tends to take a larger share of the denominator on heads of higher entropy.",
        "entropy_heatmap",
        "rank correlation of entropy and estimated residual share over heads",
        claim_statistics.residual_share_rises_with_entropy,
    ),
    Claim(
        "residual_underestimated",
        "The feature maps underestimate the residual mass on average.",
        "logz_calibration",
        "minus the mean log-Z error",
        claim_statistics.residual_underestimated,
    ),
    Claim(
        "nosub_wins_on_most_heads",
        "Without subtraction the error is lower on more than half of the heads.",
        "fullsub_nosub_delta",
        "share of heads that favour NoSub, minus one half",
        claim_statistics.nosub_wins_on_most_heads,
        applies=lambda sample: sample.setting.facts["corpus"] != "cwe",
    ),
    Claim(
        "sub_wins_on_most_heads",
        "With subtraction the error is lower on more than half of the heads.",
        "fullsub_nosub_delta",
        "share of heads that favour Sub, minus one half",
        claim_statistics.sub_wins_on_most_heads,
        applies=lambda sample: sample.setting.facts["corpus"] == "cwe",
    ),
    Claim(
        "subtraction_wins_by_more",
        "Heads that favour subtraction favour it by more than the others favour its absence.",
        "fullsub_nosub_delta",
        "mean difference on heads that favour Sub minus that on heads that favour NoSub",
        claim_statistics.subtraction_wins_by_more,
    ),
    Claim(
        "subtraction_better_on_average",
        "Subtraction lowers the mean error.",
        "fullsub_nosub_delta",
        "mean error of NoSub minus that of Sub",
        claim_statistics.subtraction_better_on_average,
    ),
    Claim(
        "nosub_wins_where_underestimated",
        "Heads that favour NoSub are those whose residual mass is underestimated more, or overestimated less.",
        "fullsub_nosub_delta",
        "mean log-Z error of heads that favour Sub minus that of heads that favour NoSub",
        claim_statistics.nosub_wins_where_underestimated,
    ),
    Claim(
        "exact_nosub_lower",
        "Counting the retrieved tokens twice, but with the true masses, has a lower error than completion.",
        "exact_accounting",
        "mean error of Sub minus that of ExactNoSub",
        claim_statistics.exact_nosub_lower,
    ),
)

JOINT_CLAIMS: tuple[Claim[Sequence[Sample]], ...] = (
    Claim(
        "log_z_error_has_both_signs",
        "Residual mass is underestimated in some settings and overestimated in others.",
        "logz_calibration",
        "smaller of the largest overestimate and the largest underestimate, mean log-Z errors of settings",
        claim_statistics.log_z_error_has_both_signs,
        applies=lambda samples: len(samples) > 1,  # a single mean has one sign
    ),
    Claim(
        "sub_lowest_everywhere",
        "Completion with subtraction has the lowest mean error of the approximate methods in every setting.",
        "exact_accounting",
        "least lead of Sub over TopK and NoSub in mean error, over settings",
        claim_statistics.sub_lowest_everywhere,
    ),
    Claim(
        "exact_sub_is_exact",
        "With the true residual, subtraction recovers full attention up to rounding.",
        "exact_accounting",
        f"{EXACT:g} minus the largest mean error of ExactSub, over settings and K",
        claim_statistics.exact_sub_is_exact,
        decimals=".3e",
    ),
)
