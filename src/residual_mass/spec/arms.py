"""The arms of a study."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from residual_mass.methods import Method, method_named
from residual_mass.methods.arms import HasMethod
from residual_mass.spec.settings import Settings


@dataclass(frozen=True)
class ArmSpec(HasMethod, Settings):
    """An arm of a study, which names its method.

    Raises:
        ValueError: the budget is missing, given to `full`, or out of range; or a method without maps names some.
    """

    method: str
    """Name of the method."""
    budget_percent: float | None = None
    """Percent of the prefix, anchors included."""
    maps: str | None = None
    """Label of the feature maps, if there are several."""

    def __post_init__(self) -> None:
        if self.is_full != (self.budget_percent is None):
            raise ValueError(f"arm {self.method!r}: full takes no budget_percent, every other method needs one")
        if self.budget_percent is not None and not 0 < self.budget_percent <= 100:
            raise ValueError(f"budget_percent {self.budget_percent:g} is outside (0, 100]")
        if self.maps is not None and not self.needs_maps:
            raise ValueError(f"arm {self.method!r}: uses no feature maps, but names {self.maps!r}")

    @property
    def rule(self) -> Method:
        return method_named(self.method)


def identities_of(arms: Iterable[ArmSpec]) -> tuple[dict[str, Any], ...]:
    """Returns the identities of the arms' methods, each once."""
    rules = dict.fromkeys(arm.rule for arm in arms)
    return tuple(rule.identity for rule in rules)
