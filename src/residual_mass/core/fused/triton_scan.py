"""Triton kernel that scores packed keys; `packed` explains their layout, `triton_kernels` how rows are numbered.

Shape letters: B = batch rows, Hq / Hkv = query / KV heads, G = Hq / Hkv, N = blocks of columns, S = columns of a block,
D = head dimension.
"""

from __future__ import annotations

import triton
import triton.language as tl

from residual_mass.core.fused.triton_kernels import DOT_ROWS
from residual_mass.core.fused.triton_selection import store_maxima


@triton.jit
def scan_kernel(
    query,  # [B, Hq, D]
    codes,  # [B, Hkv, N, D / 2, S]
    low,  # [B, Hkv, N, D]
    step,  # [B, Hkv, N, D]
    first,  # [B]
    last,  # [B]
    scores,  # out: [B * Hq, stride], written only in the mid-region
    maxima,  # out: [B * Hq, stride / SUB], by `store_maxima`
    scale,
    stride,
    sink,
    tail,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    IN_TWO: tl.constexpr,
    BLOCK: tl.constexpr,  # S
):
    """Scanned scores of the G query heads that share a block of keys, and their maxima."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = block * BLOCK + tl.arange(0, BLOCK)
    begin, end = tl.load(first + row // KV_HEADS) + sink, tl.load(last + row // KV_HEADS) - tail
    mid = (column >= begin) & (column < end)
    HALF: tl.constexpr = D // 2
    half = tl.arange(0, HALF)
    place = row * tl.num_programs(0) + block
    byte = tl.load(codes + (place * HALF + half[:, None]) * BLOCK + tl.arange(0, BLOCK)[None, :])
    member = tl.arange(0, DOT_ROWS)
    ours = member < GROUP
    head = row * GROUP + member
    channel = head[:, None] * D + half[None, :]
    first_q = tl.load(query + channel, mask=ours[:, None], other=0.0).to(tl.float32)
    second_q = tl.load(query + channel + HALF, mask=ours[:, None], other=0.0).to(tl.float32)
    scales = place * D + half
    constant = tl.sum(first_q * tl.load(low + scales).to(tl.float32)[None, :], 1)
    constant += tl.sum(second_q * tl.load(low + scales + HALF).to(tl.float32)[None, :], 1)
    first_q *= tl.load(step + scales).to(tl.float32)[None, :]
    second_q *= tl.load(step + scales + HALF).to(tl.float32)[None, :]
    product = _dot(first_q, (byte & 15).to(DOT_TYPE), DOT_TYPE, IN_TWO)
    product += _dot(second_q, (byte >> 4).to(DOT_TYPE), DOT_TYPE, IN_TWO)
    product = (product + constant[:, None]) * scale
    tl.store(scores + head[:, None] * stride + column[None, :], product, mask=ours[:, None] & mid[None, :])
    store_maxima(maxima, head, block, product, ours, mid, stride, DOT_ROWS, BLOCK)


@triton.jit
def _dot(x, codes, DOT_TYPE: tl.constexpr, IN_TWO: tl.constexpr):
    """Multiplies float32 with codes. In two numbers of DOT_TYPE a product of two bfloat16 numbers is exact."""
    high = x.to(DOT_TYPE)
    product = tl.dot(high, codes, input_precision="ieee")
    if IN_TWO:
        product += tl.dot((x - high.to(tl.float32)).to(DOT_TYPE), codes, input_precision="ieee")
    return product
