"""The paper's mathematics on tensors. Depends only on torch: no files, no models, no configuration.

Shape letters used throughout (leading dimensions `...` are free, for instance prefix and KV head):
    R = query rows that read the same keys   L = keys of the prefix   T = generated keys
    D = head dimension   M = features (d_phi)   H = heads stacked in one map   N = vectors mapped at once
"""

from residual_mass.core.accounting import (
    Estimate,
    Retrieved,
    SummaryState,
    Terms,
    attention_scores,
    exact_terms,
    key_features,
    merge,
    one_gather_terms,
    residual_terms,
    summarise,
)
from residual_mass.core.feature_maps import FoldedMap, HedgehogMap, ReZeroMap
from residual_mass.core.measures import mass_curve, mass_recovery, mid_entropy, rel_l1, residual_share
from residual_mass.core.selection import Partition, Selected, exhaustive_topk, members, partition, retrieved_count

__all__ = [
    "Estimate", "FoldedMap", "HedgehogMap", "Partition", "ReZeroMap", "Retrieved", "Selected", "SummaryState", "Terms",
    "attention_scores", "exact_terms", "exhaustive_topk", "key_features", "mass_curve", "mass_recovery", "members",
    "merge", "mid_entropy", "one_gather_terms", "partition", "rel_l1", "residual_share", "residual_terms",
    "retrieved_count", "summarise",
]  # fmt: skip
