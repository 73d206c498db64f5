"""The paper's selector.

Shape letters: R = query rows sharing keys, L = keys, K = retrieved tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from residual_mass.methods.interface import BFLOAT16, Choice, Layout, Step

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TopK:
    """The K mid-region tokens of the highest scores (the paper's eq. 2): an oracle, for it scores every key."""

    recipe: ClassVar[int] = 0
    reads_keys: ClassVar[bool] = True

    def prepare(self, keys: Tensor, mid: Tensor) -> tuple[()]:
        return ()

    def update(self, state: tuple[()], keys: Tensor, mid: Tensor, start: int) -> tuple[()]:
        return ()

    def select(
        self, queries: Tensor, scores: Tensor, state: tuple[()], mid: Tensor, k: Tensor, layout: Layout
    ) -> Choice:
        return best_of(scores, mid, k)

    def scan_bytes(self, step: Step) -> float:
        return BFLOAT16 * step.tokens * step.width


def best_of(scanned: Tensor, mid: Tensor, k: Tensor) -> Choice:
    """Chooses the K mid-region tokens of the highest scores [..., R, L]; `k` as in `Selector.select`."""
    from residual_mass.core.selection import unordered_topk

    return Choice(*unordered_topk(scanned, mid, k), scanned)
