"""The prefix that arms share: keys and values of a layer, and what selectors, residuals and feature maps keep of them.

Shape letters: E = examples, H = heads of stacked maps, Hkv = KV heads, N = vectors of a head, L = prefix columns
(right- or left-padded), D = head dimension, M = features.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from residual_mass.core.accounting import SummaryState, key_features, promoted, summarise
from residual_mass.core.feature_maps import FoldedMap
from residual_mass.core.selection import Partition, Selected, members, partition
from residual_mass.methods import Residual, Selector
from residual_mass.spec.settings import AnchorSpec

Map = FoldedMap | nn.Module
State = tuple[Tensor, ...]
"""What a selector or a residual has prepared of a prefix."""
KEY_CHUNK = 8192
"""Keys mapped at once, which bounds the inner activations (d_emb wide) of a 64k prefix."""


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


def map_heads(feature_map: Map, x: Tensor) -> Tensor:
    """Computes log phi of vectors [E, H, N, D] with maps stacked over H: [E, H, N, M] float32 or wider."""
    examples, heads, n, d = x.shape
    by_head = promoted(x).transpose(0, 1)
    stacked = by_head.reshape(heads, examples * n, d)  # a head's map takes the vectors of all examples
    parts = [feature_map(chunk) for chunk in stacked.split(KEY_CHUNK, dim=1)]
    features = torch.cat(parts, dim=1)  # [H, E * N, M]
    return features.view(heads, examples, n, -1).transpose(0, 1)
