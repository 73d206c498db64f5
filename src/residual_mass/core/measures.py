"""Measures of attention rows from the paper.

Shape letters: R = query rows, L = keys, D = value dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from residual_mass.core.accounting import Terms

REL_L1_EPS = 1e-12


def rel_l1(estimate: Tensor, full: Tensor) -> Tensor:
    """Returns ||estimate - full||_1 / (||full||_1 + 1e-12) over the last dimension: [..., D] -> [...]."""
    error = (estimate - full).abs().sum(-1)
    return error / (full.abs().sum(-1) + REL_L1_EPS)


def residual_share(exact: Terms, residual: Terms) -> Tensor:
    """Returns Z_R / (Z_E + Z_R): [..., R] in [0, 1]."""
    # From logarithms: the masses themselves may overflow, and their shifts differ.
    return torch.sigmoid(residual.log_mass() - exact.log_mass())


def mid_entropy(scores: Tensor, mid: Tensor) -> Tensor:
    """Returns H_mid, the entropy of teacher attention within the mid-region divided by log |M| (the paper's entropy
    analysis).

    scores [..., R, L], mid [..., 1 or R, L] bool -> [..., R] in [0, 1]; NaN where |M| < 2, which leaves it undefined.
    """
    log_p = scores.masked_fill(~mid, -torch.inf).log_softmax(-1)
    summands = log_p.exp() * log_p
    summands = torch.where(log_p > -torch.inf, summands, 0)  # p log p is 0 at p = 0, not NaN
    entropy = -summands.sum(-1)
    count = mid.sum(-1).to(scores.dtype)
    return torch.where(count >= 2, entropy / count.log(), torch.nan)


def score_shape(scores: Tensor, mid: Tensor) -> tuple[Tensor, Tensor]:
    """Returns skewness and excess kurtosis of the mid-region's scores; both are 0 for a Gaussian.

    scores [..., R, L], mid [..., 1 or R, L] bool -> [..., R] twice; NaN where all scores are equal or M is empty.
    """
    count = mid.sum(-1)
    mean = torch.where(mid, scores, 0).sum(-1) / count
    centred = scores - mean.unsqueeze(-1)
    centred = torch.where(mid, centred, 0)
    second = centred.pow(2).sum(-1) / count
    third = centred.pow(3).sum(-1) / count
    fourth = centred.pow(4).sum(-1) / count
    skewness = third / second.pow(1.5)
    excess_kurtosis = fourth / second.square() - 3
    return skewness, excess_kurtosis


def mass_recovery(scores: Tensor, mid: Tensor, retrieved: Tensor) -> Tensor:
    """Returns C_mid(K), the retrieved tokens' share of the mid-region's softmax mass: [..., R] in [0, 1]."""
    p = scores.masked_fill(~mid, -torch.inf).softmax(-1)
    return torch.where(retrieved, p, 0).sum(-1)


def mass_curve(scores: Tensor, mid: Tensor, ks: Sequence[int]) -> Tensor:
    """Returns C_mid(K) of every row for several K in [1, |M|]: [..., R, len(ks)] float64.

    scores [..., R, L], mid [..., 1 or R, L] bool.
    """
    p = scores.masked_fill(~mid, -torch.inf).softmax(-1)
    descending = p.sort(-1, descending=True).values
    recovered = descending.cumsum(-1, dtype=torch.float64)  # the last of many p would be lost in float32
    return recovered[..., torch.tensor(ks, device=scores.device) - 1]
