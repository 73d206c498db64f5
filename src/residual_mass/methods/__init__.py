"""Methods: a selector chooses the prefix tokens that a query reads exactly, a residual estimates the others.

METHODS is the only list of method names; configuration, generation and result files look them up here. The package
imports torch only when it computes, because the workflow and the tables run without it.
"""

from __future__ import annotations

from difflib import get_close_matches

from residual_mass.methods.clusters import Centroids, GroupSums, ImportanceSample
from residual_mass.methods.interface import Choice, Method, Phi, Residual, Seen, Selector, Step, TopK, state_bytes
from residual_mass.methods.registry import METHODS
from residual_mass.methods.residuals import ExactMass, Mean, Moments, QuantisedValues, ScanRegression
from residual_mass.methods.selectors import (
    CacheOnly,
    Channels,
    Pages,
    PerGroup,
    QuantisedScan,
    Rotated,
    WholeClusters,
)

__all__ = [
    "METHODS", "CacheOnly", "Centroids", "Channels", "Choice", "ExactMass", "GroupSums", "ImportanceSample", "Mean",
    "Method", "Moments", "Pages", "PerGroup", "Phi", "QuantisedScan", "QuantisedValues", "Residual",
    "Rotated", "ScanRegression", "Seen", "Selector", "Step", "TopK", "WholeClusters", "method_named", "names",
    "state_bytes",
]  # fmt: skip


def names() -> tuple[str, ...]:
    """Returns the names of all known methods, in the order of result files."""
    return tuple(method.name for method in METHODS)


def method_named(name: str | Method) -> Method:
    """Looks up a method by its name, and returns a `Method` as it is.

    Raises:
        ValueError: no method has this name (the message lists the most similar ones), or two have it.
    """
    if isinstance(name, Method):
        return name
    matches = [method for method in METHODS if method.name == name]
    if not matches:
        similar = get_close_matches(str(name), names(), n=3, cutoff=0)
        raise ValueError(f"method {name!r} is unknown; the most similar are {', '.join(similar)}")
    if len(matches) > 1:
        raise ValueError(f"METHODS has two methods named {name!r}; rename one")
    return matches[0]
