"""The mean token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from residual_mass.methods.moments import OnePart

if TYPE_CHECKING:
    from residual_mass.core.accounting import Terms
    from residual_mass.core.moments import MomentState
    from residual_mass.methods.interface import Seen


@dataclass(frozen=True)
class Mean(OnePart):
    """As many copies of the mean token as the mid-region has."""

    recipe: ClassVar[int] = 1
    needs_maps: ClassVar[bool] = False

    def terms(self, seen: Seen, state: MomentState) -> Terms:
        from residual_mass.core.moments import mean_terms

        return mean_terms(seen.queries, state)
