"""Clusters of keys, less the tokens that were read.

Shape letters: R = query rows sharing keys, L = keys, P = clusters, D = head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from residual_mass.methods.interface import FLOAT32, INDEX, Step

if TYPE_CHECKING:
    from torch import Tensor

    from residual_mass.core.accounting import Terms
    from residual_mass.methods.interface import Seen


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
class Centroids:
    """k-means clusters of keys with their counts and values, less the tokens that were read (RetroInfer, arXiv
    2505.02922; Multipole Attention, arXiv 2506.13059): every unread token has the score of its cluster's mean key.
    """

    clusters: int
    """P, at most 32,767. With more clusters than tokens some stay empty."""
    recipe: ClassVar[int] = 1
    needs_maps: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 1 <= self.clusters <= 2**15 - 1:
            raise ValueError(f"clusters is {self.clusters}, not between 1 and 32767")

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

        scores = seen.queries @ state.centroids.transpose(-1, -2)  # [..., R, P]
        cluster = state.cluster.long().unsqueeze(-2).expand(seen.unread.shape)
        return exact_terms(scores.gather(-1, cluster), seen.values, seen.unread)

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
