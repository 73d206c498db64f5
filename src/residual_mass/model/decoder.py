"""Attention of a decode step: E * A rows with one new token each attend to the shared prefixes.

Shape letters: E = examples, A = arms, P = partial arms (all but `full`), Hq / Hkv = query / KV heads, G = Hq / Hkv, L =
prefix columns, T = generated tokens, D = head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from residual_mass.core.accounting import Terms, attention_scores, exact_terms, merge, promoted
from residual_mass.core.settings import AnchorSpec
from residual_mass.methods.arms import ArmSpec
from residual_mass.model.hook import Window, exact_attention, window_of
from residual_mass.model.prefix import (
    ArmRows,
    Map,
    PrefixLayer,
    Summary,
    arm_rows,
    generated_terms,
    head_sinks,
    map_queries,
    prefix_terms,
)


class ArmDecoder:
    """Attention handler of the decode steps; every arm has its own generated keys and values.

    Args:
        full: rows of the `full` arms, None if there are none.
        partial: rows of the other arms, in their order; None if there are none.
    """

    def __init__(
        self, arms: Sequence[ArmSpec], full: FullRows | None, partial: PartialRows | None, num_layers: int
    ) -> None:
        self.arms, self.full, self.partial = list(arms), full, partial
        self.calls = [0] * num_layers

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        step = self.calls[module.layer_idx]
        self.calls[module.layer_idx] += 1
        by_arm = [x.unflatten(0, (-1, len(self.arms))) for x in (query, key, value)]
        output = query.new_empty(*by_arm[0].shape[:2], 1, query.shape[1], value.shape[3])
        if self.full is not None:
            whole = _places(self.arms, full=True)
            rows = (x[:, whole[0]] for x in by_arm)  # several full arms would have equal rows
            output[:, whole] = self.full.attend(module, *rows, step, scale).unsqueeze(1)
        if self.partial is not None:
            places = _places(self.arms, full=False)
            rows = (x[:, places].flatten(0, 1) for x in by_arm)
            terms = self.partial.attend(module, *rows, step, scale)
            output[:, places] = terms.unflatten(0, (-1, len(places))).to(query.dtype)
        return output.flatten(0, 1)

    def keep(self, examples: list[int], arms: list[int]) -> None:
        """Keeps some examples and arms, given by their current indices, and drops the others."""
        whole, partial = (_places(self.arms, full) for full in (True, False))
        if self.full is not None:
            self.full = self.full.at(examples) if set(arms) & set(whole) else None
        if self.partial is not None:
            kept = [partial.index(a) for a in arms if a in partial]
            self.partial = self.partial.at(examples, kept) if kept else None
        self.arms = [self.arms[a] for a in arms]

    def require_calls(self, steps: int) -> None:
        """Raises RuntimeError unless every layer was called once per step: a bypassed hook gives Full's numbers."""
        if self.calls != [steps] * len(self.calls):
            raise RuntimeError(f"attention hook calls per layer {sorted(set(self.calls))}, expected {steps} in each")


def _places(arms: Sequence[ArmSpec], full: bool) -> list[int]:
    return [a for a, arm in enumerate(arms) if arm.is_full == full]


class FullRows:
    """One row per example, with prompt and generated tokens in one buffer without padding, so that the unmodified
    backbone's attention reads it as a batch of one.
    """

    def __init__(self, caches: list[list[tuple[Tensor, Tensor]]], lengths: list[int]) -> None:
        """Takes caches of keys and values [1, Hkv, L_e + steps, D] by layer and example."""
        self.caches, self.lengths = caches, lengths

    @classmethod
    def copy(cls, layers: Sequence[PrefixLayer], lengths: Sequence[int], steps: int) -> FullRows:
        """Copies the prompts, which the other arms share, into buffers with room for generated tokens."""

        def with_room(x: Tensor, e: int, length: int) -> Tensor:
            buffer = x.new_empty(1, x.shape[1], length + steps, x.shape[3])
            buffer[:, :, :length] = x[e, :, :length]
            return buffer

        caches = [
            [(with_room(layer.keys, e, n), with_room(layer.values, e, n)) for e, n in enumerate(lengths)]
            for layer in layers
        ]
        return cls(caches, list(lengths))

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, step: int, scale: float) -> Tensor:
        """Attends with query [E, Hq, 1, D], key and value [E, Hkv, 1, D] of the new tokens: [E, 1, Hq, D]."""
        window, outputs = window_of(module), []
        for e, (keys, values) in enumerate(self.caches[module.layer_idx]):
            new = self.lengths[e] + step
            keys[:, :, new], values[:, :, new] = key[e, :, 0], value[e, :, 0]
            first = 0 if window is None else max(0, window.first(new))
            filled = keys[:, :, first : new + 1], values[:, :, first : new + 1]
            outputs.append(exact_attention(module, query[e : e + 1], *filled, None, scale))
        return torch.cat(outputs)

    def at(self, examples: list[int]) -> FullRows:
        """Selects the rows of some examples."""
        return FullRows([[layer[e] for e in examples] for layer in self.caches], [self.lengths[e] for e in examples])


@dataclass
class ArmGroup:
    """Partial arms that share a set of maps.

    Attributes:
        arms: indices among the partial arms.
        summaries, query_maps: one per layer; None if no arm of the group uses phi.
        rows: set by `PartialRows`, which knows the prefixes.
    """

    arms: list[int]
    summaries: list[Summary] | None
    query_maps: list[Map] | None
    rows: ArmRows | None = None

    def at(self, examples: Tensor, arms: list[int]) -> ArmGroup:
        """Selects examples and, among all partial arms, arms; the group may lose all of its arms."""
        summaries = self.summaries and [summary.at(examples) for summary in self.summaries]
        return ArmGroup([arms.index(a) for a in self.arms if a in arms], summaries, self.query_maps)


class PartialRows:
    """E * P rows that attend to the shared prefixes through their methods, and to their generated tokens exactly."""

    def __init__(
        self,
        layers: list[PrefixLayer],
        groups: list[ArmGroup],
        arms: Sequence[ArmSpec],
        lengths: Sequence[int],
        anchors: AnchorSpec,
        nominal_length: int | None,
        generated: list[tuple[Tensor, Tensor]],
    ) -> None:
        """Takes buffers `generated` of keys and values [E * P, Hkv, steps, D] by layer, see `generated_buffers`."""
        self.layers, self.groups, self.arms, self.lengths = layers, groups, list(arms), list(lengths)
        self.anchors, self.nominal_length, self.generated = anchors, nominal_length, generated
        order = [a for group in groups for a in group.arms]
        self.order = torch.tensor(order).argsort().to(layers[0].keys.device)

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, step: int, scale: float) -> Tensor:
        """Attends with query [E * P, Hq, 1, D], key and value [E * P, Hkv, 1, D] of the new tokens.

        Returns:
            [E * P, 1, Hq, D] float32.
        """
        index, window = module.layer_idx, window_of(module)
        keys, values = self.generated[index]
        keys[:, :, step], values[:, :, step] = key[:, :, 0], value[:, :, 0]
        grouped = query.unflatten(1, (key.shape[1], -1)).squeeze(3)  # [E * P, Hkv, G, D]
        generated = keys[:, :, : step + 1], values[:, :, : step + 1]
        if window is None:
            prefix, seen = self._prefix_terms(index, query, grouped, scale), None
        else:
            prefix, seen = self._window_terms(self.layers[index], grouped, window, step, scale)
        new = generated_terms(grouped, *generated, scale, seen)
        return merge(prefix, new, *head_sinks(module, key.shape[1])).flatten(1, 2).unsqueeze(1)

    def _window_terms(
        self, layer: PrefixLayer, grouped: Tensor, window: Window, step: int, scale: float
    ) -> tuple[Terms, Tensor]:
        """Computes the exact terms [E * P, Hkv, G, ...] of the prefix within a window, and which of the generated
        tokens it holds [E * P, 1, 1, step + 1].
        """
        start = max(0, min(window.first(length + step) for length in self.lengths))
        lengths = torch.tensor(self.lengths, device=grouped.device).unsqueeze(1)
        first = window.first(lengths + step)
        columns = torch.arange(start, layer.keys.shape[2], device=grouped.device)
        support = ((columns >= first) & (columns < lengths))[:, None, None]
        rows = _by_example(promoted(grouped), len(self.arms))
        scores = attention_scores(rows, promoted(layer.keys[:, :, start:]), scale)
        terms = exact_terms(scores, promoted(layer.values[:, :, start:]), support)
        seen = lengths + torch.arange(step + 1, device=grouped.device) >= first
        by_row = (_by_arm(part, len(self.arms)).flatten(0, 1) for part in terms)
        return Terms(*by_row), seen.repeat_interleave(len(self.arms), 0)[:, None, None]

    def _prefix_terms(self, index: int, query: Tensor, grouped: Tensor, scale: float) -> Terms:
        """Collects the groups' terms for all rows, [E * P, Hkv, G, ...]."""
        parts = []
        for group in self.groups:
            chosen = self._select_arms(grouped, group.arms)
            log_query, summary = None, None
            if group.summaries is not None and group.query_maps is not None:
                summary = group.summaries[index]
                chosen_query = self._select_arms(query, group.arms)
                log_query = map_queries(group.query_maps[index], chosen_query, grouped.shape[1])
                log_query = _by_example(log_query, len(group.arms))
            terms = prefix_terms(
                _by_example(chosen, len(group.arms)), log_query, self.layers[index], summary,
                self._arm_rows(group, grouped.shape[2]), scale,
            )  # fmt: skip
            parts.append([_by_arm(term, len(group.arms)) for term in terms])
        if len(parts) == 1:
            return Terms(*(piece.flatten(0, 1) for piece in parts[0]))
        return Terms(*(torch.cat(pieces, dim=1)[:, self.order].flatten(0, 1) for pieces in zip(*parts, strict=True)))

    def _arm_rows(self, group: ArmGroup, heads: int) -> ArmRows:
        """Builds the group's rows at the first call, when the number of query heads per KV head is known."""
        if group.rows is None:
            arms = [self.arms[a] for a in group.arms]
            device = self.layers[0].keys.device
            group.rows = arm_rows(arms, heads, self.lengths, self.anchors, self.nominal_length, device)
        return group.rows

    def _select_arms(self, x: Tensor, arms: list[int]) -> Tensor:
        """Selects the rows of some arms, in ascending order: [E * P, ...] -> [E * len(arms), ...]."""
        if len(arms) == len(self.arms):
            return x
        return x.unflatten(0, (-1, len(self.arms)))[:, arms].flatten(0, 1)

    def at(self, examples: list[int], arms: list[int]) -> PartialRows:
        """Selects the rows of some examples and arms."""
        chosen = torch.tensor(examples, device=self.layers[0].keys.device)
        rows = [e * len(self.arms) + a for e in examples for a in arms]
        groups = [group.at(chosen, arms) for group in self.groups]
        return PartialRows(
            [layer.at(chosen) for layer in self.layers],
            [group for group in groups if group.arms],
            [self.arms[a] for a in arms],
            [self.lengths[e] for e in examples],
            self.anchors,
            self.nominal_length,
            [(keys[rows], values[rows]) for keys, values in self.generated],
        )


def generated_buffers(layers: Sequence[PrefixLayer], num_arms: int, steps: int) -> list[tuple[Tensor, Tensor]]:
    """Allocates the generated keys and values [E * P, Hkv, steps, D] of every layer."""

    def room(x: Tensor) -> Tensor:
        examples, kv_heads, _, d = x.shape
        return x.new_empty(examples * num_arms, kv_heads, steps, d)

    return [(room(layer.keys), room(layer.values)) for layer in layers]


def _by_example(x: Tensor, num_arms: int) -> Tensor:
    """[E * A, Hkv, G, ...] -> [E, Hkv, A * G, ...]."""
    return x.unflatten(0, (-1, num_arms)).transpose(1, 2).flatten(2, 3)


def _by_arm(x: Tensor, num_arms: int) -> Tensor:
    """[E, Hkv, A * G, ...] -> [E, A, Hkv, G, ...]."""
    return x.unflatten(2, (num_arms, -1)).transpose(1, 2)
