"""Static buffers of one layer that a decode step reads, filled once after the prefill.

Shape letters: B = batch rows, Hkv = KV heads, R = query rows of a KV head, L = prefix columns, T = room for generated
tokens, D = head dimension, M = features, P = parts of the mid-region, N = blocks of S columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from residual_mass.core.accounting import key_features, summarise
from residual_mass.core.moments import MomentState

ADDS_RESIDUAL = 1
SUBTRACTS_RETRIEVED = 2
ADDS_MOMENTS = 4
"""Flags of a query row: adds the residual of feature maps, subtracts retrieved tokens from it, adds that of moments."""


class MethodRows(NamedTuple):
    """Settings of R query rows of a KV head that belong to several methods and budgets."""

    k: Tensor
    """[B, R] int32, tokens to retrieve."""
    kinds: Tensor
    """[R] int32, sums of ADDS_RESIDUAL, SUBTRACTS_RETRIEVED and ADDS_MOMENTS."""
    most: int
    """The largest of k, known on the host without synchronisation."""


class OnePart(NamedTuple):
    """Moments of one part, with all factors of a query in one matrix: at batch 1, to start an operation of torch takes
    longer than to compute it.
    """

    linear: Tensor
    """[B, Hkv, D, 2 D + 1] float32, the columns Sigma, C' and mu."""
    mean_value: Tensor
    """[B, Hkv, 1, D]."""
    log_half_count: Tensor
    """[B, Hkv, 1, 1], log (n / 2); -inf without tokens."""


class PackedKeys(NamedTuple):
    """Keys of 4 bits, two per byte. A code c from 0 to 15 in block b represents the value low_b + step_b c.

    Byte j holds the codes of channels j (low bits) and j + D / 2 (high bits), so that one mask and one shift give the
    two halves of the channels without interleaving. The tokens of a channel in a block are adjacent, so that a block is
    the right operand of a matrix product.
    """

    codes: Tensor
    """[B, Hkv, N, D / 2, S] uint8; the last block is padded with zeros."""
    low: Tensor
    """[B, Hkv, N, D] bfloat16, the value of code 0."""
    step: Tensor
    """[B, Hkv, N, D] bfloat16, the difference between the values of adjacent codes."""


class DecodeCache(NamedTuple):
    """Keys and values of prefix and generated tokens, and the state that estimates the unread tokens of the mid-region.

    The state is a summary with the features that it sums (`features`, `summary` and `log_shift`), or moments, or empty
    (TopK). The tokens to read are chosen by the scores of `scan` or, if it is None, by those of the keys.
    """

    keys: Tensor
    """[B, Hkv, L + T, D] in the cache's dtype: the prefix, then the generated tokens."""
    values: Tensor
    """[B, Hkv, L + T, D]."""
    first: Tensor
    """[B] int32, the first real column of the prefix, after left padding."""
    last: Tensor
    """[B] int32, one past the last real column of the prefix, before right padding."""
    length: int
    """L."""
    features: Tensor | None = None
    """[B, Hkv, L, M] in the cache's dtype: exp(log phi_k - log_shift), in [0, 1], zero outside the mid-region."""
    summary: Tensor | None = None
    """[B, Hkv, M, D + 1] float32: S, with u as last column, both summed from exactly the rounded features."""
    log_shift: Tensor | None = None
    """[B, Hkv, M] float32."""
    moments: MomentState | None = None
    """Moments of the mid-region in P parts, [B, Hkv, P or 1, ...] float32."""
    one_part: OnePart | None = None
    """The same moments arranged for one part; None if there are several."""
    scan: PackedKeys | None = None
    """Packed keys of the prefix; only scores of the mid-region are used."""


def build_cache(keys: Tensor, values: Tensor, first: Tensor, last: Tensor, room: int) -> DecodeCache:
    """Copies a prefix [B, Hkv, L, D] into buffers with `room` more columns, for TopK. The tokens of the prefix are at
    columns [first, last), both [B].
    """
    batch, heads, length, width = keys.shape
    key_buffer = keys.new_zeros(batch, heads, length + room, width)
    value_buffer = torch.zeros_like(key_buffer)
    key_buffer[:, :, :length] = keys
    value_buffer[:, :, :length] = values
    return DecodeCache(key_buffer, value_buffer, first.to(torch.int32), last.to(torch.int32), length)


def with_summary(cache: DecodeCache, log_features: Tensor, sink: int, tail: int) -> DecodeCache:
    """Adds rounded key features and their exact summary to the cache.

    Args:
        log_features: [B, Hkv, L, M] log phi_k of every column.
        sink, tail: numbers of anchors, which the summary excludes.
    """
    mid = mid_mask(cache, sink, tail)
    features, log_shift = key_features(log_features.float(), mid.unsqueeze(1))
    rounded = features.to(cache.keys.dtype).contiguous()  # a map's output may be transposed; a step reads rows
    values = _only(mid.unsqueeze(1), cache.values)
    # Sums of the features as rounded, because those of retrieved tokens are subtracted as rounded.
    state = summarise(rounded.float(), log_shift, values)
    mass = state.mass.unsqueeze(-1)
    summary = torch.cat((state.numerator, mass), dim=-1).contiguous()
    return cache._replace(features=rounded, summary=summary, log_shift=log_shift.contiguous())


def with_moments(
    cache: DecodeCache, prepare: Callable[[Tensor, Tensor, Tensor], MomentState], sink: int, tail: int
) -> DecodeCache:
    """Adds the moments that `prepare` computes from keys and values [B, Hkv, L, D] float32, zero outside the
    mid-region, and from the mid-region [B, 1, L] bool.
    """
    mid = mid_mask(cache, sink, tail).unsqueeze(1)
    keys = _only(mid, cache.keys)
    values = _only(mid, cache.values)
    prepared = prepare(keys, values, mid)
    moments = MomentState(*(x.contiguous() for x in prepared))
    return cache._replace(moments=moments, one_part=one_part(moments))


def with_scan(
    cache: DecodeCache,
    prepare: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]],
    block: int,
    sink: int,
    tail: int,
) -> DecodeCache:
    """Adds packed keys. `prepare` returns codes below 16 [B, Hkv, L, D], with `low` and `step` of every block of
    columns, for keys [B, Hkv, L, D] float32 and the mid-region [B, 1, L] bool.
    """
    mid = mid_mask(cache, sink, tail).unsqueeze(1)
    codes, low, step = prepare(_only(mid, cache.keys), mid)
    return cache._replace(scan=packed(codes, low, step, block))


def one_part(moments: MomentState) -> OnePart | None:
    """Arranges moments [B, Hkv, 1, ...]; returns None if there are several parts."""
    if moments.count.shape[-1] > 1:
        return None
    sigma = moments.key_covariance.squeeze(-3)
    cross = moments.value_key_covariance.squeeze(-3)
    factors = torch.cat((sigma, cross, moments.mean_key), dim=-2)  # [B, Hkv, 2 D + 1, D]
    linear = factors.transpose(-1, -2).contiguous()  # a query is multiplied by columns
    # The half is that of Phi(a) = e^(-a^2 / 2) erfcx(-a / sqrt(2)) / 2.
    log_half_count = (0.5 * moments.count).log().unsqueeze(-1)
    return OnePart(linear, moments.mean_value, log_half_count)


def packed(codes: Tensor, low: Tensor, step: Tensor, block: int) -> PackedKeys:
    """Packs codes [B, Hkv, L, D] uint8 below 16 in blocks of `block` columns."""
    missing = -codes.shape[-2] % block
    filled = F.pad(codes, (0, 0, 0, missing))
    blocks = filled.unflatten(-2, (-1, block))
    # The tokens of a channel become adjacent, then two channels share a byte.
    first, second = blocks.transpose(-1, -2).chunk(2, dim=-2)
    pairs = (first | second << 4).contiguous()
    return PackedKeys(pairs, low.contiguous(), step.contiguous())


def unpacked(codes: Tensor) -> Tensor:
    """Unpacks the codes of blocks: [..., D / 2, S] -> [..., D, S] uint8."""
    return torch.cat((codes & 15, codes >> 4), dim=-2)


def _only(mid: Tensor, x: Tensor) -> Tensor:
    """Returns the prefix of a buffer as float32, zero outside the mid-region [B, 1, L]: padding may hold NaN, and zero
    times NaN is NaN.
    """
    prefix = x[:, :, : mid.shape[-1]].float()
    return torch.where(mid.unsqueeze(-1), prefix, 0)


def mid_mask(cache: DecodeCache, sink: int, tail: int) -> Tensor:
    """Returns the real columns without the first `sink` and last `tail`: [B, L] bool."""
    column = torch.arange(cache.length, device=cache.first.device)
    begin = cache.first.unsqueeze(1) + sink
    end = cache.last.unsqueeze(1) - tail
    return (column >= begin) & (column < end)
