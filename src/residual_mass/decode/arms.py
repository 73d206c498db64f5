"""Attention of arms that decode together: T new tokens in each of E * A rows, after prefixes that the arms share.

A decode step has one token per row. A given continuation is one chunk of T tokens: every token selects its own prefix
tokens, and attends to itself and the chunk's tokens before it exactly.

Shape letters: E = examples, A = arms, Hq / Hkv = query / KV heads, G = Hq / Hkv, L = prefix columns, T = new tokens, N
= generated tokens, the new ones included, D = head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from residual_mass.core.accounting import Terms, attention_scores, exact_terms, promoted
from residual_mass.decode.backend import Backend, LayerCall
from residual_mass.decode.prefix import Map, PrefixLayer, Summary, map_heads
from residual_mass.decode.terms import ArmRows, arm_rows, merge_with_prefix, own_precision, prefix_terms, rows_of_heads
from residual_mass.model.hook import exact_attention
from residual_mass.model.layers import AttentionWindow, window_of
from residual_mass.spec.arms import ArmSpec
from residual_mass.spec.settings import AnchorSpec

KeysValues = tuple[Tensor, Tensor]
Layers = Sequence[KeysValues]
"""Keys and values by layer."""


class ArmsBackend(Backend):
    """Attention of all arms, in every layer. Every arm has its own generated keys and values.

    Args:
        parts: groups of arms that are computed together; each arm is in one part.
        layers: the prefixes of the partial arms.
    """

    name = "arms"
    knows_columns = True

    def __init__(
        self, arms: Sequence[ArmSpec], parts: Sequence[FullRows | PartialRows], layers: Sequence[PrefixLayer]
    ) -> None:
        self.arms = list(arms)
        self.parts = list(parts)
        self.layers = layers
        self.generated = [0] * len(layers)
        """Number of generated tokens that each layer has read."""

    @property
    def tokens(self) -> int:
        return self.layers[0].keys.shape[2]

    def read(self, call: LayerCall) -> Tensor:
        raise ValueError("arms share prefixes that were read before")

    def stored(self, call: LayerCall) -> tuple[Tensor, Tensor]:
        raise ValueError("arms attend in layers with a window, too")

    def step(self, call: LayerCall) -> Tensor:
        start = self.generated[call.index]
        self.generated[call.index] += call.query.shape[2]
        num_arms = len(self.arms)
        queries = call.query.unflatten(0, (-1, num_arms))  # [E, A, Hq, T, D]
        keys = call.key.unflatten(0, (-1, num_arms))
        values = call.value.unflatten(0, (-1, num_arms))
        examples, _, heads, tokens, _ = queries.shape
        output = call.query.new_empty(examples, num_arms, tokens, heads, call.value.shape[3])
        for part in self.parts:
            own_query = queries[:, part.places].flatten(0, 1)
            own_key = keys[:, part.places].flatten(0, 1)
            own_value = values[:, part.places].flatten(0, 1)
            with own_precision(call.query) if isinstance(part, PartialRows) else nullcontext():
                own_output = part.attend(call.module, own_query, own_key, own_value, start, call.scale)
            output[:, part.places] = own_output.unflatten(0, (examples, -1))
        return output.flatten(0, 1)

    def keep(self, examples: list[int], arms: list[int]) -> None:
        """Keeps some examples and arms, given by their current indices, and drops the others."""
        kept = set(arms)
        self.parts = [part for part in self.parts if kept.intersection(part.places)]
        if len(examples) < len(self.layers[0].keys):
            chosen = torch.tensor(examples, device=self.layers[0].keys.device)
            self.layers = [layer.at(chosen) for layer in self.layers]
        for part in self.parts:
            part.keep(examples, arms, self.layers)
        self.arms = [self.arms[a] for a in arms]


class FullRows:
    """Rows of Full: one per example, with prompt and generated tokens in one buffer without padding, so that the
    backbone's own attention reads it as a batch of one. Several arms would have equal rows, so only one is computed.

    Attributes:
        places: indices of the arms in the batch.
        caches: keys and values [1, Hkv, L_e + room, D] by layer and example.
        masked: whether a single token has a mask, as several tokens do; kernels with a mask round differently.
    """

    def __init__(self, places: list[int], layers: Sequence[PrefixLayer], lengths: Sequence[int], room: int) -> None:
        """Copies the prompts, which the other arms share, into buffers with room for generated tokens."""
        self.places = places
        self.lengths = list(lengths)
        self.masked = False
        self.caches: list[list[KeysValues]] = []
        for layer in layers:
            by_example = []
            for e, length in enumerate(lengths):
                keys = _with_room(layer.keys[e, :, :length], room)
                values = _with_room(layer.values[e, :, :length], room)
                by_example.append((keys, values))
            self.caches.append(by_example)

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, start: int, scale: float) -> Tensor:
        """Computes attention [E * A, T, Hq, D] of query [E * A, Hq, T, D] after `start` generated tokens; key and value
        [E * A, Hkv, T, D].
        """
        window = window_of(module)
        num_arms = len(self.places)
        tokens = query.shape[2]
        outputs = []
        for e, (keys, values) in enumerate(self.caches[module.layer_idx]):
            row = e * num_arms
            new = self.lengths[e] + start  # the first new column
            end = new + tokens
            keys[:, :, new:end] = key[row]
            values[:, :, new:end] = value[row]
            first = 0 if window is None else max(0, window.first(new))
            mask = None
            if self.masked or tokens > 1:
                columns = torch.arange(first, end, device=query.device)
                visible = _visible(columns, columns[new - first :], window)
                mask = visible[None, None]  # [1, 1, T, end - first]
            own_query = query[row : row + 1]
            seen_keys = keys[:, :, first:end]
            seen_values = values[:, :, first:end]
            output = exact_attention(module, own_query, seen_keys, seen_values, mask, scale)
            outputs.append(output.expand(num_arms, -1, -1, -1))
        return torch.cat(outputs)

    def keep(self, examples: list[int], arms: list[int], layers: Sequence[PrefixLayer]) -> None:
        """As `PartialRows.keep`."""
        kept = [a for a in arms if a in self.places]
        self.places = [arms.index(a) for a in kept]
        self.caches = [[by_example[e] for e in examples] for by_example in self.caches]
        self.lengths = [self.lengths[e] for e in examples]


@dataclass
class PartialRows:
    """Rows of arms that are computed together: they attend to the shared prefixes through their methods, and to their
    generated tokens exactly.

    Attributes:
        places: indices of the arms in the batch.
        lengths: tokens of the prefixes.
        maps: phi_q and the prefixes' summaries by layer, the same for all arms that need maps; None if no arm does.
        dense: keys and values [1, Hkv, T, D] by layer that later tokens of a chunk see; None for each arm's own.
        generated: keys and values [E * A, Hkv, N, D] by layer.
        terms: computes the terms of the prefix, as `prefix_terms` does.
    """

    places: list[int]
    arms: list[ArmSpec]
    layers: Sequence[PrefixLayer]
    lengths: Sequence[int]
    anchors: AnchorSpec
    nominal_length: int | None
    maps: tuple[Sequence[Map], Sequence[Summary]] | None
    dense: Layers | None = None
    generated: dict[int, KeysValues] = field(default_factory=dict)
    rows: ArmRows | None = None
    terms: Callable[..., Terms] = prefix_terms

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, start: int, scale: float) -> Tensor:
        """Computes attention [E * A, T, Hq, D] of query [E * A, Hq, T, D] after `start` generated tokens; key and value
        [E * A, Hkv, T, D].
        """
        index = module.layer_idx
        tokens = query.shape[2]
        if start > 0:
            keys_before, values_before = self.generated[index]
            key = torch.cat((keys_before, key), dim=2)
            value = torch.cat((values_before, value), dim=2)
        self.generated[index] = key, value
        kv_heads = key.shape[1]
        window = window_of(module)
        if window is None:
            prefix = self._prefix_terms(index, query, kv_heads, scale)
            columns = query.new_ones(1, tokens, start + tokens, dtype=torch.bool)
            visible = columns.tril(start)  # causal: new token t sees the `start` tokens before it and t + 1 new ones
        else:
            layer = self.layers[index]
            prefix, visible = self._window_terms(layer, query, kv_heads, window, start, scale)
        near = [(key, value, visible)]
        if self.dense is not None:
            dense_key, dense_value = self.dense[index]
            itself = torch.eye(tokens, dtype=torch.bool, device=query.device)
            before = (dense_key, dense_value, visible & ~itself)
            near = [before, (key, value, visible & itself)]
        return merge_with_prefix(module, query, prefix, near, scale)

    def _prefix_terms(self, index: int, query: Tensor, kv_heads: int, scale: float) -> Terms:
        """Computes the terms [E * A, Hkv, G * T, ...] of the prefix under the arms' methods."""
        arms = self.arms
        num_arms = len(arms)
        log_query = None
        summary = None
        if self.maps is not None:
            query_maps, summaries = self.maps
            log_query = map_heads(query_maps[index], query)
            log_query = rows_of_heads(log_query, kv_heads, num_arms)
            summary = summaries[index]
        rows = rows_of_heads(query, kv_heads, num_arms)
        if self.rows is None:
            group = rows.shape[2] // num_arms  # G * T
            lengths = self.lengths
            anchors = self.anchors
            device = query.device
            tokens = query.shape[2]
            self.rows = arm_rows(arms, group, lengths, anchors, self.nominal_length, device, tokens)
        layer = self.layers[index]
        terms = self.terms(rows, log_query, layer, summary, self.rows, scale)
        return _by_row(terms, num_arms)

    def _window_terms(
        self, layer: PrefixLayer, query: Tensor, kv_heads: int, window: AttentionWindow, start: int, scale: float
    ) -> tuple[Terms, Tensor]:
        """Computes the exact terms [E * A, Hkv, G * T, ...] of the prefix within a window, and the mask [E * A, T, N]
        of generated tokens that new tokens see.
        """
        num_arms = len(self.arms)
        tokens = query.shape[2]
        lengths = torch.tensor(self.lengths, device=query.device).unsqueeze(1)  # [E, 1]
        generated = torch.arange(start + tokens, device=query.device) + lengths  # [E, N], positions
        new = generated[:, start:]
        oldest = min(window.first(length + start) for length in self.lengths)
        end = layer.keys.shape[2]
        first = min(max(0, oldest), end - 1)  # keeps a column if all windows begin after the prefix
        columns = torch.arange(first, end, device=query.device)
        real = columns < lengths.unsqueeze(-1)
        support = _visible(columns, new, window) & real  # [E, T, L - first]
        rows = promoted(rows_of_heads(query, kv_heads, num_arms))
        keys = promoted(layer.keys[:, :, first:])
        values = promoted(layer.values[:, :, first:])
        scores = attention_scores(rows, keys, scale)
        copies = rows.shape[2] // tokens  # rows are ordered by arm, query head, token: one copy for each A * G
        support = support.repeat(1, copies, 1).unsqueeze(1)
        terms = exact_terms(scores, values, support)
        visible = _visible(generated.unsqueeze(1), new, window)
        return _by_row(terms, num_arms), visible.repeat_interleave(num_arms, 0)

    def keep(self, examples: list[int], arms: list[int], layers: Sequence[PrefixLayer]) -> None:
        """Keeps some examples, whose prefixes are `layers`, and some arms of the batch if they are in this part."""
        kept = [a for a in arms if a in self.places]
        own = [self.places.index(a) for a in kept]
        num_arms = len(self.arms)
        rows = [e * num_arms + a for e in examples for a in own]
        for index, (keys, values) in self.generated.items():
            self.generated[index] = keys[rows], values[rows]
        self.places = [arms.index(a) for a in kept]
        self.arms = [self.arms[a] for a in own]
        if self.maps is not None and not any(arm.needs_maps for arm in self.arms):
            self.maps = None
        if self.maps is not None and len(examples) < len(self.lengths):
            chosen = torch.tensor(examples, device=layers[0].keys.device)
            query_maps, summaries = self.maps
            self.maps = query_maps, [summary.at(chosen) for summary in summaries]
        self.layers = layers
        self.lengths = [self.lengths[e] for e in examples]
        self.rows = None  # built again for these examples and arms


def _with_room(prompt: Tensor, room: int) -> Tensor:
    """Copies keys or values [Hkv, L, D] of a prompt to a buffer with room for further tokens: [1, Hkv, L + room, D]."""
    heads, length, width = prompt.shape
    buffer = prompt.new_empty(1, heads, length + room, width)
    buffer[0, :, :length] = prompt
    return buffer


def _visible(columns: Tensor, positions: Tensor, window: AttentionWindow | None) -> Tensor:
    """Returns the causal mask [..., T, L] of columns [..., 1, L] for tokens at `positions` [..., T], in a window."""
    positions = positions.unsqueeze(-1)
    visible = columns <= positions
    return visible if window is None else visible & (columns >= window.first(positions))


def _by_row(terms: Terms, num_arms: int) -> Terms:
    """[E, Hkv, A * R, ...] -> [E * A, Hkv, R, ...]."""
    parts = []
    for part in terms:
        by_arm = part.unflatten(2, (num_arms, -1))  # [E, Hkv, A, R, ...]
        parts.append(by_arm.transpose(1, 2).flatten(0, 1))
    return Terms(*parts)
