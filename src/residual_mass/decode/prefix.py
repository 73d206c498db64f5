"""Attention of new tokens, to a prefix through their methods and to the tokens after it exactly.

A prefix is read-only and shared by query rows: arms, query heads and tokens.

Shape letters: E = examples, N = batch rows, Hq / Hkv = query / KV heads, G = Hq / Hkv, A = arms, T = new tokens, R =
A * G * T query rows of a KV head, L = prefix columns (right- or left-padded), D = head dimension, M = features.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from residual_mass.core.accounting import (
    Estimate,
    SummaryState,
    Terms,
    added,
    attention_scores,
    estimated_log_mass,
    exact_terms,
    key_features,
    merge,
    one_gather_terms,
    promoted,
    sink_terms,
    summarise,
)
from residual_mass.core.feature_maps import FoldedMap
from residual_mass.core.selection import Partition, Selected, members, partition, retrieved_count
from residual_mass.methods import Method, Residual, Seen, Selector
from residual_mass.methods.arms import Arm
from residual_mass.methods.interface import Choice, Layout
from residual_mass.model.layers import sinks_of
from residual_mass.spec.arms import ArmSpec
from residual_mass.spec.settings import AnchorSpec

Map = FoldedMap | nn.Module
State = tuple[Tensor, ...]
"""What a selector or a residual has prepared of a prefix."""
KEY_CHUNK = 8192
"""Keys mapped at once, which bounds the inner activations (d_emb wide) of a 64k prefix."""
MAPS_MISSING = "an arm needs feature maps, but there are none"


class Span(NamedTuple):
    """The real columns of a prefix, which have no gaps, for the kernels."""

    first: Tensor
    """[E] int32, the first real column."""
    last: Tensor
    """[E] int32, one past the last."""
    anchors: AnchorSpec


@dataclass(frozen=True)
class PrefixLayer:
    """One layer's prefix: keys and values [E, Hkv, L, D], and its anchors."""

    keys: Tensor
    values: Tensor
    partition: Partition
    """Masks [E, 1, 1, L]."""
    anchors: Selected
    """The anchors again, as indices [E, 1, 1, |A|]."""
    states: dict[Residual, State] = field(default_factory=dict)
    """Summaries of residuals with terms of their own, computed at first use."""
    scanned: dict[Selector, State] = field(default_factory=dict)
    """Summaries of selectors, computed at first use."""
    span: Span | None = None
    """None if the real columns may have gaps."""
    summarised: Tensor | None = None
    """[E], tokens of the mid-region that each row's summaries were computed from; None for all."""

    @property
    def mid_columns(self) -> Tensor:
        """[E, 1, L] bool, the mid-region as a mask of keys: `partition.mid` without its dimension of query rows."""
        return self.partition.mid[:, :, 0]

    def state(self, residual: Residual) -> State:
        if residual not in self.states:
            keys = promoted(self.keys)
            values = promoted(self.values)
            self.states[residual] = residual.prepare(keys, values, self.mid_columns)
        return self.states[residual]

    def scan(self, selector: Selector) -> State:
        if selector not in self.scanned:
            keys = promoted(self.keys)
            self.scanned[selector] = selector.prepare(keys, self.mid_columns)
        return self.scanned[selector]

    def grown(self, keys: Tensor, values: Tensor, real: Tensor, anchors: AnchorSpec) -> PrefixLayer:
        """Builds the prefix with further columns, and updates the summaries. The tail anchors are those of the new
        prefix; tail anchors of the old prefix join the mid-region.

        Updates keep the clusters, channels and groups that a summary was computed with. Once the mid-region of a row
        has doubled, the summaries of this row are computed again from all its keys, as they would be without the other
        rows.
        """
        length = self.partition.mid.shape[-1]
        layer = build_prefix(keys, values, real, anchors)
        now = layer.mid_columns.sum(-1).flatten()  # [E], tokens of the mid-region
        then = self.summarised
        if then is None:
            then = self.mid_columns.sum(-1).flatten()
        anew = (now >= 2 * then) & (now > 0)
        if anew.all():
            return layer
        layer = replace(layer, summarised=torch.where(anew, now, then))
        layer._update_from(self, start=max(0, length - anchors.tail))  # the old tail is the first that can join
        if anew.any():
            layer._summarise_again(anew.nonzero().flatten())
        return layer

    def _update_from(self, shorter: PrefixLayer, start: int) -> None:
        """Computes the summaries from those of a shorter prefix, whose mid-region is the same before column `start`."""
        mid = self.mid_columns
        further = mid.shape[-1] - shorter.mid_columns.shape[-1]
        mid_before = nn.functional.pad(shorter.mid_columns, (0, further))
        joined = (mid & ~mid_before)[..., start:]
        new_keys = promoted(self.keys[:, :, start:])
        new_values = promoted(self.values[:, :, start:])
        for residual, state in shorter.states.items():
            self.states[residual] = residual.update(state, new_keys, new_values, joined, start)
        for selector, state in shorter.scanned.items():
            keys = promoted(self.keys)
            self.scanned[selector] = selector.update(state, keys, mid, start)

    def _summarise_again(self, rows: Tensor) -> None:
        """Replaces the summaries of some rows [n] with those computed from all their keys."""
        own = replace(self.at(rows), states={}, scanned={})

        def with_own(whole: State, parts: State) -> State:
            mixed = []
            for tensor, part in zip(whole, parts, strict=True):
                mixed.append(_with_rows(tensor, rows, part))
            return _of_kind(whole, mixed)

        for residual, state in self.states.items():
            self.states[residual] = with_own(state, own.state(residual))
        for selector, state in self.scanned.items():
            self.scanned[selector] = with_own(state, own.scan(selector))

    def at(self, examples: Tensor) -> PrefixLayer:
        """Selects examples, given as indices."""
        keys = self.keys[examples]
        values = self.values[examples]
        partition = _at(self.partition, examples)
        anchors = _at(self.anchors, examples)
        span = None
        if self.span is not None:
            first = self.span.first[examples]
            last = self.span.last[examples]
            span = Span(first, last, self.span.anchors)
        states = _each_at(self.states, examples)
        scanned = _each_at(self.scanned, examples)
        chosen = replace(self, keys=keys, values=values, partition=partition, anchors=anchors, span=span)
        return replace(chosen, states=states, scanned=scanned)


def _at(parts: Any, examples: Tensor) -> Any:
    """Selects examples, given as indices, of each tensor [E, ...] of a tuple."""
    return _of_kind(parts, [part[examples] for part in parts])


def _each_at(states: dict[Any, State], examples: Tensor) -> dict[Any, State]:
    return {part: _at(state, examples) for part, state in states.items()}


def _of_kind(parts: Any, tensors: Iterable[Tensor]) -> Any:
    """Returns tensors as a tuple of the class of `parts`, which may be a named one."""
    if hasattr(parts, "_fields"):
        return type(parts)(*tensors)
    return tuple(tensors)


def _with_rows(whole: Tensor, rows: Tensor, part: Tensor) -> Tensor:
    """Returns `whole` [E, ...] with some of its rows replaced by `part` [n, ...], which is smaller where an update has
    appended clusters: a cluster without tokens is zero.
    """
    padding: list[int] = []
    for dim in range(whole.dim() - 1, 0, -1):  # `pad` takes the last dimension first
        padding += [0, whole.shape[dim] - part.shape[dim]]
    padded = nn.functional.pad(part, padding)
    return whole.index_copy(0, rows, padded)


@dataclass(frozen=True)
class Summary:
    """Summary state and features of one layer's prefix under one set of maps."""

    state: SummaryState
    features: Tensor
    """[E, Hkv, L, M] cached key features, exactly those summed into the state."""

    @cached_property
    def joined(self) -> Tensor:
        """[E, Hkv, M, D + 1] S and u of the state, for the kernels."""
        mass = self.state.mass.unsqueeze(-1)
        return torch.cat((self.state.numerator, mass), dim=-1)

    def at(self, examples: Tensor) -> Summary:
        """Selects examples, given as indices."""
        return Summary(_at(self.state, examples), self.features[examples])


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
    most: int
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
    most = max((max(counts, default=0) for counts in k), default=0)

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
    return ArmRows(adds_rows, subtracting, k_rows, any(adds_residual), own, selectors, layout, methods, most)


def retrieved_by(arm: Arm | ArmSpec, prefix_length: int, anchors: AnchorSpec, nominal_length: int | None) -> int:
    """Returns K of an arm on a prefix, at most |M|; `full` retrieves the whole mid-region."""
    num_anchors = min(prefix_length, anchors.sink + anchors.tail)
    mid = prefix_length - num_anchors
    if arm.budget_percent is None:
        return mid
    return min(mid, retrieved_count(arm.budget_percent, nominal_length or prefix_length, num_anchors))


def build_prefix(keys: Tensor, values: Tensor, real: Tensor, anchors: AnchorSpec, gapless: bool = False) -> PrefixLayer:
    """Builds one layer's prefix.

    Args:
        keys, values: [E, Hkv, L, D].
        real: [E, L] bool, False on padding.
        gapless: whether padding is known to be at the ends only; to find out would synchronise with the device.
    """
    masks = partition(real, anchors.sink, anchors.tail)
    anchor_mask = masks.anchors[:, None, None]  # [E, 1, 1, L], for all KV heads and query rows
    mid_mask = masks.mid[:, None, None]
    span = None
    if gapless:
        first = real.to(torch.int32).argmax(-1).to(torch.int32)  # of equal values, argmax gives the first
        last = first + real.sum(-1, dtype=torch.int32)
        span = Span(first, last, anchors)
    slots = members(anchor_mask, anchors.sink + anchors.tail)
    return PrefixLayer(keys, values, Partition(anchor_mask, mid_mask), slots, span=span)


def summarise_prefix(layer: PrefixLayer, key_map: Map) -> Summary:
    """Computes features and summary state of one layer's mid-region; `key_map` is phi_k stacked over Hkv."""
    log_features = map_heads(key_map, layer.keys)
    features, log_shift = key_features(log_features, layer.mid_columns)
    state = summarise(features, log_shift, promoted(layer.values))
    if features.is_cuda:
        features = features.contiguous()  # rows for the kernels
    return Summary(state, features)


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


def map_heads(feature_map: Map, x: Tensor) -> Tensor:
    """Computes log phi of vectors [E, H, N, D] with maps stacked over H: [E, H, N, M] float32 or wider."""
    examples, heads, n, d = x.shape
    by_head = promoted(x).transpose(0, 1)
    stacked = by_head.reshape(heads, examples * n, d)  # a head's map takes the vectors of all examples
    parts = [feature_map(chunk) for chunk in stacked.split(KEY_CHUNK, dim=1)]
    features = torch.cat(parts, dim=1)  # [H, E * N, M]
    return features.view(heads, examples, n, -1).transpose(0, 1)


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
    if (sinks := sinks_of(layer)) is not None:
        by_group = promoted(sinks).unflatten(0, (kv_heads, -1))  # [Hkv, G]
        terms.append(sink_terms(by_group.repeat_interleave(tokens, 1)))
    merged = merge(*terms)  # [N, Hkv, G * T, D]
    output = merged.unflatten(2, (-1, tokens)).flatten(1, 2)
    return output.transpose(1, 2).to(query.dtype)
