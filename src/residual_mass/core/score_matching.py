"""The paper's weighted objective and its gradient, computed block by block of keys: memory does not grow with R x L.

Three passes over blocks of keys compute the teacher's row maxima, then the sums behind every term and so the loss, then
the gradient in closed form, recomputing each block's scores. No tensor of size [R, L] is kept. On a GPU the passes are
kernels (`gpu.training`), which the trainer passes in.

Shape letters: H = KV heads, R = query rows of a KV head (of all its query heads), L = keys, D = head dimension, M =
features, B = keys of a block.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from residual_mass.core.feature_maps import LEAST

MASKED_SCORE = -1e9
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
    """A block's scores relative to the teacher's row maximum; r = r_hat = MASKED_SCORE for invisible keys."""

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


class TorchPasses:
    """The passes over one layer's keys, one block at a time; `TritonPasses` has the same two methods."""

    def __init__(self, inputs: Inputs, weights: Weights):
        dtype = inputs.query_shift.dtype
        self.weights = weights
        self.last = inputs.last
        self.keys = inputs.keys
        self.queries = inputs.queries.to(dtype) * inputs.scale
        self.query = inputs.query
        self.key = inputs.key
        self.query_shift = inputs.query_shift.unsqueeze(-1)
        self.key_shift = inputs.key_shift
        self.last_seen = self.last.tolist()
        heads, rows, _ = self.queries.shape
        pairs = PAIRS_AT_ONCE[self.queries.device.type]
        self.width = max(16, pairs // (heads * rows))
        self.maxima = self._maxima()
        self.newest: Pairs | None = None
        """Scores of the last block, kept because the gradients start with it."""

    def sums(self) -> Sums:
        """Computes the rows' sums, relative to their maxima."""
        totals = _RunningSums(self.queries)
        for block in self:
            pairs = self.pairs(block)
            gap = pairs.teacher - pairs.student
            self._add_exponentials(totals, block, pairs, gap)
            self._add_errors(totals, pairs, gap)
            self.newest = pairs
        return totals.value(self.weights.tau, self.last)

    def _add_exponentials(self, totals: _RunningSums, block: slice, pairs: Pairs, gap: Tensor) -> None:
        """Adds a block's keys to the sums behind L_KL and L_Z; gap [H, T, B] = r - r_hat."""
        tau = self.weights.tau
        rows = pairs.rows
        r = pairs.teacher
        r_hat = pairs.student
        share = (r / tau).clamp_min_(LEAST).exp_()  # the buffer of all exponentials of this block
        totals.warm[:, rows] += share.sum(-1)
        share.mul_(gap)
        totals.crossed[:, rows] += share.sum(-1)
        torch.clamp_min(r, LEAST, out=share).exp_()
        totals.cold[:, rows] += share.sum(-1)
        # r is at most 0, but r_hat has no bound: its sums need a unit of their own.
        largest = r_hat.amax(-1)
        torch.sub(r_hat, largest.unsqueeze(-1), out=share)
        share.div_(tau).clamp_min_(LEAST).exp_()
        totals.warm_hat.add(rows, share.sum(-1), largest / tau)
        if pairs.hidden is None:
            # exp(r_hat) is a product of the kernel and factors of row and key: no exponentials.
            mass, unit = self.key_mass(block, rows)
            summed = (pairs.kernel @ mass.unsqueeze(-1)).squeeze(-1)
            totals.cold_hat.add(rows, summed, unit)
        else:
            torch.sub(r_hat, largest.unsqueeze(-1), out=share)
            share.clamp_min_(LEAST).exp_()
            totals.cold_hat.add(rows, share.sum(-1), largest)

    def _add_errors(self, totals: _RunningSums, pairs: Pairs, gap: Tensor) -> None:
        """Adds a block's keys to the sums behind L_top and L_fp; gap [H, T, B] = r - r_hat."""
        weights = self.weights
        rows = pairs.rows
        band = _band(pairs.teacher, weights.band)
        totals.in_band[:, rows] += band.sum(-1)
        # A hidden key counts as beyond the band; with r_hat = MASKED_SCORE its false-positive error is zero.
        errors = (pairs.student + weights.band).clamp_min_(0).lerp_(gap, band)
        errors = huber(errors, weights.huber_delta)
        totals.all_errors[:, rows] += errors.sum(-1)
        errors.mul_(band)
        totals.top[:, rows] += errors.sum(-1)

    def gradients(self, sums: Sums, factors: Factors) -> tuple[Tensor, Tensor]:
        """Computes the derivatives with respect to features: [H, R, M] and [H, L, M] float32 or float64."""
        for_query = torch.zeros_like(self.query)
        for_key = torch.zeros_like(self.key)
        for block in reversed(list(self)):
            pairs = self.newest or self.pairs(block)
            self.newest = None
            slope = self._slopes(block, pairs, sums, factors)
            key = self.key[:, block]
            for_query[:, pairs.rows] += slope @ key
            query = self.query[:, pairs.rows]
            for_key[:, block] = slope.transpose(-1, -2) @ query
        return for_query, for_key

    def __iter__(self) -> Iterator[slice]:
        """Yields blocks of keys, first those that every row sees completely and that need no mask."""
        all_see = self.last_seen[0] + 1
        length = self.last_seen[-1] + 1
        for start, stop in ((0, all_see), (all_see, length)):
            for first in range(start, stop, self.width):
                yield slice(first, min(first + self.width, stop))

    def pairs(self, block: slice) -> Pairs:
        """Computes the scores of a block."""
        rows, hidden = self._visibility(block)
        teacher = self.queries[:, rows] @ self._keys(block)
        teacher.sub_(self.maxima[:, rows])
        floor = torch.finfo(teacher.dtype).tiny * 1e8  # so that 1 / z stays finite in the gradient
        key = self.key[:, block].transpose(-1, -2)
        kernel = (self.query[:, rows] @ key).clamp_min_(floor)
        # The student's score is log z plus the logarithms of both features' units, here less the teacher's maximum.
        row_shift = (self.query_shift - self.maxima)[:, rows]
        key_shift = self.key_shift[:, None, block]
        student = kernel.log().add_(row_shift).add_(key_shift)
        if hidden is not None:
            teacher.masked_fill_(hidden, MASKED_SCORE)
            student.masked_fill_(hidden, MASKED_SCORE)
        return Pairs(rows, teacher, student, kernel, hidden)

    def key_mass(self, block: slice, rows: slice) -> tuple[Tensor, Tensor]:
        """Returns mass [H, B] and unit [H, T] with exp(r_hat) = z * mass * e^unit, for a block that all rows see."""
        shift = self.key_shift[:, block]
        largest = shift.amax(-1, keepdim=True)
        unit = (self.query_shift - self.maxima)[:, rows, 0] + largest
        return (shift - largest).clamp_min_(LEAST).exp_(), unit

    def _slopes(self, block: slice, pairs: Pairs, sums: Sums, factors: Factors) -> Tensor:
        """Computes the derivative of the rows' losses with respect to z: [H, T, B]."""
        rows = pairs.rows
        r_hat = pairs.student
        sums = Sums(*(x[:, rows] for x in sums))
        factors = Factors(*(x[:, rows, None] for x in factors))
        slope = self._kl_slope(pairs, sums)
        slope *= factors.kl
        slope += self._error_slope(pairs, factors)
        if pairs.hidden is not None:
            # softmax(r_hat), the slope of log sum exp(r_hat).
            mass_slope = (r_hat - sums.log_z_hat.unsqueeze(-1)).clamp_min_(LEAST).exp_()
            slope += mass_slope.mul_(factors.z)
            # r_hat is log z plus constants, so d r_hat / dz = 1 / z.
            return slope.masked_fill_(pairs.hidden, 0).div_(pairs.kernel)
        # d exp(r_hat) / dz does not depend on z: the slope of this term is a row factor times a key factor.
        mass, unit = self.key_mass(block, rows)
        row_factor = (unit - sums.log_z_hat).exp().unsqueeze(-1)
        row_factor = factors.z * row_factor
        return slope.div_(pairs.kernel).addcmul_(row_factor, mass.unsqueeze(-2))

    def _kl_slope(self, pairs: Pairs, sums: Sums) -> Tensor:
        """Computes softmax(r_hat / tau) - softmax(r / tau), the slope of L_KL / tau in r_hat: [H, T, B]."""
        tau = self.weights.tau
        student = (pairs.student / tau).sub_(sums.log_warm_hat.unsqueeze(-1))
        student.clamp_min_(LEAST).exp_()
        teacher = (pairs.teacher / tau).sub_(sums.log_warm.unsqueeze(-1))
        teacher.clamp_min_(LEAST).exp_()
        return student.sub_(teacher)

    def _error_slope(self, pairs: Pairs, factors: Factors) -> Tensor:
        """Computes the slope of L_top and L_fp in r_hat, times their factors: [H, T, B]."""
        weights = self.weights
        band = _band(pairs.teacher, weights.band)
        gap = pairs.student - pairs.teacher
        error = (pairs.student + weights.band).clamp_min_(0).lerp_(gap, band)
        error.clamp_(-weights.huber_delta, weights.huber_delta)  # the derivative of the Huber error
        return error.mul_(torch.lerp(factors.fp, factors.top, band))

    def _maxima(self) -> Tensor:
        """Computes the teacher's row maxima: [H, R, 1]."""
        heads, rows, _ = self.queries.shape
        best = self.queries.new_full((heads, rows, 1), -torch.inf)
        for block in self:
            rows, hidden = self._visibility(block)
            scores = self.queries[:, rows] @ self._keys(block)
            if hidden is not None:
                scores.masked_fill_(hidden, -torch.inf)
            highest = scores.amax(-1, keepdim=True)
            before = best[:, rows]
            best[:, rows] = torch.maximum(before, highest)
        return best

    def _keys(self, block: slice) -> Tensor:
        """Returns the keys of a block, transposed: [H, D, B]."""
        keys = self.keys[:, block].to(self.queries.dtype)
        return keys.transpose(-1, -2)

    def _visibility(self, block: slice) -> tuple[slice, Tensor | None]:
        # Rows ascend in `last`: those that see the block's first key are the last ones.
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
        passes: Callable[[Inputs, Weights], TorchPasses],
    ) -> Tensor:
        ctx.order = last.argsort()
        log_query = log_query[:, ctx.order]
        queries = queries[:, ctx.order]
        last = last[ctx.order]
        query_shift = log_query.amax(-1)
        query = _scaled_features(log_query, query_shift)
        key_shift = log_key.amax(-1)
        key = _scaled_features(log_key, key_shift)
        inputs = Inputs(queries, keys, query, key, query_shift, key_shift, last, scale)
        ctx.inputs = inputs
        ctx.weights = weights
        ctx.key_passes = passes(inputs, weights)
        ctx.sums = ctx.key_passes.sums()
        losses = _losses(ctx.sums, weights)
        return torch.empty_like(query_shift).index_copy_(1, ctx.order, losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        factors = _factors(ctx.sums, ctx.weights, upstream[:, ctx.order])
        for_query, for_key = ctx.key_passes.gradients(ctx.sums, factors)
        # d phi / d log phi = phi
        for_query.mul_(ctx.inputs.query)
        for_key.mul_(ctx.inputs.key)
        in_place = torch.empty_like(for_query).index_copy_(1, ctx.order, for_query)
        return in_place, for_key, None, None, None, None, None, None


def score_matching_losses(
    log_query: Tensor,
    log_key: Tensor,
    queries: Tensor,
    keys: Tensor,
    scale: float,
    last: Tensor,
    weights: Weights,
    passes: Callable[[Inputs, Weights], TorchPasses] = TorchPasses,
) -> Tensor:
    """Computes lambda_KL L_KL + lambda_top L_top + lambda_fp L_fp + lambda_Z L_Z of every row, [H, R].

    Differentiable once in log_query and log_key.

    Args:
        log_query: [H, R, M] log phi_q of the rows, float32 or float64; log_key: [H, L, M] log phi_k.
        queries: [H, R, D]; keys: [H, L, D] of the same dtype, bfloat16 too; the teacher's scores are scale * q . k.
        last: [R] integer, index of the last visible key, at least 0.
        passes: class of the passes over the keys; kernels have the same two methods as `TorchPasses`.
    """
    return _ScoreMatching.apply(log_query, log_key, queries, keys, scale, last, weights, passes)


def _scaled_features(log_features: Tensor, shift: Tensor) -> Tensor:
    """Returns features [H, N, M] in units of e^shift, shift [H, N]."""
    return (log_features - shift.unsqueeze(-1)).clamp_min_(LEAST).exp_()


def huber(x: Tensor, delta: float) -> Tensor:
    """Computes x^2 / 2 up to |x| = delta, and beyond it a line of slope delta."""
    slope = x.clamp(-delta, delta)
    # x (x - x / 2) up to delta, and beyond it delta (|x| - delta / 2).
    return slope * torch.sub(x, slope, alpha=0.5)


def _band(r: Tensor, width: float) -> Tensor:
    """Returns 1.0 within the top band and 0.0 beyond it: `lerp` with these weights is several times faster than
    `where`.
    """
    return torch.ge(r, -width, out=torch.empty_like(r))


class _RunningLogSum:
    """Streaming logsumexp over blocks, in units of the largest exponent so far."""

    def __init__(self, shape: torch.Size, like: Tensor):
        self.unit = like.new_full(shape, MASKED_SCORE)
        self.sum = like.new_zeros(shape)

    def add(self, rows: slice, value: Tensor, unit: Tensor) -> None:
        """Adds value * e^unit; both [H, T] of the rows."""
        old_unit = self.unit[:, rows]
        largest = torch.maximum(old_unit, unit)
        before = self.sum[:, rows] * (old_unit - largest).exp()
        added = value * (unit - largest).exp()
        self.sum[:, rows] = before + added
        self.unit[:, rows] = largest

    def value(self) -> Tensor:
        return self.unit + self.sum.log()


class _RunningSums:
    """`Sums` over the blocks so far, [H, R] each."""

    def __init__(self, queries: Tensor):
        shape = queries.shape[:2]
        self.warm = queries.new_zeros(shape)  # sum of exp(r / tau)
        self.warm_hat = _RunningLogSum(shape, queries)
        self.cold = queries.new_zeros(shape)  # sum of exp(r)
        self.cold_hat = _RunningLogSum(shape, queries)
        self.crossed = queries.new_zeros(shape)  # sum of exp(r / tau) (r - r_hat)
        self.in_band = queries.new_zeros(shape)
        self.top = queries.new_zeros(shape)
        self.all_errors = queries.new_zeros(shape)  # within the band and beyond it

    def value(self, tau: float, last: Tensor) -> Sums:
        log_warm = self.warm.log()
        log_warm_hat = self.warm_hat.value()
        log_z = self.cold.log()
        log_z_hat = self.cold_hat.value()
        crossed = self.crossed / tau
        top = self.top
        keys_beyond = beyond(last, self.in_band)
        fp = self.all_errors - top
        return Sums(log_warm, log_warm_hat, log_z, log_z_hat, crossed, self.in_band, top, keys_beyond, fp)


def _losses(sums: Sums, weights: Weights) -> Tensor:
    mean_gap = sums.crossed * (-sums.log_warm).exp()
    # KL(p || p_hat) = E_p[(r - r_hat) / tau] - log sum exp(r / tau) + log sum exp(r_hat / tau).
    divergence = mean_gap - sums.log_warm + sums.log_warm_hat
    kl = weights.kl * weights.tau**2 * divergence
    top = weights.top * sums.top / sums.in_band
    fp = weights.fp * sums.false_positive / sums.beyond.clamp_min(1)
    excess = (sums.log_z_hat - sums.log_z).clamp(min=0)
    z = weights.z * huber(excess, weights.huber_delta)
    return kl + top + fp + z


def _factors(sums: Sums, weights: Weights, upstream: Tensor) -> Factors:
    """Computes the factors for the upstream gradient [H, R] of the rows' losses."""
    # tau^2 of the loss times 1 / tau of d(r_hat / tau).
    kl = weights.kl * weights.tau * upstream
    top = weights.top * upstream / sums.in_band
    fp = weights.fp * upstream / sums.beyond.clamp_min(1)
    excess = (sums.log_z_hat - sums.log_z).clamp(0, weights.huber_delta)  # the derivative of the Huber error
    z = weights.z * excess * upstream
    return Factors(kl, top, fp, z)


def beyond(last: Tensor, in_band: Tensor) -> Tensor:
    """Returns the number of visible keys beyond the band."""
    return (last + 1 - in_band).clamp_min_(0)
