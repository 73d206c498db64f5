"""Selectors: which mid-region tokens a query row retrieves.

Shape letters: R = query rows sharing keys, L = keys, K = retrieved tokens (the largest over rows).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LONG_ROW = 16384
"""Number of columns above which two-level selection is faster."""
BLOCK = 8


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
    blocks with the highest maxima, because k higher maxima would be k higher tokens.
    """
    length = scores.shape[-1]
    k = min(k, length)
    if length < LONG_ROW or k * BLOCK > length // 2:
        top, columns = scores.topk(k, dim=-1, sorted=False)
        return columns, top
    whole = length // BLOCK * BLOCK
    blocks = scores[..., :whole].unflatten(-1, (-1, BLOCK))
    best = blocks.amax(-1).topk(k, dim=-1, sorted=False).indices
    inside = torch.arange(BLOCK, device=scores.device)
    columns = (best.unsqueeze(-1) * BLOCK + inside).flatten(-2)
    rest = torch.arange(whole, length, device=scores.device).expand(*scores.shape[:-1], -1)
    columns = torch.cat((columns, rest), dim=-1)
    top, place = scores.gather(-1, columns).topk(k, dim=-1, sorted=False)
    return columns.gather(-1, place), top


def members(mask: Tensor, most: int) -> Selected:
    """Returns the True columns of a mask [..., L] with at most `most` of them per row."""
    found, indices = mask.to(torch.int8).topk(min(most, mask.shape[-1]), dim=-1)
    return Selected(indices, found > 0)
