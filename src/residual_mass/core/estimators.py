"""Post-selection rules: what an arm does with the prefix mass outside its exact support.

ESTIMATORS is the only list of method names; configuration, generation and result files look them up here. The module
does not import torch, which the workflow and the tables do without.
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
    """[..., R, L] bool; a row may be empty."""
    scores: Tensor
    """[..., R, L] attention scores of all tokens."""
    values: Tensor
    """[..., L, D]."""


Residual = Callable[[Unread], "tuple[Tensor, Tensor, Tensor]"]
"""Returns numerator [..., R, D], denominator [..., R] and finite shift [..., R], as in `accounting.Terms`. A row with
denominator 0 adds nothing.
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
ESTIMATORS = (FULL, TOPK, TOPK_PHI, TOPK_PHI_NOSUB)
"""All known estimators, in the order of result files."""
NAMES = tuple(estimator.name for estimator in ESTIMATORS)


def estimator_named(name: str) -> Estimator:
    """Looks up an estimator; raises ValueError listing the known names."""
    if name not in NAMES:
        raise ValueError(f"method {name!r} is unknown; known are {', '.join(NAMES)}")
    return ESTIMATORS[NAMES.index(name)]
