"""Whole pages by bounds of their scores, or by their mean keys.

Shape letters: R = query rows sharing keys, L = keys, N = pages, S = tokens of a page, D = head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from residual_mass.methods.blocks import blocks_of, bounds_of, check_size, in_order, inside, joined, scores_of_tokens
from residual_mass.methods.interface import BFLOAT16, Choice, Layout, Step

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
    reads_keys: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_size(self.size)

    def prepare(self, keys: Tensor, mid: Tensor) -> PageBounds:
        return PageBounds(*bounds_of(keys, mid, self.size))

    def update(self, state: PageBounds, keys: Tensor, mid: Tensor, start: int) -> PageBounds:
        first, column = _first(start, self.size)
        return PageBounds(*joined(state, self.prepare(keys[..., column:, :], mid[..., column:]), (first, first)))

    def bounds(self, queries: Tensor, state: PageBounds) -> Tensor:
        """Upper bounds [..., R, N] of the scores of a page's tokens."""
        low, high = (x.transpose(-1, -2) for x in state)
        return queries.clamp_min(0) @ high + queries.clamp_max(0) @ low

    def select(
        self, queries: Tensor, scores: Tensor, state: PageBounds, mid: Tensor, k: Tensor, layout: Layout
    ) -> Choice:
        return whole_pages(self.bounds(queries, state), self.size, scores, mid, k)

    def scan_bytes(self, step: Step) -> float:
        return 2 * BFLOAT16 * step.width * -(-step.tokens // self.size)


class PageMeans(NamedTuple):
    """Mean key of every page's mid-region; zeros where it is empty."""

    mean: Tensor
    """[..., N, D]."""


@dataclass(frozen=True)
class PagesByMean:
    """The same in the order of the scores of their mean keys, half of the bytes (InfLLM, arXiv 2402.04617, and MoBA,
    arXiv 2502.13189, choose blocks by representative and by mean keys).
    """

    size: int = 16
    """S."""
    recipe: ClassVar[int] = 1
    reads_keys: ClassVar[bool] = False
    groups: ClassVar[str] = "pages"

    def __post_init__(self) -> None:
        check_size(self.size)

    def prepare(self, keys: Tensor, mid: Tensor) -> PageMeans:
        members = inside(keys, mid, self.size).to(keys.dtype)
        return PageMeans((members * blocks_of(keys, self.size)).sum(-2) / members.sum(-2).clamp_min(1))

    def update(self, state: PageMeans, keys: Tensor, mid: Tensor, start: int) -> PageMeans:
        first, column = _first(start, self.size)
        return PageMeans(*joined(state, self.prepare(keys[..., column:, :], mid[..., column:]), (first,)))

    def select(
        self, queries: Tensor, scores: Tensor, state: PageMeans, mid: Tensor, k: Tensor, layout: Layout
    ) -> Choice:
        return whole_pages(queries @ state.mean.transpose(-1, -2), self.size, scores, mid, k)

    def scan_bytes(self, step: Step) -> float:
        return BFLOAT16 * step.width * -(-step.tokens // self.size)


def whole_pages(page_scores: Tensor, size: int, scores: Tensor, mid: Tensor, k: Tensor) -> Choice:
    """Reads pages whole in the order of their scores [..., R, N]; `scores`, `mid` and `k` as in `Selector.select`."""
    import torch

    from residual_mass.core.selection import least_read, unordered_topk

    tokens = scores.shape[-1]
    page = torch.arange(tokens, device=scores.device) // size
    read, _ = unordered_topk(in_order(page_scores, page.expand(*scores.shape[:-1], tokens)), mid, k)
    return Choice(read, least_read(scores, mid, read), scores_of_tokens(page_scores, size, tokens))


def page_of(mid: Tensor, size: int) -> Tensor:
    """The page of every token of the mid-region [..., L], -1 outside: [..., L] int64."""
    import torch

    return torch.where(mid, torch.arange(mid.shape[-1], device=mid.device) // size, -1)


def _first(start: int, size: int) -> tuple[int, int]:
    """The page that holds column `start`, and its first column."""
    return start // size, start // size * size
