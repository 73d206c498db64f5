"""What serves the methods of an answer on this model and machine: compiled kernels, Triton, or torch alone."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd
from transformers import PreTrainedModel

from residual_mass.decode.backends import BACKENDS, loop_refusal
from residual_mass.decode.packed_backend import PackedBackend
from residual_mass.measure.arguments import Arguments
from residual_mass.measure.choice import TORCH
from residual_mass.measure.steps import Side, require_compiler
from residual_mass.methods import method_named
from residual_mass.methods.arms import Arm
from residual_mass.methods.served import READ_WHOLE, backends_of
from residual_mass.model.layers import device_of
from residual_mass.model.phi_maps import PhiMaps

WHOLE_PERCENT = 100.0
"""Budget of a cache that is read whole, in percent."""


@dataclass(frozen=True)
class Served:
    """What serves methods here.

    Attributes:
        backends: name of the backend by method; `torch` means that no fast step does.
        refusals: why the backend of this kind of device does not serve a method that it serves elsewhere, by method.
        drafting: methods with a fast step that can draft for full attention.
    """

    backends: dict[str, str]
    refusals: dict[str, str]
    drafting: tuple[str, ...] = ()

    @classmethod
    def here(cls, model: PreTrainedModel, args: Arguments, phi: PhiMaps | None) -> Served:
        """Asks the backends; raises ValueError if `--compile` is given and steps cannot be compiled."""
        require_compiler(model, args)
        backends = {}
        refusals = {}
        drafting = []
        loop = loop_refusal(model)
        here = "packed" if device_of(model).type == "cpu" else "triton"
        for name in dict.fromkeys((*args.methods, READ_WHOLE)):
            arm = Arm(method_named(name), None)
            maps = phi if arm.needs_maps else None
            reasons = {kind.name: kind.refusal(model, arm, maps) for kind in BACKENDS}
            if loop is not None and reasons["triton"] is None:
                reasons["triton"] = loop
            serving = [kind for kind, reason in reasons.items() if reason is None]
            backends[name] = serving[0]
            if backends[name] == TORCH and here in backends_of(arm.rule):
                refusals[name] = reasons[here]
            if backends[name] == PackedBackend.name and loop is None and PackedBackend.crops(model, arm):
                drafting.append(name)
        return cls(backends, refusals, tuple(drafting))

    @property
    def packed(self) -> tuple[str, ...]:
        """Methods over a packed cache."""
        return tuple(name for name, backend in self.backends.items() if backend == PackedBackend.name)

    def side(self, args: Arguments, method: str, budget_percent: float, phi: PhiMaps | None) -> Side:
        """Returns an arm as it is timed. What only torch serves is not compiled."""
        rule = method_named(method)
        maps = phi if rule.needs_maps else None
        compiled = args.compile and self.backends[method] != TORCH
        return Side(rule, budget_percent / 100, method in self.packed, maps, compiled)

    def fast(self, method: str) -> bool:
        """Returns whether a fast step serves a method here."""
        return self.backends[method] != TORCH


def requested_arms(args: Arguments) -> list[tuple[str, float]]:
    """Returns the methods of an answer with their budgets in percent."""
    return [(name, budget) for name in args.methods for budget in budgets_of(args, name)]


def budgets_of(args: Arguments, method: str) -> tuple[float, ...]:
    """Returns the budgets of a method: those asked for, or 100 for a cache that a step reads whole."""
    return (WHOLE_PERCENT,) if method_named(method).selector.replaces_cache else args.budgets


def arm_name(arm: pd.Series) -> str:
    """Returns an arm as it is written in tables."""
    if arm.budget_percent == WHOLE_PERCENT:
        return arm.method
    return f"{arm.method} at {arm.budget_percent:g} %"
