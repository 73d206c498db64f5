"""Post-selection rules: what an arm does with the prefix mass outside its exact support."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Estimator:
    """A residual estimator as the flags that one decode path serves.

    Attributes:
        name: as in configuration and result files.
        whole_prefix: every prefix token is exact (the unmodified backbone).
        adds_residual: the summaries' estimate of the unretrieved mass is added.
        subtracts: the retrieved tokens' share is taken out of the summaries first.
    """

    name: str
    whole_prefix: bool = False
    adds_residual: bool = False
    subtracts: bool = False


FULL = Estimator("full", whole_prefix=True)
TOPK = Estimator("topk")
TOPK_PHI = Estimator("topk_phi", adds_residual=True, subtracts=True)
TOPK_PHI_NOSUB = Estimator("topk_phi_nosub", adds_residual=True)


def estimator_named(name: str) -> Estimator:
    """Raises ValueError for an unknown name, listing the known ones."""
    known = {e.name: e for e in (FULL, TOPK, TOPK_PHI, TOPK_PHI_NOSUB)}
    if name not in known:
        raise ValueError(f"method {name!r} is unknown; known are {', '.join(known)}")
    return known[name]
