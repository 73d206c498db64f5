"""Whole clusters of keys by their mean keys.

Shape letters: R = query rows sharing keys, L = keys, P = clusters, D = head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from residual_mass.methods.blocks import check_size, in_order
from residual_mass.methods.interface import BFLOAT16, INDEX, Choice, Layout, Step

if TYPE_CHECKING:
    from torch import Tensor


class KeyClusters(NamedTuple):
    """Clusters of the mid-region's keys."""

    centroids: Tensor
    """[..., P, D], mean keys."""
    cluster: Tensor
    """[..., L, 1] int32, of every token; 0 outside the mid-region."""


@dataclass(frozen=True)
class WholeClusters:
    """k-means clusters of keys in the order of the scores of their mean keys, as RetroInfer (arXiv 2505.02922) and
    Squeezed Attention (arXiv 2411.09688) choose tokens.

    Clusters are read whole until K tokens are; of the last one the first tokens. What is left unread may score above
    what was read.
    """

    size: int = 16
    """Tokens of a cluster in the mean: P = ceil(|M| / size)."""
    recipe: ClassVar[int] = 2
    reads_keys: ClassVar[bool] = False
    groups: ClassVar[str] = "clusters"

    def __post_init__(self) -> None:
        check_size(self.size)

    def prepare(self, keys: Tensor, mid: Tensor) -> KeyClusters:
        from residual_mass.core.parts import clusters_of, counts, totals

        cluster, clusters = clusters_of(keys, mid.expand(keys.shape[:-1]), self.size), -(-keys.shape[-2] // self.size)
        centroids = totals(keys, cluster, clusters) / counts(cluster, clusters).clamp_min(1).unsqueeze(-1)
        return KeyClusters(centroids, cluster.clamp_min(0).int().unsqueeze(-1))

    def update(self, state: KeyClusters, keys: Tensor, mid: Tensor, start: int) -> KeyClusters:
        """Clusters the tokens from column `start` on by themselves, and adds those clusters to the others."""
        import torch

        new = self.prepare(keys[..., start:, :], mid[..., start:])
        cluster = torch.cat((state.cluster[..., :start, :], new.cluster + state.centroids.shape[-2]), -2)
        return KeyClusters(torch.cat((state.centroids, new.centroids), -2), cluster)

    def select(
        self, queries: Tensor, scores: Tensor, state: KeyClusters, mid: Tensor, k: Tensor, layout: Layout
    ) -> Choice:
        from residual_mass.core.selection import least_read, unordered_topk

        by_cluster = queries @ state.centroids.transpose(-1, -2)
        cluster = state.cluster.long().transpose(-1, -2)
        read, _ = unordered_topk(in_order(by_cluster, cluster), mid, k)
        scanned = by_cluster.gather(-1, cluster.expand(scores.shape))
        return Choice(read, least_read(scores, mid, read), scanned)

    def scan_bytes(self, step: Step) -> float:
        return BFLOAT16 * step.width * -(-step.tokens // self.size)

    def kept_bytes(self, step: Step) -> float:
        """The cluster of every token besides."""
        return self.scan_bytes(step) + INDEX * step.tokens
