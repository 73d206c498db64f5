"""A scan of quantised keys.

Shape letters: R = query rows sharing keys, L = keys, N = blocks of keys, S = keys of a block, D = head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from residual_mass.methods.blocks import blocks_of, bounds_of, joined
from residual_mass.methods.interface import BFLOAT16, Choice, Layout, Step
from residual_mass.methods.topk import best_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class QuantisedKeys(NamedTuple):
    """Keys as integers, with a scale for each channel of each block."""

    codes: Tensor
    """[..., L, D] uint8, from 0 to 2^bits - 1."""
    low: Tensor
    """[..., N, D] bfloat16, the value of code 0."""
    step: Tensor
    """[..., N, D] bfloat16, the difference of neighbouring codes."""


@dataclass(frozen=True)
class QuantisedScan:
    """The K mid-region tokens of the highest scores with quantised keys, asymmetric and per channel over blocks of
    tokens, as KIVI (arXiv 2402.02750) stores keys.

    It keeps the meaning of a threshold: what is left unread scores below the K-th best in the same scan. The tokens
    chosen are then read exactly. A step reads bits / 8 D + 4 D / S bytes of each key.
    """

    bits: int = 4
    block: int = 64
    """S, tokens that share a scale; a whole block is quantised at once, so that tokens can be appended."""
    recipe: ClassVar[int] = 1
    reads_keys: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 8:
            raise ValueError(f"bits is {self.bits}, not between 1 and 8")
        if self.block < 1:
            raise ValueError(f"block is {self.block}, not 1 or more tokens")

    def prepare(self, keys: Tensor, mid: Tensor) -> QuantisedKeys:
        """Anchors, which are always read, do not widen the range of a block."""
        import torch

        low, high = bounds_of(keys, mid, self.block)
        low, most = low.bfloat16(), 2**self.bits - 1
        step = ((high - low.to(high.dtype)) / most).bfloat16()
        width = step.to(keys.dtype).clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-2)
        offset = blocks_of(keys, self.block) - low.to(keys.dtype).unsqueeze(-2)
        codes = (offset / width).round().clamp(0, most).to(torch.uint8)
        return QuantisedKeys(codes.flatten(-3, -2)[..., : keys.shape[-2], :], low, step)

    def update(self, state: QuantisedKeys, keys: Tensor, mid: Tensor, start: int) -> QuantisedKeys:
        first = start // self.block
        column = first * self.block
        new = self.prepare(keys[..., column:, :], mid[..., column:])
        return QuantisedKeys(*joined(state, new, (column, first, first)))

    def keys(self, state: QuantisedKeys, dtype: torch.dtype) -> Tensor:
        """The keys that codes stand for, [..., L, D]."""
        codes = blocks_of(state.codes, self.block).to(dtype)
        values = state.low.to(dtype).unsqueeze(-2) + state.step.to(dtype).unsqueeze(-2) * codes
        return values.flatten(-3, -2)[..., : state.codes.shape[-2], :]

    def select(
        self, queries: Tensor, scores: Tensor, state: QuantisedKeys, mid: Tensor, k: Tensor, layout: Layout
    ) -> Choice:
        return best_of(queries @ self.keys(state, queries.dtype).transpose(-1, -2), mid, k)

    def scan_bytes(self, step: Step) -> float:
        return step.tokens * step.width * (self.bits / 8 + 2 * BFLOAT16 / self.block)
