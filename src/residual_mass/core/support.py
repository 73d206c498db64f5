"""The exact support: anchors, the number of retrieved tokens, and the partition of a prefix.

Shape letters: L = columns of the prefix (real tokens and padding).
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
