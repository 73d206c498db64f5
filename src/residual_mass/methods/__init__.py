"""Methods: which prefix tokens a query reads exactly (a selector), and what stands for the rest (a residual).

METHODS is the only list of method names; configuration, generation and result files look them up here. The package
does not import torch before it computes, for the workflow and the tables do without.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from residual_mass.methods.centroids import Centroids
from residual_mass.methods.exact_mass import ExactMass
from residual_mass.methods.first_order import FirstOrder
from residual_mass.methods.gaussian import Gaussian
from residual_mass.methods.interface import Choice, Residual, Seen, Selector, state_bytes
from residual_mass.methods.mean import Mean
from residual_mass.methods.moments import Moments
from residual_mass.methods.pages import Pages
from residual_mass.methods.phi import Phi, PhiDirection
from residual_mass.methods.quantised_scan import QuantisedScan
from residual_mass.methods.sample import ImportanceSample, UniformSample
from residual_mass.methods.topk import TopK

__all__ = [
    "METHODS",
    "Centroids",
    "Choice",
    "ExactMass",
    "FirstOrder",
    "Gaussian",
    "ImportanceSample",
    "Mean",
    "Method",
    "Moments",
    "Pages",
    "Phi",
    "PhiDirection",
    "QuantisedScan",
    "Residual",
    "Seen",
    "Selector",
    "TopK",
    "UniformSample",
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
    """

    name: str
    selector: Selector | None = TopK()
    residual: Phi | Residual | None = None

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
        return {"method": self.name} | {
            part: {"name": type(one).__name__, "recipe": one.recipe, **asdict(one)}  # type: ignore[call-overload]
            for part, one in parts.items()
            if one is not None
        }


def names() -> tuple[str, ...]:
    """Names of all known methods, in the order of result files."""
    return tuple(method.name for method in METHODS)


def method_named(name: str) -> Method:
    """Looks up a method; raises ValueError listing the known names."""
    found = next((method for method in METHODS if method.name == name), None)
    if found is None:
        raise ValueError(f"method {name!r} is unknown; known are {', '.join(names())}")
    return found


METHODS = (
    Method("full", selector=None),
    Method("topk"),
    Method("topk_phi", residual=Phi()),
    Method("topk_phi_nosub", residual=Phi(subtracts=False)),
    Method("topk_phi_moments", residual=PhiDirection()),
    Method("topk_moments", residual=Moments()),
    Method("topk_moments_4b", residual=Moments(4, "blocks")),
    Method("topk_moments_8", residual=Moments(8)),
    Method("topk_moments_shared", residual=Moments(64, shared=True)),
    Method("topk_moments_rest", residual=Moments(takes_out=True)),
    Method("topk_moments_bf16", residual=Moments(dtype="bfloat16")),
    Method("topk_centroids", residual=Centroids(64)),
    Method("topk_first_order", residual=FirstOrder()),
    Method("topk_gaussian", residual=Gaussian()),
    Method("topk_mean", residual=Mean()),
    Method("topk_sample", residual=UniformSample(32)),
    Method("topk_importance", residual=ImportanceSample(32)),
    Method("topk_exact_mass", residual=ExactMass()),
    Method("scan4", QuantisedScan(4)),
    Method("scan4_moments", QuantisedScan(4), Moments()),
    Method("scan4_moments_shared", QuantisedScan(4), Moments(64, shared=True)),
    Method("scan2_moments", QuantisedScan(2), Moments()),
    Method("pages", Pages()),
    Method("pages_centroids", Pages(), Centroids(64)),
    Method("pages_importance", Pages(), ImportanceSample(32)),
)
"""All known methods, in the order of result files."""
