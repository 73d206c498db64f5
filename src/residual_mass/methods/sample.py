"""Samples of the unread tokens, read exactly and weighted without bias.

Shape letters: R = query rows sharing keys, L = keys, S = draws, D = head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from residual_mass.methods.centroids import Centroids, Clusters
from residual_mass.methods.interface import BFLOAT16, FLOAT32, INDEX, Step

if TYPE_CHECKING:
    from torch import Tensor

    from residual_mass.core.accounting import Terms
    from residual_mass.methods.interface import Seen


class Draws(NamedTuple):
    """Random numbers of a prompt, the same for every query."""

    places: Tensor
    """[..., S] in [0, 1), one in each of S equal intervals."""


@dataclass(frozen=True)
class UniformSample:
    """Draws unread tokens with equal probabilities (vAttention, arXiv 2510.05688)."""

    draws: int
    """S, tokens that are read besides the budget's; a token may be drawn twice."""
    seed: int = 0
    recipe: ClassVar[int] = 1
    needs_maps: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.draws < 1:
            raise ValueError(f"draws is {self.draws}, not 1 or more")

    def prepare(self, keys: Tensor, values: Tensor, mid: Tensor) -> Draws:
        return Draws(_places(keys, self.draws, self.seed))

    def update(self, state: Draws, keys: Tensor, values: Tensor, joined: Tensor, start: int) -> Draws:
        return state

    def terms(self, seen: Seen, state: Draws) -> Terms:
        return _sampled(seen, seen.unread.to(seen.scores.dtype), state.places)

    def summary_bytes(self, step: Step) -> float:
        return _row_bytes(self.draws, step)

    def kept_bytes(self, step: Step) -> float:
        return FLOAT32 * self.draws


class DrawsFromClusters(NamedTuple):
    """Random numbers of a prompt, and the clusters that give tokens their probabilities."""

    places: Tensor
    """[..., S], as in `Draws`."""
    centroids: Tensor
    count: Tensor
    value_sum: Tensor
    cluster: Tensor
    """As in `Clusters`."""


@dataclass(frozen=True)
class ImportanceSample:
    """Draws unread tokens in proportion to what the means of their k-means clusters would weigh: importance sampling
    as in MagicPIG (arXiv 2410.16179), with clusters in place of its hashes.
    """

    draws: int
    clusters: int = 64
    seed: int = 0
    recipe: ClassVar[int] = 1
    needs_maps: ClassVar[bool] = False

    def __post_init__(self) -> None:
        UniformSample(self.draws)
        Centroids(self.clusters)

    def prepare(self, keys: Tensor, values: Tensor, mid: Tensor) -> DrawsFromClusters:
        clusters = Centroids(self.clusters).prepare(keys, values, mid)
        return DrawsFromClusters(_places(keys, self.draws, self.seed), *clusters)

    def update(
        self, state: DrawsFromClusters, keys: Tensor, values: Tensor, joined: Tensor, start: int
    ) -> DrawsFromClusters:
        clusters = Centroids(self.clusters).update(Clusters(*state[1:]), keys, values, joined, start)
        return DrawsFromClusters(state.places, *clusters)

    def terms(self, seen: Seen, state: DrawsFromClusters) -> Terms:
        import torch

        scores = seen.queries @ state.centroids.transpose(-1, -2)
        guess = scores.gather(-1, state.cluster.long().unsqueeze(-2).expand(seen.unread.shape))
        guess = guess.masked_fill(~seen.unread, -torch.inf)
        highest = guess.amax(-1, keepdim=True)
        return _sampled(seen, (guess - torch.where(highest > -torch.inf, highest, 0)).exp(), state.places)

    def summary_bytes(self, step: Step) -> float:
        """Centroids and counts, and the tokens drawn."""
        return FLOAT32 * self.clusters * (step.width + 1) + _row_bytes(self.draws, step)

    def kept_bytes(self, step: Step) -> float:
        return FLOAT32 * (self.clusters * (step.width + 1) + self.draws) + INDEX * step.tokens


def _places(keys: Tensor, draws: int, seed: int) -> Tensor:
    """[..., S] for keys [..., L, D]; the same numbers for every prompt and head, in any company."""
    import torch

    inside = torch.rand(draws, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    places = (torch.arange(draws) + inside) / draws
    return places.to(keys.device, keys.dtype).clamp_max(1 - 2**-23).expand(*keys.shape[:-2], draws)


def _row_bytes(draws: int, step: Step) -> int:
    """Keys and values of as many tokens for every query head."""
    return 2 * BFLOAT16 * step.width * draws * step.heads


def _sampled(seen: Seen, weights: Tensor, places: Tensor) -> Terms:
    """Draws tokens with probabilities p in proportion to `weights` [..., R, L], and sums their terms over S p."""
    from residual_mass.core.accounting import Terms
    from residual_mass.core.rows import weighted_sum

    below = weights.cumsum(-1)
    total = below[..., -1:]
    drawn = _first_above(below, places.unsqueeze(-2) * total)  # [..., R, S]
    log_terms = seen.scores.gather(-1, drawn) - weights.gather(-1, drawn).log()
    shift = log_terms.amax(-1)
    terms = (log_terms - shift.unsqueeze(-1)).exp() * (total / places.shape[-1])
    return Terms(weighted_sum(terms, drawn, seen.values), terms.sum(-1), shift)


def _first_above(below: Tensor, bounds: Tensor) -> Tensor:
    """The first column of every row at which the running sum [..., R, L] exceeds each bound [..., R, S]."""
    import torch

    return torch.searchsorted(below, bounds.contiguous(), right=True).clamp_max(below.shape[-1] - 1)
