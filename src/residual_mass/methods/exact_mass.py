"""The true mass of the unread tokens, an oracle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from residual_mass.methods.interface import FLOAT32, Step

if TYPE_CHECKING:
    from torch import Tensor

    from residual_mass.core.accounting import Terms
    from residual_mass.methods.interface import Seen, Selector


class MeanValue(NamedTuple):
    """Mean value of the mid-region, and its tokens."""

    mean: Tensor
    """[..., D]."""
    count: Tensor
    """[...]."""


@dataclass(frozen=True)
class ExactMass:
    """The true mass in the direction of the mean value: SparQ's idea (arXiv 2312.04985) at its best."""

    recipe: ClassVar[int] = 1
    needs_maps: ClassVar[bool] = False

    def fitted(self, selector: Selector | None) -> ExactMass:
        """Raises ValueError for a selector that does not read every key: the mass is that of exact scores."""
        if not getattr(selector, "reads_keys", False):
            raise ValueError(f"ExactMass needs a selector that reads every key (TopK), not {type(selector).__name__}")
        return self

    def prepare(self, keys: Tensor, values: Tensor, mid: Tensor) -> MeanValue:
        weights = mid.expand(keys.shape[:-1]).to(values.dtype).unsqueeze(-1)
        return MeanValue((weights * values).sum(-2) / weights.sum(-2).clamp_min(1), weights.sum((-2, -1)))

    def update(self, state: MeanValue, keys: Tensor, values: Tensor, joined: Tensor, start: int) -> MeanValue:
        new = self.prepare(keys, values, joined)
        count = state.count + new.count
        share = (new.count / count.clamp_min(1)).unsqueeze(-1)
        return MeanValue(state.mean + share * (new.mean - state.mean), count)

    def terms(self, seen: Seen, state: MeanValue) -> Terms:
        from residual_mass.core.accounting import Terms, exact_terms

        mass = exact_terms(seen.scores, seen.values, seen.unread)
        return Terms(mass.denominator.unsqueeze(-1) * state.mean.unsqueeze(-2), mass.denominator, mass.shift)

    def summary_bytes(self, step: Step) -> float:
        """The mean value; the mass is that of scores which the selector has computed."""
        return FLOAT32 * (step.width + 1)
