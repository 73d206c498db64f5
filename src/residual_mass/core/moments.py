"""Estimates the softmax terms of unread tokens from moments of keys and values, without training.

Top-K selection is a threshold on scores: the unread tokens of a query score below tau, its K-th best score. If the
scores of the mid-region are Gaussian and values are linear in them, mass and value sum of the unread tokens have closed
forms. A part of the mid-region (all of it, or a cluster) has n tokens with mean key mu and covariance Sigma, mean value
v and value-key covariance C. For a scaled query q, with m = q.mu, s^2 = q' Sigma q, b = C q, a = (tau - m - s^2) / s,

    Z  = n exp(m + s^2 / 2) Phi(a)
    nu = Z [ v + b (1 - pdf(a) / (s Phi(a))) ]

because E[e^x; x < tau] = exp(m + s^2/2) Phi(a) and E[(x - m) e^x; x < tau] = exp(m + s^2/2) (s^2 Phi(a) - s pdf(a)) for
x ~ N(m, s^2), and b / s^2 is the regression of values on scores. Nothing is subtracted: the cut excludes read tokens.

Parts may share Sigma and C, each with its own factor r: then s^2 = r q' Sigma q and b = r C q.

Every token has the number of its part, -1 outside the mid-region, so that memory grows with L, not with L x P.

Shape letters: R = query rows sharing keys, L = keys, P = parts, D = head dimension of keys and values, C = columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from residual_mass.core.accounting import Terms

WHOLE = 10.0
"""Upper bound of a: 1 - Phi(10) is below 1e-23, and all terms stay in the range of float32."""
FARTHEST = 1e4
"""Upper bound of a threshold's distance below the mean, in standard deviations: at this distance there is no mass."""
LEAST_VARIANCE = 1e-8
"""Lower bound of the variance of scores (in nats), so that equal keys do not divide by zero."""


class MomentState(NamedTuple):
    """Moments of the mid-region's keys and values, by part; a part without tokens has zeros."""

    count: Tensor
    """[..., P]."""
    mean_key: Tensor
    """[..., P, D]."""
    mean_value: Tensor
    """[..., P, D]."""
    key_covariance: Tensor
    """[..., P, D, D], or [..., 1, D, D] where the parts share it."""
    value_key_covariance: Tensor
    """The same shape, values by keys."""
    spread: Tensor
    """[..., P], the factor r of both covariances; 1 where parts have their own."""

    @property
    def shared(self) -> bool:
        """Whether several parts share their covariances."""
        return self.key_covariance.shape[-3] < self.count.shape[-1]


class PartTerms(NamedTuple):
    """Terms of every part's unread tokens, Z = e^log_mass and nu = Z (v + factor r C q)."""

    log_mass: Tensor
    """[..., R, P], -inf for a part without tokens."""
    slope: Tensor
    """[..., R, P or 1, D], C q."""
    factor: Tensor
    """[..., R, P]."""

    def values(self, weights: Tensor, moments: MomentState) -> Tensor:
        """Sums the parts' mean values nu / Z with weights [..., R, P]: [..., R, D]."""
        along = weights * self.factor
        if moments.shared:
            along = (along * moments.spread.unsqueeze(-2)).sum(-1, keepdim=True)
        return weights @ moments.mean_value + (along.unsqueeze(-2) @ self.slope).squeeze(-2)


def moments_of(keys: Tensor, values: Tensor, part: Tensor, parts: int = 1) -> MomentState:
    """Computes the moments of every part.

    Args:
        keys, values: [..., L, D].
        part: [..., L] int64, the part of every token, -1 for none.
    """
    count, share, mean_key, mean_value = _means(keys, values, part, parts)
    covariances = []
    for number in range(parts):  # one at a time: a batch of parts would copy the keys for each part
        weights = (part == number).to(keys.dtype) * share[..., number, None]
        centred_keys = keys - mean_key[..., number, None, :]
        weighted = weights.unsqueeze(-1) * centred_keys
        centred_values = values - mean_value[..., number, None, :]
        covariances.append((centred_keys.transpose(-1, -2) @ weighted, centred_values.transpose(-1, -2) @ weighted))
    key_covariance, value_key = (torch.stack(matrices, dim=-3) for matrices in zip(*covariances, strict=True))
    return MomentState(count, mean_key, mean_value, key_covariance, value_key, torch.ones_like(count))


def shared_moments_of(keys: Tensor, values: Tensor, part: Tensor, parts: int) -> MomentState:
    """Computes the moments of every part as in `moments_of`, with covariances that the parts share.

    Sigma and C are pooled within parts over all tokens. r is the trace of a part's own covariance over that of Sigma.
    """
    count, share, mean_key, mean_value = _means(keys, values, part, parts)
    centred_keys = (part >= 0).to(keys.dtype).unsqueeze(-1) * from_own(keys, mean_key, part)
    centred_values = from_own(values, mean_value, part)
    total = count.sum(-1)[..., None, None].clamp_min(1)
    key_covariance, value_key = (x.transpose(-1, -2) @ centred_keys / total for x in (centred_keys, centred_values))
    own_trace = totals(centred_keys.square().sum(-1, keepdim=True), part, parts, share).squeeze(-1)
    return MomentState(
        count, mean_key, mean_value, key_covariance.unsqueeze(-3), value_key.unsqueeze(-3),
        own_trace / trace(key_covariance).clamp_min(LEAST_VARIANCE).unsqueeze(-1),
    )  # fmt: skip


def _means(keys: Tensor, values: Tensor, part: Tensor, parts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Counts n of the parts, 1 / n, and mean keys and values."""
    count = counts(part, parts).to(keys.dtype)
    share = 1 / count.clamp_min(1)
    return count, share, totals(keys, part, parts, share), totals(values, part, parts, share)


def from_own(x: Tensor, means: Tensor, part: Tensor) -> Tensor:
    """Subtracts the mean [..., P, D] of each token's part from x [..., L, D]; without a part, the mean of part 0."""
    return x - means.gather(-2, part.clamp_min(0).unsqueeze(-1).expand(*part.shape, means.shape[-1]))


def merged(first: MomentState, second: MomentState) -> MomentState:
    """Returns the moments of both sets of tokens together, part by part (Chan, Golub and LeVeque, 1983).

    If the parts of `first` share their covariances, so do those of the result; the parts of `second` have their own.
    """
    count = first.count + second.count
    share = (second.count / count.clamp_min(1)).unsqueeze(-1)
    key_step, value_step = second.mean_key - first.mean_key, second.mean_value - first.mean_value
    between = (share * (1 - share)).unsqueeze(-1)

    def covariance(a: Tensor, b: Tensor, left: Tensor, right: Tensor) -> Tensor:
        own = first.spread[..., None, None] * a
        return own + share.unsqueeze(-1) * (b - own) + between * left.unsqueeze(-1) * right.unsqueeze(-2)

    both = MomentState(
        count,
        first.mean_key + share * key_step,
        first.mean_value + share * value_step,
        covariance(first.key_covariance, second.key_covariance, key_step, key_step),
        covariance(first.value_key_covariance, second.value_key_covariance, value_step, key_step),
        torch.ones_like(count),
    )
    return _pooled(both) if first.shared else both


def _pooled(own: MomentState) -> MomentState:
    """Replaces the parts' own covariances by shared ones."""
    weights = (own.count / own.count.sum(-1, keepdim=True).clamp_min(1))[..., None, None]
    key_covariance, value_key = ((weights * x).sum(-3) for x in (own.key_covariance, own.value_key_covariance))
    spread = trace(own.key_covariance) / trace(key_covariance).clamp_min(LEAST_VARIANCE).unsqueeze(-1)
    return MomentState(*own[:3], key_covariance.unsqueeze(-3), value_key.unsqueeze(-3), spread)


def trace(covariance: Tensor) -> Tensor:
    """[..., D, D] -> [...]."""
    return covariance.diagonal(dim1=-2, dim2=-1).sum(-1)


def truncated_terms(queries: Tensor, moments: MomentState, threshold: Tensor) -> Terms:
    """Estimates the terms of the tokens whose scores lie below a threshold.

    Args:
        queries: [..., R, D], scaled.
        threshold: [..., R], the least score among the tokens read; +inf cuts nothing off, -inf everything.
    """
    return _summed(moments, truncated_parts(queries, moments, threshold))


def mean_terms(queries: Tensor, moments: MomentState) -> Terms:
    """Estimates the terms of all tokens, each with the mean key and the mean value of its part."""
    mean, _, slope = _scores(queries, moments)
    log_mass = mean + moments.count.log().unsqueeze(-2)
    return _summed(moments, PartTerms(log_mass, slope, torch.zeros_like(mean)))


def _summed(moments: MomentState, parts: PartTerms) -> Terms:
    """Adds up the parts."""
    shift = parts.log_mass.amax(-1)
    shift = torch.where(shift > -torch.inf, shift, 0)
    weights = (parts.log_mass - shift.unsqueeze(-1)).exp()
    return Terms(parts.values(weights, moments), weights.sum(-1), shift)


def truncated_parts(queries: Tensor, moments: MomentState, threshold: Tensor) -> PartTerms:
    """Estimates the terms of `truncated_terms` for every part."""
    mean, variance, slope = _scores(queries, moments)
    log_mass, factor = _cut(mean, variance, threshold.unsqueeze(-1))
    log_mass = log_mass + moments.count.log().unsqueeze(-2)  # -inf for a part without tokens
    return PartTerms(log_mass, slope, factor)


def _scores(queries: Tensor, moments: MomentState) -> tuple[Tensor, Tensor, Tensor]:
    """Returns mean and variance [..., R, P] of each part's scores, and C q [..., R, P or 1, D]."""
    mean = queries @ moments.mean_key.transpose(-1, -2)
    rows = queries.unsqueeze(-3)  # [..., 1, R, D]
    variance = ((rows @ moments.key_covariance) * rows).sum(-1).transpose(-1, -2)
    if moments.shared:
        variance = variance * moments.spread.unsqueeze(-2)
    slope = (rows @ moments.value_key_covariance.transpose(-1, -2)).transpose(-2, -3)
    return mean, variance.clamp_min(LEAST_VARIANCE), slope


def _cut(mean: Tensor, variance: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """Returns log (Z / n) and the factor of b in nu / Z, for Gaussian scores below a threshold; all of one shape."""
    deviation = variance.sqrt()
    distance = torch.minimum((threshold - mean) / deviation, deviation + WHOLE).clamp_min(-FARTHEST)
    # Phi(a) = e^(-a^2 / 2) tail / 2. With a = distance - s, a^2 cancels against s^2 before either is rounded.
    tail = torch.special.erfcx(math.sqrt(0.5) * (deviation - distance))
    log_mass = mean + distance * (deviation - 0.5 * distance) + (0.5 * tail).log()
    return log_mass, 1 - math.sqrt(2 / math.pi) / (tail * deviation)


# ---- parts -----------------------------------------------------------------------------------------------------------

ROUNDS = 8
"""Rounds of Lloyd's algorithm; more rounds change attention errors in the third digit."""
AT_ONCE = 2**22
"""Elements of an [L, P] matrix in memory at once, 16 MiB per KV head in float32: 64k tokens in 64 parts, or 8k tokens
in 512 parts.
"""


def clusters(keys: Tensor, mid: Tensor, parts: int) -> Tensor:
    """Clusters the mid-region's keys by k-means, starting from keys at equal distances in the text: [..., L] int64.

    A cluster may end up without tokens; the same keys give the same clusters.

    Args:
        keys: [..., L, D].
        mid: [..., L] bool, broadcast to the keys.
    """
    inside = mid.expand(keys.shape[:-1])
    place, count = inside.cumsum(-1) - 1, inside.sum(-1, keepdim=True).clamp_min(1)
    starts = torch.where(inside, place * parts // count, -1)
    return starts if parts == 1 else _moved(keys, mid, starts, parts, None)


def clusters_of(keys: Tensor, mid: Tensor, size: int) -> Tensor:
    """Same as `clusters` with one cluster for every `size` tokens of the mid-region, at most P = ceil(L / size)."""
    parts = -(-mid.shape[-1] // size)
    starts = torch.where(mid, (mid.cumsum(-1) - 1) // size, -1).expand(keys.shape[:-1])
    return _moved(keys, mid, starts, parts, counts(starts, parts) > 0)


def _moved(keys: Tensor, mid: Tensor, starts: Tensor, parts: int, present: Tensor | None) -> Tensor:
    """Runs Lloyd's algorithm from the first token of each part in `starts`; `present` as in `nearest`."""
    columns = torch.arange(starts.shape[-1], device=starts.device).expand_as(starts)
    first = torch.full((*starts.shape[:-1], parts + 1), starts.shape[-1], device=starts.device)
    first = first.scatter_reduce(-1, starts % (parts + 1), columns, "amin")[..., :parts]  # -1 goes to the last slot
    first = torch.where(first < starts.shape[-1], first, 0)
    centres = keys.gather(-2, first.unsqueeze(-1).expand(*first.shape, keys.shape[-1]))
    for _ in range(ROUNDS):
        count, means = centroids_of(keys, nearest(keys, mid, centres, present), parts)
        centres = torch.where(count.unsqueeze(-1) > 0, means, centres)
    return nearest(keys, mid, centres, present)


def nearest(keys: Tensor, mid: Tensor, centres: Tensor, present: Tensor | None) -> Tensor:
    """Returns the number of each key's nearest centre: [..., L] int64, -1 outside `mid`.

    Args:
        keys: [..., L, D].
        mid: [..., L] bool, keys that are assigned to a centre; broadcast to the keys.
        centres: [..., P, D].
        present: [..., P] bool, centres to choose from; a row without any takes the first. None for all.
    """
    near = []
    for rows in _chunks(keys.shape[-2], centres.shape[-2]):
        distances = torch.cdist(keys[..., rows, :], centres)
        if present is not None:
            distances = distances.masked_fill(~present.unsqueeze(-2), torch.inf)
        near.append(distances.argmin(-1))
    return torch.where(mid, torch.cat(near, -1) if near else keys.new_zeros(keys.shape[:-1], dtype=torch.long), -1)


def counts(part: Tensor, parts: int) -> Tensor:
    """Counts the tokens of every part: [..., P] int64."""
    slots = part.new_zeros(*part.shape[:-1], parts + 1)
    return slots.scatter_add_(-1, part % (parts + 1), torch.ones_like(part))[..., :parts]


def centroids_of(keys: Tensor, part: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """Returns count [..., P] and mean key [..., P, D] of every part, in the dtype of the keys; 0 for an empty part."""
    count = counts(part, parts).to(keys.dtype)
    return count, totals(keys, part, parts) / count.clamp_min(1).unsqueeze(-1)


def totals(x: Tensor, part: Tensor, parts: int, share: Tensor | None = None) -> Tensor:
    """Sums x [..., L, C] over the tokens of every part, in the same order on every run: [..., P, C].

    Args:
        part: [..., L] int64, -1 for none.
        share: [..., P], multiplies a part's summands before they are added.
    """
    numbers, total = torch.arange(parts, device=part.device), x.new_zeros(*x.shape[:-2], parts, x.shape[-1])
    for rows in _chunks(part.shape[-1], parts):
        members = (part[..., rows].unsqueeze(-1) == numbers).to(x.dtype)
        if share is not None:
            members = members * share.unsqueeze(-2)
        total = total + members.transpose(-1, -2) @ x[..., rows, :]
    return total


def _chunks(tokens: int, parts: int) -> Iterator[slice]:
    size = max(1, AT_ONCE // max(parts, 1))
    return (slice(start, start + size) for start in range(0, tokens, size))
