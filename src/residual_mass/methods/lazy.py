"""Modules that are imported when they first compute.

Configuration and tables look up methods by name, without torch, which takes seconds to import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = ["accounting", "moments", "selection", "torch"]

if TYPE_CHECKING:
    import torch

    from residual_mass.core import accounting, moments, selection
else:

    class Module:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getattr__(self, attribute: str) -> Any:
            return getattr(import_module(self.name), attribute)

    torch = Module("torch")
    accounting, moments, selection = (Module(f"residual_mass.core.{name}") for name in __all__[:-1])
