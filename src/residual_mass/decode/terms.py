"""Attention of new tokens: to a prefix by their methods, and exactly to the tokens after it.

A prefix is read-only and shared by query rows: arms, query heads and tokens.

Shape letters: E = examples, N = batch rows, Hq / Hkv = query / KV heads, G = Hq / Hkv, A = arms, T = new tokens, R =
A * G * T query rows of a KV head, L = prefix columns (right- or left-padded), D = head dimension, M = features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from residual_mass.core.accounting import (
    Estimate,
    Terms,
    added,
    attention_scores,
    estimated_log_mass,
    exact_terms,
    merge,
    one_gather_terms,
    promoted,
    sink_terms,
)
from residual_mass.core.selection import Selected, retrieved_count
from residual_mass.decode.prefix import PrefixLayer, Summary
from residual_mass.methods import Method, Residual, Seen, Selector
from residual_mass.methods.arms import Arm
from residual_mass.methods.interface import Choice, Layout
from residual_mass.model.layers import sinks_of
from residual_mass.spec.arms import ArmSpec
from residual_mass.spec.settings import AnchorSpec

MAPS_MISSING = "an arm needs feature maps, but there are none"


@dataclass(frozen=True)
class ArmRows:
    """Settings of each query row of a KV head; all G heads of an arm have the same."""

    adds_residual: Tensor
    """[R] bool."""
    subtracts: Tensor
    """[N] indices of the rows that subtract."""
    k: Tensor
    """[E, 1, R] int64, tokens to retrieve."""
    any_residual: bool
    own: tuple[tuple[Residual, Tensor], ...]
    """Residuals with terms of their own, each with the indices of its rows."""
    selectors: tuple[tuple[Selector, Tensor], ...]
    """Selectors, each with the indices of its rows."""
    layout: Layout
    methods: tuple[Method, ...]
    """Of the arms, in order."""
    max_k: int
    """The largest of k, known on the host without synchronisation."""

    @property
    def uses_scan(self) -> bool:
        """Whether a residual uses the scores that its selector saw."""
        return any(residual.uses_scan for residual, _ in self.own)


def arm_rows(
    arms: Sequence[Arm | ArmSpec],
    group: int,
    prefix_lengths: Sequence[int],
    anchors: AnchorSpec,
    nominal_length: int | None,
    device: torch.device,
    tokens: int = 1,
) -> ArmRows:
    """Builds `group` rows per partial arm, for its query heads and `tokens` tokens. L in the formula of K is
    `nominal_length`, or each prefix's own length if that is None.
    """
    methods = tuple(arm.rule for arm in arms)
    adds_residual = [method.phi is not None for method in methods]
    subtracts = [method.subtracts for method in methods]
    k = []
    for length in prefix_lengths:
        k.append([retrieved_by(arm, length, anchors, nominal_length) for arm in arms])
    max_k = max((max(counts, default=0) for counts in k), default=0)

    def rows(settings: Sequence[Any]) -> Tensor:
        """Repeats settings [..., A] of arms for their rows: [..., R]."""
        return torch.tensor(settings, device=device).repeat_interleave(group, dim=-1)

    def rows_by_part(parts: Sequence[Any]) -> tuple[tuple[Any, Tensor], ...]:
        """Returns each distinct part of the methods with the indices of its rows."""
        found = []
        for part in dict.fromkeys(parts):
            if part is not None:
                uses_part = rows([own == part for own in parts])
                found.append((part, uses_part.nonzero().flatten()))
        return tuple(found)

    own = rows_by_part([method.own for method in methods])
    selectors = rows_by_part([method.selector for method in methods])
    layout = Layout(group // tokens, tokens)
    adds_rows = rows(adds_residual)
    subtracting = rows(subtracts).nonzero().flatten()
    k_rows = rows(k)[:, None]
    return ArmRows(adds_rows, subtracting, k_rows, any(adds_residual), own, selectors, layout, methods, max_k)


def retrieved_by(arm: Arm | ArmSpec, prefix_length: int, anchors: AnchorSpec, nominal_length: int | None) -> int:
    """Returns K of an arm on a prefix, at most |M|; `full` retrieves the whole mid-region."""
    # A short prefix consists of anchors alone.
    num_anchors = min(prefix_length, anchors.sink + anchors.tail)
    mid = prefix_length - num_anchors
    if arm.budget_percent is None:
        return mid
    return min(mid, retrieved_count(arm.budget_percent, nominal_length or prefix_length, num_anchors))


class Reading(NamedTuple):
    """Tokens that query rows read of a prefix, the same for every method with their selectors."""

    queries: Tensor
    """[E, Hkv, R, D], scaled."""
    scores: Tensor
    """[E, Hkv, R, L], of all tokens."""
    retrieved: Selected
    """Slots [E, Hkv, R, K]."""
    threshold: Tensor
    """[E, Hkv, R], as in `methods.interface.Choice`."""
    scanned: Tensor | None
    """[E, Hkv, R, L], as in `Choice`; None for several selectors if no residual uses it."""

    def at(self, rows: Tensor) -> Reading:
        """Selects query rows, given as indices."""
        queries = self.queries[:, :, rows]
        scores = self.scores[:, :, rows]
        indices = self.retrieved.indices[:, :, rows]
        valid = self.retrieved.valid[:, :, rows]
        threshold = self.threshold[:, :, rows]
        scanned = None if self.scanned is None else self.scanned[:, :, rows]
        return Reading(queries, scores, Selected(indices, valid), threshold, scanned)


def prefix_terms(
    queries: Tensor, log_query: Tensor | None, layer: PrefixLayer, summary: Summary | None, arms: ArmRows, scale: float
) -> Terms:
    """Computes unnormalised terms of partial arms over the prefix, in float32 or wider.

    Args:
        queries: [E, Hkv, R, D].
        log_query: [E, Hkv, R, M] log phi_q; like `summary`, None if no arm adds a residual.
    """
    return terms_of(read_prefix(queries, layer, arms, scale), log_query, layer, summary, arms)


def read_prefix(queries: Tensor, layer: PrefixLayer, arms: ArmRows, scale: float) -> Reading:
    """Selects tokens for queries [E, Hkv, R, D]."""
    scaled = promoted(queries) * scale
    scores = scaled @ promoted(layer.keys).transpose(-1, -2)
    mid = layer.partition.mid
    choices = []
    for selector, rows in arms.selectors:
        own_queries = scaled
        own_scores = scores
        if len(arms.selectors) > 1:  # a single selector has all rows: no copy
            own_queries = scaled[:, :, rows]
            own_scores = scores[:, :, rows]
        state = layer.scan(selector)
        own_k = arms.k[..., rows]
        choices.append(selector.select(own_queries, own_scores, state, mid, own_k, arms.layout))
    if len(choices) == 1:
        return Reading(scaled, scores, *choices[0])
    order = torch.cat([rows for _, rows in arms.selectors]).argsort()  # from rows by selector to rows by arm
    retrieved, threshold, scanned = _joined(choices, order, arms.uses_scan)
    return Reading(scaled, scores, retrieved, threshold, scanned)


def _joined(choices: Sequence[Choice], order: Tensor, with_scan: bool) -> tuple[Selected, Tensor, Tensor | None]:
    """Joins the choices of several selectors as one over all rows, which `order` [R] takes from their concatenation.

    Returns:
        Slots [E, Hkv, R, K] with K of the largest choice, thresholds [E, Hkv, R], and scanned scores [E, Hkv, R, L].
    """

    def by_row(parts: list[Tensor]) -> Tensor:
        return torch.cat(parts, dim=2)[:, :, order]

    slots = max(choice.read.indices.shape[-1] for choice in choices)
    indices = []
    valid = []
    for choice in choices:
        unused = slots - choice.read.indices.shape[-1]
        indices.append(nn.functional.pad(choice.read.indices, (0, unused)))
        valid.append(nn.functional.pad(choice.read.valid, (0, unused)))
    threshold = by_row([choice.threshold for choice in choices])
    scanned = by_row([choice.scanned for choice in choices]) if with_scan else None
    return Selected(by_row(indices), by_row(valid)), threshold, scanned


def terms_of(
    reading: Reading, log_query: Tensor | None, layer: PrefixLayer, summary: Summary | None, arms: ArmRows
) -> Terms:
    """Computes the terms of `prefix_terms` from a reading."""
    estimate = _estimate(log_query, summary, arms) if arms.any_residual else None
    values = promoted(layer.values)
    terms = one_gather_terms(reading.scores, values, layer.anchors, reading.retrieved, estimate)
    for rows, own in own_residuals(reading, layer, arms):
        if len(rows) == terms.shift.shape[2]:
            return added(terms, own)
        exact = Terms(*(part[:, :, rows] for part in terms))
        mixed = []
        for whole, part in zip(terms, added(exact, own), strict=True):
            mixed.append(whole.index_copy(2, rows, part))
        terms = Terms(*mixed)
    return terms


def phi_log_mass(reading: Reading, log_query: Tensor | None, summary: Summary | None, arms: ArmRows) -> Tensor:
    """Computes log Z_R hat [E, Hkv, R] of the feature maps, the mass that `terms_of` adds for unread tokens; -inf in
    rows where it adds nothing.
    """
    return estimated_log_mass(reading.retrieved, _estimate(log_query, summary, arms))


def _estimate(log_query: Tensor | None, summary: Summary | None, arms: ArmRows) -> Estimate:
    assert log_query is not None and summary is not None, MAPS_MISSING
    return Estimate(summary.state, summary.features, log_query, arms.adds_residual, arms.subtracts)


def own_residuals(reading: Reading, layer: PrefixLayer, arms: ArmRows) -> Iterator[tuple[Tensor, Terms]]:
    """Yields residuals' own terms [E, Hkv, R, ...] with the indices of their rows; terms are zero in rows that read the
    whole mid-region.
    """
    for residual, rows, seen in seen_by_residuals(reading, layer, arms):
        estimate = Terms(*residual.terms(seen, layer.state(residual)))
        mid_tokens = layer.partition.mid.sum(-1)
        # `Residual.terms` may return anything for a row without unread tokens.
        has_unread = mid_tokens > seen.read.valid.sum(-1)
        numerator = torch.where(has_unread.unsqueeze(-1), estimate.numerator, 0)
        denominator = torch.where(has_unread, estimate.denominator, 0)
        yield rows, Terms(numerator, denominator, estimate.shift)


def seen_by_residuals(reading: Reading, layer: PrefixLayer, arms: ArmRows) -> Iterator[tuple[Residual, Tensor, Seen]]:
    """Yields residuals with terms of their own, with the indices of their rows and their inputs."""
    if not arms.own:
        return
    all_rows, length = reading.scores.shape[2:]
    read = reading.retrieved.mask(length)
    unread = layer.partition.mid & ~read
    values = promoted(layer.values)
    anchors = layer.partition.anchors
    for residual, rows in arms.own:
        own = reading
        own_unread = unread
        if len(rows) < all_rows:
            own = reading.at(rows)
            own_unread = unread[:, :, rows]
        queries, scores, retrieved, threshold, scanned = own
        seen = Seen(queries, threshold, retrieved, own_unread, scores, values, scanned, anchors)
        yield residual, rows, seen


def own_precision(query: Tensor) -> torch.autocast:
    """Returns a context in which terms are computed in float32 or wider within the caller's autocast, too."""
    return torch.autocast(query.device.type, enabled=False)


def rows_of_heads(x: Tensor, kv_heads: int, arms: int = 1) -> Tensor:
    """Groups the rows of a KV head: [E * A, Hq, T, C] -> [E, Hkv, A * G * T, C]."""
    by_arm = x.unflatten(0, (-1, arms))  # [E, A, Hq, T, C]
    by_group = by_arm.unflatten(2, (kv_heads, -1))  # [E, A, Hkv, G, T, C]
    return by_group.transpose(1, 2).flatten(2, 4)


def grouped(x: Tensor, kv_heads: int) -> Tensor:
    """Groups query rows by KV head: [Hq, Q, C] -> [Hkv, G * Q, C]."""
    return x.unflatten(0, (kv_heads, -1)).flatten(1, 2)


def merge_with_prefix(
    layer: nn.Module, query: Tensor, prefix: Terms, near: Sequence[tuple[Tensor, Tensor, Tensor]], scale: float
) -> Tensor:
    """Merges a prefix's terms with the exact terms of tokens after it and with the layer's sinks: [N, T, Hq, D].

    Args:
        query: [N, Hq, T, D]; prefix: [N, Hkv, G * T, ...].
        near: keys and values [N or 1, Hkv, C, D], and the mask [N or 1, T, C] bool of those that new tokens see.
    """
    tokens = query.shape[2]
    kv_heads = prefix.shift.shape[1]
    rows = promoted(query).unflatten(1, (kv_heads, -1))  # [N, Hkv, G, T, D]
    if tokens == 1:
        rows = rows.transpose(2, 3)  # heads share a product, and the keys need no copy for each
    terms = [prefix]
    for keys, values, visible in near:
        scores = attention_scores(rows, promoted(keys).unsqueeze(2), scale)
        near_values = promoted(values).unsqueeze(2)
        exact = exact_terms(scores, near_values, visible[:, None, None])
        terms.append(Terms(*(part.flatten(2, 3) for part in exact)))
    sinks = sinks_of(layer)
    if sinks is not None:
        by_group = promoted(sinks).unflatten(0, (kv_heads, -1))  # [Hkv, G]
        terms.append(sink_terms(by_group.repeat_interleave(tokens, 1)))  # [Hkv, G * T]
    merged = merge(*terms)  # [N, Hkv, G * T, D]
    output = merged.unflatten(2, (-1, tokens)).flatten(1, 2)
    return output.transpose(1, 2).to(query.dtype)
