"""A method at a budget."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from residual_mass.core.settings import Settings
from residual_mass.methods import Method, method_named


@dataclass(frozen=True)
class Arm:
    """A method at an exact-support budget.

    Raises:
        ValueError: the budget is missing, given to `full`, or out of range.
    """

    rule: Method
    budget_percent: float | None
    """Percent of the prefix, anchors included; None for the whole prefix."""

    def __post_init__(self) -> None:
        if self.is_full != (self.budget_percent is None):
            raise ValueError(f"arm {self.rule.name!r}: full takes no budget_percent, every other method needs one")
        if self.budget_percent is not None and not 0 < self.budget_percent <= 100:
            raise ValueError(f"budget_percent {self.budget_percent:g} is outside (0, 100]")

    @property
    def is_full(self) -> bool:
        return self.rule.whole_prefix

    @property
    def needs_maps(self) -> bool:
        return self.rule.needs_maps


def own_identities(arms: Iterable[ArmSpec]) -> tuple[dict[str, Any], ...]:
    """Identities of the arms' methods that are not the paper's, each once."""
    rules = dict.fromkeys(arm.rule for arm in arms)
    return tuple(rule.identity for rule in rules if not rule.of_the_paper)


@dataclass(frozen=True)
class ArmSpec(Settings):
    """One evaluated method at one exact-support budget."""

    method: str
    """Its name."""
    budget_percent: float | None = None
    """Percent of the prefix, anchors included."""
    maps: str | None = None
    """Label of the feature maps, where there are several."""

    def __post_init__(self) -> None:
        arm = Arm(self.rule, self.budget_percent)
        if self.maps is not None and not arm.needs_maps:
            raise ValueError(f"arm {self.method!r}: uses no feature maps, but names {self.maps!r}")

    @property
    def rule(self) -> Method:
        return method_named(self.method)

    @property
    def is_full(self) -> bool:
        return self.rule.whole_prefix

    @property
    def needs_maps(self) -> bool:
        return self.rule.needs_maps
