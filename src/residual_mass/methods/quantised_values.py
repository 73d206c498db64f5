"""Quantised values of every token.

Shape letters: L = keys, N = groups of channels, S = channels of a group, D = head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from residual_mass.methods.interface import BFLOAT16, Step

if TYPE_CHECKING:
    from torch import Tensor

    from residual_mass.core.accounting import Terms
    from residual_mass.methods.interface import Seen


class ValueCodes(NamedTuple):
    """Values as integers, with a scale for each group of channels of each token."""

    codes: Tensor
    """[..., L, D] uint8, from 0 to 2^bits - 1."""
    low: Tensor
    """[..., L, N] bfloat16, the value of code 0."""
    step: Tensor
    """[..., L, N] bfloat16, the difference of neighbouring codes."""


@dataclass(frozen=True)
class QuantisedValues:
    """Every unread token with the score that the selector saw and its own value, quantised: asymmetric, per token over
    groups of channels, as KIVI (arXiv 2402.02750) stores values. Every value is read, in bits / 8 D + 4 N bytes.
    """

    bits: int = 4
    group: int = 64
    """S, at most; D where it is less."""
    recipe: ClassVar[int] = 1
    needs_maps: ClassVar[bool] = False
    uses_scan: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 8:
            raise ValueError(f"bits is {self.bits}, not between 1 and 8")
        if self.group < 1:
            raise ValueError(f"group is {self.group}, not 1 or more channels")

    def prepare(self, keys: Tensor, values: Tensor, mid: Tensor) -> ValueCodes:
        import torch

        groups, most = values.split(self.group, -1), 2**self.bits - 1
        low = torch.stack([x.amin(-1) for x in groups], -1).bfloat16()
        step = ((torch.stack([x.amax(-1) for x in groups], -1) - low.to(values.dtype)) / most).bfloat16()
        width = self._by_channel(step, values).clamp_min(torch.finfo(torch.float32).tiny)
        codes = ((values - self._by_channel(low, values)) / width).round().clamp(0, most)
        return ValueCodes(codes.to(torch.uint8), low, step)

    def update(self, state: ValueCodes, keys: Tensor, values: Tensor, joined: Tensor, start: int) -> ValueCodes:
        from residual_mass.methods.blocks import joined as behind

        return ValueCodes(*behind(state, self.prepare(keys, values, joined), (start,) * 3))

    def terms(self, seen: Seen, state: ValueCodes) -> Terms:
        from residual_mass.core.accounting import exact_terms

        assert seen.scanned is not None, "the selector's scores are missing"
        codes = state.codes.to(seen.queries.dtype)
        values = self._by_channel(state.low, codes) + self._by_channel(state.step, codes) * codes
        return exact_terms(seen.scanned, values, seen.unread)

    def summary_bytes(self, step: Step) -> float:
        return step.tokens * (step.width * self.bits / 8 + 2 * BFLOAT16 * -(-step.width // self.group))

    def _by_channel(self, of_group: Tensor, x: Tensor) -> Tensor:
        """[..., L, N] -> [..., L, D], of the dtype of x [..., L, D]."""
        return of_group.to(x.dtype).repeat_interleave(self.group, dim=-1)[..., : x.shape[-1]]
