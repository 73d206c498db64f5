"""Whole pages by bounds of their scores.

Shape letters: R = query rows sharing keys, L = keys, N = pages, S = tokens of a page, D = head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from residual_mass.methods.interface import Choice

if TYPE_CHECKING:
    from torch import Tensor


class PageBounds(NamedTuple):
    """Least and largest key of every page, channel by channel; a page without tokens of the mid-region has zeros."""

    low: Tensor
    """[..., N, D]."""
    high: Tensor
    """[..., N, D]."""


@dataclass(frozen=True)
class Pages:
    """Pages of neighbouring tokens in the order of Quest's upper bound of their scores (arXiv 2406.10774).

    Pages are read whole until K tokens are; of the last one the first tokens. What is left unread may score above what
    was read, so a residual cannot take the threshold for a cut.
    """

    size: int = 16
    """S."""
    recipe: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size is {self.size}, not 1 or more tokens")

    def prepare(self, keys: Tensor, mid: Tensor) -> PageBounds:
        import torch

        pages = self._pages(keys, 0)
        inside = self._pages(mid.expand(keys.shape[:-1]).unsqueeze(-1), False)
        low = torch.where(inside, pages, torch.inf).amin(-2).nan_to_num(posinf=0)
        return PageBounds(low, torch.where(inside, pages, -torch.inf).amax(-2).nan_to_num(neginf=0))

    def bounds(self, queries: Tensor, state: PageBounds) -> Tensor:
        """Upper bounds [..., R, N] of the scores of a page's tokens."""
        low, high = (x.transpose(-1, -2) for x in state)
        return queries.clamp_min(0) @ high + queries.clamp_max(0) @ low

    def select(self, queries: Tensor, scores: Tensor, state: PageBounds, mid: Tensor, k: Tensor) -> Choice:
        import torch

        from residual_mass.core.selection import exhaustive_topk, least_read

        bounds = self.bounds(queries, state)
        rank = bounds.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)  # of every page, 0 for the first
        column = torch.arange(scores.shape[-1], device=scores.device)
        order = rank.gather(-1, (column // self.size).expand(scores.shape)) * self.size + column % self.size
        read = exhaustive_topk(-order.to(scores.dtype), mid, k)
        return Choice(read, least_read(scores, mid, read))

    def _pages(self, x: Tensor, filler: float | bool) -> Tensor:
        """[..., L, C] -> [..., N, S, C], the last page filled up."""
        from torch.nn.functional import pad

        return pad(x, (0, 0, 0, -x.shape[-2] % self.size), value=filler).unflatten(-2, (-1, self.size))
