"""Selectors made of another selector.

Shape letters: R = query rows sharing keys, L = keys, K = retrieved tokens, D = head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from residual_mass.methods.interface import BFLOAT16, Choice, Layout, Selector, Step
from residual_mass.methods.topk import best_of

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Reranked:
    """The K best by exact scores among the K + margin tokens that a scan of all tokens takes for the best.

    The threshold is the K-th best exact score. The tokens of the margin keep their exact scores in what was scanned.
    """

    scan: Selector
    margin: int = 16
    """Tokens whose keys a query head reads besides those of the budget."""
    recipe: ClassVar[int] = 1
    reads_keys: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.margin < 1:
            raise ValueError(f"margin is {self.margin}, not 1 or more tokens")

    def prepare(self, keys: Tensor, mid: Tensor) -> tuple[Tensor, ...]:
        return self.scan.prepare(keys, mid)

    def update(self, state: Any, keys: Tensor, mid: Tensor, start: int) -> tuple[Tensor, ...]:
        return self.scan.update(state, keys, mid, start)

    def select(self, queries: Tensor, scores: Tensor, state: Any, mid: Tensor, k: Tensor, layout: Layout) -> Choice:
        import torch

        wider = self.scan.select(queries, scores, state, mid, k + self.margin, layout)
        candidates = wider.read.mask(scores.shape[-1])
        best = best_of(scores, candidates, k)
        nothing = best_of(torch.where(candidates, scores, wider.scanned), mid, k)
        return Choice(best.read, torch.where(k > 0, best.threshold, nothing.threshold), nothing.scanned)

    def scan_bytes(self, step: Step) -> float:
        return self.scan.scan_bytes(step) + BFLOAT16 * step.width * step.heads * self.margin

    def kept_bytes(self, step: Step) -> float:
        return self.scan.scan_bytes(step)


@dataclass(frozen=True)
class CacheOnly:
    """What a scan keeps of the keys, in place of the keys: no token of the mid-region is read exactly, whatever the
    budget. With `QuantisedValues` it is a quantised cache that every step reads whole, and no other is kept.
    """

    scan: Selector
    recipe: ClassVar[int] = 1
    reads_keys: ClassVar[bool] = False
    replaces_cache: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.scan.reads_keys:
            raise ValueError(f"CacheOnly needs a scan of what is kept in place of keys, not {type(self.scan).__name__}")

    def prepare(self, keys: Tensor, mid: Tensor) -> tuple[Tensor, ...]:
        return self.scan.prepare(keys, mid)

    def update(self, state: Any, keys: Tensor, mid: Tensor, start: int) -> tuple[Tensor, ...]:
        return self.scan.update(state, keys, mid, start)

    def select(self, queries: Tensor, scores: Tensor, state: Any, mid: Tensor, k: Tensor, layout: Layout) -> Choice:
        return self.scan.select(queries, scores, state, mid, k * 0, layout)

    def scan_bytes(self, step: Step) -> float:
        return self.scan.scan_bytes(step)


@dataclass(frozen=True)
class Rotated:
    """A scan of keys and queries that are rotated first, which leaves their products as they are (QuaRot, arXiv
    2404.00456): by Hadamard's matrix of the largest power of two that divides D, block by block.
    """

    scan: Selector
    recipe: ClassVar[int] = 1

    @property
    def reads_keys(self) -> bool:
        return self.scan.reads_keys

    def prepare(self, keys: Tensor, mid: Tensor) -> tuple[Tensor, ...]:
        return self.scan.prepare(_rotated(keys), mid)

    def update(self, state: Any, keys: Tensor, mid: Tensor, start: int) -> tuple[Tensor, ...]:
        return self.scan.update(state, _rotated(keys), mid, start)

    def select(self, queries: Tensor, scores: Tensor, state: Any, mid: Tensor, k: Tensor, layout: Layout) -> Choice:
        return self.scan.select(_rotated(queries), scores, state, mid, k, layout)

    def scan_bytes(self, step: Step) -> float:
        return self.scan.scan_bytes(step)


def _rotated(x: Tensor) -> Tensor:
    """[..., D], by the fast Walsh-Hadamard transform."""
    import torch

    width = x.shape[-1] & -x.shape[-1]
    blocks, half = x.unflatten(-1, (-1, width)), 1
    while half < width:
        low, high = blocks.unflatten(-1, (-1, 2, half)).unbind(-2)
        blocks = torch.stack((low + high, low - high), -2).flatten(-3)
        half *= 2
    return blocks.flatten(-2) * width**-0.5


@dataclass(frozen=True)
class PerGroup:
    """The same K tokens for all query heads of a KV head, as serving engines read them: those with the largest share of
    attention in a scan, summed over the heads, with softmax over the mid-region.

    What a head leaves unread may score above what it reads.
    """

    scan: Selector
    recipe: ClassVar[int] = 1

    @property
    def reads_keys(self) -> bool:
        return self.scan.reads_keys

    def prepare(self, keys: Tensor, mid: Tensor) -> tuple[Tensor, ...]:
        return self.scan.prepare(keys, mid)

    def update(self, state: Any, keys: Tensor, mid: Tensor, start: int) -> tuple[Tensor, ...]:
        return self.scan.update(state, keys, mid, start)

    def select(self, queries: Tensor, scores: Tensor, state: Any, mid: Tensor, k: Tensor, layout: Layout) -> Choice:
        import torch

        from residual_mass.core.selection import least_read, unordered_topk

        scanned = self.scan.select(queries, scores, state, mid, k * 0, layout).scanned
        share = scanned.masked_fill(~mid, torch.finfo(scanned.dtype).min).softmax(-1)
        by_head = share.unflatten(-2, (-1, layout.heads, layout.tokens))
        read, _ = unordered_topk(by_head.sum(-3, keepdim=True).expand_as(by_head).flatten(-4, -2), mid, k)
        return Choice(read, least_read(scanned, mid, read), scanned)

    def scan_bytes(self, step: Step) -> float:
        return self.scan.scan_bytes(step)
