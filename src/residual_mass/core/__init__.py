"""The paper's mathematics on tensors. Depends only on torch: no files, no models, no configuration.

Shape letters used throughout (leading dimensions `...` are free, for instance prefix and KV head):
    R = query rows that read the same keys   L = keys of the prefix   T = generated keys
    D = head dimension   M = features (d_phi)   H = heads stacked in one map   N = vectors mapped at once
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from residual_mass.core.accounting import (
        Estimate,
        Retrieved,
        SummaryState,
        Terms,
        attention_scores,
        exact_terms,
        gather_retrieved,
        key_features,
        merge,
        one_gather_terms,
        residual_terms,
        summarise,
    )
    from residual_mass.core.feature_maps import FoldedMap, HedgehogMap, ReZeroMap
    from residual_mass.core.measures import (
        mass_curve,
        mass_recovery,
        mid_entropy,
        rel_l1,
        residual_share,
        row_measures,
        subset_bias,
    )
    from residual_mass.core.selection import Selected, exhaustive_topk, members
    from residual_mass.core.support import Partition, partition, retrieved_count

__all__ = [
    "Estimate",
    "FoldedMap",
    "HedgehogMap",
    "Partition",
    "ReZeroMap",
    "Retrieved",
    "Selected",
    "SummaryState",
    "Terms",
    "attention_scores",
    "exact_terms",
    "exhaustive_topk",
    "gather_retrieved",
    "key_features",
    "mass_curve",
    "mass_recovery",
    "members",
    "merge",
    "mid_entropy",
    "one_gather_terms",
    "partition",
    "rel_l1",
    "residual_share",
    "residual_terms",
    "retrieved_count",
    "row_measures",
    "subset_bias",
    "summarise",
]


def __getattr__(name: str) -> Any:
    """Imports lazily, so that `core.settings` loads without torch."""
    if name in __all__:
        for home in ("accounting", "feature_maps", "measures", "selection", "support"):
            module = importlib.import_module(f"{__name__}.{home}")
            if getattr(getattr(module, name, None), "__module__", None) == module.__name__:
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
