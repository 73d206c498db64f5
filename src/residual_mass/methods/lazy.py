"""Modules that methods compute with, imported when they first compute.

Planning and tables read the parameters, the costs and the titles of methods, in each job of a study. `import torch`
would add seconds to each, and to put what they read into classes of its own would write every method twice.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = ["accounting", "moments", "selection", "torch"]


class LazyModule(ModuleType):
    """Stands for a module, and imports it when an attribute is asked for."""

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self.__name__), name)


if TYPE_CHECKING:  # what editors and type checkers see
    import torch

    from residual_mass.core import accounting, moments, selection
else:
    torch = LazyModule("torch")
    accounting = LazyModule("residual_mass.core.accounting")
    moments = LazyModule("residual_mass.core.moments")
    selection = LazyModule("residual_mass.core.selection")
