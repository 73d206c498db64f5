"""Residuals made of a summary of the prompt, and METHODS, the named combinations of all selectors and residuals.

Shape letters: R = query rows sharing keys, L = keys, N = tokens that join, P = parts or clusters, S = draws, D = head
dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from residual_mass.methods.interface import (
    BFLOAT16,
    FLOAT32,
    INDEX,
    Method,
    Phi,
    Residual,
    Selector,
    Step,
    check_range,
)
from residual_mass.methods.scanned import GroupSums, QuantisedValues, ScanRegression
from residual_mass.methods.selectors import CacheOnly, Channels, Pages, PerGroup, QuantisedScan, Rotated, WholeClusters

if TYPE_CHECKING:
    from torch import Tensor

    from residual_mass.core.accounting import Terms
    from residual_mass.core.moments import MomentState
    from residual_mass.methods.interface import Seen


@dataclass(frozen=True)
class Moments(Residual):
    """Gaussian scores cut at the selection threshold (`core.moments`). We found no earlier use of the cut.

    P parts of the mid-region have moments of their own, P (2 D^2 + 2 D + 2) numbers a KV head. With `shared` they have
    counts, means and spreads of their own and one covariance, 2 D^2 + P (2 D + 2) numbers.
    """

    parts: int = 1
    """P. With more parts than tokens some stay empty."""
    split: Literal["blocks", "clusters"] = "clusters"
    """Runs of neighbours, or k-means clusters of the keys."""
    shared: bool = False
    """Whether parts share their covariances, each scaled by its own spread."""
    takes_out: bool = False
    """Whether the tokens that were read are taken out of the moments first; with one part only."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What a step reads means and covariances in. They are kept in float32, so that tokens that join are not lost in
    rounding.
    """

    def __post_init__(self) -> None:
        check_range("parts", self.parts)
        if self.split not in ("blocks", "clusters"):
            raise ValueError(f"split {self.split!r} is unknown; known are blocks, clusters")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype {self.dtype!r} is unknown; known are float32, bfloat16")
        if self.takes_out and self.parts > 1:
            raise ValueError(f"takes_out needs parts=1, not {self.parts}: the parts of tokens are not kept")

    @property
    def fused(self) -> bool:
        return not self.takes_out and self.dtype == "float32"

    def prepare(self, keys: Tensor, values: Tensor, mid: Tensor) -> MomentState:
        from residual_mass.core import moments, parts

        mid, by_blocks = mid.expand(keys.shape[:-1]), self.parts == 1 or self.split == "blocks"
        part = parts.blocks(mid, self.parts) if by_blocks else parts.clusters(keys, mid, self.parts)
        return (moments.shared_moments_of if self.shared else moments.moments_of)(keys, values, part, self.parts)

    def update(self, state: MomentState, keys: Tensor, values: Tensor, joined: Tensor, start: int) -> MomentState:
        """Adds tokens to the last block, or to the cluster with the nearest mean key."""
        from residual_mass.core import moments, parts

        present = state.count > 0
        if self.split == "blocks":
            present = present & (present.cumsum(-1) == present.sum(-1, keepdim=True))
        part = parts.nearest(keys, joined.expand(keys.shape[:-1]), state.mean_key, present)
        return moments.merged(state, moments.moments_of(keys, values, part, self.parts))

    def terms(self, seen: Seen, state: MomentState) -> Terms:
        from residual_mass.core.moments import MomentState, rest_terms, truncated_terms
        from residual_mass.core.rows import rows_at

        if self.dtype == "bfloat16":
            count, *means, spread = state
            state = MomentState(count, *(part.bfloat16().to(seen.queries.dtype) for part in means), spread)
        if not self.takes_out:
            return truncated_terms(seen.queries, state, seen.threshold)
        scores, values = seen.scores.gather(-1, seen.read.indices), rows_at(seen.values, seen.read.indices)
        return rest_terms(seen.queries, state, seen.threshold, scores, values, seen.read.valid)

    def summary_bytes(self, step: Step) -> float:
        """The numbers of a `MomentState`."""
        size = FLOAT32 if self.dtype == "float32" else BFLOAT16
        return size * (2 * step.width**2 * (1 if self.shared else self.parts) + self.parts * (2 * step.width + 2))


@dataclass(frozen=True)
class Mean(Residual):
    """As many copies of the mean token as the mid-region has. Keeps the moments of one part."""

    def prepare(self, keys: Tensor, values: Tensor, mid: Tensor) -> MomentState:
        return Moments().prepare(keys, values, mid)

    def update(self, state: MomentState, keys: Tensor, values: Tensor, joined: Tensor, start: int) -> MomentState:
        from residual_mass.core.moments import merged

        return merged(state, self.prepare(keys, values, joined))

    def terms(self, seen: Seen, state: MomentState) -> Terms:
        from residual_mass.core.moments import mean_terms

        return mean_terms(seen.queries, state)

    def summary_bytes(self, step: Step) -> float:
        return Moments().summary_bytes(step)


class Clusters(NamedTuple):
    """Clusters of a mid-region."""

    centroids: Tensor
    """[..., P, D], mean keys."""
    count: Tensor
    """[..., P]."""
    value_sum: Tensor
    """[..., P, D]."""
    cluster: Tensor
    """[..., L] int16, of every token; 0 outside the mid-region."""


@dataclass(frozen=True)
class Centroids(Residual):
    """k-means clusters of keys with their counts and values, less the tokens that were read (RetroInfer, arXiv
    2505.02922; Multipole Attention, arXiv 2506.13059): every unread token has the score of its cluster's mean key.
    """

    clusters: int
    """P, at most 32,767. With more clusters than tokens some stay empty."""

    def __post_init__(self) -> None:
        check_range("clusters", self.clusters, 2**15 - 1)

    def prepare(self, keys: Tensor, values: Tensor, mid: Tensor) -> Clusters:
        from residual_mass.core.parts import clusters

        part = clusters(keys, mid.expand(keys.shape[:-1]), self.clusters)
        return _clusters(keys, values, part, self.clusters)

    def update(self, state: Clusters, keys: Tensor, values: Tensor, joined: Tensor, start: int) -> Clusters:
        """Adds tokens to the clusters of the nearest mean key."""
        import torch

        from residual_mass.core.parts import nearest

        part = nearest(keys, joined.expand(keys.shape[:-1]), state.centroids, state.count > 0)
        new = _clusters(keys, values, part, self.clusters)
        count = state.count + new.count
        share = (new.count / count.clamp_min(1)).unsqueeze(-1)
        centroids = state.centroids + share * (new.centroids - state.centroids)
        return Clusters(
            centroids, count, state.value_sum + new.value_sum, torch.cat((state.cluster[..., :start], new.cluster), -1)
        )

    def terms(self, seen: Seen, state: Clusters) -> Terms:
        from residual_mass.core.accounting import exact_terms

        return exact_terms(_scores_of_clusters(seen, state), seen.values, seen.unread)

    def summary_bytes(self, step: Step) -> float:
        """Centroids, counts and value sums, and the cluster of each token that was read."""
        return FLOAT32 * self.clusters * (2 * step.width + 1) + INDEX * step.retrieved

    def kept_bytes(self, step: Step) -> float:
        """The cluster of every token."""
        return self.summary_bytes(step._replace(retrieved=step.tokens))


def _clusters(keys: Tensor, values: Tensor, part: Tensor, clusters: int) -> Clusters:
    """Summarises clusters, given that of every token, [..., L] int64, -1 for none."""
    import torch

    from residual_mass.core.parts import counts, totals

    count = counts(part, clusters).to(keys.dtype)
    centroids = totals(keys, part, clusters) / count.clamp_min(1).unsqueeze(-1)
    return Clusters(centroids, count, totals(values, part, clusters), part.clamp_min(0).to(torch.int16))


def _scores_of_clusters(seen: Seen, state: Clusters) -> Tensor:
    """The score of every token's mean key [..., R, L]."""
    scores = seen.queries @ state.centroids.transpose(-1, -2)  # [..., R, P]
    return scores.gather(-1, state.cluster.long().unsqueeze(-2).expand(seen.unread.shape))


class DrawsFromClusters(NamedTuple):
    """Random numbers of a prompt, the same for every query, and the clusters that give tokens their probabilities."""

    places: Tensor
    """[..., S] in [0, 1), one in each of S equal intervals."""
    centroids: Tensor
    count: Tensor
    value_sum: Tensor
    cluster: Tensor
    """As in `Clusters`."""


@dataclass(frozen=True)
class ImportanceSample(Residual):
    """Draws unread tokens, which are read exactly and weighted without bias, in proportion to what the means of their
    k-means clusters would weigh: importance sampling as in MagicPIG (arXiv 2410.16179), with clusters in place of its
    hashes. A single cluster draws with equal probabilities (vAttention, arXiv 2510.05688).
    """

    draws: int
    """S, tokens that are read besides the budget's; a token may be drawn twice."""
    clusters: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        check_range("draws", self.draws)
        Centroids(self.clusters)

    def prepare(self, keys: Tensor, values: Tensor, mid: Tensor) -> DrawsFromClusters:
        import torch

        inside = torch.rand(self.draws, generator=torch.Generator().manual_seed(self.seed), dtype=torch.float64)
        places = ((torch.arange(self.draws) + inside) / self.draws).to(keys.device, keys.dtype)
        places = places.clamp_max(1 - 2**-23).expand(*keys.shape[:-2], self.draws)
        return DrawsFromClusters(places, *Centroids(self.clusters).prepare(keys, values, mid))

    def update(
        self, state: DrawsFromClusters, keys: Tensor, values: Tensor, joined: Tensor, start: int
    ) -> DrawsFromClusters:
        clusters = Centroids(self.clusters).update(Clusters(*state[1:]), keys, values, joined, start)
        return DrawsFromClusters(state.places, *clusters)

    def terms(self, seen: Seen, state: DrawsFromClusters) -> Terms:
        """Draws tokens with probabilities p in proportion to weights, and sums their terms over S p."""
        import torch

        from residual_mass.core.accounting import Terms
        from residual_mass.core.rows import weighted_sum

        guess = _scores_of_clusters(seen, Clusters(*state[1:])).masked_fill(~seen.unread, -torch.inf)
        highest = guess.amax(-1, keepdim=True)
        weights = (guess - torch.where(highest > -torch.inf, highest, 0)).exp()
        below = weights.cumsum(-1)
        total = below[..., -1:]
        bounds = (state.places.unsqueeze(-2) * total).contiguous()  # [..., R, S]
        drawn = torch.searchsorted(below, bounds, right=True).clamp_max(below.shape[-1] - 1)
        log_terms = seen.scores.gather(-1, drawn) - weights.gather(-1, drawn).log()
        shift = log_terms.amax(-1)
        terms = (log_terms - shift.unsqueeze(-1)).exp() * (total / self.draws)
        return Terms(weighted_sum(terms, drawn, seen.values), terms.sum(-1), shift)

    def summary_bytes(self, step: Step) -> float:
        """Centroids and counts, and keys and values of the tokens that every query head draws."""
        drawn = 2 * BFLOAT16 * step.width * self.draws * step.heads
        return FLOAT32 * self.clusters * (step.width + 1) + drawn

    def kept_bytes(self, step: Step) -> float:
        return FLOAT32 * (self.clusters * (step.width + 1) + self.draws) + INDEX * step.tokens


class MeanValue(NamedTuple):
    """Mean value of the mid-region, and its tokens."""

    mean: Tensor
    """[..., D]."""
    count: Tensor
    """[...]."""


@dataclass(frozen=True)
class ExactMass(Residual):
    """The true mass in the direction of the mean value: SparQ's idea (arXiv 2312.04985) at its best, an oracle."""

    def fitted(self, selector: Selector) -> ExactMass:
        """Raises ValueError for a selector that does not read every key: the mass is that of exact scores."""
        if not selector.reads_keys:
            raise ValueError(f"ExactMass needs a selector that reads every key (TopK), not {type(selector).__name__}")
        return self

    def prepare(self, keys: Tensor, values: Tensor, mid: Tensor) -> MeanValue:
        weights = mid.expand(keys.shape[:-1]).to(values.dtype).unsqueeze(-1)
        return MeanValue((weights * values).sum(-2) / weights.sum(-2).clamp_min(1), weights.sum((-2, -1)))

    def update(self, state: MeanValue, keys: Tensor, values: Tensor, joined: Tensor, start: int) -> MeanValue:
        new = self.prepare(keys, values, joined)
        count = state.count + new.count
        share = (new.count / count.clamp_min(1)).unsqueeze(-1)
        return MeanValue(state.mean + share * (new.mean - state.mean), count)

    def terms(self, seen: Seen, state: MeanValue) -> Terms:
        from residual_mass.core.accounting import Terms, exact_terms

        mass = exact_terms(seen.scores, seen.values, seen.unread)
        return Terms(mass.denominator.unsqueeze(-1) * state.mean.unsqueeze(-2), mass.denominator, mass.shift)

    def summary_bytes(self, step: Step) -> float:
        """The mean value; the mass is that of scores which the selector has computed."""
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
    Method("cache4_rotated", "4-bit cache, rotated", CacheOnly(Rotated(QuantisedScan(4))), QuantisedValues(4)),
)  # fmt: skip
"""All known methods, in the order of result files."""
