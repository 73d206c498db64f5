"""Selectors: which mid-region tokens a query row retrieves.

Shape letters: R = query rows sharing keys, L = keys, K = retrieved tokens (the largest over rows).
"""

from __future__ import annotations

import torch
from torch import Tensor


def exhaustive_topk(scores: Tensor, mid: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """The paper's oracle selector: the K highest-scoring mid-region tokens of every query row.

    Args:
        scores: [..., R, L] attention scores.
        mid: [..., 1 or R, L] bool, the mid-region.
        k: [..., R] or [R] integer, tokens wanted per row; more than |M| retrieves all of M.

    Returns:
        indices [..., R, K] into L in falling score order, and valid [..., R, K] bool, False beyond a row's own K or
        |M|.
    """
    most = min(int(k.max()), scores.shape[-1]) if k.numel() else 0
    candidates = scores.masked_fill(~mid, -torch.inf)
    top, indices = candidates.topk(most, dim=-1)
    rank = torch.arange(most, device=scores.device)
    valid = (rank < k.unsqueeze(-1)) & (top > -torch.inf)
    return indices, valid


def retrieved_mask(scores: Tensor, mid: Tensor, k: Tensor) -> Tensor:
    """Retrieved set K(q) as a mask [..., R, L] bool; arguments as in `exhaustive_topk`."""
    indices, valid = exhaustive_topk(scores, mid, k)
    mask = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    return mask.scatter_(-1, indices, valid)
