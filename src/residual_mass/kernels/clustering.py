"""Clusters of a packed cache's tokens, and the moments of their keys and values, by the kernels.

Shape letters: H = KV heads, n = tokens, S = clusters, D = head dimension.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from residual_mass.kernels.library import Library, source_of

CLUSTER_ROUNDS = 6
"""Rounds of Lloyd's algorithm in the kernels."""
CLUSTER_SAMPLE = 2048
"""Tokens that Lloyd's algorithm runs on."""


def clusters_of(
    library: Library, keys: Tensor, values: Tensor, parts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns order [H, n] and bounds [H, S, 2] int32 of clusters, mean values [H, S, D], and C' [H, D, D] and
    variance of values [H, D] within clusters, float32.
    """
    heads, count, width = keys.shape
    new = functools.partial(torch.empty, dtype=torch.float32, device="cpu")
    order = new(heads, count, dtype=torch.int32)
    bounds = new(heads, parts, 2, dtype=torch.int32)
    means = new(heads, parts, width)
    covariance = new(heads, width, width)
    variance = new(heads, width)
    padded_parts = -(-parts // 64) * 64
    # By head, 2 D + 1 numbers for every part and one for every token, as the kernels ask.
    scratch = new(heads, padded_parts * (2 * width + 1) + count)
    threads = torch.get_num_threads()
    source, narrow = source_of(keys, values)
    library.call(
        "clusters", width, threads, heads, count, parts, CLUSTER_SAMPLE, CLUSTER_ROUNDS, source, narrow,
        order, bounds, means, covariance, variance, scratch, scratch.shape[1],
    )  # fmt: skip
    return order, bounds, means, covariance, variance
