"""The paper's objective, row by row and term by term as its appendix on the training objective writes it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import huber_loss

from residual_mass.core.feature_maps import log_kernel
from residual_mass.core.score_matching import Weights


def written_objective(scores: Tensor, student: Tensor, weights: Weights) -> Tensor:
    """From the scores of teacher and student over the L keys that the row sees, both [L]."""
    r, r_hat = scores - scores.max(), student - scores.max()
    log_p, log_p_hat = ((x / weights.tau).log_softmax(-1) for x in (r, r_hat))
    kl = weights.tau**2 * (log_p.exp() * (log_p - log_p_hat)).sum()
    near = r >= -weights.band
    top = _huber(r_hat - r, weights)[near].mean()
    beyond = _huber((r_hat + weights.band).clamp_min(0), weights)[~near]
    false_positive = beyond.sum() / max(len(beyond), 1)
    z = _huber((r_hat.logsumexp(-1) - r.logsumexp(-1)).clamp_min(0), weights)
    return weights.kl * kl + weights.top * top + weights.fp * false_positive + weights.z * z


def _huber(x: Tensor, weights: Weights) -> Tensor:
    return huber_loss(x, x.new_zeros(x.shape), reduction="none", delta=weights.huber_delta)


def written_losses(
    log_query: Tensor, log_key: Tensor, queries: Tensor, keys: Tensor, scale: float, last: Tensor, weights: Weights
) -> Tensor:
    """[H, R], row by row: each sees the keys up to its own of `last`."""
    scores, student = queries @ keys.transpose(-1, -2) * scale, log_kernel(log_query, log_key)
    rows = [
        [
            written_objective(scores[head, row, : end + 1], student[head, row, : end + 1], weights)
            for row, end in enumerate(last.tolist())
        ]
        for head in range(len(scores))
    ]
    return torch.stack([torch.stack(of_head) for of_head in rows])
