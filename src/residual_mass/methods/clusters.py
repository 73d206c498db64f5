"""Residuals that give an unread token the score of its cluster's mean key, or of its page.

Shape letters: R = query rows sharing keys, L = keys, P = clusters, S = draws, D = head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from residual_mass.methods.interface import BFLOAT16, FLOAT32, INDEX, Residual, Selector, Step
from residual_mass.methods.lazy import accounting, moments, selection, torch
from residual_mass.methods.selectors import WholeClusters

if TYPE_CHECKING:
    from torch import Tensor

    from residual_mass.core.accounting import Terms
    from residual_mass.methods.interface import Seen


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
        count, share = moments.joined_counts(state.count, new.count)
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
