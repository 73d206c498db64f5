"""The paper's training objectives, written as in its appendix on the training objective.

Every term is a mean over query rows, computed from teacher scores s and student scores s_hat = log <phi_q, phi_k> over
the visible keys; the top-band and far-region terms average within each row first. Training uses `score_matching`, which
gives the same numbers without a matrix of all scores.

Shape letters: R = query rows, L = keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MASKED = -1e9
"""Score of an invisible key; finite, so that the difference of two masked scores is not NaN."""


class Weights(NamedTuple):
    """Factors of L_KL, L_top, L_fp and L_Z, and their constants."""

    kl: float
    top: float
    fp: float
    z: float
    tau: float
    band: float
    huber_delta: float


class Shifted(NamedTuple):
    """Scores relative to the teacher's row maximum b: r = s - b and r_hat = s_hat - b; MASKED where not visible."""

    teacher: Tensor
    """[..., R, L]."""
    student: Tensor
    """[..., R, L]."""
    visible: Tensor
    """[..., R, L] bool."""


def shifted(scores: Tensor, student: Tensor, visible: Tensor) -> Shifted:
    """Shifts scores and student [..., R, L]; visible: broadcastable bool with at least one key in every row."""
    visible = visible.expand(scores.shape)
    b = scores.masked_fill(~visible, MASKED).amax(-1, keepdim=True)
    return Shifted((scores - b).masked_fill(~visible, MASKED), (student - b).masked_fill(~visible, MASKED), visible)


def kl_term(x: Shifted, tau: float) -> Tensor:
    """L_KL = tau^2 KL(softmax(r / tau) || softmax(r_hat / tau)), mean over rows."""
    log_p = (x.teacher / tau).masked_fill(~x.visible, -torch.inf).log_softmax(-1)
    log_p_hat = (x.student / tau).masked_fill(~x.visible, -torch.inf).log_softmax(-1)
    gap = torch.where(x.visible, log_p - log_p_hat, 0)
    return tau**2 * (log_p.exp() * gap).sum(-1).mean()


def top_term(x: Shifted, band: float, delta: float) -> Tensor:
    """L_top: Huber of r_hat - r over the keys within `band` of the teacher's maximum."""
    inside = x.visible & (x.teacher >= -band)
    return _row_mean(huber(x.student - x.teacher, delta), inside)


def false_positive_term(x: Shifted, band: float, delta: float) -> Tensor:
    """L_fp: Huber of max(r_hat + band, 0) over the keys further than `band` below the teacher's maximum."""
    outside = x.visible & (x.teacher < -band)
    return _row_mean(huber((x.student + band).clamp_min(0), delta), outside)


def partition_term(x: Shifted, delta: float) -> Tensor:
    """L_Z: one-sided Huber of the student's overestimated log-partition function."""
    excess = x.student.logsumexp(-1) - x.teacher.logsumexp(-1)
    return huber(excess.clamp_min(0), delta).mean()


def aux_term(x: Shifted, lambda_top: float, lambda_fp: float, lambda_z: float, band: float, delta: float) -> Tensor:
    """L_aux = lambda_top L_top + lambda_fp L_fp + lambda_Z L_Z."""
    return (
        lambda_top * top_term(x, band, delta)
        + lambda_fp * false_positive_term(x, band, delta)
        + lambda_z * partition_term(x, delta)
    )


def huber(x: Tensor, delta: float) -> Tensor:
    """rho_delta: x^2 / 2 up to |x| = delta, then linear with slope delta."""
    slope = x.clamp(-delta, delta)
    return slope * torch.sub(x, slope, alpha=0.5)


def _row_mean(values: Tensor, where: Tensor) -> Tensor:
    """Averages over `where` within each row, then over all rows; an empty row contributes 0."""
    count = where.sum(-1).clamp_min(1)
    return (torch.where(where, values, 0).sum(-1) / count).mean()
