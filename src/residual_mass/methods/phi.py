"""The paper's learned feature maps, alone and with the mass of truncated moments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from residual_mass.methods.moments import OnePart

if TYPE_CHECKING:
    from residual_mass.core.accounting import Terms
    from residual_mass.core.moments import MomentState
    from residual_mass.methods.interface import Seen


@dataclass(frozen=True)
class Phi:
    """Summaries of learned features, Z = <phi_q, u> and nu = S phi_q.

    It computes no terms of its own: the decode paths compute them together with the exact ones (`core.accounting`).
    """

    subtracts: bool = True
    """Whether the retrieved tokens are subtracted from S and u first (TopK+phi) or not (NoSub)."""
    needs_maps: ClassVar[bool] = True


@dataclass(frozen=True)
class PhiDirection(OnePart):
    """The direction nu / Z of the feature maps with subtraction, and the mass Z of truncated moments.

    Maps used beyond the length that they were trained on are farthest off in the mass. Where they leave nothing, the
    direction is that of the moments.
    """

    recipe: ClassVar[int] = 1
    needs_maps: ClassVar[bool] = True

    def terms(self, seen: Seen, state: MomentState) -> Terms:
        import torch

        from residual_mass.core.accounting import Terms
        from residual_mass.core.moments import truncated_terms

        assert seen.phi is not None, "the maps' terms are missing"
        moments = truncated_terms(seen.queries, state, seen.threshold)
        estimated = seen.phi.denominator > 0
        ratio = moments.denominator / torch.where(estimated, seen.phi.denominator, 1)
        numerator = torch.where(estimated.unsqueeze(-1), ratio.unsqueeze(-1) * seen.phi.numerator, moments.numerator)
        return Terms(numerator, moments.denominator, moments.shift)
