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
    former = {"split": "clusters", "takes_out": False, "dtype": "float32"}
    uses_cut = fused = True

    def prepare(self, keys: Tensor, values: Tensor, mid: Tensor) -> MomentState:
        moments_of = moments.shared_moments_of if self.shared else moments.moments_of
        return moments_of(keys, values, moments.clusters(keys, mid, self.parts), self.parts)

    def update(self, state: MomentState, keys: Tensor, values: Tensor, joined: Tensor, start: int) -> MomentState:
        """Adds each token to the cluster with the nearest mean key."""
        part = moments.nearest(keys, joined, state.mean_key, state.count > 0)
        return moments.merged(state, moments.moments_of(keys, values, part, self.parts))

    def terms(self, seen: Seen, state: MomentState) -> Terms:
        return moments.truncated_terms(seen.queries, state, seen.threshold)

    def summary_bytes(self, step: Step) -> float:
        """Returns the bytes of a `MomentState`."""
        covariances = 1 if self.shared else self.parts
        return FLOAT32 * (2 * step.width**2 * covariances + self.parts * (2 * step.width + 2))


@dataclass(frozen=True)
class Mean(Residual):
    """Gives every token of the mid-region the mean key and the mean value. Keeps the moments of one part."""

    title = "mean"
    prepare, update, summary_bytes = Moments().prepare, Moments().update, Moments().summary_bytes

    def terms(self, seen: Seen, state: MomentState) -> Terms:
        return moments.mean_terms(seen.queries, state)


def joined_counts(before: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sum of both counts, and the share of new tokens [..., 1], which is the weight of their mean."""
    count = before + new
    return count, (new / count.clamp_min(1)).unsqueeze(-1)


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
        return scores.gather(-1, cluster.expand(*scores.shape[:-1], -1))


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
        return self._summarise(keys, values, moments.clusters(keys, mid, self.clusters))

    def update(self, state: Clusters, keys: Tensor, values: Tensor, joined: Tensor, start: int) -> Clusters:
        """Adds each token to the cluster with the nearest mean key."""
        new = self._summarise(keys, values, moments.nearest(keys, joined, state.mean_key, state.count > 0))
        count, share = joined_counts(state.count, new.count)
        mean_key = state.mean_key + share * (new.mean_key - state.mean_key)
        cluster = torch.cat((state.cluster[..., :start], new.cluster), -1)
        return Clusters(mean_key, count, state.value_sum + new.value_sum, cluster)

    def _summarise(self, keys: Tensor, values: Tensor, part: Tensor) -> Clusters:
        """Summarises tokens whose clusters are `part` [..., L] int64, -1 for none."""
        count, mean_key = moments.centroids_of(keys, part, self.clusters)
        value_sum = moments.totals(values, part, self.clusters)
        return Clusters(mean_key, count, value_sum, part.clamp_min(0).to(torch.int16))

    def terms(self, seen: Seen, state: Clusters) -> Terms:
        return accounting.exact_terms(state.scores(seen.queries), seen.values, seen.unread)

    def summary_bytes(self, step: Step) -> float:
        """Returns the bytes of mean keys, counts and value sums, and of the cluster of each token that was read."""
        return FLOAT32 * self.clusters * (2 * step.width + 1) + INDEX * step.retrieved

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
        places = ((torch.arange(self.draws, device="cpu") + inside) / self.draws).to(keys.device, keys.dtype)
        places = places.clamp_max(1 - 2**-23).expand(*keys.shape[:-2], self.draws)
        return (places, *Centroids(self.clusters).prepare(keys, values, mid))

    def update(self, state: Any, keys: Tensor, values: Tensor, joined: Tensor, start: int) -> tuple[Tensor, ...]:
        places, *clusters = state
        return (places, *Centroids(self.clusters).update(Clusters(*clusters), keys, values, joined, start))

    def terms(self, seen: Seen, state: Any) -> Terms:
        """Draws tokens with probabilities p in proportion to weights, and sums their terms divided by S p."""
        places, *clusters = state
        guess = Clusters(*clusters).scores(seen.queries).masked_fill(~seen.unread, -torch.inf)
        highest = guess.amax(-1, keepdim=True)
        weights = (guess - torch.where(highest > -torch.inf, highest, 0)).exp()
        below = weights.cumsum(-1)
        total = below[..., -1:]
        bounds = (places.unsqueeze(-2) * total).contiguous()  # [..., R, S]
        drawn = torch.searchsorted(below, bounds, right=True).clamp_max(below.shape[-1] - 1)
        log_terms = seen.scores.gather(-1, drawn) - weights.gather(-1, drawn).log()
        shift = log_terms.amax(-1)
        terms = (log_terms - shift.unsqueeze(-1)).exp() * (total / self.draws)
        return accounting.Terms(selection.weighted_sum(terms, drawn, seen.values), terms.sum(-1), shift)

    def summary_bytes(self, step: Step) -> float:
        """Returns the bytes of mean keys and counts, and of keys and values of the tokens that query heads draw."""
        drawn = 2 * BFLOAT16 * step.width * self.draws * step.heads
        return FLOAT32 * self.clusters * (step.width + 1) + drawn

    def kept_bytes(self, step: Step) -> float:
        return FLOAT32 * (self.clusters * (step.width + 1) + self.draws) + INDEX * step.tokens


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
        return self._summarise(keys, values, moments.clusters(keys, mid, self.clusters))

    def update(
        self, state: ClusteredMoments, keys: Tensor, values: Tensor, joined: Tensor, start: int
    ) -> ClusteredMoments:
        """Adds each token to the cluster with the nearest mean key."""
        new = self._summarise(keys, values, moments.nearest(keys, joined, state.mean_key, state.count > 0))
        count, share = joined_counts(state.count, new.count)
        key_step, value_step = new.mean_key - state.mean_key, new.mean_value - state.mean_value
        between = count.unsqueeze(-1) * share * (1 - share) * value_step
        total, old, late = (x.sum(-1).clamp_min(1).unsqueeze(-1) for x in (count, state.count, new.count))
        variance = old * state.value_variance + late * new.value_variance + (between * value_step).sum(-2)
        covariance = old.unsqueeze(-1) * state.value_key_covariance + late.unsqueeze(-1) * new.value_key_covariance
        return ClusteredMoments(
            count,
            state.mean_key + share * key_step,
            state.mean_value + share * value_step,
            (covariance + between.transpose(-1, -2) @ key_step) / total.unsqueeze(-1),
            variance / total,
            torch.cat((state.cluster[..., :start], new.cluster), -1),
        )

    def _summarise(self, keys: Tensor, values: Tensor, part: Tensor) -> ClusteredMoments:
        """Summarises tokens whose clusters are `part` [..., L] int64, -1 for none."""
        count, mean_key, mean_value, _, covariance, _ = moments.shared_moments_of(keys, values, part, self.clusters)
        squares = moments.from_own(values, mean_value, part).square()
        variance = torch.where((part >= 0).unsqueeze(-1), squares, 0).sum(-2)
        variance = variance / count.sum(-1, keepdim=True).clamp_min(1)
        return ClusteredMoments(count, mean_key, mean_value, covariance.squeeze(-3), variance, part.to(torch.int16))

    def terms(self, seen: Seen, state: ClusteredMoments) -> Terms:
        dtype = seen.queries.dtype
        count = state.count.to(dtype)
        members = (state.cluster.unsqueeze(-1) == torch.arange(count.shape[-1], device=count.device)).to(dtype)
        inside = (state.cluster >= 0).unsqueeze(-2)  # [..., 1, L]
        offset = torch.where(inside, seen.scanned, 0)
        rounding = ROUNDING * torch.finfo(dtype).eps * torch.linalg.vector_norm(offset, torch.inf, dim=-1)
        mean = offset @ members / count.clamp_min(1).unsqueeze(-2)  # [..., R, P]
        offset -= mean @ members.transpose(-1, -2)  # stays 0 outside the mid-region
        variance = torch.linalg.vector_norm(offset, dim=-1).square() / count.sum(-1, keepdim=True).clamp_min(1)
        deviation = torch.maximum(variance.clamp_min(moments.LEAST_VARIANCE).sqrt(), rounding).unsqueeze(-1)

        weights = torch.where(seen.unread, seen.scanned, -torch.inf)
        shift = weights.amax(-1)
        shift = torch.where(shift > -torch.inf, shift, 0)
        weights = weights.sub_(shift.unsqueeze(-1)).exp_()
        read = (state.mean_value, state.value_key_covariance, state.value_variance)
        mean_value, covariance, value_variance = (x.bfloat16().to(dtype) for x in read)
        along = (weights * offset).sum(-1, keepdim=True) / deviation
        steepest = value_variance.sqrt().unsqueeze(-2)
        slope = (seen.queries @ covariance.transpose(-1, -2) / deviation).clamp(-steepest, steepest)
        return accounting.Terms((weights @ members) @ mean_value + along * slope, weights.sum(-1), shift)

    def summary_bytes(self, step: Step) -> float:
        """Returns the bytes of mean values, counts, C, the variance of values, and with several clusters one or two for
        the cluster of every token.
        """
        cluster = 0 if self.clusters == 1 else 1 if self.clusters <= 2**8 else 2
        return BFLOAT16 * (step.width + self.clusters) * (step.width + 1) + cluster * step.tokens

    def kept_bytes(self, step: Step) -> float:
        """Adds mean keys, for `update`."""
        return self.summary_bytes(step) + BFLOAT16 * self.clusters * step.width


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
        return BFLOAT16 * (step.width + 1) * -(-step.tokens // self.size)


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
        every_channel = torch.ones(channels.shape[-2], dtype=torch.bool, device=values.device)
        codes = quantised(channels, every_channel, min(self.group, len(every_channel)), self.bits)
        return Codes(*(x.mT.contiguous() for x in codes))

    def update(self, state: Codes, keys: Tensor, values: Tensor, joined: Tensor, start: int) -> Codes:
        return Codes(*appended(state, self.prepare(keys, values, joined), (start,) * 3))

    def terms(self, seen: Seen, state: Codes) -> Terms:
        size = min(self.group, state.codes.shape[-1])
        values = restored(Codes(*(x.mT for x in state)), size, seen.queries.dtype).mT.contiguous()
        terms = accounting.exact_terms(seen.scanned, values, seen.unread)
        chosen = self.values_read(seen)
        if chosen is None:
            return terms
        weights = torch.where(chosen, (seen.scanned - terms.shift.unsqueeze(-1)).exp(), 0)
        return terms._replace(numerator=weights @ values)

    def values_read(self, seen: Seen) -> Tensor | None:
        if self.bound == 0:
            return None
        known = torch.where(seen.unread, seen.scanned, -torch.inf)
        if seen.anchors is not None:
            known = torch.where(seen.anchors, seen.scores, known)
        read = torch.where(seen.read.mask(known.shape[-1]), seen.scores, known)
        return seen.unread & (seen.scanned > read.amax(-1, keepdim=True) + math.log(self.bound))

    def summary_bytes(self, step: Step) -> float:
        """Returns the bytes of all values or, with a bound, of `step.retrieved`, a number that has to be measured."""
        tokens = step.retrieved if self.bound else step.tokens
        return tokens * (step.width * self.bits / 8 + 2 * BFLOAT16 * -(-step.width // self.group))

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
        weights = mid.expand(keys.shape[:-1]).to(values.dtype).unsqueeze(-1)
        return (weights * values).sum(-2) / weights.sum(-2).clamp_min(1), weights.sum((-2, -1))

    def update(self, state: Any, keys: Tensor, values: Tensor, joined: Tensor, start: int) -> tuple[Tensor, Tensor]:
        (mean, before), (new, late) = state, self.prepare(keys, values, joined)
        count, share = joined_counts(before, late)
        return mean + share * (new - mean), count

    def terms(self, seen: Seen, state: Any) -> Terms:
        mass = accounting.exact_terms(seen.scores, seen.values, seen.unread)
        return mass._replace(numerator=mass.denominator.unsqueeze(-1) * state[0].unsqueeze(-2))

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
        Method(f"sparse_v_{bound}", f"Sparse V, {bound}", CacheOnly(QuantisedScan(8)), QuantisedValues(8, bound=number))
        for bound, number in {"1e-6": 1e-6, "1e-5": 1e-5, "1e-4": 1e-4, "1e-3": 1e-3}.items()
    ),
)  # fmt: skip
"""All known methods, in the order of result files."""
