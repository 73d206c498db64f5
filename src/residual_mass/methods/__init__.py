"""Methods: which prefix tokens a query reads exactly (a selector), and what stands for the rest (a residual).

METHODS is the only list of method names; configuration, generation and result files look them up here. The package
does not import torch before it computes, for the workflow and the tables do without.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from typing import Any

from residual_mass.methods.centroids import Centroids
from residual_mass.methods.channels import Channels
from residual_mass.methods.combined import CacheOnly, PerGroup, Reranked, Rotated
from residual_mass.methods.exact_mass import ExactMass
from residual_mass.methods.first_order import FirstOrder
from residual_mass.methods.gaussian import Gaussian
from residual_mass.methods.group_moments import GroupMoments
from residual_mass.methods.interface import Choice, Residual, Seen, Selector, Step, state_bytes
from residual_mass.methods.mean import Mean
from residual_mass.methods.moments import Moments
from residual_mass.methods.pages import Pages, PagesByMean
from residual_mass.methods.phi import Phi, PhiDirection
from residual_mass.methods.quantised_scan import QuantisedScan
from residual_mass.methods.quantised_values import QuantisedValues
from residual_mass.methods.sample import ImportanceSample, UniformSample
from residual_mass.methods.scanned import GroupSums, ScanRegression
from residual_mass.methods.topk import TopK
from residual_mass.methods.whole_clusters import WholeClusters

__all__ = [
    "METHODS",
    "CacheOnly",
    "Centroids",
    "Channels",
    "Choice",
    "ExactMass",
    "FirstOrder",
    "Gaussian",
    "GroupMoments",
    "GroupSums",
    "ImportanceSample",
    "Mean",
    "Method",
    "Moments",
    "Pages",
    "PagesByMean",
    "PerGroup",
    "Phi",
    "PhiDirection",
    "QuantisedScan",
    "QuantisedValues",
    "Reranked",
    "Residual",
    "Rotated",
    "ScanRegression",
    "Seen",
    "Selector",
    "Step",
    "TopK",
    "UniformSample",
    "WholeClusters",
    "method_named",
    "names",
    "state_bytes",
]


@dataclass(frozen=True)
class Method:
    """What is read exactly, and what is added for the rest.

    Attributes:
        name: name in configuration and result files.
        selector: None reads every prefix token (the unmodified backbone).
        residual: None adds nothing.

    Raises:
        ValueError: a selector or residual is no frozen dataclass, or lacks a member that decoding uses; the residual
            does not fit the selector.
    """

    name: str
    selector: Selector | None = TopK()
    residual: Phi | Residual | None = None

    def __post_init__(self) -> None:
        if self.selector is not None:
            _require("selector", self.selector, ("recipe", "prepare", "update", "select"))
        if self.own is not None:
            _require("residual", self.own, ("recipe", "needs_maps", "prepare", "update", "terms"))
        if self.selector is None and self.residual is not None:
            raise ValueError(f"method {self.name!r} reads the whole prompt, which leaves nothing for a residual")
        if hasattr(self.selector, "replaces_cache") and not isinstance(self.residual, QuantisedValues):
            raise ValueError(f"method {self.name!r} keeps no values: CacheOnly goes with QuantisedValues")
        if hasattr(self.residual, "fitted"):
            object.__setattr__(self, "residual", self.residual.fitted(self.selector))

    @property
    def whole_prefix(self) -> bool:
        return self.selector is None

    @property
    def needs_maps(self) -> bool:
        return self.residual is not None and self.residual.needs_maps

    @property
    def phi(self) -> Phi | None:
        """The paper's residual, which the decode paths compute together with the exact terms."""
        return self.residual if isinstance(self.residual, Phi) else None

    @property
    def subtracts(self) -> bool:
        """Whether the retrieved tokens are subtracted from the summaries of feature maps."""
        return self.phi is not None and self.phi.subtracts

    @property
    def own(self) -> Residual | None:
        """A residual that computes terms of its own."""
        return None if self.residual is None or isinstance(self.residual, Phi) else self.residual

    @property
    def fused(self) -> bool:
        """Whether `core.fused` has a fast decode step for it."""
        selects = self.selector == TopK() or (isinstance(self.selector, QuantisedScan) and self.selector.bits == 4)
        return self.of_the_paper or (selects and (self.residual is None or getattr(self.own, "fused", False)))

    @property
    def of_the_paper(self) -> bool:
        return self.selector in (None, TopK()) and self.own is None

    @property
    def identity(self) -> dict[str, Any]:
        """What tells its numbers from those of another method, for the keys of stored rows. Of the paper's methods the
        name alone, for rows were stored before there were others.
        """
        parts = {"selector": None if self.selector == TopK() else self.selector, "residual": self.own}
        return {"method": self.name} | {part: _identity(one) for part, one in parts.items() if one is not None}


def _require(role: str, part: Any, members: tuple[str, ...]) -> None:
    if isinstance(part, type) or not is_dataclass(part) or not part.__dataclass_params__.frozen:
        raise ValueError(f"{role} {part!r} is no instance of a frozen dataclass (see docs/extending.md)")
    missing = [member for member in members if not hasattr(part, member)]
    if missing:
        raise ValueError(f"{role} {type(part).__name__} lacks {', '.join(missing)} (see docs/extending.md)")


def _identity(part: Any) -> dict[str, Any]:
    """Class, recipe and parameters of a selector or residual, also of one that it is made of."""
    named = {"name": type(part).__name__, "recipe": part.recipe}
    values = {field.name: getattr(part, field.name) for field in fields(part)}
    return named | {name: _identity(value) if is_dataclass(value) else value for name, value in values.items()}


def names() -> tuple[str, ...]:
    """Names of all known methods, in the order of result files."""
    return tuple(method.name for method in METHODS)


def method_named(name: str | Method) -> Method:
    """Looks up a method by its name, and returns a `Method` as it is; raises ValueError with the most similar names."""
    if isinstance(name, Method):
        return name
    found = next((method for method in METHODS if method.name == name), None)
    if found is None:
        similar = get_close_matches(str(name), names(), n=3, cutoff=0)
        raise ValueError(f"method {name!r} is unknown; the most similar are {', '.join(similar)}")
    return found


METHODS = (
    Method("full", selector=None),
    Method("topk"),
    Method("topk_phi", residual=Phi()),
    Method("topk_phi_nosub", residual=Phi(subtracts=False)),
    Method("topk_moments", residual=Moments()),
    Method("topk_moments_8", residual=Moments(8)),
    Method("topk_moments_shared", residual=Moments(64, shared=True)),
    Method("topk_centroids", residual=Centroids(64)),
    Method("topk_mean", residual=Mean()),
    Method("topk_importance", residual=ImportanceSample(32)),
    Method("topk_exact_mass", residual=ExactMass()),
    Method("scan4", QuantisedScan(4)),
    Method("scan4_moments", QuantisedScan(4), Moments()),
    Method("scan4_regression_64", QuantisedScan(4), ScanRegression(64)),
    Method("scan3_regression_32", QuantisedScan(3, 128), ScanRegression(32)),
    Method("group4_regression_64", PerGroup(QuantisedScan(4)), ScanRegression(64)),
    Method("channels_regression_64", Channels(16), ScanRegression(64)),
    Method("pages", Pages()),
    Method("clusters_sums", WholeClusters(), GroupSums()),
    Method("cache4", CacheOnly(QuantisedScan(4)), QuantisedValues(4)),
    Method("cache4_rotated", CacheOnly(Rotated(QuantisedScan(4))), QuantisedValues(4)),
)
"""All known methods, in the order of result files."""
