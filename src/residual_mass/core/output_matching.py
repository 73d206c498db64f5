"""Objectives on attention outputs. They need one product for each query and key; objectives on scores need a dozen
functions.

The student's share of an output is a sum of phi(k) v^T over a prefix, multiplied by phi(q): exactly the summaries of
decoding. One pass over the keys therefore serves every query position, and the retrieved tokens are subtracted as in
decoding. The teacher's side is computed once per teacher pass (`exact_targets`).

Shape letters: H = KV heads, Q = query positions, G = query heads of a KV head, S = supports, L = keys, D = value
dimension, M = features, K = most tokens that a support retrieves. `D + 1`: values with a one appended, whose weighted
sums hold numerator and denominator.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from residual_mass.core.accounting import CLAMP_RELATIVE
from residual_mass.core.feature_maps import LEAST
from residual_mass.core.measures import rel_l1
from residual_mass.core.score_matching import huber
from residual_mass.core.selection import exhaustive_topk, weighted_sum


class Window(NamedTuple):
    """The prefix of each query position: keys up to `last`; its first `sink` and last `tail` are anchors."""

    last: Tensor
    """[Q] integer."""
    sink: int
    tail: int


class Targets(NamedTuple):
    """The teacher's output and terms for every query row, in units of e^shift."""

    shift: Tensor
    """[H, Q, G] largest score of a visible key."""
    output: Tensor
    """[H, Q, G, D] full attention."""
    exact: Tensor
    """[H, Q, G, S, D + 1] exact terms of each support: anchors and retrieved tokens."""
    log_rest: Tensor
    """[H, Q, G, S] log Z_R; -inf where the support covers the mid-region."""
    best: Tensor
    """[H, Q, G, K] int32, mid-region keys in descending order of score."""
    ks: Tensor
    """[1, Q, S] tokens that each support retrieves, at most |M|; the same for all heads."""

    def at(self, chosen: Tensor) -> Targets:
        """Selects query positions, given as indices."""
        return Targets(*(x[:, chosen] for x in self))

    def select_supports(self, chosen: list[int]) -> Targets:
        """Selects supports, given as indices."""
        exact = self.exact[..., chosen, :]
        log_rest = self.log_rest[..., chosen]
        return self._replace(exact=exact, log_rest=log_rest, ks=self.ks[..., chosen])

    @staticmethod
    def joined(parts: Sequence[Targets]) -> Targets:
        """Concatenates the targets of consecutive query positions, for the same supports."""
        most = max(part.best.shape[-1] for part in parts)
        padded = []
        for part in parts:
            missing = most - part.best.shape[-1]
            best = F.pad(part.best, (0, missing))
            padded.append(part._replace(best=best))
        fields = zip(*padded, strict=True)
        return Targets(*(torch.cat(tensors, 1) for tensors in fields))


class Completion(NamedTuple):
    """The student's residual terms, in units of e^unit."""

    rest: Tensor
    """[H, Q, G, S, D + 1] after subtraction; zero where only rounding errors remain."""
    whole: Tensor
    """[H, Q, G, 1, D + 1] of the whole mid-region (NoSub)."""
    unit: Tensor
    """[H, Q, G], relative to the targets' shift."""


@torch.no_grad()
def exact_targets(scores: Tensor, values: Tensor, window: Window, ks: Tensor) -> Targets:
    """Computes full attention and the exact terms of each support.

    Args:
        scores: [H, Q, G, L] of the teacher; values: [H, L, D].
        ks: [Q, S] integer, tokens that the supports retrieve from the mid-region; more than |M| retrieves all of it.
            S = 0 computes only full attention.
    """
    columns = torch.arange(scores.shape[-1], device=scores.device)
    last = window.last[:, None, None]
    visible = columns <= last  # [Q, 1, L]
    before_tail = columns <= last - window.tail
    mid = visible & (columns >= window.sink) & before_tail
    shift = scores.masked_fill(~visible, -torch.inf).amax(-1)
    weights = (scores - shift.unsqueeze(-1)).clamp_(LEAST, 0).exp_()
    weights = torch.where(visible, weights, 0)
    mid_weights = weights * mid
    values = _with_one(values)
    ks = ks.minimum(mid.sum(-1)).unsqueeze(0)
    if ks.shape[-1]:
        most = ks.amax(-1, keepdim=True)
    else:
        most = ks.new_zeros(*ks.shape[:-1], 1)
    best = exhaustive_topk(scores, mid, most.expand(scores.shape[:-1]))
    best_weights = mid_weights.gather(-1, best.indices).mul_(best.valid)
    retrieved = _sum_of_first(best_weights, ks, values, best.indices)
    # Visible keys outside the mid-region are the anchors.
    anchors = _product_by_head(weights - mid_weights, values)
    exact = anchors.unsqueeze(-2) + retrieved
    output = _normalised(_product_by_head(weights, values))
    log_rest = _log_rest(mid_weights, best.indices, ks)
    return Targets(shift, output, exact, log_rest, best.indices.int(), ks)


def complete(log_query: Tensor, log_key: Tensor, values: Tensor, window: Window, targets: Targets) -> Completion:
    """Computes the student's residual terms of every row and support, differentiable in log_query and log_key.

    Args:
        log_query: [H, Q, G, M] log phi_q; log_key: [H, L, M] log phi_k; values: [H, L, D].
    """
    values = _with_one(values)
    # One past the last mid-region key; an empty mid-region ends where it begins.
    ends = (window.last + 1 - window.tail).clamp_min(window.sink)
    first = window.sink  # column of the first mid-region key, of which features and kernel have column 0
    log_features = log_key[:, first : int(ends.max())]
    features, log_shift = _key_features(log_features)
    states = _prefix_sums(features, values[:, first:], ends - first)
    weights, largest = _query_weights(log_query, log_shift)
    whole = weights @ states
    # Few entries of the kernel are needed, but to compute all of it is no slower than to gather these keys' features.
    if not features.shape[1]:  # no row has a mid-region, but slots need a valid index
        features = F.pad(features, (0, 0, 0, 1))
    kernel = _product_by_head(weights, features.transpose(-1, -2))  # [H, Q, G, L of the mid-region]
    best = targets.best.long()
    # Slots that no support counts may hold any index.
    kernel_columns = (best - first).clamp(0, kernel.shape[-1] - 1)
    best_kernel = kernel.gather(-1, kernel_columns)
    taken = _sum_of_first(best_kernel, targets.ks, values, best)
    whole = whole.unsqueeze(-2)
    rest = whole - taken
    least_mass = CLAMP_RELATIVE * whole[..., -1:]
    kept = rest[..., -1:] > least_mass
    rest = torch.where(kept, rest, 0)
    return Completion(rest, whole, largest - targets.shift)


def residual_losses(completion: Completion, targets: Targets, weight_z: float, relative: bool = False) -> Tensor:
    """Computes the error of subtractive completion, averaged over the supports: [H, Q, G]. Ours, not the paper's.

    Per support: the relative l1 error of the completed output against full attention, plus `weight_z` times the Huber
    of log Z_R hat - log Z_R. A support that covers the mid-region contributes 0. Where the subtraction leaves only
    rounding errors, the error is TopK's, as in decoding, and has no gradient.

    Args:
        relative: divide a support's errors by TopK's mean error with it, over the given rows. Otherwise the supports
            with the smallest K dominate the loss, because their residuals are the largest.
    """
    errors = output_errors(completion.rest, completion.unit, targets)
    if relative:
        dropped = output_errors(torch.zeros_like(completion.whole), completion.unit, targets)
        errors = errors / dropped.mean((0, 1, 2)).clamp_min(1e-6)  # 0 if a support covers every mid-region
    gap = log_mass_error(completion, targets)
    gap = torch.where(gap.isfinite(), gap, 0)
    losses = errors + weight_z * huber(gap, 1.0)
    has_rest = targets.log_rest > -torch.inf
    return torch.where(has_rest, losses, 0).mean(-1)


def output_errors(residual: Tensor, unit: Tensor, targets: Targets) -> Tensor:
    """Relative l1 error of the exact terms merged with `residual` [H, Q, G, 1 or S, D + 1]: [H, Q, G, S]."""
    common = unit.clamp_min(0)[..., None, None]  # exact terms are in units of e^0; neither may overflow
    exact = targets.exact * (-common).clamp_min(LEAST).exp()
    residual_scale = (unit[..., None, None] - common).clamp_min(LEAST).exp()
    both = exact + residual * residual_scale
    return rel_l1(_normalised(both), targets.output.unsqueeze(-2))


def log_mass_error(completion: Completion, targets: Targets) -> Tensor:
    """Returns log Z_R hat - log Z_R, [H, Q, G, S]; not finite for an empty or a dropped residual."""
    mass = completion.rest[..., -1]
    log_mass = torch.where(mass > 0, mass, 1).log()  # the gradient of log 0 is not finite, even where it is not taken
    estimated = log_mass + completion.unit.unsqueeze(-1)
    estimated = torch.where(mass > 0, estimated, -torch.inf)
    return estimated - targets.log_rest


def lolcats_losses(log_query: Tensor, log_key: Tensor, values: Tensor, window: Window, targets: Targets) -> Tensor:
    """Computes L_lolcats of every row, [H, Q, G]: the mean squared error of feature-map attention over all visible keys
    against full attention. Arguments as for `complete`.
    """
    features, log_shift = _key_features(log_key)
    weights, _ = _query_weights(log_query, log_shift)
    states = _prefix_sums(features, _with_one(values), window.last + 1)
    output = _normalised(weights @ states)
    return (output - targets.output).square().mean(-1)


def _normalised(terms: Tensor) -> Tensor:
    """Divides the numerator by the denominator, which is the last column: [..., D + 1] -> [..., D]."""
    return terms[..., :-1] / terms[..., -1:]


def _product_by_head(rows: Tensor, matrix: Tensor) -> Tensor:
    """Multiplies the rows [H, Q, G, N] of all query positions and query heads and a matrix [H, N, C] of each KV head:
    [H, Q, G, C].
    """
    product = rows.flatten(1, 2) @ matrix
    return product.unflatten(1, rows.shape[1:3])


def _prefix_sums(features: Tensor, values: Tensor, ends: Tensor) -> Tensor:
    """Sums phi(k) v^T over the first ends[i] keys for every i: [H, Q, M, D + 1]."""
    order = ends.argsort()
    bounds = [0, *ends[order].tolist()]
    widths = [stop - start for start, stop in pairwise(bounds)]
    part_features = features[:, : bounds[-1]].split(widths, 1)
    part_values = values[:, : bounds[-1]].split(widths, 1)
    sums = []
    for part, own_values in zip(part_features, part_values, strict=True):
        sums.append(part.transpose(-1, -2) @ own_values)
    sums = torch.stack(sums, 1).cumsum(1)  # of the keys up to each end, in ascending order
    return sums[:, order.argsort()]


def _key_features(log_key: Tensor) -> tuple[Tensor, Tensor]:
    """Returns features [H, L, M] in [0, 1] and their log scale [H, M], as in decoding."""
    if not log_key.shape[1]:
        return log_key, log_key.new_zeros(log_key.shape[0], log_key.shape[2])
    log_shift = log_key.amax(1).detach()
    return (log_key - log_shift.unsqueeze(1)).clamp_min(LEAST).exp(), log_shift


def _query_weights(log_query: Tensor, log_shift: Tensor) -> tuple[Tensor, Tensor]:
    """Returns phi_q [H, Q, G, M] times the keys' scale, in units of e^largest, and its log maximum `largest`
    [H, Q, G].
    """
    log_weights = log_query + log_shift[:, None, None]
    largest = log_weights.amax(-1).detach()
    return (log_weights - largest.unsqueeze(-1)).clamp_min(LEAST).exp(), largest


def _with_one(values: Tensor) -> Tensor:
    return F.pad(values, (0, 1), value=1.0)


def _sum_of_first(weights: Tensor, ks: Tensor, values: Tensor, best: Tensor) -> Tensor:
    """Sums the weighted values [H, L, D + 1] of each support's first K entries of `best`: [H, Q, G, S, D + 1].

    weights, best: [H, Q, G, K]; ks: [1, Q, S].
    """
    rank = torch.arange(weights.shape[-1], device=ks.device)
    first = rank < ks[:, :, None, :, None]  # [1, Q, 1, S, K]
    counted = weights.unsqueeze(-2) * first
    indices = best.unsqueeze(-2).expand(counted.shape)
    sums = weighted_sum(counted.flatten(1, 3), indices.flatten(1, 3), values)
    return sums.unflatten(1, counted.shape[1:-1])


def _log_rest(weights: Tensor, best: Tensor, ks: Tensor) -> Tensor:
    """Computes log Z_R of each support, [H, Q, G, S], from weights of the mid-region: sums, and does not subtract."""
    if not ks.shape[-1]:
        return weights.new_zeros(*weights.shape[:3], 0)
    rank = torch.arange(best.shape[-1], device=best.device)
    best_weights = weights.gather(-1, best)
    log_rest = []
    for k in ks.unbind(-1):
        unread = rank >= k[..., None, None]
        # The weights of the tokens that this support retrieves are replaced by 0.
        mass = weights.scatter(-1, best, best_weights * unread).sum(-1)
        log_rest.append(mass.log())
    return torch.stack(log_rest, -1)
