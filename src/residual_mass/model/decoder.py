"""Attention of arms that decode together: T new tokens in each of E * A rows, after prefixes that the arms share.

A decode step has one token per row. A given continuation is one chunk of T tokens: every token selects its own prefix
tokens, and attends to itself and the chunk's tokens before it exactly.

Shape letters: E = examples, A = arms, Hq / Hkv = query / KV heads, G = Hq / Hkv, L = prefix columns, T = new tokens, N
= generated tokens, the new ones included, D = head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from residual_mass.core.accounting import Terms, attention_scores, exact_terms, promoted
from residual_mass.core.settings import AnchorSpec
from residual_mass.methods.arms import ArmSpec
from residual_mass.model.hook import Window, exact_attention, window_of
from residual_mass.model.prefix import (
    ArmRows,
    Map,
    PrefixLayer,
    Summary,
    arm_rows,
    map_heads,
    merge_with_prefix,
    own_precision,
    prefix_terms,
    rows_of_heads,
)

Layers = Sequence[tuple[Tensor, Tensor]]
"""Keys and values by layer."""


class ArmDecoder:
    """Attention handler of all arms. Every arm has its own generated keys and values.

    Args:
        parts: groups of arms that are computed together; each arm is in one part.
        layers: the prefixes of the partial arms.
    """

    def __init__(
        self, arms: Sequence[ArmSpec], parts: Sequence[FullRows | PartialRows], layers: Sequence[PrefixLayer]
    ) -> None:
        self.arms, self.parts, self.layers = list(arms), list(parts), layers
        self.read = [0] * len(layers)
        """Number of generated tokens that each layer has read."""

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        start = self.read[module.layer_idx]
        self.read[module.layer_idx] += query.shape[2]
        by_arm = [x.unflatten(0, (-1, len(self.arms))) for x in (query, key, value)]
        output = query.new_empty(*by_arm[0].shape[:2], query.shape[2], query.shape[1], value.shape[3])
        for part in self.parts:
            rows = (x[:, part.places].flatten(0, 1) for x in by_arm)
            with own_precision(query) if isinstance(part, PartialRows) else nullcontext():
                output[:, part.places] = part.attend(module, *rows, start, scale).unflatten(0, (len(output), -1))
        return output.flatten(0, 1)

    def keep(self, examples: list[int], arms: list[int]) -> None:
        """Keeps some examples and arms, given by their current indices, and drops the others."""
        self.parts = [part for part in self.parts if set(part.places) & set(arms)]
        if len(examples) < len(self.layers[0].keys):
            chosen = torch.tensor(examples, device=self.layers[0].keys.device)
            self.layers = [layer.at(chosen) for layer in self.layers]
        for part in self.parts:
            part.keep(examples, arms, self.layers)
        self.arms = [self.arms[a] for a in arms]

    def require_read(self, tokens: int) -> None:
        """Raises RuntimeError unless every layer has read `tokens` tokens: a bypassed hook gives Full's numbers."""
        if self.read != [tokens] * len(self.read):
            raise RuntimeError(f"attention hook: layers have read {sorted(set(self.read))} tokens, expected {tokens}")


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

        def with_room(x: Tensor, e: int, length: int) -> Tensor:
            buffer = x.new_empty(1, x.shape[1], length + room, x.shape[3])
            buffer[:, :, :length] = x[e, :, :length]
            return buffer

        self.places, self.lengths, self.masked = places, list(lengths), False
        self.caches = [
            [(with_room(layer.keys, e, n), with_room(layer.values, e, n)) for e, n in enumerate(lengths)]
            for layer in layers
        ]

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, start: int, scale: float) -> Tensor:
        """Computes attention [E * A, T, Hq, D] of query [E * A, Hq, T, D] after `start` generated tokens; key and value
        [E * A, Hkv, T, D].
        """
        window, outputs, arms = window_of(module), [], len(self.places)
        for e, (keys, values) in enumerate(self.caches[module.layer_idx]):
            row, new, mask = e * arms, self.lengths[e] + start, None
            end = new + query.shape[2]
            keys[:, :, new:end], values[:, :, new:end] = key[row], value[row]
            first = 0 if window is None else max(0, window.first(new))
            if self.masked or query.shape[2] > 1:
                columns = torch.arange(first, end, device=query.device)
                mask = _visible(columns, columns[new - first :], window)[None, None]
            filled = keys[:, :, first:end], values[:, :, first:end]
            output = exact_attention(module, query[row : row + 1], *filled, mask, scale)
            outputs.append(output.expand(arms, -1, -1, -1))
        return torch.cat(outputs)

    def keep(self, examples: list[int], arms: list[int], layers: Sequence[PrefixLayer]) -> None:
        self.places = [place for place, a in enumerate(arms) if a in self.places]
        self.caches = [[layer[e] for e in examples] for layer in self.caches]
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
    """

    places: list[int]
    arms: list[ArmSpec]
    layers: Sequence[PrefixLayer]
    lengths: Sequence[int]
    anchors: AnchorSpec
    nominal_length: int | None
    maps: tuple[Sequence[Map], Sequence[Summary]] | None
    dense: Layers | None = None
    generated: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    rows: ArmRows | None = None

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, start: int, scale: float) -> Tensor:
        """Computes attention [E * A, T, Hq, D] of query [E * A, Hq, T, D] after `start` generated tokens; key and value
        [E * A, Hkv, T, D].
        """
        index, window, tokens = module.layer_idx, window_of(module), query.shape[2]
        if start > 0:
            key, value = (torch.cat(both, dim=2) for both in zip(self.generated[index], (key, value), strict=True))
        self.generated[index] = key, value
        if window is None:
            prefix = self._prefix_terms(index, query, key.shape[1], scale)
            visible = torch.ones(1, tokens, start + tokens, dtype=torch.bool, device=query.device).tril(start)
        else:
            prefix, visible = self._window_terms(self.layers[index], query, key.shape[1], window, start, scale)
        near = [(key, value, visible)]
        if self.dense is not None:
            itself = torch.eye(tokens, dtype=torch.bool, device=query.device)
            near = [(*self.dense[index], visible & ~itself), (key, value, visible & itself)]
        return merge_with_prefix(module, query, prefix, near, scale)

    def _prefix_terms(self, index: int, query: Tensor, kv_heads: int, scale: float) -> Terms:
        """Computes the terms [E * A, Hkv, G * T, ...] of the prefix under the arms' methods."""
        log_query, summary, num_arms = None, None, len(self.arms)
        if self.maps is not None:
            query_map, summary = (by_layer[index] for by_layer in self.maps)
            log_query = rows_of_heads(map_heads(query_map, query), kv_heads, num_arms)
        rows = rows_of_heads(query, kv_heads, num_arms)
        if self.rows is None:
            group, settings = rows.shape[2] // num_arms, (self.anchors, self.nominal_length, query.device)
            self.rows = arm_rows(self.arms, group, self.lengths, *settings, tokens=query.shape[2])
        terms = prefix_terms(rows, log_query, self.layers[index], summary, self.rows, scale)
        return _by_row(terms, num_arms)

    def _window_terms(
        self, layer: PrefixLayer, query: Tensor, kv_heads: int, window: Window, start: int, scale: float
    ) -> tuple[Terms, Tensor]:
        """Computes the exact terms [E * A, Hkv, G * T, ...] of the prefix within a window, and the mask [E * A, T, N]
        of generated tokens that new tokens see.
        """
        lengths, num_arms = torch.tensor(self.lengths, device=query.device).unsqueeze(1), len(self.arms)
        generated = torch.arange(start + query.shape[2], device=query.device) + lengths  # [E, N]
        new = generated[:, start:]
        oldest = min(window.first(length + start) for length in self.lengths)
        first = min(max(0, oldest), layer.keys.shape[2] - 1)  # keeps a column if all windows begin after the prefix
        columns = torch.arange(first, layer.keys.shape[2], device=query.device)
        support = _visible(columns, new, window) & (columns < lengths.unsqueeze(-1))  # [E, T, L - first]
        rows = promoted(rows_of_heads(query, kv_heads, num_arms))
        scores = attention_scores(rows, promoted(layer.keys[:, :, first:]), scale)
        support = support.repeat(1, rows.shape[2] // query.shape[2], 1).unsqueeze(1)
        terms = exact_terms(scores, promoted(layer.values[:, :, first:]), support)
        visible = _visible(generated.unsqueeze(1), new, window).repeat_interleave(num_arms, 0)
        return _by_row(terms, num_arms), visible

    def keep(self, examples: list[int], arms: list[int], layers: Sequence[PrefixLayer]) -> None:
        """Keeps some examples, whose prefixes are `layers`, and some arms of the batch if they are in this part."""
        own = [self.places.index(a) for a in arms if a in self.places]
        rows = [e * len(self.arms) + a for e in examples for a in own]
        self.generated = {index: (keys[rows], values[rows]) for index, (keys, values) in self.generated.items()}
        self.places = [place for place, a in enumerate(arms) if a in self.places]
        self.arms = [self.arms[a] for a in own]
        if self.maps is not None and not any(arm.needs_maps for arm in self.arms):
            self.maps = None
        if self.maps is not None and len(examples) < len(self.lengths):
            chosen = torch.tensor(examples, device=layers[0].keys.device)
            self.maps = self.maps[0], [summary.at(chosen) for summary in self.maps[1]]
        self.layers, self.lengths, self.rows = layers, [self.lengths[e] for e in examples], None


def _visible(columns: Tensor, positions: Tensor, window: Window | None) -> Tensor:
    """Returns the causal mask [..., T, L] of columns [..., 1, L] for tokens at `positions` [..., T], in a window."""
    positions = positions.unsqueeze(-1)
    visible = columns <= positions
    return visible if window is None else visible & (columns >= window.first(positions))


def _by_row(terms: Terms, num_arms: int) -> Terms:
    """[E, Hkv, A * R, ...] -> [E * A, Hkv, R, ...]."""
    return Terms(*(part.unflatten(2, (num_arms, -1)).transpose(1, 2).flatten(0, 1) for part in terms))
