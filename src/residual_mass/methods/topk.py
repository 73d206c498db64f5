"""The paper's selector.

Shape letters: R = query rows sharing keys, L = keys, K = retrieved tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from residual_mass.methods.interface import Choice

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TopK:
    """The K mid-region tokens of the highest scores (the paper's eq. 2): an oracle, for it scores every key."""

    recipe: ClassVar[int] = 0

    def prepare(self, keys: Tensor, mid: Tensor) -> tuple[()]:
        return ()

    def select(self, queries: Tensor, scores: Tensor, state: tuple[()], mid: Tensor, k: Tensor) -> Choice:
        from residual_mass.core.selection import exhaustive_topk, least_read

        read = exhaustive_topk(scores, mid, k)
        return Choice(read, least_read(scores, mid, read))
