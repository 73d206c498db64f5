"""A scan of quantised keys.

Shape letters: R = query rows sharing keys, L = keys, N = blocks of keys, S = keys of a block, D = head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from residual_mass.methods.interface import Choice

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

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 8:
            raise ValueError(f"bits is {self.bits}, not between 1 and 8")
        if self.block < 1:
            raise ValueError(f"block is {self.block}, not 1 or more tokens")

    def prepare(self, keys: Tensor, mid: Tensor) -> QuantisedKeys:
        """Anchors, which are always read, do not widen the range of a block."""
        import torch

        blocks, inside = self._blocks(keys, 0), self._blocks(mid.expand(keys.shape[:-1]).unsqueeze(-1), False)
        low = torch.where(inside, blocks, torch.inf).amin(-2).nan_to_num(posinf=0).bfloat16()
        high = torch.where(inside, blocks, -torch.inf).amax(-2).nan_to_num(neginf=0)
        most = 2**self.bits - 1
        step = ((high - low.to(high.dtype)) / most).bfloat16()
        width = step.to(keys.dtype).clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-2)
        codes = ((blocks - low.to(keys.dtype).unsqueeze(-2)) / width).round().clamp(0, most).to(torch.uint8)
        return QuantisedKeys(codes.flatten(-3, -2)[..., : keys.shape[-2], :], low, step)

    def keys(self, state: QuantisedKeys, dtype: torch.dtype) -> Tensor:
        """The keys that codes stand for, [..., L, D]."""
        codes = self._blocks(state.codes, 0).to(dtype)
        values = state.low.to(dtype).unsqueeze(-2) + state.step.to(dtype).unsqueeze(-2) * codes
        return values.flatten(-3, -2)[..., : state.codes.shape[-2], :]

    def select(self, queries: Tensor, scores: Tensor, state: QuantisedKeys, mid: Tensor, k: Tensor) -> Choice:
        from residual_mass.core.selection import exhaustive_topk, least_read

        scanned = queries @ self.keys(state, queries.dtype).transpose(-1, -2)
        read = exhaustive_topk(scanned, mid, k)
        return Choice(read, least_read(scanned, mid, read))

    def _blocks(self, x: Tensor, filler: float | bool) -> Tensor:
        """[..., L, C] -> [..., N, S, C], the last block filled up."""
        from torch.nn.functional import pad

        missing = -x.shape[-2] % self.block
        return pad(x, (0, 0, 0, missing), value=filler).unflatten(-2, (-1, self.block))
