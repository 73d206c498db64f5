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

LARGEST_CUT = 10.0
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
        regressed = (along.unsqueeze(-2) @ self.slope).squeeze(-2)
        return weights @ moments.mean_value + regressed


def moments_of(keys: Tensor, values: Tensor, part: Tensor, parts: int = 1) -> MomentState:
    """Computes the moments of every part.

    Args:
        keys, values: [..., L, D].
        part: [..., L] int64, the part of every token, -1 for none.
    """
    count, share, mean_key, mean_value = _means(keys, values, part, parts)
    key_covariances = []
    value_key_covariances = []
    for number in range(parts):  # one at a time: a batch of parts would copy the keys for each part
        inside = (part == number).to(keys.dtype)
        weights = inside * share[..., number, None]
        centred_keys = keys - mean_key[..., number, None, :]
        weighted = weights.unsqueeze(-1) * centred_keys
        key_covariances.append(centred_keys.transpose(-1, -2) @ weighted)
        centred_values = values - mean_value[..., number, None, :]
        value_key_covariances.append(centred_values.transpose(-1, -2) @ weighted)
    key_covariance = torch.stack(key_covariances, dim=-3)
    value_key = torch.stack(value_key_covariances, dim=-3)
    return MomentState(count, mean_key, mean_value, key_covariance, value_key, torch.ones_like(count))


def shared_moments_of(keys: Tensor, values: Tensor, part: Tensor, parts: int) -> MomentState:
    """Computes the moments of every part as in `moments_of`, with covariances that the parts share.

    Sigma and C are pooled within parts over all tokens. r is the trace of a part's own covariance over that of Sigma.
    """
    count, share, mean_key, mean_value = _means(keys, values, part, parts)
    inside = (part >= 0).to(keys.dtype).unsqueeze(-1)
    centred_keys = inside * from_own(keys, mean_key, part)  # zero outside the mid-region, so that values need no mask
    centred_values = from_own(values, mean_value, part)
    total = count.sum(-1)[..., None, None].clamp_min(1)
    key_covariance = centred_keys.transpose(-1, -2) @ centred_keys / total
    value_key = centred_values.transpose(-1, -2) @ centred_keys / total
    # The trace of a covariance is the mean squared distance from the mean, which needs no matrix for each part.
    squares = centred_keys.square().sum(-1, keepdim=True)
    own_trace = totals(squares, part, parts, share).squeeze(-1)
    spread = own_trace / _shared_trace(key_covariance)
    key_covariance = key_covariance.unsqueeze(-3)
    value_key = value_key.unsqueeze(-3)
    return MomentState(count, mean_key, mean_value, key_covariance, value_key, spread)


def _means(keys: Tensor, values: Tensor, part: Tensor, parts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Counts n of the parts, 1 / n, and mean keys and values."""
    count = counts(part, parts).to(keys.dtype)
    share = 1 / count.clamp_min(1)
    mean_key = totals(keys, part, parts, share)
    mean_value = totals(values, part, parts, share)
    return count, share, mean_key, mean_value


def from_own(x: Tensor, means: Tensor, part: Tensor) -> Tensor:
    """Subtracts the mean [..., P, D] of each token's part from x [..., L, D]; without a part, the mean of part 0."""
    own = part.clamp_min(0).unsqueeze(-1)
    own = own.expand(*part.shape, means.shape[-1])
    return x - means.gather(-2, own)


def joined_counts(before: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sum of both counts, and the share of new tokens [..., 1], which is the weight of their mean."""
    count = before + new
    share = new / count.clamp_min(1)
    return count, share.unsqueeze(-1)


def merged(first: MomentState, second: MomentState) -> MomentState:
    """Returns the moments of both sets of tokens together, part by part (Chan, Golub and LeVeque, 1983).

    If the parts of `first` share their covariances, so do those of the result; the parts of `second` have their own.
    """
    count, share = joined_counts(first.count, second.count)
    key_step = second.mean_key - first.mean_key
    value_step = second.mean_value - first.mean_value
    between = (share * (1 - share)).unsqueeze(-1)

    def covariance(a: Tensor, b: Tensor, left: Tensor, right: Tensor) -> Tensor:
        own = first.spread[..., None, None] * a
        within = own + share.unsqueeze(-1) * (b - own)
        # The means of both sets differ: the outer product of these steps adds to the covariance.
        step = between * left.unsqueeze(-1)
        return within + step * right.unsqueeze(-2)

    mean_key = first.mean_key + share * key_step
    mean_value = first.mean_value + share * value_step
    key_covariance = covariance(first.key_covariance, second.key_covariance, key_step, key_step)
    value_key = covariance(first.value_key_covariance, second.value_key_covariance, value_step, key_step)
    both = MomentState(count, mean_key, mean_value, key_covariance, value_key, torch.ones_like(count))
    return _pooled(both) if first.shared else both


def _pooled(own: MomentState) -> MomentState:
    """Replaces the parts' own covariances by shared ones."""
    total = own.count.sum(-1, keepdim=True).clamp_min(1)
    weights = (own.count / total)[..., None, None]
    key_covariance = (weights * own.key_covariance).sum(-3)
    value_key = (weights * own.value_key_covariance).sum(-3)
    spread = trace(own.key_covariance) / _shared_trace(key_covariance)
    key_covariance = key_covariance.unsqueeze(-3)
    value_key = value_key.unsqueeze(-3)
    return own._replace(key_covariance=key_covariance, value_key_covariance=value_key, spread=spread)


def _shared_trace(key_covariance: Tensor) -> Tensor:
    """Returns the trace of a shared covariance [..., D, D], at least LEAST_VARIANCE, to divide by: [..., 1]."""
    return trace(key_covariance).clamp_min(LEAST_VARIANCE).unsqueeze(-1)


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
    variance = ((rows @ moments.key_covariance) * rows).sum(-1)  # q' Sigma q, [..., P or 1, R]
    variance = variance.transpose(-1, -2)
    if moments.shared:
        variance = variance * moments.spread.unsqueeze(-2)
    slope = rows @ moments.value_key_covariance.transpose(-1, -2)  # [..., P or 1, R, D]
    slope = slope.transpose(-2, -3)
    return mean, variance.clamp_min(LEAST_VARIANCE), slope


def _cut(mean: Tensor, variance: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """Returns log (Z / n) and the factor of b in nu / Z, for Gaussian scores below a threshold; all of one shape."""
    deviation = variance.sqrt()
    distance = (threshold - mean) / deviation
    distance = torch.minimum(distance, deviation + LARGEST_CUT).clamp_min(-FARTHEST)
    # Phi(a) = e^(-a^2 / 2) tail / 2. With a = distance - s, a^2 cancels against s^2 before either is rounded.
    tail = torch.special.erfcx(math.sqrt(0.5) * (deviation - distance))
    exponent = mean + distance * (deviation - 0.5 * distance)
    log_mass = exponent + (0.5 * tail).log()
    pdf_scale = math.sqrt(2 / math.pi)  # pdf(a) / Phi(a) = pdf_scale / tail
    return log_mass, 1 - pdf_scale / (tail * deviation)


# ---- parts -----------------------------------------------------------------------------------------------------------

LLOYD_ROUNDS = 8
"""Rounds of Lloyd's algorithm; more rounds change attention errors in the third digit."""
ELEMENTS_AT_ONCE = 2**22
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
    place = inside.cumsum(-1) - 1
    count = inside.sum(-1, keepdim=True).clamp_min(1)
    starts = torch.where(inside, place * parts // count, -1)
    return starts if parts == 1 else _moved(keys, mid, starts, parts, None)


def clusters_of(keys: Tensor, mid: Tensor, size: int) -> Tensor:
    """Same as `clusters` with one cluster for every `size` tokens of the mid-region, at most P = ceil(L / size)."""
    parts = -(-mid.shape[-1] // size)
    place = mid.cumsum(-1) - 1
    starts = torch.where(mid, place // size, -1)
    starts = starts.expand(keys.shape[:-1])
    return _moved(keys, mid, starts, parts, counts(starts, parts) > 0)


def _moved(keys: Tensor, mid: Tensor, starts: Tensor, parts: int, present: Tensor | None) -> Tensor:
    """Runs Lloyd's algorithm from the first token of each part in `starts`; `present` as in `nearest`."""
    *leading, length = starts.shape
    columns = torch.arange(length, device=starts.device).expand_as(starts)
    shape = (*leading, parts + 1)
    slots = torch.full(shape, length, device=starts.device)
    slot = starts % (parts + 1)  # -1 goes to the last slot
    first = slots.scatter_reduce(-1, slot, columns, "amin")[..., :parts]
    first = torch.where(first < length, first, 0)  # an empty part starts from column 0
    width = keys.shape[-1]
    first = first.unsqueeze(-1).expand(*leading, parts, width)
    centres = keys.gather(-2, first)
    for _ in range(LLOYD_ROUNDS):
        part = nearest(keys, mid, centres, present)
        count, means = centroids_of(keys, part, parts)
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
    if near:
        numbers = torch.cat(near, -1)
    else:  # no keys
        numbers = keys.new_zeros(keys.shape[:-1], dtype=torch.long)
    return torch.where(mid, numbers, -1)


def counts(part: Tensor, parts: int) -> Tensor:
    """Counts the tokens of every part: [..., P] int64."""
    slots = part.new_zeros(*part.shape[:-1], parts + 1)
    slot = part % (parts + 1)  # -1 goes to the last slot
    slots.scatter_add_(-1, slot, torch.ones_like(part))
    return slots[..., :parts]


def centroids_of(keys: Tensor, part: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """Returns count [..., P] and mean key [..., P, D] of every part, in the dtype of the keys; 0 for an empty part."""
    count = counts(part, parts).to(keys.dtype)
    divisor = count.clamp_min(1).unsqueeze(-1)
    return count, totals(keys, part, parts) / divisor


def totals(x: Tensor, part: Tensor, parts: int, share: Tensor | None = None) -> Tensor:
    """Sums x [..., L, C] over the tokens of every part, in the same order on every run: [..., P, C].

    Args:
        part: [..., L] int64, -1 for none.
        share: [..., P], multiplies a part's summands before they are added.
    """
    *leading, _, columns = x.shape
    total = x.new_zeros(*leading, parts, columns)
    numbers = torch.arange(parts, device=part.device)
    for rows in _chunks(part.shape[-1], parts):
        own = part[..., rows].unsqueeze(-1)
        members = (own == numbers).to(x.dtype)  # [..., L, P], one 1 in the row of every token of a part
        if share is not None:
            members = members * share.unsqueeze(-2)
        members = members.transpose(-1, -2)
        total = total + members @ x[..., rows, :]
    return total


def _chunks(tokens: int, parts: int) -> Iterator[slice]:
    size = max(1, ELEMENTS_AT_ONCE // max(parts, 1))
    return (slice(start, start + size) for start in range(0, tokens, size))
