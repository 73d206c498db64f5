"""Measures of attention rows from the paper.

Shape letters: R = query rows, L = keys, D = value dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from residual_mass.core.accounting import (
    Retrieved,
    SummaryState,
    Terms,
    exact_terms,
    gather_retrieved,
    merge,
    residual_terms,
)
from residual_mass.core.selection import Partition, Selected, exhaustive_topk

REL_L1_EPS = 1e-12


def rel_l1(estimate: Tensor, full: Tensor) -> Tensor:
    """Returns ||estimate - full||_1 / (||full||_1 + 1e-12) over the last dimension: [..., D] -> [...]."""
    return (estimate - full).abs().sum(-1) / (full.abs().sum(-1) + REL_L1_EPS)


def subset_bias(exact: Terms, residual: Terms) -> Tensor:
    """Returns y_full - y_TopK = Z_R / (Z_E + Z_R) * (y_R - y_TopK) (the paper's eq. 5): [..., R, D].

    Both sets must be non-empty in every row.
    """
    share = residual_share(exact, residual).unsqueeze(-1)
    inside = exact.numerator / exact.denominator.unsqueeze(-1)
    outside = residual.numerator / residual.denominator.unsqueeze(-1)
    return share * (outside - inside)


def residual_share(exact: Terms, residual: Terms) -> Tensor:
    """Returns Z_R / (Z_E + Z_R): [..., R] in [0, 1]."""
    return torch.sigmoid(residual.log_mass() - exact.log_mass())


def mid_entropy(scores: Tensor, mid: Tensor) -> Tensor:
    """Returns H_mid, the entropy of teacher attention within the mid-region divided by log |M| (the paper's entropy
    analysis).

    scores [..., R, L], mid [..., 1 or R, L] bool -> [..., R] in [0, 1]; NaN where |M| < 2, which leaves it undefined.
    """
    log_p = scores.masked_fill(~mid, -torch.inf).log_softmax(-1)
    entropy = -torch.where(log_p > -torch.inf, log_p.exp() * log_p, 0).sum(-1)
    count = mid.sum(-1).to(scores.dtype)
    return torch.where(count >= 2, entropy / count.log(), torch.nan)


def score_shape(scores: Tensor, mid: Tensor) -> tuple[Tensor, Tensor]:
    """Returns skewness and excess kurtosis of the mid-region's scores; both are 0 for a Gaussian.

    scores [..., R, L], mid [..., 1 or R, L] bool -> [..., R] twice; NaN where all scores are equal or M is empty.
    """
    count = mid.sum(-1)
    centred = torch.where(mid, scores - (torch.where(mid, scores, 0).sum(-1) / count).unsqueeze(-1), 0)
    second, third, fourth = (centred.pow(power).sum(-1) / count for power in (2, 3, 4))
    return third / second.pow(1.5), fourth / second.square() - 3


def mass_recovery(scores: Tensor, mid: Tensor, retrieved: Tensor) -> Tensor:
    """Returns C_mid(K), the retrieved tokens' share of the mid-region's softmax mass: [..., R] in [0, 1]."""
    p = scores.masked_fill(~mid, -torch.inf).softmax(-1)
    return torch.where(retrieved, p, 0).sum(-1)


def mass_curve(scores: Tensor, mid: Tensor, ks: Sequence[int]) -> Tensor:
    """Returns C_mid(K) of every row for several K in [1, |M|]: [..., R, len(ks)] float64.

    scores [..., R, L], mid [..., 1 or R, L] bool.
    """
    p = scores.masked_fill(~mid, -torch.inf).softmax(-1)
    recovered = p.sort(-1, descending=True).values.cumsum(-1, dtype=torch.float64)
    return recovered[..., torch.tensor(ks, device=scores.device) - 1]


def row_measures(
    scores: Tensor,
    values: Tensor,
    masks: Partition,
    ks: Sequence[int],
    state: SummaryState,
    features: Tensor,
    log_query: Tensor,
) -> dict[str, Tensor]:
    """Computes all measures that the diagnostics report on one prefix; each entry is [..., R, len(ks)].

    e_* are relative l1 errors against full prefix attention: of TopK, of the estimate with (sub) and without (nosub)
    subtraction, and of the two oracles that use the true residual and the true mid-region. log_z_hat and log_z_true are
    the estimated and the true log Z_R (-inf where nothing is left), residual_share* their shares of the total, h_mid
    and c_mid the teacher's entropy and mass recovery; clamped is True where the subtraction left only rounding errors.

    Args:
        scores: [..., R, L].
        values: [..., L, D].
        masks: [..., 1, L].
        state, features, log_query: of phi, the latter two [..., L, M] and [..., R, M].
    """
    everything = (masks.anchors | masks.mid).expand(scores.shape)
    full = merge(exact_terms(scores, values, everything))
    whole_mid = exact_terms(scores, values, masks.mid.expand(scores.shape))
    shared = {"h_mid": mid_entropy(scores, masks.mid)}
    wanted = torch.full(scores.shape[-2:-1], max(ks), device=scores.device)
    most = exhaustive_topk(scores, masks.mid, wanted)
    gathered = gather_retrieved(features, values, most)
    of_k: list[dict[str, Tensor]] = []
    for k in ks:
        # Slots are in descending order of score, so the first k are the top k.
        selected = Selected(most.indices[..., :k], most.valid[..., :k])
        of_selected = Retrieved(gathered.features[..., :k, :], gathered.values[..., :k, :])
        retrieved = selected.mask(scores.shape[-1])
        exact = exact_terms(scores, values, masks.anchors | retrieved)
        rest = exact_terms(scores, values, masks.mid & ~retrieved)
        estimate = residual_terms(state, log_query, of_selected)
        of_k.append(shared | {
            "e_topk": rel_l1(merge(exact), full),
            "e_exact_sub": rel_l1(merge(exact, rest), full),
            "e_exact_nosub": rel_l1(merge(exact, whole_mid), full),
            "log_z_true": rest.log_mass(),
            "residual_share": residual_share(exact, rest),
            "c_mid": mass_recovery(scores, masks.mid, retrieved),
            "e_sub": rel_l1(merge(exact, estimate), full),
            "e_nosub": rel_l1(merge(exact, residual_terms(state, log_query)), full),
            "log_z_hat": estimate.log_mass(),
            "residual_share_hat": residual_share(exact, estimate),
            "clamped": (estimate.denominator == 0) & (rest.denominator > 0),
        })  # fmt: skip
    return {name: torch.stack([rows[name] for rows in of_k], dim=-1) for name in of_k[0]}
