"""Residuals without feature maps: what each keeps of a prompt, and what it adds for the unread tokens.

The formulas are in `core.moments`. This module does not import torch before it computes, for the workflow lists methods
with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from residual_mass.core.accounting import Terms
    from residual_mass.core.estimators import Seen
    from residual_mass.core.moments import Moments


@dataclass(frozen=True)
class _WithMoments:
    """Keeps the moments of the mid-region's keys and values: 2 D^2 + 2 D + 1 numbers a part and KV head."""

    parts: int = 1
    """Parts of the mid-region, each with moments of its own."""
    split: Literal["blocks", "clusters"] = "clusters"
    """Runs of neighbours, or k-means clusters of the keys."""

    def __post_init__(self) -> None:
        if self.parts < 1:
            raise ValueError(f"parts is {self.parts}, not 1 or more")

    def prepare(self, keys: Tensor, values: Tensor, mid: Tensor) -> Moments:
        from residual_mass.core import moments, parts

        mid = mid.expand(keys.shape[:-1])
        if self.parts == 1:
            members = mid.unsqueeze(-1)
        elif self.split == "blocks":
            members = parts.blocks(mid, self.parts)
        else:
            members = parts.clusters(keys, mid, self.parts)
        return moments.moments_of(keys, values, members.to(keys.dtype))


@dataclass(frozen=True)
class Truncated(_WithMoments):
    """Gaussian scores cut at the selection threshold (`core.moments`). We found no earlier use of the cut."""

    def terms(self, seen: Seen, state: Moments) -> Terms:
        from residual_mass.core.moments import truncated_terms

        return truncated_terms(seen.queries, state, seen.threshold)


@dataclass(frozen=True)
class Gaussian(_WithMoments):
    """Gaussian scores without a cut: counts the tokens that were read once more. The negative control."""

    def terms(self, seen: Seen, state: Moments) -> Terms:
        from residual_mass.core.moments import gaussian_terms

        return gaussian_terms(seen.queries, state)


@dataclass(frozen=True)
class FirstOrder(_WithMoments):
    """First order in the distance from the mean key, the read-out of MomentKV (arXiv 2606.01563)."""

    def terms(self, seen: Seen, state: Moments) -> Terms:
        from residual_mass.core.moments import first_order_terms

        return first_order_terms(seen.queries, state)


@dataclass(frozen=True)
class Mean(_WithMoments):
    """As many copies of the mean token as the mid-region has."""

    def terms(self, seen: Seen, state: Moments) -> Terms:
        from residual_mass.core.moments import mean_terms

        return mean_terms(seen.queries, state)


@dataclass(frozen=True)
class Centroids:
    """Clusters of keys with their counts, less the tokens that were read (RetroInfer, Multipole Attention)."""

    count: int
    """Clusters of a KV head."""

    def prepare(self, keys: Tensor, values: Tensor, mid: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the centroids [..., P, D] and the members [..., L, P]."""
        from residual_mass.core.parts import clusters

        members = clusters(keys, mid.expand(keys.shape[:-1]), self.count).to(keys.dtype)
        return members.transpose(-1, -2) @ keys / members.sum(-2).clamp_min(1).unsqueeze(-1), members

    def terms(self, seen: Seen, state: tuple[Tensor, Tensor]) -> Terms:
        from residual_mass.core.accounting import exact_terms

        centroids, members = state
        scores = seen.queries @ centroids.transpose(-1, -2) @ members.transpose(-1, -2)  # each token has its centroid's
        return exact_terms(scores, seen.values, seen.unread)


@dataclass(frozen=True)
class ExactMass:
    """The true mass of the unread tokens in the direction of the mean value: an oracle, SparQ's idea at its best."""

    def prepare(self, keys: Tensor, values: Tensor, mid: Tensor) -> tuple[Tensor]:
        weights = mid.expand(keys.shape[:-1]).to(values.dtype).unsqueeze(-1)
        return ((weights * values).sum(-2) / weights.sum(-2).clamp_min(1),)

    def terms(self, seen: Seen, state: tuple[Tensor]) -> Terms:
        from residual_mass.core.accounting import Terms, exact_terms

        mass = exact_terms(seen.scores, seen.values, seen.unread)
        return Terms(mass.denominator.unsqueeze(-1) * state[0].unsqueeze(-2), mass.denominator, mass.shift)
