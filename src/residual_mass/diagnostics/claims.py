"""The paper's statements about its diagnostics, with what decides each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal

import numpy as np

from residual_mass.diagnostics import CWE, claim_statistics
from residual_mass.diagnostics.claim_statistics import EXACT
from residual_mass.diagnostics.resampling import Sample, Samples
from residual_mass.diagnostics.settings import CapturedSetting


@dataclass(frozen=True)
class Claim(Generic[Samples]):
    """A statement about one setting (`number` takes a `Sample`) or about all of them (it takes all samples).

    Attributes:
        shown_in: label of the figure or table that shows it.
        statistic: what the number is, in a few words; the statement holds where it is positive.
        number: [B], or [B, any], of which `extreme` counts.
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
        return self.about == "any" or (self.about == CWE) == (setting.facts["corpus"] == CWE)


CLAIMS: tuple[Claim[Sample], ...] = (
    Claim(
        "gain_largest_at_high_entropy",
        "Completion lowers the error most on the heads of highest mid-region entropy.",
        "entropy_gain",
        "least lead in mean gain of the highest entropy quartile over another",
        claim_statistics.gain_largest_at_high_entropy,
        extreme="least",
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
        "mean loss of the heads that lose, lowest entropy quartile minus the others",
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
        extreme="least",
        one_budget=False,
    ),
    Claim(
        "topk_error_rises_with_entropy",
        "The error of TopK tends to rise with mid-region entropy.",
        "quartile_error",
        "rank correlation of entropy and error of TopK over heads",
        claim_statistics.topk_error_rises_with_entropy,
    ),
    Claim(
        "completion_error_rises_with_entropy",
        "The error with completion tends to rise with mid-region entropy.",
        "quartile_error",
        "rank correlation of entropy and error of Sub over heads",
        claim_statistics.completion_error_rises_with_entropy,
    ),
    Claim(
        "errors_fall_with_k",
        "More retrieved tokens lower the error of TopK and of completion.",
        "quartile_error",
        "least fall of the mean error between neighbouring K, over both methods",
        claim_statistics.errors_fall_with_k,
        extreme="least",
        one_budget=False,
        needs_several_k=True,
    ),
    Claim(
        "mass_recovered_faster_at_low_entropy",
        "Few tokens hold more of the mid-region's mass on heads of low entropy than on heads of high entropy.",
        "mass_curves",
        "least lead in mass recovery of the lowest over the highest quartile, up to the table's K",
        claim_statistics.mass_recovered_faster_at_low_entropy,
        extreme="least",
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
        about="text",
    ),
    Claim(
        "nosub_wins_on_most_heads",
        "Without subtraction the error is lower on more than half of the heads.",
        "fullsub_nosub_delta",
        "share of heads that favour NoSub, minus one half",
        claim_statistics.nosub_wins_on_most_heads,
        about="text",
    ),
    Claim(
        "sub_wins_on_most_heads",
        "With subtraction the error is lower on more than half of the heads.",
        "fullsub_nosub_delta",
        "share of heads that favour Sub, minus one half",
        claim_statistics.sub_wins_on_most_heads,
        about="cwe",
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
)

JOINT_CLAIMS: tuple[Claim[Sequence[Sample]], ...] = (
    Claim(
        "residual_underestimated_somewhere",
        "In some setting the feature maps underestimate the residual mass.",
        "logz_calibration",
        "largest of minus the mean log-Z errors of the settings",
        claim_statistics.residual_underestimated_somewhere,
        extreme="largest",
    ),
    Claim(
        "residual_overestimated_somewhere",
        "In some setting the feature maps overestimate the residual mass, so that its error has no universal sign.",
        "logz_calibration",
        "largest of the mean log-Z errors of the settings",
        claim_statistics.residual_overestimated_somewhere,
        extreme="largest",
    ),
    Claim(
        "sub_lowest_everywhere",
        "Completion with subtraction has the lowest mean error of the approximate methods in every setting.",
        "exact_accounting",
        "least lead of Sub over TopK and NoSub in mean error, over settings",
        claim_statistics.sub_lowest_everywhere,
        extreme="least",
    ),
    Claim(
        "exact_sub_is_exact",
        "With the true residual, subtraction recovers full attention up to rounding.",
        "exact_accounting",
        f"{EXACT:g} minus the largest mean error of ExactSub, over settings and K",
        claim_statistics.exact_sub_is_exact,
        extreme="least",
        one_budget=False,
        decimals=".3e",
    ),
    Claim(
        "exact_nosub_lower_somewhere",
        "Counting the retrieved tokens twice, but with the true masses, has a lower error than completion somewhere.",
        "exact_accounting",
        "largest lead of ExactNoSub over Sub in mean error, over settings",
        claim_statistics.exact_nosub_lower_somewhere,
        extreme="largest",
    ),
)
