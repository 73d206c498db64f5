"""The unread tokens' softmax terms from moments of the keys, without training.

Top-K selection is a threshold on scores: what a query leaves unread is what scores below tau, its K-th best score. If
the scores of the mid-region are Gaussian, and values linear in them, mass and value sum of that rest have closed forms.
A part of the mid-region (all of it, a block, a cluster) has n tokens with mean key mu and covariance Sigma, mean value
v and value-key covariance C. For a scaled query q, with m = q.mu, s^2 = q' Sigma q, b = C q, a = (tau - m - s^2) / s,

    Z  = n exp(m + s^2 / 2) Phi(a)
    nu = Z [ v + b (1 - pdf(a) / (s Phi(a))) ]

because E[e^x; x < tau] = exp(m + s^2/2) Phi(a) and E[(x - m) e^x; x < tau] = exp(m + s^2/2) (s^2 Phi(a) - s pdf(a)) for
x ~ N(m, s^2), and b / s^2 is the regression of values on scores. Nothing is subtracted: the cut does it.

Shape letters: R = query rows sharing keys, L = keys, P = parts, D = head dimension of keys and values.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from residual_mass.core.accounting import Terms

LEAST_VARIANCE = 1e-8
"""Variances of scores below this count as this, so that equal keys divide by no zero; scores are in nats."""
FARTHEST = 1e4
"""Cuts farther from the mean than this many standard deviations count as this far: log Phi is finite there."""


class Moments(NamedTuple):
    """Moments of the mid-region's keys and values, by part; a part without tokens has zeros."""

    count: Tensor
    """[..., P]."""
    mean_key: Tensor
    """[..., P, D]."""
    key_covariance: Tensor
    """[..., P, D, D]."""
    mean_value: Tensor
    """[..., P, D]."""
    value_key_covariance: Tensor
    """[..., P, D, D], values by keys."""


def moments_of(keys: Tensor, values: Tensor, parts: Tensor) -> Moments:
    """Computes the moments of every part.

    Args:
        keys, values: [..., L, D].
        parts: [..., L, P] of the keys' dtype, 1 where a token belongs to a part and 0 elsewhere.
    """
    count = parts.sum(-2)
    share = parts / count.clamp_min(1).unsqueeze(-2)
    mean_key, mean_value = (share.transpose(-1, -2) @ x for x in (keys, values))
    covariances = []
    for part, weights in enumerate(share.unbind(-1)):  # one at a time: all together would copy the keys for each
        centred_keys = keys - mean_key[..., part, None, :]
        weighted = weights.unsqueeze(-1) * centred_keys
        centred_values = values - mean_value[..., part, None, :]
        covariances.append((centred_keys.transpose(-1, -2) @ weighted, centred_values.transpose(-1, -2) @ weighted))
    key_covariance, value_key = (torch.stack(each, dim=-3) for each in zip(*covariances, strict=True))
    return Moments(count, mean_key, key_covariance, mean_value, value_key)


def merged(first: Moments, second: Moments) -> Moments:
    """The moments of both sets of tokens together, part by part (Chan, Golub and LeVeque, 1983)."""
    count = first.count + second.count
    share = (second.count / count.clamp_min(1)).unsqueeze(-1)
    key_step, value_step = second.mean_key - first.mean_key, second.mean_value - first.mean_value
    between = (share * (1 - share)).unsqueeze(-1)

    def covariance(a: Tensor, b: Tensor, left: Tensor, right: Tensor) -> Tensor:
        inner = a + share.unsqueeze(-1) * (b - a)
        return inner + between * left.unsqueeze(-1) * right.unsqueeze(-2)

    return Moments(
        count,
        first.mean_key + share * key_step,
        covariance(first.key_covariance, second.key_covariance, key_step, key_step),
        first.mean_value + share * value_step,
        covariance(first.value_key_covariance, second.value_key_covariance, value_step, key_step),
    )


def truncated_terms(queries: Tensor, moments: Moments, threshold: Tensor) -> Terms:
    """Estimates the terms of the tokens whose scores lie below a threshold.

    Args:
        queries: [..., R, D], scaled.
        threshold: [..., R], the least score among the tokens read; +inf cuts nothing off.
    """
    mean, variance, slope = _scores(queries, moments)
    deviation = variance.sqrt()
    cut = ((threshold.unsqueeze(-1) - mean - variance) / deviation).clamp(-FARTHEST, FARTHEST)
    log_below = torch.special.log_ndtr(cut)
    # pdf / Phi in one exponential: both underflow far below the mean, where their ratio is about -a.
    ratio = (-0.5 * cut.square() - 0.5 * math.log(2 * math.pi) - log_below).exp()
    log_mass = mean + 0.5 * variance + log_below
    return _summed(moments, log_mass, moments.mean_value.unsqueeze(-3), slope * (1 - ratio / deviation).unsqueeze(-1))


def gaussian_terms(queries: Tensor, moments: Moments) -> Terms:
    """Estimates the terms of all tokens of the mid-region: the same without a cut."""
    mean, variance, slope = _scores(queries, moments)
    return _summed(moments, mean + 0.5 * variance, moments.mean_value.unsqueeze(-3), slope)


def first_order_terms(queries: Tensor, moments: Moments) -> Terms:
    """Estimates the terms of all tokens to first order in their distance from the mean key: Z = n e^m and
    nu = Z (v + C q), the read-out of MomentKV (arXiv 2606.01563).
    """
    mean, _, slope = _scores(queries, moments)
    return _summed(moments, mean, moments.mean_value.unsqueeze(-3), slope)


def mean_terms(queries: Tensor, moments: Moments) -> Terms:
    """Estimates the terms of all tokens as those of as many copies of one with the mean key and the mean value."""
    mean, _, slope = _scores(queries, moments)
    return _summed(moments, mean, moments.mean_value.unsqueeze(-3), 0 * slope)


def _scores(queries: Tensor, moments: Moments) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance [..., R, P] of each part's scores, and their covariance with its values [..., R, P, D]."""
    mean = queries @ moments.mean_key.transpose(-1, -2)
    rows = queries.unsqueeze(-3)  # [..., 1, R, D]
    variance = ((rows @ moments.key_covariance) * rows).sum(-1).transpose(-1, -2)
    slope = (rows @ moments.value_key_covariance.transpose(-1, -2)).transpose(-2, -3)
    return mean, variance.clamp_min(LEAST_VARIANCE), slope


def _summed(moments: Moments, log_mass: Tensor, mean_value: Tensor, slope: Tensor) -> Terms:
    """Adds up the parts, given log Z / n [..., R, P] and the two summands of the mean value [..., R, P, D]."""
    present = (moments.count > 0).unsqueeze(-2)
    log_mass = torch.where(present, log_mass + moments.count.clamp_min(1).log().unsqueeze(-2), -torch.inf)
    shift = log_mass.amax(-1)
    shift = torch.where(shift > -torch.inf, shift, 0)
    weights = (log_mass - shift.unsqueeze(-1)).exp()
    numerator = (weights.unsqueeze(-2) @ (mean_value + slope)).squeeze(-2)
    return Terms(numerator, weights.sum(-1), shift)
