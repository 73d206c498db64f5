"""The paper's selector.

Shape letters: R = query rows sharing keys, L = keys, K = retrieved tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from residual_mass.core.selection import Selected


@dataclass(frozen=True)
class TopK:
    """The K mid-region tokens of the highest scores (the paper's eq. 2): an oracle, for it scores every key."""

    def select(self, scores: Tensor, mid: Tensor, k: Tensor) -> Selected:
        """Chooses per row: scores [..., R, L], mid [..., 1 or R, L] bool, k [..., 1 or R] -> [..., R, K]."""
        from residual_mass.core.selection import exhaustive_topk

        return exhaustive_topk(scores, mid, k)
