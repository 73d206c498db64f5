"""Post-selection rules: what an arm does with the prefix mass outside its exact support.

ESTIMATORS is where methods are known by name; configuration, generation and result files all ask here. Nothing is
imported, for the workflow and the tables do without torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Unread(NamedTuple):
    """The mid-region tokens that each row did not retrieve."""

    mask: Tensor
    """[..., R, L] bool; a row may have none."""
    scores: Tensor
    """[..., R, L] attention scores, of the other tokens too."""
    values: Tensor
    """[..., L, D]."""


Residual = Callable[[Unread], "tuple[Tensor, Tensor, Tensor]"]
"""Numerator [..., R, D], denominator [..., R] and finite shift [..., R], as in `accounting.Terms`; a row with
denominator 0 gets nothing added.
"""


@dataclass(frozen=True)
class Estimator:
    """A residual estimator as the flags that one decode path serves, or with a function of its own.

    Attributes:
        name: as in configuration and result files.
        whole_prefix: every prefix token is exact (the unmodified backbone).
        adds_residual: the summaries' estimate of the unretrieved mass is added, so feature maps are needed.
        subtracts: the retrieved tokens' share is taken out of the summaries first.
        residual: makes an estimate that needs no feature maps.
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
ESTIMATORS = (FULL, TOPK, TOPK_PHI, TOPK_PHI_NOSUB)
"""All that are known, in the order of result files."""
NAMES = tuple(estimator.name for estimator in ESTIMATORS)


def estimator_named(name: str) -> Estimator:
    """Raises ValueError for an unknown name, listing the known ones."""
    if name not in NAMES:
        raise ValueError(f"method {name!r} is unknown; known are {', '.join(NAMES)}")
    return ESTIMATORS[NAMES.index(name)]
