"""Numbers that decide the paper's statements about its diagnostics, each positive where its statement is true.

Those of one setting read a `Sample`, those of all settings the samples of all; either gives [B]. Gains, losses and
differences of a head are means over its queries and packs.

Shape letters: B = resamples, H = heads, that is (layer, query head).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from residual_mass.diagnostics.resampling import Sample

EXACT = 1e-6
"""Relative errors below this are rounding."""


def gain_largest_at_high_entropy(sample: Sample) -> np.ndarray:
    gain = sample.over_quartiles(sample.by_head("gain"))
    return gain[:, -1] - gain[:, :-1].max(axis=1)


def gain_rises_with_entropy(sample: Sample) -> np.ndarray:
    return sample.spearman(sample.by_head("h_mid"), sample.by_head("gain"))


def losses_at_low_entropy(sample: Sample) -> np.ndarray:
    return _lowest_minus_rest(sample, np.maximum(-sample.by_head("gain"), 0))


def losses_more_frequent_at_low_entropy(sample: Sample) -> np.ndarray:
    return _lowest_minus_rest(sample, sample.by_head("gain") < 0)


def completion_helps_in_every_quartile(sample: Sample) -> np.ndarray:
    gains = [sample.over_quartiles(sample.by_head("gain", budget)).min(axis=1) for budget in sample.setting.ks]
    return np.min(gains, axis=0)


def topk_error_rises_with_entropy(sample: Sample) -> np.ndarray:
    return _least_rise(sample, sample.by_head("e_topk"))


def completion_error_rises_with_entropy(sample: Sample) -> np.ndarray:
    return _least_rise(sample, sample.by_head("e_sub"))


def errors_fall_with_k(sample: Sample) -> np.ndarray:
    """From one K to the next larger one; budgets that lead to the same K count once."""
    budgets = dict(sorted((k, budget) for budget, k in sample.setting.ks.items())).values()
    errors = [np.stack([sample.mean(name, budget) for budget in budgets]) for name in ("e_topk", "e_sub")]
    return -np.diff(errors, axis=1).max(axis=(0, 1))


def mass_recovered_faster_at_low_entropy(sample: Sample) -> np.ndarray:
    grid = sorted(k for k in sample.setting.mass if k >= 1)
    largest = max(sample.setting.ks[sample.budget], grid[0])
    leads = []
    for k in grid:
        if k <= largest:
            share = sample.over_quartiles(sample.over_packs(sample.setting.mass[k]))
            leads.append(share[:, 0] - share[:, -1])
    return np.min(leads, axis=0)


def residual_share_rises_with_entropy(sample: Sample) -> np.ndarray:
    return sample.spearman(sample.by_head("h_mid"), sample.by_head("residual_share_hat"))


def residual_underestimated(sample: Sample) -> np.ndarray:
    return -sample.log_z_error()


def nosub_wins_on_most_heads(sample: Sample) -> np.ndarray:
    return sample.over_heads(sample.by_head("delta") > 0) - 0.5


def sub_wins_on_most_heads(sample: Sample) -> np.ndarray:
    return sample.over_heads(sample.by_head("delta") < 0) - 0.5


def nosub_wins_where_underestimated(sample: Sample) -> np.ndarray:
    """Heads without any defined log-Z error are on neither side; a side that no head is on has an error of 0."""
    count, total = sample.by_head("log_z_count"), sample.by_head("log_z_sum")
    error = np.divide(total, count, where=count > 0, out=np.zeros_like(total))
    delta = sample.by_head("delta")
    return _mean_where(sample, error, (delta < 0) & (count > 0)) - _mean_where(sample, error, (delta > 0) & (count > 0))


def exact_nosub_lower(sample: Sample) -> np.ndarray:
    return sample.mean("e_sub") - sample.mean("e_exact_nosub")


def subtraction_wins_by_more(sample: Sample) -> np.ndarray:
    """A side that no head is on wins by 0."""
    delta = sample.by_head("delta")
    for_sub, for_nosub = (_mean_where(sample, np.abs(delta), side) for side in (delta < 0, delta > 0))
    return for_sub - for_nosub


def subtraction_better_on_average(sample: Sample) -> np.ndarray:
    return -sample.mean("delta")


def log_z_error_has_both_signs(samples: Sequence[Sample]) -> np.ndarray:
    """Settings without any defined error are passed over."""
    errors = [sample.log_z_error() for sample in samples]
    return np.minimum(np.fmax.reduce(errors), -np.fmin.reduce(errors))


def sub_lowest_everywhere(samples: Sequence[Sample]) -> np.ndarray:
    leads = [sample.mean(name) - sample.mean("e_sub") for sample in samples for name in ("e_topk", "e_nosub")]
    return np.min(leads, axis=0)


def exact_sub_is_exact(samples: Sequence[Sample]) -> np.ndarray:
    """Of all budgets."""
    errors = [sample.mean("e_exact_sub", budget) for sample in samples for budget in sample.setting.ks]
    return EXACT - np.max(errors, axis=0)


def _lowest_minus_rest(sample: Sample, values: np.ndarray) -> np.ndarray:
    """The mean of [B, H] over the quartile of lowest entropy minus that over all other heads."""
    low, *rest = sample.over_quartiles(values).T
    sizes = [len(group) for group in sample.setting.quartiles[1:]]
    return low - np.average(rest, axis=0, weights=sizes)


def _least_rise(sample: Sample, values: np.ndarray) -> np.ndarray:
    """From the mean of [B, H] over one quartile to that over the next."""
    return np.diff(sample.over_quartiles(values), axis=1).min(axis=1)


def _mean_where(sample: Sample, values: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """The mean of [B, H] over the drawn heads that are chosen, 0 without any."""
    share = sample.over_heads(chosen)
    return np.divide(sample.over_heads(values * chosen), share, where=share > 0, out=np.zeros_like(share))
