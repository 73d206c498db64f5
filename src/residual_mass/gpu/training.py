"""The passes of the paper's objective (`core.score_matching`) as Triton kernels.

Scores of a tile of rows and keys stay in registers: a pass reads each query, key and feature once for each tile and
writes only its rows' or keys' results. The keys are divided into shares, one program each, whose results are added up
afterwards, so they are the same in every run. The fourth pass computes the gradient of the keys' features: in one pass
with that of the rows' features it would need atomic additions.

Shape letters: H = KV heads, R = query rows of a KV head, L = keys, D = head dimension, M = features, S = shares.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from residual_mass.core import score_matching
from residual_mass.core.score_matching import Factors, Inputs, Sums, Weights, beyond
from residual_mass.gpu.path import product_type

ROW_BLOCK = 32
"""Rows of a tile: so few that no kernel spills the registers of its products in float32."""
KEY_BLOCK = 32
KEYS_OF_SHARE = 4096
"""64k keys make 16 shares: with 400 rows and 8 heads, 6 programs or more for each multiprocessor of an H200."""
MASKED = tl.constexpr(score_matching.MASKED_SCORE)
LEAST_KERNEL = tl.constexpr(torch.finfo(torch.float32).tiny * 1e8)
"""Smallest z, so that 1 / z stays finite in the gradient."""


class TritonPasses:
    """The passes over one layer's keys; D and M at least 16 and powers of two."""

    def __init__(self, inputs: Inputs, weights: Weights) -> None:
        inputs = Inputs(*(x.contiguous() if isinstance(x, Tensor) else x for x in inputs))
        self.last = inputs.last
        self.tau = weights.tau
        self.query_shift = inputs.query_shift
        self.heads, self.rows, self.m = inputs.query.shape
        self.length = inputs.keys.shape[1]
        self.shares = triton.cdiv(self.length, KEYS_OF_SHARE)
        score_type = product_type(inputs.queries, inputs.keys)
        self.by_share = (triton.cdiv(self.rows, ROW_BLOCK), self.shares, self.heads)
        self.teacher = {
            "queries": inputs.queries,
            "keys": inputs.keys,
            "last": inputs.last,
            "scale": inputs.scale,
            "rows": self.rows,
            "length": self.length,
            "D": inputs.keys.shape[-1],
            "DOT_TYPE": score_type,
            "ROWS": ROW_BLOCK,
            "KEYS": KEY_BLOCK,
            "num_warps": 8,
            "num_stages": 2,
        }
        self.student = {
            "query": inputs.query,
            "key": inputs.key,
            "key_shift": inputs.key_shift,
            "inverse_tau": 1 / weights.tau,
            "band": weights.band,
            "delta": weights.huber_delta,
            "M": self.m,
        }

    def sums(self) -> Sums:
        parts = self.query_shift.new_empty(self.shares, self.heads, self.rows)
        maxima_kernel[self.by_share](**self.teacher, maxima=parts, SHARE=KEYS_OF_SHARE)
        maxima = parts.amax(0)
        self.shifts = torch.stack((maxima, self.query_shift - maxima))
        parts = maxima.new_empty(9, self.shares, self.heads, self.rows)
        sums_kernel[self.by_share](**self.teacher, **self.student, per_row=self.shifts, sums=parts, SHARE=KEYS_OF_SHARE)
        # The student's sums are relative to the largest score of their share, the others to that of all shares.
        largest, warm_hat, cold_hat = parts[:3]
        log_warm_hat = (largest / self.tau + warm_hat.log()).logsumexp(0)
        log_cold_hat = (largest + cold_hat.log()).logsumexp(0)
        warm, cold, crossed, in_band, top, false_positive = parts[3:].sum(1)
        cross = crossed / self.tau
        out_of_band = beyond(self.last, in_band)
        return Sums(
            warm.log(), log_warm_hat, cold.log(), log_cold_hat, cross, in_band, top, out_of_band, false_positive
        )

    def gradients(self, sums: Sums, factors: Factors) -> tuple[Tensor, Tensor]:
        of_rows = torch.stack((sums.log_warm, sums.log_warm_hat, sums.log_z_hat, *factors))
        per_row = torch.cat((self.shifts, of_rows))
        parts = per_row.new_empty(self.shares, self.heads, self.rows, self.m)
        query_gradient_kernel[self.by_share](
            **self.teacher, **self.student, per_row=per_row, gradient=parts, SHARE=KEYS_OF_SHARE
        )
        for_key = per_row.new_empty(self.heads, self.length, self.m)
        grid = (triton.cdiv(self.length, KEY_BLOCK), self.heads)
        key_gradient_kernel[grid](**self.teacher, **self.student, per_row=per_row, gradient=for_key)
        return parts.sum(0), for_key


@triton.jit
def maxima_kernel(
    queries,  # [H, R, D]
    keys,  # [H, L, D]
    last,  # [R]
    maxima,  # out: [S, H, R]
    scale,
    rows,  # R
    length,  # L
    D: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SHARE: tl.constexpr,
):
    """Computes the teacher's largest visible score in a share of the keys; MASKED where no key is visible."""
    share, head, heads = tl.program_id(1), tl.program_id(2).to(tl.int64), tl.num_programs(2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    q = _vectors(queries + head * rows * D, row, rows, D).to(DOT_TYPE)
    seen = tl.load(last + row, mask=row < rows, other=-1)
    largest = tl.full([ROWS], MASKED, tl.float32)
    for start in range(share * SHARE, tl.minimum((share + 1) * SHARE, tl.max(seen) + 1), KEYS):
        column = start + tl.arange(0, KEYS)
        k = _vectors(keys + head * length * D, column, length, D).to(DOT_TYPE)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(column[None, :] <= seen[:, None], scores, MASKED)
        largest = tl.maximum(largest, tl.max(scores, 1))
    tl.store(maxima + (share * heads + head) * rows + row, largest, mask=row < rows)


@triton.jit
def sums_kernel(
    queries,  # [H, R, D]
    keys,  # [H, L, D]
    last,  # [R]
    query,  # [H, R, M]
    key,  # [H, L, M]
    key_shift,  # [H, L]
    per_row,  # [2, H, R]: the teacher's maximum, the student's shift relative to it
    sums,  # out: [9, S, H, R]
    scale,
    inverse_tau,
    band,
    delta,
    rows,  # R
    length,  # L
    D: tl.constexpr,
    M: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SHARE: tl.constexpr,
):
    """Computes the rows' sums over a share of the keys; the student's are in units of its largest score there."""
    share, head, heads = tl.program_id(1), tl.program_id(2).to(tl.int64), tl.num_programs(2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    used = row < rows
    q = _vectors(queries + head * rows * D, row, rows, D).to(DOT_TYPE)
    phi_q = _vectors(query + head * rows * M, row, rows, M)
    seen = tl.load(last + row, mask=used, other=-1)
    maximum = tl.load(per_row + head * rows + row, mask=used, other=0.0)
    shift = tl.load(per_row + (heads + head) * rows + row, mask=used, other=0.0)
    largest = tl.full([ROWS], MASKED, tl.float32)
    warm_hat, cold_hat = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    warm, cold, crossed = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    in_band, top, fp = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    for start in range(share * SHARE, tl.minimum((share + 1) * SHARE, tl.max(seen) + 1), KEYS):
        column = start + tl.arange(0, KEYS)
        k = _vectors(keys + head * length * D, column, length, D).to(DOT_TYPE)
        phi_k = _vectors(key + head * length * M, column, length, M)
        shift_k = tl.load(key_shift + head * length + column, mask=column < length, other=0.0)
        visible = column[None, :] <= seen[:, None]
        r = tl.dot(q, tl.trans(k), input_precision="ieee") * scale - maximum[:, None]
        z = tl.maximum(tl.dot(phi_q, tl.trans(phi_k), input_precision="ieee"), LEAST_KERNEL)
        r = tl.where(visible, r, MASKED)
        r_hat = tl.where(visible, tl.log(z) + shift[:, None] + shift_k[None, :], MASKED)
        share_warm = tl.exp(r * inverse_tau)
        warm += tl.sum(share_warm, 1)
        crossed += tl.sum(share_warm * (r - r_hat), 1)
        cold += tl.sum(tl.exp(r), 1)
        larger = tl.maximum(largest, tl.max(r_hat, 1))
        warm_hat *= tl.exp((largest - larger) * inverse_tau)
        cold_hat *= tl.exp(largest - larger)
        warm_hat += tl.sum(tl.exp((r_hat - larger[:, None]) * inverse_tau), 1)
        cold_hat += tl.sum(tl.exp(r_hat - larger[:, None]), 1)
        largest = larger
        # A hidden key counts as beyond the band; with r_hat = MASKED its false-positive error is zero.
        within = r >= -band
        size = tl.abs(tl.where(within, r - r_hat, tl.maximum(r_hat + band, 0.0)))
        bent = tl.minimum(size, delta)
        error = bent * (size - 0.5 * bent)
        in_band += tl.sum(tl.where(within, 1.0, 0.0), 1)
        top += tl.sum(tl.where(within, error, 0.0), 1)
        fp += tl.sum(tl.where(within, 0.0, error), 1)
    place = sums + (share * heads + head) * rows + row
    step = tl.num_programs(1) * heads * rows
    tl.store(place, largest, mask=used)
    tl.store(place + step, warm_hat, mask=used)
    tl.store(place + 2 * step, cold_hat, mask=used)
    tl.store(place + 3 * step, warm, mask=used)
    tl.store(place + 4 * step, cold, mask=used)
    tl.store(place + 5 * step, crossed, mask=used)
    tl.store(place + 6 * step, in_band, mask=used)
    tl.store(place + 7 * step, top, mask=used)
    tl.store(place + 8 * step, fp, mask=used)


@triton.jit
def query_gradient_kernel(
    queries,  # [H, R, D]
    keys,  # [H, L, D]
    last,  # [R]
    query,  # [H, R, M]
    key,  # [H, L, M]
    key_shift,  # [H, L]
    per_row,  # [9, H, R], in the order of `_slopes`
    gradient,  # out: [S, H, R, M]
    scale,
    inverse_tau,
    band,
    delta,
    rows,  # R
    length,  # L
    D: tl.constexpr,
    M: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SHARE: tl.constexpr,
):
    """Computes the derivatives with respect to the rows' features, from a share of the keys."""
    share, head, heads = tl.program_id(1), tl.program_id(2).to(tl.int64), tl.num_programs(2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    q = _vectors(queries + head * rows * D, row, rows, D).to(DOT_TYPE)
    phi_q = _vectors(query + head * rows * M, row, rows, M)
    seen = tl.load(last + row, mask=row < rows, other=-1)
    total = tl.zeros([ROWS, M], tl.float32)
    for start in range(share * SHARE, tl.minimum((share + 1) * SHARE, tl.max(seen) + 1), KEYS):
        column = start + tl.arange(0, KEYS)
        k = _vectors(keys + head * length * D, column, length, D).to(DOT_TYPE)
        phi_k = _vectors(key + head * length * M, column, length, M)
        shift_k = tl.load(key_shift + head * length + column, mask=column < length, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        z = tl.dot(phi_q, tl.trans(phi_k), input_precision="ieee")
        hidden = column[None, :] > seen[:, None]
        slopes = _slopes(
            scores, z, hidden, shift_k[None, :], per_row + head * rows, heads * rows, row, rows, inverse_tau, band,
            delta, 1,
        )  # fmt: skip
        total += tl.dot(slopes, phi_k, input_precision="ieee")
    place = ((share * heads + head) * rows + row)[:, None] * M + tl.arange(0, M)[None, :]
    tl.store(gradient + place, total, mask=(row < rows)[:, None])


@triton.jit
def key_gradient_kernel(
    queries,  # [H, R, D]
    keys,  # [H, L, D]
    last,  # [R]
    query,  # [H, R, M]
    key,  # [H, L, M]
    key_shift,  # [H, L]
    per_row,  # [9, H, R], in the order of `_slopes`
    gradient,  # out: [H, L, M]
    scale,
    inverse_tau,
    band,
    delta,
    rows,  # R
    length,  # L
    D: tl.constexpr,
    M: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Computes the derivatives with respect to the keys' features, from all rows."""
    head, heads = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    column = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    k = _vectors(keys + head * length * D, column, length, D).to(DOT_TYPE)
    phi_k = _vectors(key + head * length * M, column, length, M)
    shift_k = tl.load(key_shift + head * length + column, mask=column < length, other=0.0)
    total = tl.zeros([KEYS, M], tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        q = _vectors(queries + head * rows * D, row, rows, D).to(DOT_TYPE)
        phi_q = _vectors(query + head * rows * M, row, rows, M)
        seen = tl.load(last + row, mask=row < rows, other=-1)
        scores = tl.dot(k, tl.trans(q), input_precision="ieee") * scale
        z = tl.dot(phi_k, tl.trans(phi_q), input_precision="ieee")
        hidden = column[:, None] > seen[None, :]
        slopes = _slopes(
            scores, z, hidden, shift_k[:, None], per_row + head * rows, heads * rows, row, rows, inverse_tau, band,
            delta, 0,
        )  # fmt: skip
        total += tl.dot(slopes, phi_q, input_precision="ieee")
    place = (head * length + column)[:, None] * M + tl.arange(0, M)[None, :]
    tl.store(gradient + place, total, mask=(column < length)[:, None])


@triton.jit
def _slopes(
    scores, z, hidden, shift_k, per_row, step, row, rows, inverse_tau, band, delta, AXIS: tl.constexpr
):  # fmt: skip
    """Computes the derivative of the rows' losses with respect to z; rows are along axis 1 - AXIS. `per_row` are the
    teacher's maximum, the student's shift, log_warm, log_warm_hat, log_z_hat and the factors.
    """
    r = scores - _load_row(per_row, row, rows, AXIS)
    z = tl.maximum(z, LEAST_KERNEL)
    r_hat = tl.log(z) + _load_row(per_row + step, row, rows, AXIS) + shift_k
    warm = tl.exp(r * inverse_tau - _load_row(per_row + 2 * step, row, rows, AXIS))
    warm_hat = tl.exp(r_hat * inverse_tau - _load_row(per_row + 3 * step, row, rows, AXIS))
    cold_hat = tl.exp(r_hat - _load_row(per_row + 4 * step, row, rows, AXIS))
    within = r >= -band
    error = tl.where(within, r_hat - r, tl.maximum(r_hat + band, 0.0))
    error = tl.minimum(tl.maximum(error, -delta), delta)
    top = _load_row(per_row + 6 * step, row, rows, AXIS)
    fp = _load_row(per_row + 7 * step, row, rows, AXIS)
    slopes = (warm_hat - warm) * _load_row(per_row + 5 * step, row, rows, AXIS)
    slopes += error * tl.where(within, top, fp)
    slopes += cold_hat * _load_row(per_row + 8 * step, row, rows, AXIS)
    return tl.where(hidden, 0.0, slopes / z)


@triton.jit
def _load_row(values, row, rows, AXIS: tl.constexpr):
    return tl.expand_dims(tl.load(values + row, mask=row < rows, other=0.0), AXIS)


@triton.jit
def _vectors(matrix, index, count, WIDTH: tl.constexpr):
    """Loads vectors of a matrix [count, WIDTH]; zero beyond its end."""
    place = index[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    return tl.load(matrix + place, mask=(index < count)[:, None], other=0.0)
