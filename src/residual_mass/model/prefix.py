"""Attention of new tokens, to a prefix through their methods and to the tokens after it exactly.

A prefix is read-only and shared by query rows: arms, query heads and tokens.

Shape letters: E = examples, N = batch rows, Hq / Hkv = query / KV heads, G = Hq / Hkv, A = arms, T = new tokens, R =
A * G * T query rows of a KV head, L = prefix columns (right- or left-padded), D = head dimension, M = features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from residual_mass.core.fused import DecodeCache, MethodRows, kernels_run_on, tiles_fit
from residual_mass.core.fused.cache import ADDS, MOMENTS, SUBTRACTS
from residual_mass.core.moments import MomentState
from residual_mass.core.selection import Partition, Selected, members, partition, retrieved_count
from residual_mass.core.settings import AnchorSpec
from residual_mass.methods import Residual, Seen, Selector, TopK
from residual_mass.methods.arms import Arm, ArmSpec
from residual_mass.methods.interface import Layout
from residual_mass.model.hook import sinks_of

Map = FoldedMap | nn.Module
KEY_CHUNK = 8192
"""Keys mapped at once, which bounds the inner activations (d_emb wide) of a 64k prefix."""
MAPS_MISSING = "an arm needs feature maps, but there are none"
LONGEST = 2**21
"""Columns that the selection of the kernels can count (`core.fused.triton_selection`)."""
MOST_ROWS = 2**16
"""Query rows of all examples and KV heads that one launch can number."""


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
    states: dict[Residual, tuple[Tensor, ...]] = field(default_factory=dict)
    """Summaries of residuals with terms of their own, computed at first use."""
    scanned: dict[Selector, tuple[Tensor, ...]] = field(default_factory=dict)
    """Summaries of selectors, computed at first use."""
    span: Span | None = None
    """None if the real columns may have gaps."""
    summarised: Tensor | None = None
    """[E], tokens of the mid-region that each row's summaries were computed from; None for all."""

    def state(self, residual: Residual) -> tuple[Tensor, ...]:
        if residual not in self.states:
            keys, values = promoted(self.keys), promoted(self.values)
            self.states[residual] = residual.prepare(keys, values, self.partition.mid[:, :, 0])
        return self.states[residual]

    def scan(self, selector: Selector) -> tuple[Tensor, ...]:
        if selector not in self.scanned:
            self.scanned[selector] = selector.prepare(promoted(self.keys), self.partition.mid[:, :, 0])
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
        now = layer.partition.mid.sum(-1).flatten()
        then = self.partition.mid.sum(-1).flatten() if self.summarised is None else self.summarised
        anew = now >= 2 * then
        if anew.all():
            return layer
        layer = replace(layer, summarised=torch.where(anew, now, then))
        start = max(0, length - anchors.tail)
        before = nn.functional.pad(self.partition.mid, (0, keys.shape[2] - length))
        joined = (layer.partition.mid & ~before)[:, :, 0, start:]
        new_keys, new_values = (promoted(x[:, :, start:]) for x in (keys, values))
        for residual, state in self.states.items():
            layer.states[residual] = residual.update(state, new_keys, new_values, joined, start)
        for selector, summary in self.scanned.items():
            layer.scanned[selector] = selector.update(summary, promoted(keys), layer.partition.mid[:, :, 0], start)
        if anew.any():
            layer._summarise_again(anew.nonzero().flatten())
        return layer

    def _summarise_again(self, rows: Tensor) -> None:
        """Replaces the summaries of some rows [n] with those computed from all their keys."""
        own = replace(self.at(rows), states={}, scanned={})

        def with_own(whole: Any, parts: Any) -> Any:
            mixed = [_with_rows(x, rows, part) for x, part in zip(whole, parts, strict=True)]
            return type(whole)(*mixed) if hasattr(whole, "_fields") else tuple(mixed)

        for residual, state in self.states.items():
            self.states[residual] = with_own(state, own.state(residual))
        for selector, summary in self.scanned.items():
            self.scanned[selector] = with_own(summary, own.scan(selector))

    def at(self, examples: Tensor) -> PrefixLayer:
        """Selects examples, given as indices."""

        def at(parts: Any) -> Any:
            chosen = [part[examples] for part in parts]
            return type(parts)(*chosen) if hasattr(parts, "_fields") else tuple(chosen)

        return replace(
            self,
            keys=self.keys[examples],
            values=self.values[examples],
            partition=at(self.partition),
            anchors=at(self.anchors),
            states={residual: at(state) for residual, state in self.states.items()},
            scanned={selector: at(state) for selector, state in self.scanned.items()},
            span=self.span and Span(*at(self.span[:2]), self.span.anchors),
        )


def _with_rows(whole: Tensor, rows: Tensor, part: Tensor) -> Tensor:
    """Returns `whole` [E, ...] with some of its rows replaced by `part` [n, ...], which is smaller where an update has
    appended clusters: a cluster without tokens is zero.
    """
    missing = [large - small for large, small in zip(whole.shape[1:], part.shape[1:], strict=True)]
    return whole.index_copy(0, rows, nn.functional.pad(part, [n for size in reversed(missing) for n in (0, size)]))


@dataclass(frozen=True)
class Summary:
    """Summary state and features of one layer's prefix under one set of maps."""

    state: SummaryState
    features: Tensor
    """[E, Hkv, L, M] cached key features, exactly those summed into the state."""

    @cached_property
    def joined(self) -> Tensor:
        """[E, Hkv, M, D + 1] S and u of the state, for the kernels."""
        return torch.cat((self.state.numerator, self.state.mass.unsqueeze(-1)), dim=-1)

    def at(self, examples: Tensor) -> Summary:
        """Selects examples, given as indices."""
        return Summary(SummaryState(*(part[examples] for part in self.state)), self.features[examples])


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
    for_kernels: MethodRows | None
    """The settings for the kernels; None if an arm has a method that they do not compute."""

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
    rules = [arm.rule for arm in arms]
    k = [[retrieved_by(arm, n, anchors, nominal_length) for arm in arms] for n in prefix_lengths]
    adds, subtracts = [rule.phi is not None for rule in rules], [rule.subtracts for rule in rules]

    def rows(settings: Sequence[Any], dtype: torch.dtype | None = None) -> Tensor:
        return torch.tensor(settings, dtype=dtype, device=device).repeat_interleave(group, dim=-1)

    def indices(parts: Sequence[Any]) -> tuple[tuple[Any, Tensor], ...]:
        distinct = dict.fromkeys(part for part in parts if part is not None)
        return tuple((part, rows([own == part for own in parts]).nonzero().flatten()) for part in distinct)

    for_kernels = None
    if all(rule.selector == TopK() and (rule.own is None or rule.own.fused) for rule in rules):
        kinds = [ADDS * (r.phi is not None) + SUBTRACTS * r.subtracts + MOMENTS * (r.own is not None) for r in rules]
        most = max((max(counts, default=0) for counts in k), default=0)
        for_kernels = MethodRows(rows(k, torch.int32), rows(kinds, torch.int32), most)
    return ArmRows(
        rows(adds),
        rows(subtracts).nonzero().flatten(),
        rows(k)[:, None],
        any(adds),
        indices([rule.own for rule in rules]),
        indices([rule.selector for rule in rules]),
        Layout(group // tokens, tokens),
        for_kernels,
    )


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
    masks = Partition(masks.anchors[:, None, None], masks.mid[:, None, None])
    first = real.to(torch.int32).argmax(-1)
    span = Span(first.to(torch.int32), (first + real.sum(-1)).to(torch.int32), anchors) if gapless else None
    slots = members(masks.anchors, anchors.sink + anchors.tail)
    return PrefixLayer(keys, values, masks, slots, span=span)


def summarise_prefix(layer: PrefixLayer, key_map: Map) -> Summary:
    """Computes features and summary state of one layer's mid-region; `key_map` is phi_k stacked over Hkv."""
    features, log_shift = key_features(map_heads(key_map, layer.keys), layer.partition.mid[:, :, 0])
    state = summarise(features, log_shift, promoted(layer.values))
    return Summary(state, features.contiguous() if features.is_cuda else features)  # rows for the kernels


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


def prefix_terms(
    queries: Tensor, log_query: Tensor | None, layer: PrefixLayer, summary: Summary | None, arms: ArmRows, scale: float
) -> Terms:
    """Computes unnormalised terms of partial arms over the prefix, in float32 or wider; by kernels if `kernels_serve`.

    Args:
        queries: [E, Hkv, R, D].
        log_query: [E, Hkv, R, M] log phi_q; like `summary`, None if no arm adds a residual.
    """
    if kernels_serve(queries, layer, summary, arms):
        return kernel_terms(queries, log_query, layer, summary, arms, scale)
    return terms_of(read_prefix(queries, layer, arms, scale), log_query, layer, summary, arms)


def read_prefix(queries: Tensor, layer: PrefixLayer, arms: ArmRows, scale: float) -> Reading:
    """Selects tokens for queries [E, Hkv, R, D]."""
    scaled = promoted(queries) * scale
    scores = scaled @ promoted(layer.keys).transpose(-1, -2)
    mid, choices = layer.partition.mid, []
    for selector, rows in arms.selectors:
        inputs = (scaled, scores) if len(arms.selectors) == 1 else (scaled[:, :, rows], scores[:, :, rows])
        choices.append(selector.select(*inputs, layer.scan(selector), mid, arms.k[..., rows], arms.layout))
    if len(choices) == 1:
        return Reading(scaled, scores, *choices[0])
    slots = max(choice.read.indices.shape[-1] for choice in choices)
    padded = [[nn.functional.pad(part, (0, slots - part.shape[-1])) for part in choice.read] for choice in choices]
    order = torch.cat([rows for _, rows in arms.selectors]).argsort()
    indices, valid = (torch.cat(parts, dim=2)[:, :, order] for parts in zip(*padded, strict=True))
    threshold = torch.cat([choice.threshold for choice in choices], dim=2)[:, :, order]
    scanned = torch.cat([choice.scanned for choice in choices], dim=2)[:, :, order] if arms.uses_scan else None
    return Reading(scaled, scores, Selected(indices, valid), threshold, scanned)


def terms_of(
    reading: Reading, log_query: Tensor | None, layer: PrefixLayer, summary: Summary | None, arms: ArmRows
) -> Terms:
    """Computes the terms of `prefix_terms` from a reading."""
    estimate = _estimate(log_query, summary, arms) if arms.any_residual else None
    terms = one_gather_terms(reading.scores, promoted(layer.values), layer.anchors, reading.retrieved, estimate)
    for rows, own in own_residuals(reading, layer, arms):
        if len(rows) == terms.shift.shape[2]:
            return added(terms, own)
        both = added(Terms(*(part[:, :, rows] for part in terms)), own)
        terms = Terms(*(part.index_copy(2, rows, more) for part, more in zip(terms, both, strict=True)))
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
        has_unread = layer.partition.mid.sum(-1) > seen.read.valid.sum(-1)
        numerator = torch.where(has_unread.unsqueeze(-1), estimate.numerator, 0)
        yield rows, Terms(numerator, torch.where(has_unread, estimate.denominator, 0), estimate.shift)


def seen_by_residuals(reading: Reading, layer: PrefixLayer, arms: ArmRows) -> Iterator[tuple[Residual, Tensor, Seen]]:
    """Yields residuals with terms of their own, with the indices of their rows and their inputs."""
    if not arms.own:
        return
    scaled, scores, retrieved, threshold, scanned = reading
    unread = layer.partition.mid & ~retrieved.mask(scores.shape[-1])
    inputs = scaled, threshold, *retrieved, unread, scores, scanned
    for residual, rows in arms.own:
        whole = len(rows) == scores.shape[2]
        own = [part if whole or part is None else part[:, :, rows] for part in inputs]
        queries, threshold, indices, valid, unread, exact, scanned = own
        read, values = Selected(indices, valid), promoted(layer.values)
        yield residual, rows, Seen(queries, threshold, read, unread, exact, values, scanned, layer.partition.anchors)


def own_precision(query: Tensor) -> torch.autocast:
    """Returns a context in which terms are computed in float32 or wider within the caller's autocast, too."""
    return torch.autocast(query.device.type, enabled=False)


def map_heads(feature_map: Map, x: Tensor) -> Tensor:
    """Computes log phi of vectors [E, H, N, D] with maps stacked over H: [E, H, N, M] float32 or wider."""
    examples, heads, n, d = x.shape
    stacked = promoted(x).transpose(0, 1).reshape(heads, examples * n, d)
    parts = [feature_map(chunk) for chunk in stacked.split(KEY_CHUNK, dim=1)]
    return torch.cat(parts, dim=1).view(heads, examples, n, -1).transpose(0, 1)


def rows_of_heads(x: Tensor, kv_heads: int, arms: int = 1) -> Tensor:
    """Groups the rows of a KV head: [E * A, Hq, T, C] -> [E, Hkv, A * G * T, C]."""
    return x.unflatten(0, (-1, arms)).unflatten(2, (kv_heads, -1)).transpose(1, 2).flatten(2, 4)


def merge_with_prefix(
    layer: nn.Module, query: Tensor, prefix: Terms, near: Sequence[tuple[Tensor, Tensor, Tensor]], scale: float
) -> Tensor:
    """Merges a prefix's terms with the exact terms of tokens after it and with the layer's sinks: [N, T, Hq, D].

    Args:
        query: [N, Hq, T, D]; prefix: [N, Hkv, G * T, ...].
        near: keys and values [N or 1, Hkv, C, D], and the mask [N or 1, T, C] bool of those that new tokens see.
    """
    tokens, kv_heads = query.shape[2], prefix.shift.shape[1]
    rows = promoted(query).unflatten(1, (kv_heads, -1))  # [N, Hkv, G, T, D]
    if tokens == 1:
        rows = rows.transpose(2, 3)  # heads share a product, and the keys need no copy for each
    terms = [prefix]
    for keys, values, visible in near:
        scores = attention_scores(rows, promoted(keys).unsqueeze(2), scale)
        exact = exact_terms(scores, promoted(values).unsqueeze(2), visible[:, None, None])
        terms.append(Terms(*(part.flatten(2, 3) for part in exact)))
    if (sinks := sinks_of(layer)) is not None:
        terms.append(sink_terms(promoted(sinks).unflatten(0, (kv_heads, -1)).repeat_interleave(tokens, 1)))
    output = merge(*terms).unflatten(2, (-1, tokens)).flatten(1, 2)
    return output.transpose(1, 2).to(query.dtype)


def kernels_serve(queries: Tensor, layer: PrefixLayer, summary: Summary | None, arms: ArmRows) -> bool:
    """Returns whether the kernels compute `prefix_terms` for these arguments on this device."""
    keys, values, span = layer.keys, layer.values, layer.span
    if span is None or arms.for_kernels is None or not kernels_run_on(keys.device):
        return False
    features = summary.features.shape[-1:] if arms.any_residual and summary is not None else ()
    return (
        tiles_fit(keys.shape[-1], *features)
        and values.shape == keys.shape
        and keys.shape[2] < LONGEST
        and queries.shape[:3].numel() < MOST_ROWS
        and all(x.dtype in (torch.bfloat16, torch.float32) for x in (queries, keys, values))
        and all(x.is_contiguous() for x in (keys, values))
        and not queries.requires_grad  # kernels have no gradients
    )


def kernel_terms(
    queries: Tensor, log_query: Tensor | None, layer: PrefixLayer, summary: Summary | None, arms: ArmRows, scale: float
) -> Terms:
    """Same as `prefix_terms`, for arguments with `kernels_serve`."""
    from residual_mass.core.fused.triton_path import prefix_terms

    assert layer.span is not None and arms.for_kernels is not None
    first, last, anchors = layer.span
    cache = DecodeCache(layer.keys, layer.values, first, last, layer.keys.shape[2])
    if arms.any_residual:
        assert log_query is not None and summary is not None, MAPS_MISSING
        features, log_shift = summary.features.contiguous(), summary.state.log_shift.contiguous()
        cache = cache._replace(features=features, summary=summary.joined, log_shift=log_shift)
    moments = [(MomentState(*(x.contiguous() for x in layer.state(own))), rows) for own, rows in arms.own]
    return prefix_terms(
        queries, cache, log_query.float() if arms.any_residual else None, arms.for_kernels, moments,
        sink=anchors.sink, tail=anchors.tail, scale=scale,
    )  # fmt: skip
