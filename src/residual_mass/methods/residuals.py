"""Residuals from moments of the prompt, from the scores of a scan or from exact scores (of clusters: `clusters.py`).

Shape letters: R = query rows sharing keys, L = keys, N = groups of channels, P = parts or clusters, D = head dimension.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from residual_mass.methods.interface import BFLOAT16, FLOAT32, Residual, Selector, Step
from residual_mass.methods.lazy import accounting, moments, torch
from residual_mass.methods.selectors import Quantised, appended, quantised, restored

if TYPE_CHECKING:
    from torch import Tensor

    from residual_mass.core.accounting import Terms
    from residual_mass.core.moments import MomentState
    from residual_mass.methods.interface import Seen


# ---- Gaussian scores cut at the threshold of selection ---------------------------------------------------------------


@dataclass(frozen=True)
class Moments(Residual):
    """Gaussian scores cut at the selection threshold (`core.moments`). We found no earlier use of the cut.

    P clusters of the mid-region have moments of their own, P (2 D^2 + 2 D + 2) numbers a KV head. With `shared` they
    have counts, means and spreads of their own and one covariance, 2 D^2 + P (2 D + 2) numbers.
    """

    title = "moments"
    limits = {"parts": None}
    parts: int = 1
    """P, k-means clusters of the keys. With more clusters than tokens, some are empty."""
    shared: bool = False
    """Whether clusters share their covariances, each scaled by its own spread."""
    uses_cut = True

    def prepare(self, keys: Tensor, values: Tensor, mid: Tensor) -> MomentState:
        moments_of = moments.shared_moments_of if self.shared else moments.moments_of
        part = moments.clusters(keys, mid, self.parts)
        return moments_of(keys, values, part, self.parts)

    def update(self, state: MomentState, keys: Tensor, values: Tensor, joined: Tensor, start: int) -> MomentState:
        """Adds each token to the cluster with the nearest mean key."""
        part = moments.nearest(keys, joined, state.mean_key, state.count > 0)
        return moments.merged(state, moments.moments_of(keys, values, part, self.parts))

    def terms(self, seen: Seen, state: MomentState) -> Terms:
        return moments.truncated_terms(seen.queries, state, seen.threshold)

    def summary_bytes(self, step: Step) -> float:
        """Returns the bytes of a `MomentState`."""
        pairs = 1 if self.shared else self.parts  # of a covariance of keys and one of values and keys
        covariances = 2 * step.width**2 * pairs
        others = self.parts * (2 * step.width + 2)
        return FLOAT32 * (covariances + others)


@dataclass(frozen=True)
class Mean(Residual):
    """Gives every token of the mid-region the mean key and the mean value. Keeps the moments of one part."""

    title = "mean"
    prepare = Moments().prepare
    update = Moments().update
    summary_bytes = Moments().summary_bytes

    def terms(self, seen: Seen, state: MomentState) -> Terms:
        return moments.mean_terms(seen.queries, state)


# ---- scores that the selector saw, or exact scores of all tokens -----------------------------------------------------

ROUNDING = 64
"""Lower bound of the deviation of scores within clusters, in rounding errors of the largest score."""


class ClusteredMoments(NamedTuple):
    """Means of clusters, and covariances within clusters, pooled over all tokens. A step reads them in bfloat16."""

    count: Tensor  # [..., P]
    mean_key: Tensor  # [..., P, D]; used by `update` only
    mean_value: Tensor  # [..., P, D]
    value_key_covariance: Tensor  # [..., D, D], C: values by keys
    value_variance: Tensor  # [..., D], of values within clusters
    cluster: Tensor  # [..., L] int16, of every token; -1 outside the mid-region


@dataclass(frozen=True)
class ScanRegression(Residual):
    """Takes the mass of the scanned scores s, and regresses values on them: with weights w = e^s over the unread tokens
    and m_p the mean score of cluster p,

        Z  = sum_i w_i
        nu = sum_p Z_p v_p + sum_i w_i (s_i - m_p(i)) C q / var(s),

    where v_p is the mean value of cluster p, C the covariance of values and keys within clusters, and var(s) the
    variance of scores within clusters. Every scan of all tokens gives s, m and var(s) at no cost. No cut is needed, so
    it works with all selectors that scan. We found no earlier use. SparQ (arXiv 2312.04985) takes the mass from such
    scores, in the direction of the mean value.

    C is of exact keys, var(s) of scanned keys. If keys differ by less than the scan resolves, var(s) vanishes and C
    does not. The slope C q / var(s) is therefore clamped to sd(v) / sd(s), the largest that values and scores can have.
    """

    title = "regression on the scan"
    clusters: int = 1
    """P, k-means clusters of the keys."""
    recipe = 2
    uses_scan = True
    limits = {"clusters": 2**15 - 2}

    def prepare(self, keys: Tensor, values: Tensor, mid: Tensor) -> ClusteredMoments:
        part = moments.clusters(keys, mid, self.clusters)
        return self._summarise(keys, values, part)

    def update(
        self, state: ClusteredMoments, keys: Tensor, values: Tensor, joined: Tensor, start: int
    ) -> ClusteredMoments:
        """Adds each token to the cluster with the nearest mean key."""
        part = moments.nearest(keys, joined, state.mean_key, state.count > 0)
        new = self._summarise(keys, values, part)
        count, share = moments.joined_counts(state.count, new.count)
        key_step = new.mean_key - state.mean_key
        value_step = new.mean_value - state.mean_value
        # Sums of squares and products add up, with those of the steps between the means of both sets of tokens.
        between = count.unsqueeze(-1) * share
        between = between * (1 - share) * value_step
        total = _tokens(count)
        before = _tokens(state.count)
        late = _tokens(new.count)
        variance = before * state.value_variance + late * new.value_variance
        variance = variance + (between * value_step).sum(-2)
        own = before.unsqueeze(-1) * state.value_key_covariance
        covariance = own + late.unsqueeze(-1) * new.value_key_covariance
        covariance = covariance + between.transpose(-1, -2) @ key_step
        covariance = covariance / total.unsqueeze(-1)
        mean_key = state.mean_key + share * key_step
        mean_value = state.mean_value + share * value_step
        earlier = state.cluster[..., :start]
        cluster = torch.cat((earlier, new.cluster), -1)
        return ClusteredMoments(count, mean_key, mean_value, covariance, variance / total, cluster)

    def _summarise(self, keys: Tensor, values: Tensor, part: Tensor) -> ClusteredMoments:
        """Summarises tokens whose clusters are `part` [..., L] int64, -1 for none."""
        found = moments.shared_moments_of(keys, values, part, self.clusters)
        covariance = found.value_key_covariance.squeeze(-3)
        squares = moments.from_own(values, found.mean_value, part).square()
        inside = (part >= 0).unsqueeze(-1)
        variance = torch.where(inside, squares, 0).sum(-2)
        variance = variance / _tokens(found.count)
        cluster = part.to(torch.int16)
        return ClusteredMoments(found.count, found.mean_key, found.mean_value, covariance, variance, cluster)

    def terms(self, seen: Seen, state: ClusteredMoments) -> Terms:
        dtype = seen.queries.dtype
        count = state.count
        number = torch.arange(count.shape[-1], device=count.device)
        members = (state.cluster.unsqueeze(-1) == number).to(dtype)  # [..., L, P]
        offset, deviation = _within_clusters(seen.scanned, state, members)

        weights = torch.where(seen.unread, seen.scanned, -torch.inf)
        shift = weights.amax(-1)
        shift = torch.where(shift > -torch.inf, shift, 0)
        weights = weights.sub_(shift.unsqueeze(-1)).exp_()
        # Scores and slope are both in units of the deviation, so that their product is over its square, var(s).
        along = (weights * offset).sum(-1, keepdim=True) / deviation
        covariance = state.value_key_covariance.bfloat16().to(dtype)
        slope = seen.queries @ covariance.transpose(-1, -2) / deviation
        steepest = state.value_variance.bfloat16().to(dtype)
        steepest = steepest.sqrt().unsqueeze(-2)
        slope = slope.clamp(-steepest, steepest)
        mean_value = state.mean_value.bfloat16().to(dtype)
        numerator = (weights @ members) @ mean_value + along * slope
        return accounting.Terms(numerator, weights.sum(-1), shift)

    def summary_bytes(self, step: Step) -> float:
        """Returns the bytes of mean values, counts, C, the variance of values, and with several clusters one or two for
        the cluster of every token.
        """
        if self.clusters == 1:
            cluster = 0
        else:
            cluster = 1 if self.clusters <= 2**8 else 2
        numbers = (step.width + self.clusters) * (step.width + 1)
        return BFLOAT16 * numbers + cluster * step.tokens

    def kept_bytes(self, step: Step) -> float:
        """Adds mean keys, for `update`."""
        return self.summary_bytes(step) + BFLOAT16 * self.clusters * step.width


def _tokens(count: Tensor) -> Tensor:
    """Returns the number of tokens in all clusters, at least 1 to divide by: [..., P] -> [..., 1]."""
    return count.sum(-1).clamp_min(1).unsqueeze(-1)


def _within_clusters(scanned: Tensor, state: ClusteredMoments, members: Tensor) -> tuple[Tensor, Tensor]:
    """Returns every token's score less the mean score of its cluster, [..., R, L], 0 outside the mid-region, and the
    deviation of scores within clusters, [..., R, 1].

    Args:
        scanned: [..., R, L].
        members: [..., L, P], one 1 in the row of every mid-region token.
    """
    dtype = members.dtype
    count = state.count.to(dtype)
    inside = (state.cluster >= 0).unsqueeze(-2)  # [..., 1, L]
    offset = torch.where(inside, scanned, 0)
    largest = torch.linalg.vector_norm(offset, torch.inf, dim=-1)
    rounding = ROUNDING * torch.finfo(dtype).eps * largest
    mean = offset @ members / count.clamp_min(1).unsqueeze(-2)  # [..., R, P]
    offset -= mean @ members.transpose(-1, -2)  # stays 0 outside the mid-region
    squares = torch.linalg.vector_norm(offset, dim=-1).square()
    variance = squares / _tokens(count)
    deviation = variance.clamp_min(moments.LEAST_VARIANCE).sqrt()
    deviation = torch.maximum(deviation, rounding)
    return offset, deviation.unsqueeze(-1)


@dataclass(frozen=True)
class QuantisedValues(Residual):
    """Gives every unread token the score that the selector saw and its own quantised value: asymmetric, per token over
    groups of channels, as KIVI (arXiv 2402.02750) stores values. A value that is read has bits / 8 D + 4 N bytes.

    With a `bound`, values are read only of tokens with e^(s - m) > bound, s their score and m the largest score of the
    prompt, anchors included ("sparse V"). All tokens keep their place in the mass. A kernel of one pass knows the
    largest score so far in place of m, and reads as many values or more; none divides by the mass, which it knows last.
    """

    title = "quantised values"
    bits: int = 4
    group: int = 64
    """Channels of a group, at most D."""
    bound: float = 0
    """In [0, 1); 0 reads every value."""
    uses_scan = True
    holds_values = True
    limits = {"bits": 8, "group": None}

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.bound < 1:
            raise ValueError(f"bound is {self.bound}, not between 0 and 1 (0 reads every value)")

    def prepare(self, keys: Tensor, values: Tensor, mid: Tensor) -> Quantised:
        channels = values.mT  # in place of the tokens that `quantised` takes
        width = channels.shape[-2]
        every_channel = torch.ones(width, dtype=torch.bool, device=values.device)
        codes = quantised(channels, every_channel, min(self.group, width), self.bits)
        return Quantised(*(x.mT.contiguous() for x in codes))

    def update(self, state: Quantised, keys: Tensor, values: Tensor, joined: Tensor, start: int) -> Quantised:
        new = self.prepare(keys, values, joined)
        return Quantised(*appended(state, new, (start, start, start)))

    def terms(self, seen: Seen, state: Quantised) -> Terms:
        size = min(self.group, state.codes.shape[-1])
        by_channel = Quantised(*(x.mT for x in state))
        values = restored(by_channel, size, seen.queries.dtype)
        values = values.mT.contiguous()
        terms = accounting.exact_terms(seen.scanned, values, seen.unread)
        chosen = self.values_read(seen)
        if chosen is None:
            return terms
        weights = (seen.scanned - terms.shift.unsqueeze(-1)).exp()
        weights = torch.where(chosen, weights, 0)
        return terms._replace(numerator=weights @ values)

    def values_read(self, seen: Seen) -> Tensor | None:
        if self.bound == 0:
            return None
        known = torch.where(seen.unread, seen.scanned, -torch.inf)
        if seen.anchors is not None:
            known = torch.where(seen.anchors, seen.scores, known)
        read = seen.read.mask(known.shape[-1])
        known = torch.where(read, seen.scores, known)
        least = known.amax(-1, keepdim=True) + math.log(self.bound)
        return seen.unread & (seen.scanned > least)

    def summary_bytes(self, step: Step) -> float:
        """Returns the bytes of all values or, with a bound, of `step.retrieved`, a number that has to be measured."""
        tokens = step.retrieved if self.bound else step.tokens
        groups = -(-step.width // self.group)
        codes = step.width * self.bits / 8
        return tokens * (codes + 2 * BFLOAT16 * groups)

    def kept_bytes(self, step: Step) -> float:
        return self.summary_bytes(step._replace(retrieved=step.tokens))


@dataclass(frozen=True)
class ExactMass(Residual):
    """The true mass times the mean value, the best case of SparQ's idea (arXiv 2312.04985). An oracle."""

    title = "exact mass"
    oracle = True

    def fitted(self, selector: Selector) -> ExactMass:
        """Raises ValueError for a selector that does not read every key, because the mass is that of exact scores."""
        if not selector.reads_keys:
            raise ValueError(f"ExactMass needs a selector that reads every key (TopK), not {type(selector).__name__}")
        return self

    def prepare(self, keys: Tensor, values: Tensor, mid: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the mean value [..., D] of the mid-region and its number of tokens [...]."""
        inside = mid.expand(keys.shape[:-1])
        weights = inside.to(values.dtype).unsqueeze(-1)
        total = (weights * values).sum(-2)
        mean = total / weights.sum(-2).clamp_min(1)
        return mean, weights.sum((-2, -1))

    def update(self, state: Any, keys: Tensor, values: Tensor, joined: Tensor, start: int) -> tuple[Tensor, Tensor]:
        mean, before = state
        new, late = self.prepare(keys, values, joined)
        count, share = moments.joined_counts(before, late)
        return mean + share * (new - mean), count

    def terms(self, seen: Seen, state: Any) -> Terms:
        mean, _ = state
        exact = accounting.exact_terms(seen.scores, seen.values, seen.unread)
        numerator = exact.denominator.unsqueeze(-1) * mean.unsqueeze(-2)
        return exact._replace(numerator=numerator)

    def summary_bytes(self, step: Step) -> float:
        """Returns the bytes of the mean value; the mass is that of scores that the selector has computed."""
        return FLOAT32 * (step.width + 1)
