"""Truncated moments of a mid-region in one part, in as few operations as a step allows.

At batch 1 the vectors are short, and an operation of torch costs more to start than to compute. So everything that a
query is multiplied with stands in one matrix, made once, and there are no dimensions of parts. The formulas are those
of `core.moments`.

Shape letters: B = batch rows, Hkv = KV heads, G = query heads of a KV head, D = head dimension.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from residual_mass.core.moments import FARTHEST, LEAST_VARIANCE, WHOLE, MomentState


class OnePart(NamedTuple):
    """Moments of one part, arranged for `one_part_terms`."""

    linear: Tensor
    """[B, Hkv, D, 2 D + 1] float32, the columns Sigma, C' and mu."""
    mean_value: Tensor
    """[B, Hkv, 1, D]."""
    log_half_count: Tensor
    """[B, Hkv, 1, 1], log (n / 2); -inf without tokens."""


class OnePartTerms(NamedTuple):
    """Terms Z and nu / Z of a part's unread tokens."""

    log_mass: Tensor
    """[B, Hkv, G, 1]."""
    mean_value: Tensor
    """[B, Hkv, G, D]."""

    def values(self, weights: Tensor, moments: MomentState) -> Tensor:
        """Same as `core.moments.PartTerms.values`, which needs the moments."""
        return weights * self.mean_value


def one_part(moments: MomentState) -> OnePart | None:
    """Arranges moments [B, Hkv, 1, ...]; returns None if there are several parts."""
    if moments.count.shape[-1] > 1:
        return None
    rows = (moments.key_covariance.squeeze(-3), moments.value_key_covariance.squeeze(-3), moments.mean_key)
    linear = torch.cat(rows, dim=-2).transpose(-1, -2).contiguous()
    return OnePart(linear, moments.mean_value, (0.5 * moments.count).log().unsqueeze(-1))


def one_part_terms(queries: Tensor, part: OnePart, threshold: Tensor) -> OnePartTerms:
    """Same as `core.moments.truncated_parts`, for queries [B, Hkv, G, D] and thresholds [B, Hkv, G]."""
    d = queries.shape[-1]
    products = queries @ part.linear
    along, slope, mean = products[..., :d], products[..., d : 2 * d], products[..., 2 * d :]
    deviation = (along * queries).sum(-1, keepdim=True).clamp_min_(LEAST_VARIANCE).sqrt_()
    distance = (threshold.unsqueeze(-1) - mean).div_(deviation)
    distance = torch.minimum(distance, deviation + WHOLE).clamp_min_(-FARTHEST)
    tail = torch.special.erfcx((deviation - distance).mul_(math.sqrt(0.5)))
    log_mass = torch.addcmul(mean, distance, torch.sub(deviation, distance, alpha=0.5))
    log_mass.add_(tail.log()).add_(part.log_half_count)
    cut_off = tail.mul_(deviation)
    return OnePartTerms(log_mass, torch.addcdiv(part.mean_value + slope, slope, cut_off, value=-math.sqrt(2 / math.pi)))
