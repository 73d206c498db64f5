"""Training objectives of the feature maps (the paper's appendix on the training objective).

Every term is a mean over query rows of something computed from teacher scores s and student scores s_hat = log <phi_q,
phi_k> over the keys a row may see; inside the top-band and far-region terms the mean is taken within a row first.

Shape letters: R = query rows, L = keys, D = value dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from residual_mass.core.selection import Selected, exhaustive_topk

MASKED = -1e9
"""Stands for a key that a row may not see; finite, so that differences of two masked scores are not NaN."""


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
    """scores, student: [..., R, L]; visible: broadcastable bool with at least one key in every row."""
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


class _WeightedTerms(torch.autograd.Function):
    """lambda_KL L_KL + lambda_top L_top + lambda_fp L_fp + lambda_Z L_Z with its gradient in closed form.

    A third of the passes over [..., R, L] that autograd through the terms above makes, and nothing of that size is
    saved.
    """

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, student: Tensor, scores: Tensor, visible: Tensor, weights: Weights
    ) -> Tensor:
        hidden = ~visible
        teacher = scores.masked_fill(hidden, MASKED)
        b = teacher.amax(-1, keepdim=True)
        r, r_hat = teacher.sub_(b), student.sub(b).masked_fill_(hidden, MASKED)
        rows = r[..., 0].numel()
        tau, delta = weights.tau, weights.huber_delta

        warm, warm_hat = r / tau, r_hat / tau
        p = warm.softmax(-1)
        loss = weights.kl * tau**2 * (p * (warm.log_softmax(-1) - warm_hat.log_softmax(-1))).sum()
        gradient = warm_hat.softmax(-1).sub_(p).mul_(weights.kl * tau)

        band = r >= -weights.band
        in_band = band.sum(-1, keepdim=True).to(r.dtype)
        beyond = (visible.sum(-1, keepdim=True) - in_band).clamp_min(1)
        # Hidden keys count as far ones at r_hat = MASKED, where the false-positive term and its gradient vanish.
        error = torch.where(band, r_hat - r, (r_hat + weights.band).clamp_min_(0))
        weight = torch.where(band, weights.top / in_band, weights.fp / beyond)
        slope = error.clamp(-delta, delta)
        loss += (weight * slope * (error - 0.5 * slope)).sum()
        gradient.add_(slope.mul_(weight))

        excess = (_log_sum_exp(r_hat) - _log_sum_exp(r)).clamp_min(0)
        slope = excess.clamp_max(delta)
        loss += weights.z * (slope * (excess - 0.5 * slope)).sum()
        gradient.add_(r_hat.softmax(-1).mul_(weights.z * slope))
        ctx.save_for_backward(gradient.div_(rows))
        return loss / rows

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: D102
        (gradient,) = ctx.saved_tensors
        return gradient * upstream, None, None, None


def _log_sum_exp(x: Tensor) -> Tensor:
    """[..., L] -> [..., 1]. On CPUs exp of what underflows takes thirty times as long, except inside log_softmax."""
    return x.amax(-1, keepdim=True) - x.log_softmax(-1).amax(-1, keepdim=True)


def weighted_terms(scores: Tensor, student: Tensor, visible: Tensor, weights: Weights) -> Tensor:
    """Weighted sum of L_KL, L_top, L_fp and L_Z, differentiable (once) in `student`; arguments as for `shifted`."""
    return _WeightedTerms.apply(student, scores, visible.expand(scores.shape), weights)


def lolcats_term(x: Shifted, values: Tensor) -> Tensor:
    """L_lolcats: mean squared error between feature-map attention and exact attention over the visible keys.

    values: [..., L, D].
    """
    exact = x.teacher.masked_fill(~x.visible, -torch.inf).softmax(-1) @ values
    student = x.student.masked_fill(~x.visible, -torch.inf).softmax(-1) @ values
    return (student - exact).square().mean()


def residual_term(
    scores: Tensor, student: Tensor, values: Tensor, visible: Tensor, mid: Tensor, ks: Sequence[Tensor], weight_z: float
) -> Tensor:
    """Ours, not the paper's: what subtractive completion gets wrong, averaged over several supports.

    For every K the anchors and the K best-scoring mid-region keys count exactly and all other visible keys by the
    student's kernel, under one normalisation; a row's loss is the relative l1 error of that output against full
    attention, plus `weight_z` times the Huber of log Z_R hat - log Z_R.

    Args:
        scores, student: [..., R, L]; values: [..., L, D].
        visible, mid: [..., R, L] bool; what is visible and not mid counts as anchor.
        ks: K of each row, [..., R] or [R] integer, one tensor per support. A row whose K leaves no residual
            contributes 0 for that support.
    """
    visible = visible.expand(scores.shape)
    b = scores.masked_fill(~visible, MASKED).amax(-1, keepdim=True)
    exact = _weights(scores - b, visible)
    estimated = _weights((student - b).clamp_max(MOST), visible)
    target = exact @ values / exact.sum(-1, keepdim=True)
    size = target.abs().sum(-1)
    most = torch.stack([k.max() for k in ks]).max().expand(scores.shape[:-1])
    ranked = exhaustive_topk(scores, mid, most).indices
    losses = []
    for k in ks:
        first = torch.arange(ranked.shape[-1], device=scores.device) < k.unsqueeze(-1)
        left = mid & ~Selected(ranked, first.expand(ranked.shape)).mask(scores.shape[-1])
        weights = torch.where(left, estimated, exact)
        output = weights @ values / weights.sum(-1, keepdim=True)
        error = (output - target).abs().sum(-1) / size
        gap = _log_mass(estimated, left) - _log_mass(exact, left)
        losses.append(torch.where(left.any(-1), error + weight_z * huber(gap, 1.0), 0).mean())
    return torch.stack(losses).mean()


MOST, LEAST = 40.0, -80.0
"""Scores are held to this range around the teacher's maximum: float32 has the exponentials of both ends, and what
underflows takes CPUs thirty times as long.
"""


def _weights(relative: Tensor, visible: Tensor) -> Tensor:
    return torch.where(visible, relative.clamp_min(LEAST).exp(), 0)


def _log_mass(weights: Tensor, where: Tensor) -> Tensor:
    """log of the weights' sum over `where`; 0 where there is nothing, so that gradients stay finite."""
    mass = (weights * where).sum(-1)
    return torch.where(where.any(-1), mass, 1).log()


def huber(x: Tensor, delta: float) -> Tensor:
    """rho_delta: x^2 / 2 up to |x| = delta, then linear with slope delta."""
    size = x.abs()
    return torch.where(size <= delta, 0.5 * size.square(), delta * (size - 0.5 * delta))


def _row_mean(values: Tensor, where: Tensor) -> Tensor:
    """Mean within each row over `where`, then over all rows; a row with nothing in it contributes 0."""
    count = where.sum(-1).clamp_min(1)
    return (torch.where(where, values, 0).sum(-1) / count).mean()
