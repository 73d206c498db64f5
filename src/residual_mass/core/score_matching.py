"""The paper's weighted objective and its gradient, computed block by block of keys: memory does not grow with R x L.

Three passes over blocks of keys compute the teacher's row maxima, then the sums behind every term and so the loss, then
the gradient in closed form, recomputing each block's scores. No tensor of size [R, L] is kept. On a GPU the passes are
kernels (`fused.triton_score_matching`).

Shape letters: H = KV heads, R = query rows of a KV head (of all its query heads), L = keys, D = head dimension, M =
features, B = keys of a block.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from residual_mass.core.feature_maps import LEAST
from residual_mass.core.fused import kernels_run_on, tiles_fit

if TYPE_CHECKING:
    from residual_mass.core.fused.triton_score_matching import TritonPasses

MASKED = -1e9
"""Score of an invisible key; finite, so that the difference of two masked scores is not NaN."""
PAIRS_AT_ONCE = {"cpu": 2**18, "cuda": 2**25}
"""Query-key pairs of a block: as many as fit a core's cache on CPUs, enough to fill the device on GPUs."""


class Weights(NamedTuple):
    """Factors of the objective's terms, and their constants.

    With r and r_hat the teacher's and the student's scores of a row, minus the teacher's maximum, over visible keys:
    L_KL = tau^2 KL(softmax(r / tau) || softmax(r_hat / tau)),
    L_top = mean of Huber(r_hat - r) over the keys within the band, r >= -band,
    L_fp = mean of Huber(max(r_hat + band, 0)) over the keys beyond it,
    L_Z = Huber(max(log sum exp(r_hat) - log sum exp(r), 0)).
    """

    kl: float
    top: float
    fp: float
    z: float
    tau: float
    band: float
    huber_delta: float


class Inputs(NamedTuple):
    """Inputs of the passes; rows are in ascending order of `last`."""

    queries: Tensor
    """[H, R, D]."""
    keys: Tensor
    """[H, L, D] of the queries' dtype; the teacher's scores are scale * q . k."""
    query: Tensor
    """[H, R, M] features of the rows, in units of e^query_shift."""
    key: Tensor
    """[H, L, M] features of the keys, in units of e^key_shift."""
    query_shift: Tensor
    """[H, R] logarithm of the largest feature."""
    key_shift: Tensor
    """[H, L]."""
    last: Tensor
    """[R] integer, index of the last visible key."""
    scale: float


class Pairs(NamedTuple):
    """A block's scores relative to the teacher's row maximum; r = r_hat = MASKED for invisible keys."""

    rows: slice
    """The T rows that see any key of the block."""
    teacher: Tensor
    """r [H, T, B]."""
    student: Tensor
    """r_hat [H, T, B]."""
    kernel: Tensor
    """z [H, T, B] in units of the largest features of its row and key."""
    hidden: Tensor | None
    """[T, B] bool, True for invisible keys; None if all rows see the whole block."""


class Sums(NamedTuple):
    """Sums over each row's keys for the loss and its gradient; all [H, R]."""

    log_warm: Tensor
    """log sum exp(r / tau)."""
    log_warm_hat: Tensor
    log_z: Tensor
    """log sum exp(r)."""
    log_z_hat: Tensor
    crossed: Tensor
    """Sum of exp(r / tau) (r - r_hat) / tau."""
    in_band: Tensor
    """Number of keys within the band, at least 1."""
    top: Tensor
    """Sum of Huber errors within the band."""
    beyond: Tensor
    """Number of visible keys beyond the band."""
    false_positive: Tensor
    """Sum of Huber errors beyond the band."""


class Factors(NamedTuple):
    """Row factors of the gradient, all [H, R]: the derivative of a term with respect to r_hat is its factor times a
    function of the query-key pair.
    """

    kl: Tensor
    top: Tensor
    fp: Tensor
    z: Tensor


class _TorchPasses:
    """The passes over one layer's keys, one block at a time; `TritonPasses` has the same two methods."""

    def __init__(self, inputs: Inputs, weights: Weights):
        dtype = inputs.query_shift.dtype
        self.weights, self.last, self.keys = weights, inputs.last, inputs.keys
        self.queries = inputs.queries.to(dtype) * inputs.scale
        self.rounded, self.query, self.key = inputs.key.dtype, inputs.query.to(dtype), inputs.key.to(dtype)
        self.query_shift, self.key_shift = inputs.query_shift.unsqueeze(-1), inputs.key_shift
        self.last_seen = self.last.tolist()
        heads, rows, _ = self.queries.shape
        self.width = max(16, PAIRS_AT_ONCE[self.queries.device.type] // (heads * rows))
        self.maxima = self._maxima()
        self.newest: Pairs | None = None
        """Scores of the last block, kept because the gradients start with it."""

    def sums(self) -> Sums:
        """Computes the rows' sums, relative to their maxima."""
        weights, shape = self.weights, self.queries.shape[:2]
        warm, cold, crossed, in_band, top, false_positive = self.queries.new_zeros(6, *shape)
        warm_hat, cold_hat = _RunningLogSum(shape, self.queries), _RunningLogSum(shape, self.queries)
        for block in self:
            self.newest = pairs = self.pairs(block)
            rows, r, r_hat = pairs.rows, pairs.teacher, pairs.student
            share = (r / weights.tau).clamp_min_(LEAST).exp_()
            gap = r - r_hat
            warm[:, rows] += share.sum(-1)
            crossed[:, rows] += share.mul_(gap).sum(-1)
            cold[:, rows] += torch.clamp_min(r, LEAST, out=share).exp_().sum(-1)
            largest = r_hat.amax(-1)
            torch.sub(r_hat, largest.unsqueeze(-1), out=share).div_(weights.tau).clamp_min_(LEAST).exp_()
            warm_hat.add(rows, share.sum(-1), largest / weights.tau)
            if pairs.hidden is None:
                mass, unit = self.key_mass(block, rows)
                cold_hat.add(rows, (pairs.kernel @ mass.unsqueeze(-1)).squeeze(-1), unit)
            else:
                torch.sub(r_hat, largest.unsqueeze(-1), out=share).clamp_min_(LEAST).exp_()
                cold_hat.add(rows, share.sum(-1), largest)
            band = _band(r, weights.band)
            in_band[:, rows] += band.sum(-1)
            # A hidden key counts as beyond the band; with r_hat = MASKED its false-positive error is zero.
            errors = huber((r_hat + weights.band).clamp_min_(0).lerp_(gap, band), weights.huber_delta)
            false_positive[:, rows] += errors.sum(-1)
            top[:, rows] += errors.mul_(band).sum(-1)
        return Sums(
            warm.log(), warm_hat.value(), cold.log(), cold_hat.value(), crossed / weights.tau, in_band, top,
            beyond(self.last, in_band), false_positive - top,
        )  # fmt: skip

    def gradients(self, sums: Sums, factors: Factors) -> tuple[Tensor, Tensor]:
        """Computes the derivatives with respect to features: [H, R, M] and [H, L, M] float32 or float64."""
        for_query, for_key = torch.zeros_like(self.query), torch.zeros_like(self.key)
        newest, self.newest = self.newest, None
        for block in reversed(list(self)):
            pairs = newest or self.pairs(block)
            newest = None
            slope = self._slopes(block, pairs, sums, factors).to(self.rounded).to(for_key.dtype)
            for_query[:, pairs.rows] += slope @ self.key[:, block]
            for_key[:, block] = slope.transpose(-1, -2) @ self.query[:, pairs.rows]
        return for_query, for_key

    def __iter__(self) -> Iterator[slice]:
        """Yields blocks of keys, first those that every row sees completely and that need no mask."""
        all_see, length = self.last_seen[0] + 1, self.last_seen[-1] + 1
        for start, stop in ((0, all_see), (all_see, length)):
            for first in range(start, stop, self.width):
                yield slice(first, min(first + self.width, stop))

    def pairs(self, block: slice) -> Pairs:
        rows, hidden = self._visibility(block)
        teacher = (self.queries[:, rows] @ self._keys(block)).sub_(self.maxima[:, rows])
        floor = torch.finfo(teacher.dtype).tiny * 1e8  # so that 1 / z stays finite in the gradient
        kernel = (self.query[:, rows] @ self.key[:, block].transpose(-1, -2)).clamp_min_(floor)
        student = kernel.log().add_((self.query_shift - self.maxima)[:, rows]).add_(self.key_shift[:, None, block])
        if hidden is not None:
            teacher.masked_fill_(hidden, MASKED)
            student.masked_fill_(hidden, MASKED)
        return Pairs(rows, teacher, student, kernel, hidden)

    def key_mass(self, block: slice, rows: slice) -> tuple[Tensor, Tensor]:
        """Returns mass [H, B] and unit [H, T] with exp(r_hat) = z * mass * e^unit, for a block that all rows see."""
        shift = self.key_shift[:, block]
        largest = shift.amax(-1, keepdim=True)
        unit = (self.query_shift - self.maxima)[:, rows, 0] + largest
        return (shift - largest).clamp_min_(LEAST).exp_(), unit

    def _slopes(self, block: slice, pairs: Pairs, sums: Sums, factors: Factors) -> Tensor:
        """Computes the derivative of the rows' losses with respect to z: [H, T, B]."""
        rows, r, r_hat = pairs.rows, pairs.teacher, pairs.student
        tau, delta = self.weights.tau, self.weights.huber_delta
        sums, factors = Sums(*(x[:, rows] for x in sums)), Factors(*(x[:, rows, None] for x in factors))
        slope = (r_hat / tau).sub_(sums.log_warm_hat.unsqueeze(-1)).clamp_min_(LEAST).exp_()
        slope -= (r / tau).sub_(sums.log_warm.unsqueeze(-1)).clamp_min_(LEAST).exp_()
        slope *= factors.kl
        band = _band(r, self.weights.band)
        error = (r_hat + self.weights.band).clamp_min_(0).lerp_(r_hat - r, band).clamp_(-delta, delta)
        slope += error.mul_(torch.lerp(factors.fp, factors.top, band))
        if pairs.hidden is not None:
            slope += (r_hat - sums.log_z_hat.unsqueeze(-1)).clamp_min_(LEAST).exp_().mul_(factors.z)
            return slope.masked_fill_(pairs.hidden, 0).div_(pairs.kernel)
        # d exp(r_hat) / dz does not depend on z: the slope of this term is a row factor times a key factor.
        mass, unit = self.key_mass(block, rows)
        row_factor = factors.z * (unit - sums.log_z_hat).exp().unsqueeze(-1)
        return slope.div_(pairs.kernel).addcmul_(row_factor, mass.unsqueeze(-2))

    def _maxima(self) -> Tensor:
        """Computes the teacher's row maxima: [H, R, 1]."""
        best = self.queries.new_full((*self.queries.shape[:2], 1), -torch.inf)
        for block in self:
            rows, hidden = self._visibility(block)
            scores = self.queries[:, rows] @ self._keys(block)
            if hidden is not None:
                scores.masked_fill_(hidden, -torch.inf)
            best[:, rows] = torch.maximum(best[:, rows], scores.amax(-1, keepdim=True))
        return best

    def _keys(self, block: slice) -> Tensor:
        """Returns the keys of a block, transposed: [H, D, B]."""
        return self.keys[:, block].to(self.queries.dtype).transpose(-1, -2)

    def _visibility(self, block: slice) -> tuple[slice, Tensor | None]:
        rows = slice(bisect_left(self.last_seen, block.start), None)
        if block.stop <= self.last_seen[rows.start] + 1:
            return rows, None
        columns = torch.arange(block.start, block.stop, device=self.last.device)
        return rows, columns > self.last[rows].unsqueeze(-1)


class _ScoreMatching(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        log_query: Tensor,
        log_key: Tensor,
        queries: Tensor,
        keys: Tensor,
        scale: float,
        last: Tensor,
        weights: Weights,
        products: torch.dtype | None,
    ) -> Tensor:
        ctx.order = last.argsort()
        log_query = log_query[:, ctx.order]
        query_shift, key_shift = log_query.amax(-1), log_key.amax(-1)
        query, key = (
            (x - shift.unsqueeze(-1)).clamp_min_(LEAST).exp_().to(products or x.dtype)
            for x, shift in ((log_query, query_shift), (log_key, key_shift))
        )
        inputs = Inputs(queries[:, ctx.order], keys, query, key, query_shift, key_shift, last[ctx.order], scale)
        ctx.inputs, ctx.weights, ctx.key_passes = inputs, weights, _key_passes(inputs, weights)
        ctx.sums = ctx.key_passes.sums()
        return torch.empty_like(query_shift).index_copy_(1, ctx.order, _losses(ctx.sums, weights))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        for_query, for_key = ctx.key_passes.gradients(ctx.sums, _factors(ctx.sums, ctx.weights, upstream[:, ctx.order]))
        in_place = torch.empty_like(for_query).index_copy_(1, ctx.order, for_query.mul_(ctx.inputs.query))
        return in_place, for_key.mul_(ctx.inputs.key), None, None, None, None, None, None


def score_matching_losses(
    log_query: Tensor,
    log_key: Tensor,
    queries: Tensor,
    keys: Tensor,
    scale: float,
    last: Tensor,
    weights: Weights,
    products: torch.dtype | None = None,
) -> Tensor:
    """Computes lambda_KL L_KL + lambda_top L_top + lambda_fp L_fp + lambda_Z L_Z of every row, [H, R].

    Differentiable once in log_query and log_key.

    Args:
        log_query: [H, R, M] log phi_q of the rows, float32 or float64; log_key: [H, L, M] log phi_k.
        queries: [H, R, D]; keys: [H, L, D] of the same dtype, bfloat16 too; the teacher's scores are scale * q . k.
        last: [R] integer, index of the last visible key, at least 0.
        products: dtype that the operands of products with features are rounded to; None does not round.
    """
    return _ScoreMatching.apply(log_query, log_key, queries, keys, scale, last, weights, products)


def _key_passes(inputs: Inputs, weights: Weights) -> _TorchPasses | TritonPasses:
    on_kernels = kernels_run_on(inputs.key.device) and tiles_fit(inputs.keys.shape[-1], inputs.key.shape[-1])
    if not on_kernels or inputs.query_shift.dtype != torch.float32:
        return _TorchPasses(inputs, weights)
    from residual_mass.core.fused.triton_score_matching import TritonPasses

    return TritonPasses(inputs, weights)


def huber(x: Tensor, delta: float) -> Tensor:
    """Computes x^2 / 2 up to |x| = delta, and beyond it a line of slope delta."""
    slope = x.clamp(-delta, delta)
    return slope * torch.sub(x, slope, alpha=0.5)


def _band(r: Tensor, width: float) -> Tensor:
    """Returns 1.0 within the top band and 0.0 beyond it: `lerp` with these weights is several times faster than
    `where`.
    """
    return torch.ge(r, -width, out=torch.empty_like(r))


class _RunningLogSum:
    """Streaming logsumexp over blocks, in units of the largest exponent so far."""

    def __init__(self, shape: torch.Size, like: Tensor):
        self.unit, self.sum = like.new_full(shape, MASKED), like.new_zeros(shape)

    def add(self, rows: slice, value: Tensor, unit: Tensor) -> None:
        """Adds value * e^unit; both [H, T] of the rows."""
        largest = torch.maximum(self.unit[:, rows], unit)
        before = self.sum[:, rows] * (self.unit[:, rows] - largest).exp()
        self.sum[:, rows] = before + value * (unit - largest).exp()
        self.unit[:, rows] = largest

    def value(self) -> Tensor:
        return self.unit + self.sum.log()


def _losses(sums: Sums, weights: Weights) -> Tensor:
    divergence = sums.crossed * (-sums.log_warm).exp() - sums.log_warm + sums.log_warm_hat
    excess = (sums.log_z_hat - sums.log_z).clamp(min=0)
    return (
        weights.kl * weights.tau**2 * divergence
        + weights.top * sums.top / sums.in_band
        + weights.fp * sums.false_positive / sums.beyond.clamp_min(1)
        + weights.z * huber(excess, weights.huber_delta)
    )


def _factors(sums: Sums, weights: Weights, upstream: Tensor) -> Factors:
    """Computes the factors for the upstream gradient [H, R] of the rows' losses."""
    return Factors(
        weights.kl * weights.tau * upstream,
        weights.top * upstream / sums.in_band,
        weights.fp * upstream / sums.beyond.clamp_min(1),
        weights.z * (sums.log_z_hat - sums.log_z).clamp(0, weights.huber_delta) * upstream,
    )


def beyond(last: Tensor, in_band: Tensor) -> Tensor:
    """Returns the number of visible keys beyond the band."""
    return (last + 1 - in_band).clamp_min_(0)
