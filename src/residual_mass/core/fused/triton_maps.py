"""Triton kernel of the query heads' feature maps, log phi(x) = A x + B gelu(C x + c) + e (`FoldedMap`).

A single query reads 70,000 weights per head, so several programs share a head: each takes some of the inner channels
and writes its term of the sum. The kernels that read log phi_q add the terms up, which saves a launch.

Shape letters: B = batch rows, Hq = query heads, D = head dimension, M = features, I = inner width, C = terms.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from residual_mass.core.feature_maps import FoldedMap
from residual_mass.core.fused.triton_kernels import DOT_ROWS
from residual_mass.core.fused.triton_path import product_type

INNER_BLOCK = {tl.bfloat16: 64, tl.float32: 32}
"""Inner channels of a program: 8 programs per head at the paper's inner width of 512 in bfloat16."""
WARPS = {tl.bfloat16: 4, tl.float32: 16}
"""Products of float32 take so many registers that fewer threads spill them."""


class QueryMap:
    """The maps of a layer's query heads, with weights rounded to the type of the cache."""

    def __init__(self, folded: FoldedMap, dtype: torch.dtype) -> None:
        """D at least 16; D and M powers of two."""
        self.a, self.b, self.c = (x.to(dtype).contiguous() for x in (folded.a, folded.b, folded.c))
        self.c_bias, self.e_bias = (x.float().contiguous() for x in (folded.c_bias, folded.e_bias))

    def __call__(self, query: Tensor) -> Tensor:
        """Queries [B, Hq, D] -> terms [C, B, Hq, M] float32, whose sum is log phi."""
        (batch, heads, d), (inner, m) = query.shape, self.b.shape[1:]
        kind = product_type(query, self.a)
        blocks = triton.cdiv(inner, INNER_BLOCK[kind])
        terms = query.new_empty(blocks, batch, heads, m, dtype=torch.float32)
        map_kernel[blocks, heads](
            query.contiguous(),
            self.a,
            self.b,
            self.c,
            self.c_bias,
            self.e_bias,
            terms,
            batch,
            inner,
            D=d,
            M=m,
            DOT_TYPE=kind,
            BLOCK=INNER_BLOCK[kind],
            num_warps=WARPS[kind],
        )
        return terms


@triton.jit
def map_kernel(
    query,  # [B, Hq, D]
    a,  # [Hq, D, M]
    b,  # [Hq, I, M]
    c,  # [Hq, D, I]
    c_bias,  # [Hq, I]
    e_bias,  # [Hq, M]
    terms,  # out: [C, B, Hq, M]
    batch,
    inner,  # I
    D: tl.constexpr,
    M: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One head's term of a block of inner channels; the first block's has A x + e as well."""
    block, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    width, feature = tl.arange(0, D), tl.arange(0, M)
    channel = block * BLOCK + tl.arange(0, BLOCK)
    used = channel < inner
    up = tl.load(c + (head * D + width)[:, None] * inner + channel[None, :], mask=used[None, :], other=0.0)
    down = tl.load(b + (head * inner + channel)[:, None] * M + feature[None, :], mask=used[:, None], other=0.0)
    linear = tl.load(a + (head * D + width)[:, None] * M + feature[None, :], mask=block == 0, other=0.0)
    inner_bias = tl.load(c_bias + head * inner + channel, mask=used, other=0.0)
    bias = tl.load(e_bias + head * M + feature, mask=block == 0, other=0.0)
    for start in range(0, batch, DOT_ROWS):
        row = start + tl.arange(0, DOT_ROWS)
        place = row * heads + head
        x = tl.load(query + place[:, None] * D + width[None, :], mask=(row < batch)[:, None], other=0.0).to(DOT_TYPE)
        z = tl.dot(x, up.to(DOT_TYPE), input_precision="ieee") + inner_bias[None, :]
        z = 0.5 * z * (1 + tl.erf(0.70710678 * z))
        term = tl.dot(z.to(DOT_TYPE), down.to(DOT_TYPE), input_precision="ieee") + bias[None, :]
        term += tl.dot(x, linear.to(DOT_TYPE), input_precision="ieee")
        out = (block * batch * heads + place)[:, None] * M + feature[None, :]
        tl.store(terms + out, term, mask=(row < batch)[:, None])
