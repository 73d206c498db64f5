"""The paper's mathematics on tensors. Depends only on torch: no files, no models, no configuration.

Shape letters used throughout (leading dimensions `...` are free, for instance prefix and KV head):
    R = query rows that read the same keys   L = keys of the prefix   T = generated keys
    D = head dimension   M = features (d_phi)   H = heads stacked in one map   N = vectors mapped at once
"""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {
    "accounting": (
        "Estimate", "Retrieved", "SummaryState", "Terms", "attention_scores", "exact_terms", "key_features",
        "merge", "one_gather_terms", "residual_terms", "summarise",
    ),
    "feature_maps": ("FoldedMap", "HedgehogMap", "ReZeroMap"),
    "measures": ("mass_curve", "mass_recovery", "mid_entropy", "rel_l1", "residual_share"),
    "selection": ("Partition", "Selected", "exhaustive_topk", "members", "partition", "retrieved_count"),
}  # fmt: skip
__all__ = sorted(name for names in _NAMES.values() for name in names)


def __getattr__(name: str) -> Any:
    """Imports lazily, so that methods can be named without torch."""
    for home, names in _NAMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
