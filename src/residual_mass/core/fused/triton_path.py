"""One decode step's attention in Triton kernels: same result as `torch_path`, without leaving the GPU.

1. `score` reads every key once, for all query heads that share it, and counts the scores' leading bits in a histogram.
   `scan` does the same with packed keys.
2. `refine` (twice) and `select` are a radix selection over all 32 bits of the scores. Each digit is one launch, because
   a histogram must be complete before it is read, and no program may wait for another. The passes do not depend on the
   scores, so no distribution of scores is slow or inexact.
3. `gather` sums values and key features of the exact support in shares, after a scan with its exact scores. `moments`
   computes more shares from the moments of the rest. `merge` adds them up with the residual of feature maps and divides
   once.

Nothing is read back to the host, and all shapes and grids depend only on the buffers and k, so CUDA graphs can capture
a step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from residual_mass.core.accounting import CLAMP_RELATIVE
from residual_mass.core.fused import triton_kernels as kernels
from residual_mass.core.fused import triton_scan
from residual_mass.core.fused.cache import DecodeCache
from residual_mass.core.fused.packed import PackedKeys
from residual_mass.core.moments import LEAST_VARIANCE, WHOLE, MomentState

SCORE_BLOCK = 128
"""Keys per program, 16 KiB in bfloat16 at D = 64: small enough for several programs per SM."""
SELECT_BLOCK = 4096
"""Scores per program, at least as many as the bins that it first sums up."""
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
    generated: int,
    scale: float,
) -> Tensor:
    """Same as `torch_path.decode_attention`; D at least 16 or, with a scan, 32; D, M and S powers of two; the cache
    bfloat16 or float32.
    """
    cache = cache._replace(first=cache.first.contiguous(), last=cache.last.contiguous())
    large = (x for x in (*cache, *(cache.moments or ()), *(cache.scan or ())) if isinstance(x, Tensor))
    assert all(x.is_contiguous() for x in large), "no copies of large buffers"
    query, log_query = query.contiguous(), None if log_query is None else log_query.contiguous()
    region = Region(min(k, cache.length), sink, tail)
    if cache.scan is None:
        scores, counts = score(query, cache, region, generated, scale)
    else:
        scores, counts = scan(query, cache, cache.scan, region, scale)
    selection = select(scores, counts, cache, region)
    return _merge(query, cache, log_query, region, scores, selection, generated, subtracts, scale)


class Region(NamedTuple):
    """Number of tokens that every query head retrieves, and anchors around the mid-region."""

    k: int
    sink: int
    tail: int


class Selection(NamedTuple):
    """Retrieved tokens by blocks of columns: the first `tally[n, 0, p]` of `chosen[n, p]`, then, in order of p, as many
    as are still missing of the next `tally[n, 1, p]`, which tie with the k-th highest.
    """

    chosen: Tensor
    """[B * Hq, P, SELECT_BLOCK] int32, columns."""
    tally: Tensor
    """[B * Hq, 2, P] int32."""
    least: Tensor
    """[B * Hq] float32, the least score among them, or the highest of all where k is 0."""


def score(query: Tensor, cache: DecodeCache, region: Region, generated: int, scale: float) -> tuple[Tensor, Tensor]:
    """Returns scores [B * Hq, >= L + T] float32 of real tokens, and histograms [B * Hq, bins] of the first digit."""
    batch, kv_heads, columns, d = cache.keys.shape
    heads = query.shape[1]
    blocks = triton.cdiv(columns, SCORE_BLOCK)
    # Rows start at multiples of the block, which aligns the scores for wide stores.
    scores = query.new_empty(batch * heads, blocks * SCORE_BLOCK, dtype=torch.float32)
    counts = _histograms(query)
    kernels.score_kernel[blocks, batch * kv_heads](
        query,
        cache.keys,
        cache.first,
        cache.last,
        scores,
        counts,
        scale,
        cache.length,
        columns,
        scores.stride(0),
        generated,
        region.sink,
        region.tail,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        D=d,
        DOT_TYPE=_dot_type(query, cache.keys),
        BLOCK=SCORE_BLOCK,
    )
    return scores, counts


def scan(query: Tensor, cache: DecodeCache, keys: PackedKeys, region: Region, scale: float) -> tuple[Tensor, Tensor]:
    """Returns scores [B * Hq, N S] float32 of the mid-region's packed keys, and histograms as `score` does."""
    (batch, heads, d), (kv_heads, blocks, _, block) = query.shape, keys.codes.shape[1:]
    scores = query.new_empty(batch * heads, blocks * block, dtype=torch.float32)
    counts = _histograms(query)
    dot_type = _dot_type(query, query)
    triton_scan.scan_kernel[blocks, batch * kv_heads](
        query,
        *keys,
        cache.first,
        cache.last,
        scores,
        counts,
        scale,
        scores.stride(0),
        region.sink,
        region.tail,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        D=d,
        DOT_TYPE=dot_type,
        IN_TWO=dot_type == tl.bfloat16,
        BLOCK=block,
    )
    return scores, counts


def _histograms(query: Tensor) -> Tensor:
    bins = kernels.FIRST_BINS.value + 2 * kernels.NEXT_BINS.value
    return torch.zeros(query.shape[0] * query.shape[1], bins, dtype=torch.int32, device=query.device)


def select(scores: Tensor, counts: Tensor, cache: DecodeCache, region: Region) -> Selection:
    """Selects the k highest scores of every query head's mid-region; completes `counts`."""
    rows, device = len(scores), scores.device
    blocks = triton.cdiv(cache.length, SELECT_BLOCK)
    chosen = torch.empty(rows, blocks, SELECT_BLOCK, dtype=torch.int32, device=device)
    tally = torch.empty(rows, 2, blocks, dtype=torch.int32, device=device)
    least = torch.empty(rows, dtype=torch.float32, device=device)
    spans, sizes = (cache.first, cache.last), (scores.stride(0), *region)
    settings = {"HEADS": rows // len(cache.first), "BLOCK": SELECT_BLOCK, "num_warps": 8}
    for level in (1, 2):
        kernels.refine_kernel[blocks, rows](scores, *spans, counts, *sizes, LEVEL=level, **settings)
    kernels.select_kernel[blocks, rows](scores, *spans, counts, chosen, tally, least, *sizes, **settings)
    return Selection(chosen, tally, least)


def _merge(
    query: Tensor,
    cache: DecodeCache,
    log_query: Tensor | None,
    region: Region,
    scores: Tensor,
    selection: Selection,
    generated: int,
    subtracts: bool,
    scale: float,
) -> Tensor:
    (batch, heads, d), columns = query.shape, cache.keys.shape[2]
    rows, group, blocks = batch * heads, heads // cache.keys.shape[1], selection.tally.shape[2]
    subtracts = subtracts and log_query is not None
    m = 1 if log_query is None else log_query.shape[-1]
    pieces = triton.cdiv(sum(region) + columns - cache.length, SLOTS)
    rounds = triton.cdiv(pieces, MOST_SPLITS)
    splits = triton.cdiv(pieces, rounds)
    shares = splits + _programs(cache.moments)
    sums = torch.empty(2, rows, shares, d + 1, dtype=torch.float32, device=query.device)
    shifts = torch.empty(rows, shares, dtype=torch.float32, device=query.device)
    out = torch.empty(batch, heads, d, dtype=torch.float32, device=query.device)
    kernels.gather_kernel[splits, rows](
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
        selection.tally,
        sums,
        shifts,
        shares,
        scale,
        cache.length,
        columns,
        scores.stride(0),
        region.k,
        generated,
        rounds,
        blocks,
        region.sink,
        region.tail,
        HEADS=heads,
        GROUP=group,
        D=d,
        M=m,
        SCANNED=cache.scan is not None,
        SUBTRACTS=subtracts,
        SELECT_BLOCK=SELECT_BLOCK,
        MAX_BLOCKS=triton.next_power_of_2(blocks),
        SLOTS=SLOTS,
    )
    if cache.moments is not None:
        _add_moments(query, cache, cache.moments, region, selection.least, (sums, shifts), splits, scale)
    kernels.merge_kernel[(rows,)](
        sums,
        shifts,
        cache.summary,
        log_query,
        cache.log_shift,
        out,
        shares,
        CLAMP_RELATIVE,
        GROUP=group,
        D=d,
        M=m,
        RESIDUAL=log_query is not None,
        SUBTRACTS=subtracts,
        MAX_SHARES=triton.next_power_of_2(shares),
        num_warps=8,
    )
    return out


def _add_moments(
    query: Tensor,
    cache: DecodeCache,
    moments: MomentState,
    region: Region,
    least: Tensor,
    terms: tuple[Tensor, Tensor],
    splits: int,
    scale: float,
) -> None:
    """Writes the shares after the first `splits` of every query head."""
    (batch, heads, d), shares, parts = query.shape, terms[1].shape[1], moments.count.shape[2]
    kernels.moments_kernel[shares - splits, batch * heads](
        query,
        least,
        *moments,
        cache.first,
        cache.last,
        *terms,
        shares,
        splits,
        parts,
        _at_once(moments),
        scale,
        region.k,
        LEAST_VARIANCE,
        WHOLE,
        region.sink,
        region.tail,
        HEADS=heads,
        GROUP=heads // moments.count.shape[1],
        D=d,
        SHARED=moments.shared,
        num_warps=8,
    )


def _programs(moments: MomentState | None) -> int:
    """Programs of a query head that the parts are shared among."""
    return 0 if moments is None else triton.cdiv(moments.count.shape[2], _at_once(moments))


def _at_once(moments: MomentState) -> int:
    """Parts that one program computes."""
    return SHARED_PARTS if moments.shared else 1


def _dot_type(query: Tensor, keys: Tensor) -> tl.dtype:
    """Returns bfloat16, whose products are exact in float32, except in Triton's interpreter: it silently multiplies
    bfloat16 bits as integers.
    """
    compiled = isinstance(kernels.score_kernel, triton.JITFunction)
    return tl.bfloat16 if compiled and query.dtype == keys.dtype == torch.bfloat16 else tl.float32
