"""Quantities that the paper measures on attention rows.

Shape letters: R = query rows, L = keys, D = value dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from residual_mass.core.accounting import Terms

REL_L1_EPS = 1e-12


def rel_l1(estimate: Tensor, full: Tensor) -> Tensor:
    """||estimate - full||_1 / (||full||_1 + 1e-12) over the last dimension: [..., D] -> [...]."""
    return (estimate - full).abs().sum(-1) / (full.abs().sum(-1) + REL_L1_EPS)


def subset_bias(exact: Terms, residual: Terms) -> Tensor:
    """y_full - y_TopK from its decomposition: Z_R / (Z_E + Z_R) * (y_R - y_TopK) (the paper's eq. 5). [..., R, D].

    Both sets must be non-empty in every row.
    """
    share = residual_share(exact, residual).unsqueeze(-1)
    inside = exact.numerator / exact.denominator.unsqueeze(-1)
    outside = residual.numerator / residual.denominator.unsqueeze(-1)
    return share * (outside - inside)


def residual_share(exact: Terms, residual: Terms) -> Tensor:
    """Z_R / (Z_E + Z_R): [..., R], in [0, 1]."""
    return torch.sigmoid(residual.log_mass() - exact.log_mass())


def mid_entropy(scores: Tensor, mid: Tensor) -> Tensor:
    """H_mid: entropy of teacher attention restricted to the mid-region over log |M| (the paper's eq. in its entropy analysis).

    scores [..., R, L], mid [..., 1 or R, L] bool -> [..., R] in [0, 1]; NaN where |M| < 2, for which it is not defined.
    """
    log_p = scores.masked_fill(~mid, -torch.inf).log_softmax(-1)
    entropy = -torch.where(log_p > -torch.inf, log_p.exp() * log_p, 0).sum(-1)
    count = mid.sum(-1).to(scores.dtype)
    return torch.where(count >= 2, entropy / count.log(), torch.nan)


def mass_recovery(scores: Tensor, mid: Tensor, retrieved: Tensor) -> Tensor:
    """C_mid(K): share of the mid-region's softmax mass that the retrieved tokens hold. [..., R] in [0, 1]."""
    p = scores.masked_fill(~mid, -torch.inf).softmax(-1)
    return torch.where(retrieved, p, 0).sum(-1)
