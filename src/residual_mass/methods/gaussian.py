"""The Gaussian without a cut, the negative control."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from residual_mass.methods.moments import OnePart

if TYPE_CHECKING:
    from residual_mass.core.accounting import Terms
    from residual_mass.core.moments import MomentState
    from residual_mass.methods.interface import Seen


@dataclass(frozen=True)
class Gaussian(OnePart):
    """Gaussian scores without a cut: counts the tokens that were read once more. The negative control."""

    recipe: ClassVar[int] = 1
    needs_maps: ClassVar[bool] = False

    def terms(self, seen: Seen, state: MomentState) -> Terms:
        from residual_mass.core.moments import gaussian_terms

        return gaussian_terms(seen.queries, state)
