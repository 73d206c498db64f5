"""One decode step's attention in torch: one gather of values for anchors, retrieved and generated tokens together.

By linearity nu_R hat = S phi_q - sum_{i in K} z_i v_i with z_i = <phi_q, phi_k(k_i)>, so no S_R is formed. The keys of
retrieved tokens are not read again, because their scores are known. A part of the mid-region with moments is one more
token, with score log Z and value nu / Z. After a scan of packed keys, only the keys of the exact support are read.

Shape letters: B = batch rows, Hq / Hkv = query / KV heads, G = Hq / Hkv, L = prefix columns, C = filled columns, X =
|A| + K + generated tokens, P = parts of the mid-region, D = head dimension, M = features.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from residual_mass.core.accounting import CLAMP_RELATIVE
from residual_mass.core.moments import FARTHEST, LARGEST_CUT, LEAST_VARIANCE, MomentState, PartTerms, truncated_parts
from residual_mass.core.selection import largest, products_at, weighted_sum
from residual_mass.gpu.cache import DecodeCache, OnePart, PackedKeys, mid_mask, unpacked

ROWS = 4
"""Query rows are padded to a multiple of this: on CPUs a matrix product of four rows is faster than one of three."""


class FixedColumns(NamedTuple):
    """Columns that every query reads, the same in all layers of a step."""

    always: Tensor
    """[B, 1, 1, sink + tail + generated] columns of anchors and generated tokens."""
    valid: Tensor
    """Same shape, bool: False where the row has no such token."""
    left_out: Tensor
    """[B, 1, 1, L] bool, True outside the mid-region."""
    others: Tensor
    """[B, 1, 1] int32, number of mid-region tokens; negative in a row shorter than its anchors."""


def fixed_columns(cache: DecodeCache, sink: int, tail: int, generated: int) -> FixedColumns:
    """Returns the columns that all queries of a step read, with `generated` tokens (1 or more) in the cache."""
    columns, valid = _anchors_and_generated(cache, sink, tail, generated)
    others = (cache.last - cache.first - sink - tail)[:, None, None]
    left_out = ~mid_mask(cache, sink, tail)[:, None, None]
    return FixedColumns(columns[:, None, None], valid[:, None, None], left_out, others)


def decode_attention(
    query: Tensor,
    cache: DecodeCache,
    log_query: Tensor | None,
    *,
    k: int,
    sink: int,
    tail: int,
    subtracts: bool,
    generated: int,
    scale: float,
    fixed: FixedColumns | None = None,
) -> Tensor:
    """Computes the attention of one new token per row under a partial-KV method: [B, Hq, D] float32.

    Args:
        query: [B, Hq, D]; its own key and value are among the generated ones.
        cache: with moments, the residual is theirs (TopK+moments); with a scan, it chooses the tokens to retrieve.
        log_query: [B, Hq, M] float32 log phi_q; None adds no residual of feature maps.
        k: mid-region tokens that every query head retrieves; more than |M| retrieves all of it.
        sink, tail: numbers of anchors that the cache was built with.
        subtracts: whether to subtract the retrieved tokens from the summary (TopK+phi) or not (NoSub).
        generated: filled columns after the prefix, at least 1.
        fixed: result of `fixed_columns` for the same sizes, to share it between layers.
    """
    heads = (cache.keys.shape[1], -1)
    grouped = query.float().unflatten(1, heads) * scale  # [B, Hkv, G, D]
    if fixed is None:
        fixed = fixed_columns(cache, sink, tail, generated)
    if cache.scan is None:
        filled = cache.length + generated
        scores = grouped @ cache.keys[:, :, :filled].float().transpose(-1, -2)  # [B, Hkv, G, C]
    else:
        scores = scanned_scores(grouped, cache.scan)
    candidates = scores[..., : cache.length].masked_fill(fixed.left_out, -torch.inf)
    chosen, top = largest(candidates, k)
    retrieved = top > -torch.inf

    always = fixed.always.expand(*scores.shape[:3], -1)
    # Invalid columns have weight zero but may hold NaN: read a real column in their place.
    valid = torch.cat((fixed.valid.expand_as(always), retrieved), dim=-1)
    support = torch.cat((always, chosen), dim=-1)  # [B, Hkv, G, X]
    support = torch.where(valid, support, cache.last.long().view(-1, 1, 1, 1) - 1)
    if cache.scan is None:
        exact = torch.cat((scores.gather(-1, always), top), dim=-1)
    else:
        exact = products_at(grouped, cache.keys, support)
    exact = exact.masked_fill(~valid, -torch.inf)
    tokens = support.shape[-1]
    residual: _Residual | None = None
    parts: PartTerms | OnePartTerms | None = None
    if cache.moments is not None:
        threshold = _threshold(candidates, top, fixed.others > k)
        if cache.one_part is None:
            parts = truncated_parts(grouped, cache.moments, threshold)
        else:
            parts = one_part_terms(grouped, cache.one_part, threshold)
    logits = exact if parts is None else torch.cat((exact, parts.log_mass), dim=-1)
    shift = logits.amax(-1, keepdim=True)
    if log_query is not None:
        subtracted = (chosen, retrieved) if subtracts else None
        residual = _residual(cache, log_query.unflatten(1, heads), subtracted, shift)
        shift = residual.shift
    share = (logits - shift).exp()
    denominator = share.sum(-1)
    if residual is not None:
        denominator = denominator + residual.mass
        if residual.z is not None:
            share[..., always.shape[-1] :] -= residual.z
    numerator = weighted_sum(share[..., :tokens], support, cache.values)
    if parts is not None:
        numerator = numerator + parts.values(share[..., tokens:], cache.moments)
    if residual is not None:
        numerator = numerator + residual.numerator
    return (numerator / denominator.unsqueeze(-1)).flatten(1, 2)


class _Residual(NamedTuple):
    """In units of exp(shift): S phi_q [B, Hkv, G, D], z of the retrieved tokens [B, Hkv, G, K] if they are subtracted,
    Z_R hat [B, Hkv, G].
    """

    numerator: Tensor
    z: Tensor | None
    mass: Tensor
    shift: Tensor
    """[B, Hkv, G, 1]."""


def _residual(
    cache: DecodeCache, log_query: Tensor, subtracted: tuple[Tensor, Tensor] | None, shift: Tensor
) -> _Residual:
    """Computes the residual terms; zero with an unchanged shift where the subtraction leaves only rounding errors.

    Args:
        subtracted: columns [B, Hkv, G, K], and a mask of those that hold a token.
    """
    assert cache.features is not None and cache.summary is not None and cache.log_shift is not None
    log_weights = log_query + cache.log_shift.unsqueeze(2)
    own_shift = log_weights.amax(-1, keepdim=True)
    query = (log_weights - own_shift).exp()
    whole = query @ cache.summary
    mass, z = whole[..., -1:], None
    if subtracted is not None:
        columns, valid = subtracted
        z = torch.where(valid, products_at(query, cache.features, columns), 0)
        mass = mass - z.sum(-1, keepdim=True)
    kept = ~(mass <= CLAMP_RELATIVE * whole[..., -1:])  # negated, so that NaN is kept and not dropped silently
    shift = torch.where(kept, torch.maximum(shift, own_shift), shift)
    unit = torch.where(kept, (own_shift - shift).exp(), 0)
    return _Residual(unit * whole[..., :-1], None if z is None else unit * z, (unit * mass).squeeze(-1), shift)


def _threshold(candidates: Tensor, top: Tensor, unread: Tensor) -> Tensor:
    """Returns the lowest chosen score [B, Hkv, G], the highest candidate if none is chosen; -inf where not `unread`."""
    least = top.amin(-1) if top.shape[-1] else candidates.amax(-1)
    return torch.where(unread, least, -torch.inf)


def _anchors_and_generated(cache: DecodeCache, sink: int, tail: int, generated: int) -> tuple[Tensor, Tensor]:
    """Returns the columns that every head reads, [B, sink + tail + generated], and a mask of those that exist."""
    device, first, last = cache.first.device, cache.first.unsqueeze(1).long(), cache.last.unsqueeze(1).long()
    sinks = first + torch.arange(sink, device=device)
    tails = last - tail + torch.arange(tail, device=device)
    new = cache.length + torch.arange(generated, device=device).expand(len(first), -1)
    columns = torch.cat((sinks, tails, new), dim=1)
    # In a short row the two ends overlap: sinks end at its last token, tails start after the sinks.
    valid = torch.cat((sinks < last, tails >= first + sink, new >= 0), dim=1)
    return columns.masked_fill(~valid, 0), valid


def scanned_scores(queries: Tensor, keys: PackedKeys) -> Tensor:
    """Computes scores of queries [B, Hkv, G, D] float32 with all packed keys, without restoring these keys:
    [B, Hkv, G, N S].

    q.k_hat = q.low_b + sum_d (q_d step_bd) c_d: the step is folded into the query once per block.
    """
    group = queries.shape[-2]
    rows = F.pad(queries, (0, 0, 0, -group % ROWS))
    folded = rows.unsqueeze(-3) * keys.step.unsqueeze(-2)  # [B, Hkv, N, G, D]
    scores = (folded @ unpacked(keys.codes).float())[..., :group, :]
    return (scores.transpose(-2, -3) + (queries @ keys.low.float().transpose(-1, -2)).unsqueeze(-1)).flatten(-2)


class OnePartTerms(NamedTuple):
    """Terms Z and nu / Z of a part's unread tokens."""

    log_mass: Tensor
    """[B, Hkv, G, 1]."""
    mean_value: Tensor
    """[B, Hkv, G, D]."""

    def values(self, weights: Tensor, moments: MomentState) -> Tensor:
        """Same as `core.moments.PartTerms.values`, which needs the moments."""
        return weights * self.mean_value


def one_part_terms(queries: Tensor, part: OnePart, threshold: Tensor) -> OnePartTerms:
    """Same as `core.moments.truncated_parts`, for queries [B, Hkv, G, D] and thresholds [B, Hkv, G]."""
    d = queries.shape[-1]
    products = queries @ part.linear
    along, slope, mean = products[..., :d], products[..., d : 2 * d], products[..., 2 * d :]
    deviation = (along * queries).sum(-1, keepdim=True).clamp_min_(LEAST_VARIANCE).sqrt_()
    distance = (threshold.unsqueeze(-1) - mean).div_(deviation)
    distance = torch.minimum(distance, deviation + LARGEST_CUT).clamp_min_(-FARTHEST)
    tail = torch.special.erfcx((deviation - distance).mul_(math.sqrt(0.5)))
    log_mass = torch.addcmul(mean, distance, torch.sub(deviation, distance, alpha=0.5))
    log_mass.add_(tail.log()).add_(part.log_half_count)
    cut_off = tail.mul_(deviation)
    return OnePartTerms(log_mass, torch.addcdiv(part.mean_value + slope, slope, cut_off, value=-math.sqrt(2 / math.pi)))
