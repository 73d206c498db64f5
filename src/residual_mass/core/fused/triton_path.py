"""One decode step's attention in Triton kernels: same result as `torch_path`, without leaving the GPU.

1. `score` reads every key once, for all query heads that share it, and writes the maxima of neighbouring scores beside
   them. `scan` does the same with packed keys.
2. `select` lists the columns of the k highest scores, in one program per query head (`triton_selection`).
3. `gather` sums values and key features of the exact support in shares, after a scan with its exact scores. `moments`
   computes more shares from the moments of the rest. `merge` adds them up with the residual of feature maps and divides
   once.

`triton_maps` computes log phi_q beforehand, in one launch.

Nothing is read back to the host, and all shapes and grids depend only on the buffers and k, so a CUDA graph can capture
a step; it serves all steps where the number of generated tokens is on the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from residual_mass.core.accounting import CLAMP_RELATIVE, Terms
from residual_mass.core.fused import triton_kernels as kernels
from residual_mass.core.fused import triton_scan, triton_selection
from residual_mass.core.fused.cache import DecodeCache, MethodRows
from residual_mass.core.fused.packed import PackedKeys
from residual_mass.core.moments import LEAST_VARIANCE, WHOLE, MomentState

SCORE_BLOCK = 128
"""Keys per program, 16 KiB in bfloat16 at D = 64: small enough for several programs per SM."""
MOST_ROWS = 64
"""Query rows that a program scores; further ones of a KV head have programs of their own."""
SELECT_CHUNK = 4096
"""Keys that a program of `select` holds in registers: all maxima of 64k columns."""
SHARED_PARTS = 8
"""Parts that a program computes where they share a covariance, which it reads once."""
SLOTS = 32
"""Tokens that a program gathers at once: at D = M = 128 their values and features still fit in its registers."""
MOST_SPLITS = 32
"""Most shares of a query head: enough to fill any GPU from 24 heads on, few enough for `merge` to read at once."""


def decode_attention(
    query: Tensor,
    cache: DecodeCache,
    log_query: Tensor | None,
    *,
    k: int,
    sink: int,
    tail: int,
    subtracts: bool,
    generated: int | Tensor,
    scale: float,
) -> Tensor:
    """Same as `torch_path.decode_attention`; D at least 16 or, with a scan, 32; D, M and S powers of two; with a scan
    at most MOST_HEADS query heads of a KV head; the cache bfloat16 or float32. `log_query` may also be terms
    [C, B, Hq, M] of a sum, as `triton_maps` computes them, and `generated` a tensor [1] int32.
    """
    if isinstance(generated, int):
        generated = torch.full((1,), generated, dtype=torch.int32, device=query.device)
    cache = cache._replace(first=cache.first.contiguous(), last=cache.last.contiguous())
    large = (x for x in (*cache, *(cache.moments or ()), *(cache.scan or ())) if isinstance(x, Tensor))
    assert all(x.is_contiguous() for x in large), "no copies of large buffers"
    query = query.contiguous()
    if log_query is not None:
        log_query = log_query.contiguous().view(-1, *query.shape[:2], log_query.shape[-1])
    region = Region(min(k, cache.length), sink, tail)
    if cache.scan is None:
        scores, maxima = score(query, cache, region, generated, scale)
    else:
        scores, maxima = scan(query, cache, cache.scan, region, scale)
    selection = select(scores, maxima, cache, region)
    subtracts = subtracts and log_query is not None
    programs = programs_of(cache.moments)
    shares = gather(query, cache, log_query, region, scores, selection, generated, subtracts, scale, programs=programs)
    if cache.moments is not None:
        add_moments(query, cache, cache.moments, region, selection.least, shares, scale)
    out = torch.empty(query.shape, dtype=torch.float32, device=query.device)
    merge(query, cache, log_query, shares, subtracts, out)
    return out


class Region(NamedTuple):
    """Number of tokens that every query head retrieves, or at most retrieves, and anchors around the mid-region."""

    k: int
    sink: int
    tail: int


class Selection(NamedTuple):
    """Retrieved tokens."""

    chosen: Tensor
    """[B * Hq, K] int32, columns in rising order, as many as a head retrieves and the mid-region has."""
    least: Tensor
    """[B * Hq] float32, the least score among them, or the highest of all where k is 0."""


def score(
    query: Tensor, cache: DecodeCache, region: Region, generated: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Returns scores [B * Hq, >= L + T] float32 of real tokens, and the mid-region's maxima [B * Hq, groups]."""
    batch, kv_heads, columns, d = cache.keys.shape
    heads = query.shape[1]
    blocks, group = triton.cdiv(columns, SCORE_BLOCK), heads // kv_heads
    tile = min(max(triton.next_power_of_2(group), kernels.DOT_ROWS.value), MOST_ROWS)
    # Rows start at multiples of the block, which aligns the scores for wide stores.
    scores = query.new_empty(batch * heads, blocks * SCORE_BLOCK, dtype=torch.float32)
    maxima = _maxima(scores)
    kernels.score_kernel[blocks, batch * kv_heads, triton.cdiv(group, tile)](
        query,
        cache.keys,
        cache.first,
        cache.last,
        scores,
        maxima,
        scale,
        cache.length,
        columns,
        scores.stride(0),
        generated,
        region.sink,
        region.tail,
        KV_HEADS=kv_heads,
        GROUP=group,
        D=d,
        DOT_TYPE=product_type(query, cache.keys),
        ROWS=tile,
        BLOCK=SCORE_BLOCK,
        num_warps=4 if tile == kernels.DOT_ROWS.value else 8,
    )
    return scores, maxima


def scan(query: Tensor, cache: DecodeCache, keys: PackedKeys, region: Region, scale: float) -> tuple[Tensor, Tensor]:
    """Returns scores [B * Hq, N S] float32 of the mid-region's packed keys, and maxima as `score` does."""
    (batch, heads, d), (kv_heads, blocks, _, block) = query.shape, keys.codes.shape[1:]
    scores = query.new_empty(batch * heads, blocks * block, dtype=torch.float32)
    maxima = _maxima(scores)
    kind = product_type(query, query)
    triton_scan.scan_kernel[blocks, batch * kv_heads](
        query,
        *keys,
        cache.first,
        cache.last,
        scores,
        maxima,
        scale,
        scores.stride(0),
        region.sink,
        region.tail,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        D=d,
        DOT_TYPE=kind,
        IN_TWO=kind == tl.bfloat16,
        BLOCK=block,
        num_warps=4 if kind == tl.bfloat16 else 8,  # products of float32 take registers of more threads
    )
    return scores, maxima


def _maxima(scores: Tensor) -> Tensor:
    return scores.new_empty(len(scores), scores.shape[1] // triton_selection.SUB.value, dtype=torch.int32)


def select(
    scores: Tensor, maxima: Tensor, cache: DecodeCache, region: Region, rows: MethodRows | None = None
) -> Selection:
    """Selects the k highest scores of every query head's mid-region."""
    heads = len(scores)
    assert cache.length < 2**triton_selection.COUNT_BITS.value, "three counts fill 64 bits"
    groups = torch.empty_like(maxima)
    columns, keys = torch.empty(2, *scores.shape, dtype=torch.int32, device=scores.device)
    chosen = scores.new_empty(heads, region.k, dtype=torch.int32)
    least = scores.new_empty(heads)
    triton_selection.select_kernel[(heads,)](
        scores,
        maxima,
        cache.first,
        cache.last,
        groups,
        columns,
        keys,
        chosen,
        least,
        scores.stride(0),
        region.k if rows is None else rows.k,
        *region,
        HEADS=heads // len(cache.first),
        GROUP=heads // (len(cache.first) * cache.keys.shape[1]),
        BY_ROW=rows is not None,
        CHUNK=SELECT_CHUNK,
        num_warps=32,
    )
    return Selection(chosen, least)


class Shares(NamedTuple):
    """Sums over parts of what every query head reads and estimates, to be merged."""

    sums: Tensor
    """[2, B * Hq, S, D + 1] float32."""
    shifts: Tensor
    """[B * Hq, S]."""
    of_tokens: int
    """The first ones; the others are of moments."""


def gather(
    query: Tensor,
    cache: DecodeCache,
    log_query: Tensor | None,
    region: Region,
    scores: Tensor,
    selection: Selection,
    generated: Tensor | None,
    subtracts: bool,
    scale: float,
    rows: MethodRows | None = None,
    programs: int = 0,
) -> Shares:
    """Sums the exact support of every query head, leaving room for so many programs of moments."""
    (batch, heads, d), columns = query.shape, cache.keys.shape[2]
    terms, m = _size_of(log_query)
    pieces = max(triton.cdiv(sum(region) + columns - cache.length, SLOTS), 1)
    rounds = triton.cdiv(pieces, MOST_SPLITS)
    splits = triton.cdiv(pieces, rounds)
    shares = splits + programs
    sums = torch.empty(2, batch * heads, shares, d + 1, dtype=torch.float32, device=query.device)
    shifts = torch.empty(batch * heads, shares, dtype=torch.float32, device=query.device)
    kernels.gather_kernel[splits, batch * heads](
        scores,
        query,
        cache.keys,
        cache.values,
        cache.features,
        log_query,
        cache.log_shift,
        cache.first,
        cache.last,
        selection.chosen,
        None if rows is None else rows.kinds,
        sums,
        shifts,
        shares,
        scale,
        cache.length,
        columns,
        scores.stride(0),
        region.k if rows is None else rows.k,
        region.k,
        generated,
        rounds,
        region.sink,
        region.tail,
        HEADS=heads,
        GROUP=heads // cache.keys.shape[1],
        D=d,
        M=m,
        TERMS=terms,
        MAX_TERMS=triton.next_power_of_2(terms),
        SCANNED=cache.scan is not None,
        SUBTRACTS=subtracts,
        BY_ROW=rows is not None,
        SLOTS=SLOTS,
    )
    return Shares(sums, shifts, splits)


def add_moments(
    query: Tensor,
    cache: DecodeCache,
    moments: MomentState,
    region: Region,
    least: Tensor,
    shares: Shares,
    scale: float,
    rows: MethodRows | None = None,
    members: Tensor | None = None,
) -> None:
    """Writes the shares of moments of every query head, or of the `members` [N] of each KV head's."""
    (batch, heads, d), (kv_heads, parts) = query.shape, moments.count.shape[1:]
    count, before = shares.shifts.shape[1], shares.of_tokens
    each = heads // kv_heads if members is None else len(members)
    kernels.moments_kernel[count - before, batch * kv_heads * each](
        query,
        least,
        *moments,
        cache.first,
        cache.last,
        shares.sums,
        shares.shifts,
        count,
        before,
        parts,
        _at_once(moments),
        scale,
        region.k if rows is None else rows.k,
        members,
        each,
        LEAST_VARIANCE,
        WHOLE,
        region.sink,
        region.tail,
        HEADS=heads,
        GROUP=heads // kv_heads,
        D=d,
        SHARED=moments.shared,
        BY_ROW=rows is not None,
        num_warps=8,
    )


def merge(
    query: Tensor,
    cache: DecodeCache,
    log_query: Tensor | None,
    shares: Shares,
    subtracts: bool,
    out: Tensor | Terms,
    rows: MethodRows | None = None,
) -> None:
    """Adds up the shares of every query head to attention [B, Hq, D] or, given `rows`, to terms [B, Hq, ...]."""
    batch, heads, d = query.shape
    terms, m = _size_of(log_query)
    count = shares.shifts.shape[1]
    kernels.merge_kernel[(batch * heads,)](
        shares.sums,
        shares.shifts,
        cache.summary,
        log_query,
        cache.log_shift,
        *(out if isinstance(out, Terms) else (out, None, None)),
        None if rows is None else rows.kinds,
        count,
        shares.of_tokens,
        CLAMP_RELATIVE,
        GROUP=heads // cache.keys.shape[1],
        D=d,
        M=m,
        TERMS=terms,
        MAX_TERMS=triton.next_power_of_2(terms),
        RESIDUAL=log_query is not None,
        SUBTRACTS=subtracts,
        BY_ROW=rows is not None,
        MAX_SHARES=triton.next_power_of_2(count),
        num_warps=8,
    )


def _size_of(log_query: Tensor | None) -> tuple[int, int]:
    """Returns C and M of terms [C, B, Hq, M]."""
    return (1, 1) if log_query is None else (log_query.shape[0], log_query.shape[-1])


def programs_of(moments: MomentState | None) -> int:
    """Programs of a query head that the parts are shared among."""
    return 0 if moments is None else triton.cdiv(moments.count.shape[2], _at_once(moments))


def _at_once(moments: MomentState) -> int:
    """Parts that one program computes."""
    return SHARED_PARTS if moments.shared else 1


def product_type(query: Tensor, others: Tensor) -> tl.dtype:
    """Returns bfloat16, whose products are exact in float32, except in Triton's interpreter: it silently multiplies
    bfloat16 bits as integers.
    """
    compiled = isinstance(kernels.score_kernel, triton.JITFunction)
    return tl.bfloat16 if compiled and query.dtype == others.dtype == torch.bfloat16 else tl.float32
