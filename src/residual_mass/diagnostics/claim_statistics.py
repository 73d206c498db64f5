"""Numbers that decide the paper's statements about its diagnostics; a statement holds where its number is positive.

Statements about one setting take a `Sample`, those about all settings take all samples. Each function returns [B], or
[B, any] where the least or the largest of several numbers counts; NaN where a number is not defined. Gains, losses and
differences of a head are means over its queries and packs.

Shape letters: B = resamples, H = heads, that is (layer, query head).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from residual_mass.diagnostics.resampling import Sample, ratio

EXACT = 1e-6
"""Relative errors below this are rounding."""


def gain_largest_at_high_entropy(sample: Sample) -> np.ndarray:
    gain = sample.over_quartiles(sample.by_head("gain"))
    return gain[:, -1:] - gain[:, :-1]


def gain_rises_with_entropy(sample: Sample) -> np.ndarray:
    return _rises_with_entropy(sample, "gain")


def losses_at_low_entropy(sample: Sample) -> np.ndarray:
    """Not defined where one of the two groups has no head with a loss."""
    gain = sample.by_head("gain")
    losing = sample.over_quartiles(gain < 0) * _sizes(sample)
    lost = sample.over_quartiles(np.maximum(-gain, 0)) * _sizes(sample)
    return ratio(lost[:, 0], losing[:, 0]) - ratio(lost[:, 1:].sum(axis=1), losing[:, 1:].sum(axis=1))


def losses_more_frequent_at_low_entropy(sample: Sample) -> np.ndarray:
    losing, sizes = sample.over_quartiles(sample.by_head("gain") < 0), _sizes(sample)
    return losing[:, 0] - (losing[:, 1:] * sizes[1:]).sum(axis=1) / sizes[1:].sum()


def completion_helps_in_every_quartile(sample: Sample) -> np.ndarray:
    return np.concatenate(
        [sample.over_quartiles(sample.by_head("gain", budget)) for budget in sample.setting.ks], axis=1
    )


def topk_error_rises_with_entropy(sample: Sample) -> np.ndarray:
    return _rises_with_entropy(sample, "e_topk")


def completion_error_rises_with_entropy(sample: Sample) -> np.ndarray:
    return _rises_with_entropy(sample, "e_sub")


def errors_fall_with_k(sample: Sample) -> np.ndarray:
    """From each K to the next larger one; budgets with the same K count once."""
    budgets = dict(sorted((k, budget) for budget, k in sample.setting.ks.items())).values()
    errors = [np.stack([sample.mean(name, budget) for budget in budgets]) for name in ("e_topk", "e_sub")]
    return -np.diff(errors, axis=1).reshape(-1, errors[0].shape[1]).T


def mass_recovered_faster_at_low_entropy(sample: Sample) -> np.ndarray:
    grid = sorted(k for k in sample.setting.mass if k >= 1)
    largest = max(sample.setting.ks[sample.budget], grid[0])
    shares = [sample.over_quartiles(sample.over_packs(sample.setting.mass[k])) for k in grid if k <= largest]
    return np.stack([share[:, 0] - share[:, -1] for share in shares], axis=1)


def residual_share_rises_with_entropy(sample: Sample) -> np.ndarray:
    return _rises_with_entropy(sample, "residual_share_hat")


def residual_underestimated(sample: Sample) -> np.ndarray:
    return -sample.log_z_error()


def nosub_wins_on_most_heads(sample: Sample) -> np.ndarray:
    return sample.over_heads(sample.by_head("delta") > 0) - 0.5


def sub_wins_on_most_heads(sample: Sample) -> np.ndarray:
    return sample.over_heads(sample.by_head("delta") < 0) - 0.5


def subtraction_wins_by_more(sample: Sample) -> np.ndarray:
    """Not defined where all heads are on one side."""
    delta = sample.by_head("delta")
    return _mean_where(sample, -delta, delta < 0) - _mean_where(sample, delta, delta > 0)


def subtraction_better_on_average(sample: Sample) -> np.ndarray:
    return -sample.mean("delta")


def nosub_wins_where_underestimated(sample: Sample) -> np.ndarray:
    """Heads without any defined log-Z error are on neither side; not defined where no head is on one of them."""
    count = sample.by_head("log_z_count")
    error = np.nan_to_num(ratio(sample.by_head("log_z_sum"), count))
    delta = sample.by_head("delta")
    return _mean_where(sample, error, (delta < 0) & (count > 0)) - _mean_where(sample, error, (delta > 0) & (count > 0))


def residual_underestimated_somewhere(samples: Sequence[Sample]) -> np.ndarray:
    return -residual_overestimated_somewhere(samples)


def residual_overestimated_somewhere(samples: Sequence[Sample]) -> np.ndarray:
    return np.stack([sample.log_z_error() for sample in samples], axis=1)


def sub_lowest_everywhere(samples: Sequence[Sample]) -> np.ndarray:
    leads = [sample.mean(name) - sample.mean("e_sub") for sample in samples for name in ("e_topk", "e_nosub")]
    return np.stack(leads, axis=1)


def exact_nosub_lower_somewhere(samples: Sequence[Sample]) -> np.ndarray:
    return np.stack([sample.mean("e_sub") - sample.mean("e_exact_nosub") for sample in samples], axis=1)


def exact_sub_is_exact(samples: Sequence[Sample]) -> np.ndarray:
    errors = [sample.mean("e_exact_sub", budget) for sample in samples for budget in sample.setting.ks]
    return EXACT - np.stack(errors, axis=1)


def _rises_with_entropy(sample: Sample, name: str) -> np.ndarray:
    return sample.spearman(sample.by_head("h_mid"), sample.by_head(name))


def _sizes(sample: Sample) -> np.ndarray:
    """Heads in each quartile."""
    return np.array([len(group) for group in sample.setting.quartiles])


def _mean_where(sample: Sample, values: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """The mean of [B, H] over the drawn heads that are chosen, NaN without any."""
    return ratio(sample.over_heads(values * chosen), sample.over_heads(chosen))
