"""Selectors: which mid-region tokens a query row retrieves.

Shape letters: R = query rows sharing keys, L = keys, K = retrieved tokens (the largest over rows).
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor


class Partition(NamedTuple):
    """Anchor set A and mid-region M of a prefix (the paper's eq. 2) as disjoint masks; padding is in neither."""

    anchors: Tensor
    """[..., L] bool."""
    mid: Tensor
    """[..., L] bool."""


def retrieved_count(budget_percent: float, length: int, num_anchors: int) -> int:
    """Returns K = max(0, ceil(r L) - |A|), the mid-region tokens that a budget leaves after the anchors.

    Args:
        budget_percent: exact-support budget in percent of the prefix, in (0, 100].
        length: L in tokens, nominal or real.
        num_anchors: |A|, sink and tail tokens together.

    Raises:
        ValueError: the budget is outside (0, 100].
    """
    if not 0 < budget_percent <= 100:
        raise ValueError(f"budget {budget_percent:g} % is outside (0, 100]")
    # Exact rational arithmetic: 0.07 * 100 is 7.000000000000001 in floats, and its ceiling is one token too many.
    return max(0, math.ceil(Fraction(str(budget_percent)) * length / 100) - num_anchors)


def partition(real: Tensor, num_sink: int, num_tail: int) -> Partition:
    """Splits each row's real tokens into anchors (first `num_sink`, last `num_tail`) and the mid-region between them.

    Args:
        real: [..., L] bool, False on padding (on either side); a row shorter than the anchors has an empty mid-region.
    """
    rank = real.long().cumsum(-1) - 1
    count = real.sum(-1, keepdim=True)
    anchors = real & ((rank < num_sink) | (rank >= count - num_tail))
    return Partition(anchors, real & ~anchors)


def full_prefix(length: int, device: torch.device | None = None) -> Tensor:
    """Returns the mask [L] bool of a prefix without padding."""
    return torch.ones(length, dtype=torch.bool, device=device)


LONG_ROW = 1024
"""Number of columns from which two-level selection is faster."""
LEAST_BLOCK = 3
"""Fewest columns of a block for which two-level selection is faster."""


class Selected(NamedTuple):
    """Tokens chosen per row, as slots with indices into L; only valid slots count."""

    indices: Tensor
    """[..., R, K] int64."""
    valid: Tensor
    """[..., R, K] bool."""

    def mask(self, length: int) -> Tensor:
        """Returns the chosen set as a mask [..., R, length] bool."""
        mask = torch.zeros(*self.indices.shape[:-1], length, dtype=torch.int8, device=self.indices.device)
        return mask.scatter_add_(-1, self.indices, self.valid.to(torch.int8)) > 0


def exhaustive_topk(scores: Tensor, mid: Tensor, k: Tensor) -> Selected:
    """Selects the K highest-scoring mid-region tokens of every query row, the paper's oracle selector.

    Args:
        scores: [..., R, L] attention scores.
        mid: [..., 1 or R, L] bool, the mid-region.
        k: [..., R] or [R] integer, tokens wanted per row; more than |M| retrieves all of M.

    Returns:
        Slots in descending order of score; slots beyond a row's own K or |M| are invalid.
    """
    most = min(int(k.max()), scores.shape[-1]) if k.numel() else 0
    candidates = scores.masked_fill(~mid, -torch.inf)
    top, indices = candidates.topk(most, dim=-1)
    rank = torch.arange(most, device=scores.device)
    valid = (rank < k.unsqueeze(-1)) & (top > -torch.inf)
    return Selected(indices, valid)


def unordered_topk(scores: Tensor, mid: Tensor, k: Tensor) -> tuple[Selected, Tensor]:
    """Selects as `exhaustive_topk` does from scores [..., R, L], faster and with slots in any order; also returns their
    `least_read`. Waits for the device, to read k [..., R].
    """
    candidates = torch.where(mid, scores, -torch.inf)
    by_example = k.reshape(-1, k.shape[-1]).clamp_max(scores.shape[-1]).tolist()
    most = [max(of_row) for of_row in zip(*by_example, strict=True)]
    columns, top = _rowwise_largest(candidates, most)
    found = top > -torch.inf
    if any(of_example != most for of_example in by_example):  # examples of different lengths
        top, order = top.sort(dim=-1, descending=True)
        columns = columns.gather(-1, order)
        found = torch.arange(top.shape[-1], device=k.device) < k.clamp_min(1).unsqueeze(-1)
        found = found & (top > -torch.inf)
    least = torch.where(found, top, torch.inf).amin(-1)
    slots = max(most, default=0)
    valid = found[..., :slots]
    if any(0 in of_example for of_example in by_example):  # of these rows, the highest score was found
        valid = valid & (k > 0).unsqueeze(-1)
    return Selected(columns[..., :slots], valid), torch.where(least < torch.inf, least, 0)


def _rowwise_largest(candidates: Tensor, counts: list[int]) -> tuple[Tensor, Tensor]:
    """As `largest`, with as many for each row, and at least one; -inf in the slots of rows that have fewer."""
    if len(set(counts)) == 1:
        return largest(candidates, max(counts[0], 1))
    top = candidates.new_full((*candidates.shape[:-1], max(counts, default=1)), -torch.inf)
    columns = torch.zeros_like(top, dtype=torch.int64)
    for count in set(counts):
        rows = torch.tensor([row for row, each in enumerate(counts) if each == count], device=top.device)
        found, highest = largest(candidates.index_select(-2, rows), max(count, 1))
        columns[..., : highest.shape[-1]].index_copy_(-2, rows, found)
        top[..., : highest.shape[-1]].index_copy_(-2, rows, highest)
    return columns, top


def least_read(scores: Tensor, mid: Tensor, read: Selected) -> Tensor:
    """The least score among the tokens read [..., R], or the largest of the mid-region where there are none; 0 for an
    empty mid-region.
    """
    highest = scores.masked_fill(~mid, -torch.inf).amax(-1, keepdim=True)
    least = torch.where(read.valid, scores.gather(-1, read.indices), torch.inf)
    least = torch.cat((highest, least), dim=-1).amin(-1)
    return torch.where(least > -torch.inf, least, 0)


def largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Returns columns [..., K] and values [..., K] of the k highest scores [..., L], unordered; K = min(k, L).

    Long rows compare the maxima of blocks first. This is exact: each of the k highest tokens lies in one of the k
    blocks with the highest maxima, because k higher maxima would be k higher tokens. Blocks of sqrt(L / k) columns
    leave the fewest numbers to sort, 2 sqrt(k L).
    """
    length = scores.shape[-1]
    k = min(k, length)
    size = math.isqrt(length // max(k, 1))
    if length < LONG_ROW or size < LEAST_BLOCK:
        top, columns = scores.topk(k, dim=-1, sorted=False)
        return columns, top
    whole = length // size * size
    blocks = scores[..., :whole].unflatten(-1, (size, -1))  # each of columns far apart: maxima of whole vectors
    best = blocks.amax(-2).topk(k, dim=-1, sorted=False).indices
    inside = torch.arange(0, whole, whole // size, device=scores.device)
    columns = (best.unsqueeze(-1) + inside).flatten(-2)
    rest = torch.arange(whole, length, device=scores.device).expand(*scores.shape[:-1], -1)
    columns = torch.cat((columns, rest), dim=-1)
    top, place = scores.gather(-1, columns).topk(k, dim=-1, sorted=False)
    return columns.gather(-1, place), top


def members(mask: Tensor, most: int) -> Selected:
    """Returns the True columns of a mask [..., L] with at most `most` of them per row."""
    found, indices = mask.to(torch.int8).topk(min(most, mask.shape[-1]), dim=-1)
    return Selected(indices, found > 0)
