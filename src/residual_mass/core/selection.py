"""Selectors: which mid-region tokens a query row retrieves.

Shape letters: R = query rows sharing keys, L = keys, K = retrieved tokens (the largest over rows).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Selected(NamedTuple):
    """Tokens chosen per row, as slots: indices into L, of which only the valid ones count."""

    indices: Tensor
    """[..., R, K] int64."""
    valid: Tensor
    """[..., R, K] bool."""

    def mask(self, length: int) -> Tensor:
        """The chosen set as [..., R, length] bool."""
        mask = torch.zeros(*self.indices.shape[:-1], length, dtype=torch.int8, device=self.indices.device)
        return mask.scatter_add_(-1, self.indices, self.valid.to(torch.int8)) > 0


def exhaustive_topk(scores: Tensor, mid: Tensor, k: Tensor) -> Selected:
    """The paper's oracle selector: the K highest-scoring mid-region tokens of every query row.

    Args:
        scores: [..., R, L] attention scores.
        mid: [..., 1 or R, L] bool, the mid-region.
        k: [..., R] or [R] integer, tokens wanted per row; more than |M| retrieves all of M.

    Returns:
        Slots in falling score order; a row's slots beyond its own K or |M| are not valid.
    """
    most = min(int(k.max()), scores.shape[-1]) if k.numel() else 0
    candidates = scores.masked_fill(~mid, -torch.inf)
    top, indices = candidates.topk(most, dim=-1)
    rank = torch.arange(most, device=scores.device)
    valid = (rank < k.unsqueeze(-1)) & (top > -torch.inf)
    return Selected(indices, valid)


def members(mask: Tensor, most: int) -> Selected:
    """The True columns of a mask [..., L] that has at most `most` of them in a row."""
    found, indices = mask.to(torch.int8).topk(min(most, mask.shape[-1]), dim=-1)
    return Selected(indices, found > 0)
