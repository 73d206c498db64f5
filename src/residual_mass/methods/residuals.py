"""Residuals from a summary of the prompt or from scanned scores, and METHODS, the named combinations of selectors and
residuals.

Shape letters: R = query rows sharing keys, L = keys, N = tokens that join, or groups of channels, P = parts or
clusters, S = draws, D = head dimension.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from residual_mass.methods.interface import BFLOAT16, FLOAT32, INDEX, Method, Phi, Residual, Selector, Step
from residual_mass.methods.lazy import accounting, moments, selection, torch
from residual_mass.methods.selectors import (
    CacheOnly,
    Channels,
    Codes,
    Pages,
    PerGroup,
    QuantisedScan,
    Rotated,
    WholeClusters,
    appended,
    quantised,
    restored,
)

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


def joined_counts(before: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sum of both counts, and the share of new tokens [..., 1], which is the weight of their mean."""
    count = before + new
    share = new / count.clamp_min(1)
    return count, share.unsqueeze(-1)


# ---- the scores of clusters' mean keys -------------------------------------------------------------------------------


class Clusters(NamedTuple):
    """Clusters of a mid-region."""

    mean_key: Tensor  # [..., P, D]
    count: Tensor  # [..., P]
    value_sum: Tensor  # [..., P, D]
    cluster: Tensor  # [..., L] int16, of every token; 0 outside the mid-region

    def scores(self, queries: Tensor) -> Tensor:
        """Computes the score of the mean key of every token's cluster, [..., R, L]."""
        scores = queries @ self.mean_key.transpose(-1, -2)  # [..., R, P]
        cluster = self.cluster.long().unsqueeze(-2)
        cluster = cluster.expand(*scores.shape[:-1], -1)
        return scores.gather(-1, cluster)


@dataclass(frozen=True)
class Centroids(Residual):
    """Gives every unread token the score of its cluster's mean key: k-means clusters with counts and value sums, less
    the tokens that were read (RetroInfer, arXiv 2505.02922; Multipole Attention, arXiv 2506.13059).
    """

    title = "centroids"
    clusters: int
    """P, at most 32,767. With more clusters than tokens, some are empty."""
    limits = {"clusters": 2**15 - 1}

    def prepare(self, keys: Tensor, values: Tensor, mid: Tensor) -> Clusters:
        part = moments.clusters(keys, mid, self.clusters)
        return self._summarise(keys, values, part)

    def update(self, state: Clusters, keys: Tensor, values: Tensor, joined: Tensor, start: int) -> Clusters:
        """Adds each token to the cluster with the nearest mean key."""
        part = moments.nearest(keys, joined, state.mean_key, state.count > 0)
        new = self._summarise(keys, values, part)
        count, share = joined_counts(state.count, new.count)
        mean_key = state.mean_key + share * (new.mean_key - state.mean_key)
        value_sum = state.value_sum + new.value_sum
        earlier = state.cluster[..., :start]
        cluster = torch.cat((earlier, new.cluster), -1)
        return Clusters(mean_key, count, value_sum, cluster)

    def _summarise(self, keys: Tensor, values: Tensor, part: Tensor) -> Clusters:
        """Summarises tokens whose clusters are `part` [..., L] int64, -1 for none."""
        count, mean_key = moments.centroids_of(keys, part, self.clusters)
        value_sum = moments.totals(values, part, self.clusters)
        return Clusters(mean_key, count, value_sum, part.clamp_min(0).to(torch.int16))

    def terms(self, seen: Seen, state: Clusters) -> Terms:
        scores = state.scores(seen.queries)
        return accounting.exact_terms(scores, seen.values, seen.unread)

    def summary_bytes(self, step: Step) -> float:
        """Returns the bytes of mean keys, counts and value sums, and of the cluster of each token that was read."""
        of_clusters = FLOAT32 * self.clusters * (2 * step.width + 1)
        return of_clusters + INDEX * step.retrieved

    def kept_bytes(self, step: Step) -> float:
        """Includes the cluster of every token."""
        return self.summary_bytes(step._replace(retrieved=step.tokens))


@dataclass(frozen=True)
class ImportanceSample(Residual):
    """Draws unread tokens with probabilities proportional to e^s, s the score of their cluster's mean key, reads them
    exactly and weights them without bias: importance sampling as in MagicPIG (arXiv 2410.16179), with k-means clusters
    in place of hashes. A single cluster gives equal probabilities (vAttention, arXiv 2510.05688).

    The state has [..., S] random numbers in [0, 1), one in each of S equal intervals and the same for every query, and
    the `Clusters` that give tokens their probabilities.
    """

    title = "importance sample"
    draws: int
    """S, tokens that are read in addition to the budget; a token may be drawn twice."""
    clusters: int = 64
    seed: int = 0
    limits = {"draws": None, "clusters": 2**15 - 1}

    def prepare(self, keys: Tensor, values: Tensor, mid: Tensor) -> tuple[Tensor, ...]:
        seeded = torch.Generator("cpu").manual_seed(self.seed)  # the same numbers on every device
        inside = torch.rand(self.draws, generator=seeded, dtype=torch.float64, device="cpu")
        interval = torch.arange(self.draws, device="cpu")
        places = (interval + inside) / self.draws
        places = places.to(keys.device, keys.dtype)
        places = places.clamp_max(1 - 2**-23)  # the conversion may have rounded up to 1
        places = places.expand(*keys.shape[:-2], self.draws)
        return (places, *Centroids(self.clusters).prepare(keys, values, mid))

    def update(self, state: Any, keys: Tensor, values: Tensor, joined: Tensor, start: int) -> tuple[Tensor, ...]:
        places, *clusters = state
        clusters = Clusters(*clusters)
        clusters = Centroids(self.clusters).update(clusters, keys, values, joined, start)
        return (places, *clusters)

    def terms(self, seen: Seen, state: Any) -> Terms:
        """Draws tokens with probabilities p in proportion to weights, and sums their terms divided by S p."""
        places, *clusters = state
        guess = Clusters(*clusters).scores(seen.queries)
        guess = guess.masked_fill(~seen.unread, -torch.inf)
        highest = guess.amax(-1, keepdim=True)
        highest = torch.where(highest > -torch.inf, highest, 0)
        weights = (guess - highest).exp()
        # Token i is drawn where a place, times the total, lies between the sums of weights up to i - 1 and up to i.
        below = weights.cumsum(-1)
        total = below[..., -1:]
        bounds = (places.unsqueeze(-2) * total).contiguous()  # [..., R, S]
        drawn = torch.searchsorted(below, bounds, right=True)
        drawn = drawn.clamp_max(below.shape[-1] - 1)
        # 1 / (S p) = total / (S weight)
        log_weights = weights.gather(-1, drawn).log()
        log_terms = seen.scores.gather(-1, drawn) - log_weights
        shift = log_terms.amax(-1)
        terms = (log_terms - shift.unsqueeze(-1)).exp()
        terms = terms * (total / self.draws)
        numerator = selection.weighted_sum(terms, drawn, seen.values)
        return accounting.Terms(numerator, terms.sum(-1), shift)

    def summary_bytes(self, step: Step) -> float:
        """Returns the bytes of mean keys and counts, and of keys and values of the tokens that query heads draw."""
        drawn = self.draws * step.heads
        rows = 2 * BFLOAT16 * step.width * drawn
        return FLOAT32 * self.clusters * (step.width + 1) + rows

    def kept_bytes(self, step: Step) -> float:
        mean_keys_and_counts = self.clusters * (step.width + 1)
        numbers = FLOAT32 * (mean_keys_and_counts + self.draws)
        return numbers + INDEX * step.tokens


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
        count, share = joined_counts(state.count, new.count)
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
class GroupSums(Residual):
    """Gives every unread token the score of its cluster: centroids with counts and value sums, less the tokens that
    were read (RetroInfer's estimation zone, arXiv 2505.02922).

    For `WholeClusters`. The code sums over unread tokens, which equals the clusters' sums less the tokens that were
    read.
    """

    title = "sums of pages or clusters"
    size: int | None = None
    """Mean number of tokens in a cluster; a `Method` takes that of its selector."""
    uses_scan = True

    def fitted(self, selector: Selector) -> GroupSums:
        inner = getattr(selector, "scan", selector)
        if not isinstance(inner, WholeClusters):
            raise ValueError(f"GroupSums needs WholeClusters, not {type(inner).__name__}")
        if self.size not in (None, inner.size):
            raise ValueError(f"GroupSums has size={self.size}, WholeClusters {inner.size}: leave it out of GroupSums")
        return replace(self, size=inner.size)

    def terms(self, seen: Seen, state: tuple[()]) -> Terms:
        return accounting.exact_terms(seen.scanned, seen.values, seen.unread)

    def summary_bytes(self, step: Step) -> float:
        """Returns the bytes of value sums and counts."""
        clusters = -(-step.tokens // self.size)
        return BFLOAT16 * (step.width + 1) * clusters


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

    def prepare(self, keys: Tensor, values: Tensor, mid: Tensor) -> Codes:
        channels = values.mT  # in place of the tokens that `quantised` takes
        width = channels.shape[-2]
        every_channel = torch.ones(width, dtype=torch.bool, device=values.device)
        codes = quantised(channels, every_channel, min(self.group, width), self.bits)
        return Codes(*(x.mT.contiguous() for x in codes))

    def update(self, state: Codes, keys: Tensor, values: Tensor, joined: Tensor, start: int) -> Codes:
        new = self.prepare(keys, values, joined)
        return Codes(*appended(state, new, (start, start, start)))

    def terms(self, seen: Seen, state: Codes) -> Terms:
        size = min(self.group, state.codes.shape[-1])
        by_channel = Codes(*(x.mT for x in state))
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
        count, share = joined_counts(before, late)
        return mean + share * (new - mean), count

    def terms(self, seen: Seen, state: Any) -> Terms:
        mean, _ = state
        exact = accounting.exact_terms(seen.scores, seen.values, seen.unread)
        numerator = exact.denominator.unsqueeze(-1) * mean.unsqueeze(-2)
        return exact._replace(numerator=numerator)

    def summary_bytes(self, step: Step) -> float:
        """Returns the bytes of the mean value; the mass is that of scores that the selector has computed."""
        return FLOAT32 * (step.width + 1)


TOPK = "Top-$K$"
PHI = r"Top-$K{+}\phi$"
METHODS = (
    Method("full", "Full", selector=None),
    Method("topk", TOPK),
    Method("topk_phi", PHI, residual=Phi()),
    Method("topk_phi_nosub", f"{PHI} (NoSub)", residual=Phi(subtracts=False)),
    Method("topk_moments", f"{TOPK}+moments", residual=Moments()),
    Method("topk_moments_8", f"{TOPK}+moments, 8 clusters", residual=Moments(8)),
    Method("topk_moments_shared", f"{TOPK}+moments, 64 clusters", residual=Moments(64, shared=True)),
    Method("topk_centroids", f"{TOPK}+centroids", residual=Centroids(64)),
    Method("topk_mean", f"{TOPK}+mean", residual=Mean()),
    Method("topk_importance", f"{TOPK}+importance sample", residual=ImportanceSample(32)),
    Method("topk_exact_mass", f"{TOPK}+exact mass", residual=ExactMass()),
    Method("scan4", "4-bit scan", QuantisedScan(4)),
    Method("scan4_moments", "4-bit scan+moments", QuantisedScan(4), Moments()),
    Method("scan4_regression_64", "4-bit scan+regression, 64 clusters", QuantisedScan(4), ScanRegression(64)),
    Method("scan3_regression_32", "3-bit scan+regression, 32 clusters", QuantisedScan(3, 128), ScanRegression(32)),
    Method(
        "group4_regression_64", "4-bit scan per group+regression, 64 clusters", PerGroup(QuantisedScan(4)),
        ScanRegression(64),
    ),
    Method("channels_regression_64", "16 channels+regression, 64 clusters", Channels(16), ScanRegression(64)),
    Method("pages", "Pages", Pages()),
    Method("clusters_sums", "Whole clusters+sums", WholeClusters(), GroupSums()),
    Method("cache8", "8-bit cache", CacheOnly(QuantisedScan(8)), QuantisedValues(8)),
    Method("cache4_rotated", "4-bit cache, rotated", CacheOnly(Rotated(QuantisedScan(4))), QuantisedValues(4)),
    Method(
        "cache4_rotated_tail128", "4-bit cache, rotated, last 128 exact",
        CacheOnly(Rotated(QuantisedScan(4)), tail=112), QuantisedValues(4),
    ),
    *(
        Method(
            f"cache8_sparse_v_{bound}", f"Sparse V, {bound}",
            CacheOnly(QuantisedScan(8)), QuantisedValues(8, bound=float(bound)),
        )
        for bound in ("1e-6", "1e-5", "1e-4", "1e-3")
    ),
)  # fmt: skip
"""All known methods, in the order of result files."""
