"""Residual-mass accounting: exact terms, residual terms, subtraction, one normalisation.

Terms stay unnormalised as (numerator, denominator, shift) until `merge` divides once, because normalised states cannot
carry a subtractive estimate.

Shape letters: R = query rows sharing keys, L = keys, D = value dimension, M = features. Leading `...` are free.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from residual_mass.core.selection import Selected, products_at, weighted_sum

CLAMP_RELATIVE = 1e-6
"""A residual below this share of the mid-region's mass is dropped: the subtraction left only rounding errors."""


class Terms(NamedTuple):
    """Unnormalised softmax terms in units of e^shift: nu = numerator * e^shift and Z = denominator * e^shift."""

    numerator: Tensor
    """[..., R, D]."""
    denominator: Tensor
    """[..., R]."""
    shift: Tensor
    """[..., R], finite, and arbitrary for an empty set."""

    def log_mass(self) -> Tensor:
        """log Z [..., R]; -inf for an empty set."""
        return self.denominator.log() + self.shift


class SummaryState(NamedTuple):
    """Fixed-size summary of the mid-region (the paper's eq. for S_M, u_M), in units of a per-feature shift.

    S[:, m] = numerator[m] * e^log_shift[m] and u[m] = mass[m] * e^log_shift[m].
    """

    numerator: Tensor
    """[..., M, D]."""
    mass: Tensor
    """[..., M]."""
    log_shift: Tensor
    """[..., M]."""


class Retrieved(NamedTuple):
    """Features and values of every row's retrieved tokens in K slots; unused slots have zero features."""

    features: Tensor
    """[..., R, K, M] cached key features."""
    values: Tensor
    """[..., R, K, D]."""


class Estimate(NamedTuple):
    """Inputs of the residual estimate, and the rows that add it."""

    state: SummaryState
    features: Tensor
    """[..., L, M] cached key features, exactly those summed into the state."""
    log_query: Tensor
    """[..., R, M] log phi_q."""
    adds_residual: Tensor
    """[R] bool."""
    subtracts: Tensor
    """[N] indices of the rows that first subtract the retrieved tokens from the summaries."""


def promoted(x: Tensor) -> Tensor:
    """Converts `x` to float32, unless its dtype is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def attention_scores(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """s = scale * q . k: [..., R, D] and [..., L, D] -> [..., R, L]."""
    return queries @ keys.transpose(-1, -2) * scale


def exact_terms(scores: Tensor, values: Tensor, support: Tensor) -> Terms:
    """Computes nu_E and Z_E of the tokens in `support` (the paper's eq. 3).

    Args:
        scores: [..., R, L].
        values: [..., L, D].
        support: [..., 1 or R, L] bool; an empty row gives zero terms.
    """
    shift = _finite_max(scores, support)
    weights = (scores - shift.unsqueeze(-1)).exp()
    # Not a product with the mask: outside the support e^(s - shift) may be infinite, and inf * 0 is NaN.
    weights = torch.where(support, weights, 0)
    return Terms(weights @ values, weights.sum(-1), shift)


def sink_terms(sinks: Tensor) -> Terms:
    """Returns the terms of attention sinks with logits [..., R]. A sink adds exp(sink) to Z and nothing to nu: the
    numerator is zero, [..., R, 1], and broadcasts.
    """
    numerator = torch.zeros_like(sinks).unsqueeze(-1)
    return Terms(numerator, torch.ones_like(sinks), sinks)


def key_features(log_features: Tensor, mid: Tensor) -> tuple[Tensor, Tensor]:
    """Scales the key features of the mid-region so that they cannot overflow.

    Args:
        log_features: [..., L, M] log phi_k(k).
        mid: [..., L] bool.

    Returns:
        features [..., L, M] = exp(log_features - log_shift), in [0, 1] and zero outside `mid`; log_shift [..., M].
    """
    inside = mid.unsqueeze(-1)
    by_feature = log_features.transpose(-1, -2)  # [..., M, L]: the maximum is over tokens
    # One shift per feature, and none per token, so that sums over tokens stay in its units.
    log_shift = _finite_max(by_feature, inside.transpose(-1, -2))
    features = (log_features - log_shift.unsqueeze(-2)).exp()
    features = torch.where(inside, features, 0)
    return features, log_shift


def summarise(features: Tensor, log_shift: Tensor, values: Tensor) -> SummaryState:
    """Sums S_M and u_M from exactly the cached features, so that subtracting all of them leaves only rounding errors.

    Args:
        features: [..., L, M], zero outside the mid-region; log_shift: [..., M]; values: [..., L, D].
    """
    numerator = features.transpose(-1, -2) @ values
    return SummaryState(numerator, features.sum(-2), log_shift)


def residual_terms(state: SummaryState, log_query: Tensor, retrieved: Retrieved | None = None) -> Terms:
    """Computes nu_R hat and Z_R hat as in the paper: forms S_R and u_R for every row, then multiplies by phi_q.

    Without `retrieved`, subtracts nothing (NoSub). Numerator and denominator are zero when the subtraction leaves less
    than CLAMP_RELATIVE of the mid-region's mass.

    Args:
        log_query: [..., R, M] log phi_q(q).
    """
    # The keys' scale joins the exponent, phi_q[m] e^log_shift[m], before the largest is factored out.
    log_weights = log_query + state.log_shift.unsqueeze(-2)
    shift = log_weights.amax(-1)
    weights = (log_weights - shift.unsqueeze(-1)).exp()
    whole_mass = (weights * state.mass.unsqueeze(-2)).sum(-1)
    if retrieved is None:
        return Terms(weights @ state.numerator, whole_mass, shift)
    retrieved_numerator = retrieved.features.transpose(-1, -2) @ retrieved.values  # [..., R, M, D]
    residual_numerator = state.numerator.unsqueeze(-3) - retrieved_numerator  # S_R = S_M - S_K for every row
    residual_mass = state.mass.unsqueeze(-2) - retrieved.features.sum(-2)
    numerator = (weights.unsqueeze(-2) @ residual_numerator).squeeze(-2)
    denominator = (weights * residual_mass).sum(-1)
    kept = ~(denominator <= CLAMP_RELATIVE * whole_mass)  # negated, so that NaN is kept and not dropped silently
    numerator = torch.where(kept.unsqueeze(-1), numerator, 0)
    denominator = torch.where(kept, denominator, 0)
    return Terms(numerator, denominator, shift)


def one_gather_terms(
    scores: Tensor, values: Tensor, anchors: Selected, retrieved: Selected, estimate: Estimate | None
) -> Terms:
    """Computes exact and residual terms of all rows in one pass over the values.

    By linearity nu_R hat = S phi_q - sum_{i in K} z_i v_i with z_i = <phi_q, phi_k(k_i)>, so no S_R is formed: token i
    of K has weight e^{s_i} - z_i in the numerator. NoSub is the case z = 0; TopK also omits S and u.

    Args:
        scores: [..., R, L].
        values: [..., L, D].
        anchors: the set A, indices [..., 1 or R, A].
        retrieved: the set K(q), indices [..., R, K], disjoint from the anchors.
        estimate: inputs of the residual estimate; None when no row adds one.
    """
    num_anchors = anchors.indices.shape[-1]
    rows = scores.shape[:-1]
    anchor_indices = anchors.indices.expand(*rows, -1)
    anchor_valid = anchors.valid.expand(*rows, -1)
    indices = torch.cat((anchor_indices, retrieved.indices), dim=-1)
    valid = torch.cat((anchor_valid, retrieved.valid), dim=-1)
    exact_scores = scores.gather(-1, indices)
    shift = _finite_max(exact_scores, valid)
    if estimate is not None:
        residual = _residual_weights(retrieved, estimate)
        # Choose the common unit after the clamp: a dropped residual with a huge phi must not make e^s underflow.
        shift = torch.where(residual.kept, torch.maximum(shift, residual.shift), shift)
    weights = (exact_scores - shift.unsqueeze(-1)).exp()
    weights = torch.where(valid, weights, 0)
    denominator = weights.sum(-1)
    if estimate is not None:
        # At most 1 in kept rows; in the others it may overflow.
        unit = torch.where(residual.kept, (residual.shift - shift).exp(), 0)
        z = unit.unsqueeze(-1) * residual.z
        weights[..., num_anchors:] -= z  # negative where phi overestimates a retrieved token
        denominator = denominator + unit * residual.mass
    numerator = weighted_sum(weights, indices, values)
    if estimate is not None:
        phi_q = unit.unsqueeze(-1) * residual.query
        numerator = numerator + phi_q @ estimate.state.numerator
    return Terms(numerator, denominator, shift)


def estimated_log_mass(retrieved: Selected, estimate: Estimate) -> Tensor:
    """Computes log Z_R hat [..., R], the mass that `one_gather_terms` adds; -inf in rows where it adds nothing."""
    residual = _residual_weights(retrieved, estimate)
    log_mass = residual.mass.log() + residual.shift
    return torch.where(residual.kept, log_mass, -torch.inf)


class _ResidualWeights(NamedTuple):
    """In units of exp(shift): phi_q per row [..., R, M], z of the retrieved tokens [..., R, K], Z_R hat [..., R]."""

    query: Tensor
    z: Tensor
    mass: Tensor
    shift: Tensor
    kept: Tensor
    """[..., R] bool, False where the residual is dropped or the row adds none."""


def _residual_weights(retrieved: Selected, estimate: Estimate) -> _ResidualWeights:
    log_weights = estimate.log_query + estimate.state.log_shift.unsqueeze(-2)
    shift = log_weights.amax(-1)
    query = (log_weights - shift.unsqueeze(-1)).exp()
    query = torch.where(estimate.adds_residual.unsqueeze(-1), query, 0)  # keeps NaNs of the maps out of other rows
    whole_mass = (query * estimate.state.mass.unsqueeze(-2)).sum(-1)
    z = _subtracted(query, retrieved, estimate)
    mass = whole_mass - z.sum(-1)
    dropped = mass <= CLAMP_RELATIVE * whole_mass  # False for NaN, which must stay visible
    return _ResidualWeights(query, z, mass, shift, estimate.adds_residual & ~dropped)


def _subtracted(query: Tensor, retrieved: Selected, estimate: Estimate) -> Tensor:
    """Computes z of the retrieved tokens [..., R, K], 0 in rows that do not subtract."""
    rows = estimate.subtracts
    if len(rows) == query.shape[-2]:
        return _products_of_read(query, retrieved, estimate)
    chosen = Selected(*(x.index_select(-2, rows) for x in retrieved))
    z = _products_of_read(query.index_select(-2, rows), chosen, estimate)
    in_all_rows = z.new_zeros(retrieved.indices.shape)
    return in_all_rows.index_copy_(-2, rows, z)


def _products_of_read(query: Tensor, retrieved: Selected, estimate: Estimate) -> Tensor:
    """Computes <phi_q, phi_k> of the retrieved tokens, 0 in unused slots: [..., R, K]."""
    products = products_at(query, estimate.features, retrieved.indices)
    return torch.where(retrieved.valid, products, 0)


def merge(*terms: Terms) -> Tensor:
    """Adds up terms and normalises once (the paper's eqs. for y_TopK+phi and y_impl): [..., R, D].

    Shifts may differ. Terms with denominator 0 are ignored; every row needs terms with a positive one.
    """
    total = added(*terms)
    return total.numerator / total.denominator.unsqueeze(-1)


def added(*terms: Terms) -> Terms:
    """Adds up terms without normalising. As in `merge`, shifts may differ and empty terms are ignored."""
    # Not -inf: the shift of a sum of empty terms must be finite.
    lowest = torch.finfo(terms[0].shift.dtype).min
    shifts = []
    for term in terms:
        shifts.append(torch.where(term.denominator > 0, term.shift, lowest))
    common = torch.stack(torch.broadcast_tensors(*shifts)).amax(0)
    numerator = 0
    denominator = 0
    for term in terms:
        scale = (term.shift - common).exp()
        scale = torch.where(term.denominator > 0, scale, 0)  # the scale of an empty term may overflow
        numerator = numerator + term.numerator * scale.unsqueeze(-1)
        denominator = denominator + term.denominator * scale
    return Terms(numerator, denominator, common)


def _finite_max(scores: Tensor, mask: Tensor) -> Tensor:
    """Returns the largest masked score along the last dimension, 0 for an empty mask or no columns."""
    if scores.shape[-1] == 0:
        return scores.new_zeros(scores.shape[:-1])
    highest = scores.masked_fill(~mask, -torch.inf).amax(-1)
    # With a shift of -inf, s - shift would be infinite or NaN.
    return torch.where(highest > -torch.inf, highest, 0)
