"""First-order moments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from residual_mass.methods.moments import OnePart

if TYPE_CHECKING:
    from residual_mass.core.accounting import Terms
    from residual_mass.core.moments import MomentState
    from residual_mass.methods.interface import Seen


@dataclass(frozen=True)
class FirstOrder(OnePart):
    """First order in the distance from the mean key, the read-out of MomentKV (arXiv 2606.01563)."""

    recipe: ClassVar[int] = 1
    needs_maps: ClassVar[bool] = False

    def terms(self, seen: Seen, state: MomentState) -> Terms:
        from residual_mass.core.moments import first_order_terms

        return first_order_terms(seen.queries, state)
