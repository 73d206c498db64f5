"""Modules that are imported at first use: tables look up methods without torch, whose import takes seconds."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = ["accounting", "moments", "selection", "torch"]


class Lazy:
    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_module(self.name), attribute)


if TYPE_CHECKING:  # what editors and type checkers see
    import torch

    from residual_mass.core import accounting, moments, selection
else:
    torch = Lazy("torch")
    accounting = Lazy("residual_mass.core.accounting")
    moments = Lazy("residual_mass.core.moments")
    selection = Lazy("residual_mass.core.selection")
