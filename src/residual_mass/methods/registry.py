"""METHODS, the methods that have a name: each a selector of the tokens that are read exactly, and a residual for the
others.
"""

from __future__ import annotations

from residual_mass.methods.clusters import Centroids, GroupSums, ImportanceSample
from residual_mass.methods.interface import Method, Phi
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

TOPK_TITLE = "Top-$K$"
PHI_TITLE = r"Top-$K{+}\phi$"

OF_THE_PAPER = (
    Method("full", "Full", selector=None),
    Method("topk", TOPK_TITLE),
    Method("topk_phi", PHI_TITLE, residual=Phi()),
    Method("topk_phi_nosub", f"{PHI_TITLE} (NoSub)", residual=Phi(subtracts=False)),
)

OF_EXACT_SCORES = (
    Method("topk_moments", f"{TOPK_TITLE}+moments", residual=Moments()),
    Method("topk_moments_8", f"{TOPK_TITLE}+moments, 8 clusters", residual=Moments(8)),
    Method("topk_moments_shared", f"{TOPK_TITLE}+moments, 64 clusters", residual=Moments(64, shared=True)),
    Method("topk_centroids", f"{TOPK_TITLE}+centroids", residual=Centroids(64)),
    Method("topk_mean", f"{TOPK_TITLE}+mean", residual=Mean()),
    Method("topk_importance", f"{TOPK_TITLE}+importance sample", residual=ImportanceSample(32)),
    Method("topk_exact_mass", f"{TOPK_TITLE}+exact mass", residual=ExactMass()),
)
"""They choose as TopK does, and differ in the residual."""

GROUP_SCAN = PerGroup(QuantisedScan(4))
OF_SCANS = (
    Method("scan4", "4-bit scan", QuantisedScan(4)),
    Method("scan4_moments", "4-bit scan+moments", QuantisedScan(4), Moments()),
    Method("scan4_regression_64", "4-bit scan+regression, 64 clusters", QuantisedScan(4), ScanRegression(64)),
    Method("scan3_regression_32", "3-bit scan+regression, 32 clusters", QuantisedScan(3, 128), ScanRegression(32)),
    Method("group4_regression_64", "4-bit scan per group+regression, 64 clusters", GROUP_SCAN, ScanRegression(64)),
    Method("channels_regression_64", "16 channels+regression, 64 clusters", Channels(16), ScanRegression(64)),
)
"""They choose by scores of all keys that cost fewer bytes than exact ones."""

OF_GROUPS = (
    Method("pages", "Pages", Pages()),
    Method("clusters_sums", "Whole clusters+sums", WholeClusters(), GroupSums()),
)
"""They read whole pages or clusters."""

CACHE_8_BITS = CacheOnly(QuantisedScan(8))
CACHE_4_BITS = CacheOnly(Rotated(QuantisedScan(4)))
CACHE_4_BITS_TAIL = CacheOnly(Rotated(QuantisedScan(4)), tail=112)
"""With the 16 tail anchors, the last 128 tokens are exact."""
CACHES = (
    Method("cache8", "8-bit cache", CACHE_8_BITS, QuantisedValues(8)),
    Method("cache4_rotated", "4-bit cache, rotated", CACHE_4_BITS, QuantisedValues(4)),
    Method("cache4_rotated_tail128", "4-bit cache, rotated, last 128 exact", CACHE_4_BITS_TAIL, QuantisedValues(4)),
    Method("cache8_sparse_v_1e-6", "Sparse V, 1e-6", CACHE_8_BITS, QuantisedValues(8, bound=1e-6)),
    Method("cache8_sparse_v_1e-4", "Sparse V, 1e-4", CACHE_8_BITS, QuantisedValues(8, bound=1e-4)),
)
"""They replace keys and values by quantised ones."""

METHODS: tuple[Method, ...] = (*OF_THE_PAPER, *OF_EXACT_SCORES, *OF_SCANS, *OF_GROUPS, *CACHES)
"""All known methods, in the order of result files."""
