"""Post-selection rules: what an arm does with the prefix mass outside its exact support.

ESTIMATORS is the only list of method names; configuration, generation and result files look them up here. The module
does not import torch, which the workflow and the tables do without.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from residual_mass.core.residuals import Centroids, ExactMass, FirstOrder, Gaussian, Mean, Truncated

if TYPE_CHECKING:
    from torch import Tensor


class Seen(NamedTuple):
    """What selection leaves to a residual that needs no feature maps."""

    queries: Tensor
    """[..., R, D], scaled."""
    threshold: Tensor
    """[..., R], the least score that was read; the largest of all where none was."""
    unread: Tensor
    """[..., R, L] bool, mid-region tokens that were not read; a row may be empty."""
    scores: Tensor
    """[..., R, L], of all tokens; a residual that uses those of unread tokens is an oracle."""
    values: Tensor
    """[..., L, D]."""


class Residual(Protocol):
    """Estimates the terms of the unread tokens without feature maps. A frozen dataclass with its own parameters."""

    def prepare(self, keys: Tensor, values: Tensor, mid: Tensor) -> tuple[Tensor, ...]:
        """Summarises a prompt once per layer: keys, values [..., L, D] and the mid-region [..., L] bool to a tuple of
        tensors, whose leading dimensions are those of the keys.
        """

    def terms(self, seen: Seen, state: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Returns numerator [..., R, D], denominator [..., R] and finite shift [..., R], as in `accounting.Terms`. A
        row with denominator 0 adds nothing; what is returned for a row without unread tokens is ignored.
        """


@dataclass(frozen=True)
class Estimator:
    """A residual estimator: flags of the shared decode path, or a function of its own.

    Attributes:
        name: name in configuration and result files.
        whole_prefix: reads every prefix token exactly (the unmodified backbone).
        adds_residual: adds the summaries' estimate of the unretrieved mass; needs feature maps.
        subtracts: first subtracts the retrieved tokens from the summaries.
        residual: estimates the unretrieved mass without feature maps.
    """

    name: str
    whole_prefix: bool = False
    adds_residual: bool = False
    subtracts: bool = False
    residual: Residual | None = None


FULL = Estimator("full", whole_prefix=True)
TOPK = Estimator("topk")
TOPK_PHI = Estimator("topk_phi", adds_residual=True, subtracts=True)
TOPK_PHI_NOSUB = Estimator("topk_phi_nosub", adds_residual=True)
WITHOUT_MAPS = (
    Estimator("topk_moments", residual=Truncated()),
    Estimator("topk_moments_4b", residual=Truncated(4, "blocks")),
    Estimator("topk_moments_8", residual=Truncated(8, "clusters")),
    Estimator("topk_centroids", residual=Centroids(64)),
    Estimator("topk_first_order", residual=FirstOrder()),
    Estimator("topk_gaussian", residual=Gaussian()),
    Estimator("topk_mean", residual=Mean()),
    Estimator("topk_exact_mass", residual=ExactMass()),
)
"""Nothing to train: any model and any length at once."""
ESTIMATORS = (FULL, TOPK, TOPK_PHI, TOPK_PHI_NOSUB, *WITHOUT_MAPS)
"""All known estimators, in the order of result files."""
NAMES = tuple(estimator.name for estimator in ESTIMATORS)


def estimator_named(name: str) -> Estimator:
    """Looks up an estimator; raises ValueError listing the known names."""
    if name not in NAMES:
        raise ValueError(f"method {name!r} is unknown; known are {', '.join(NAMES)}")
    return ESTIMATORS[NAMES.index(name)]
