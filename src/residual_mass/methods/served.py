"""Which backends serve a method, as far as the method alone decides it; without torch.

A backend's `refusal` (`decode.backend`) adds what the model and the machine decide. docs/library.md prints the table.
"""

from __future__ import annotations

from dataclasses import dataclass

from residual_mass.methods.interface import Method, TopK
from residual_mass.methods.residuals import Moments, QuantisedValues, ScanRegression
from residual_mass.methods.selectors import CacheOnly, QuantisedScan

RECOMMENDED = "scan4_regression_64"
"""The method to start with: of those that select tokens, the one with compiled steps that is nearest to full attention
for its bytes. `residual-mass measure`, README.md and docs/methods.md take the name from here or are tested against it.
"""
FEWEST_BYTES = "scan3_regression_32"
"""The method that reads the fewest bytes at high accuracy; torch alone serves it, which saves no time."""
READ_WHOLE = "cache8"
"""The quantised cache that a step reads whole: what a method that selects tokens has to beat."""


@dataclass(frozen=True)
class Packing:
    """Format of a packed cache: bits of keys and number of clusters, as in `LayerCache`."""

    bits: int
    clusters: int = 64


def packing_of(method: Method) -> Packing | None:
    """Returns the format of a method's packed cache, None for a method that the CPU kernels do not serve.

    They serve full attention in bfloat16 and over an 8-bit cache, and the 4-bit scan, alone or with regression.
    """
    selector = method.selector
    residual = method.own
    if method.whole_prefix:
        return Packing(16)
    if selector == CacheOnly(QuantisedScan(8)) and residual == QuantisedValues(8):
        return Packing(8)
    if selector != QuantisedScan(4) or method.needs_maps:
        return None
    if residual is None:
        return Packing(4)
    return Packing(4, residual.clusters) if isinstance(residual, ScanRegression) else None


def triton_serves(method: Method) -> bool:
    """Returns whether the GPU's backend serves a method: full attention, which torch computes there, and those that
    choose by the scores of all keys, exact or of 4 bits, alone, with feature maps (by exact scores) or with moments.
    """
    residual = method.own
    if method.whole_prefix:
        return True
    if residual is not None and not isinstance(residual, Moments):
        return False
    if type(method.selector) is TopK:
        return True
    return isinstance(method.selector, QuantisedScan) and method.selector.bits == 4 and not method.needs_maps


def backends_of(method: Method) -> tuple[str, ...]:
    """Returns the names of the backends that serve a method, in the order in which they are asked."""
    names = []
    if packing_of(method) is not None:
        names.append("packed")
    if triton_serves(method):
        names.append("triton")
    return (*names, "torch")
