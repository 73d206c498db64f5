"""The attention of one decode step: a batch of E * A rows of one new token each, read against the shared prefixes.

Shape letters: E = examples, A = arms, Hq / Hkv = query / KV heads, G = Hq / Hkv, L = prefix columns, T = generated
tokens, D = head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from residual_mass.backbones.prefix import (
    ArmRows,
    Map,
    PrefixLayer,
    Summary,
    arm_rows,
    generated_terms,
    map_queries,
    prefix_terms,
)
from residual_mass.core.accounting import Terms, merge
from residual_mass.specs import AnchorSpec, ArmSpec


@dataclass
class ArmGroup:
    """Arms that share a set of maps, by their place among the decoder's arms.

    Attributes:
        summaries, query_maps: one per layer; None where no arm of the group uses phi.
        rows: set by the decoder, which knows the prefixes.
    """

    arms: list[int]
    summaries: list[Summary] | None
    query_maps: list[Map] | None
    rows: ArmRows | None = None


class ArmDecoder:
    """Attention handler of the decode steps; every arm has its own generated keys and values."""

    def __init__(
        self,
        layers: list[PrefixLayer],
        groups: list[ArmGroup],
        arms: Sequence[ArmSpec],
        lengths: Sequence[int],
        anchors: AnchorSpec,
        nominal_length: int | None,
        steps: int,
    ) -> None:
        self.layers, self.groups, self.arms, self.lengths = layers, groups, list(arms), list(lengths)
        self.anchors, self.nominal_length = anchors, nominal_length
        self.calls = [0] * len(layers)
        self.generated = [self._buffers(layer, steps) for layer in layers]
        self._plan()

    def _buffers(self, layer: PrefixLayer, steps: int) -> tuple[Tensor, Tensor]:
        examples, kv_heads, _, d = layer.keys.shape
        size = (examples * len(self.arms), kv_heads, steps, d)
        return layer.keys.new_empty(size), layer.values.new_empty(size)

    def _plan(self) -> None:
        """Which rows of a group read what, and how the groups' arms come back into the decoder's order."""
        for group in self.groups:
            group.rows = None
        order = [a for group in self.groups for a in group.arms]
        self.order = torch.tensor(order).argsort().to(self.layers[0].keys.device)

    def _rows(self, group: ArmGroup, heads: int) -> ArmRows:
        """Made at the first call, which tells the number of query heads of a KV head."""
        if group.rows is None:
            arms = [self.arms[a] for a in group.arms]
            device = self.layers[0].keys.device
            group.rows = arm_rows(arms, heads, self.lengths, self.anchors, self.nominal_length, device)
        return group.rows

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        index = module.layer_idx
        step = self.calls[index]
        self.calls[index] += 1
        keys, values = self.generated[index]
        keys[:, :, step], values[:, :, step] = key[:, :, 0], value[:, :, 0]
        grouped = query.unflatten(1, (key.shape[1], -1)).squeeze(3)  # [E * A, Hkv, G, D]
        prefix = self._prefix_terms(index, query, grouped, scale)
        new = generated_terms(grouped, keys[:, :, : step + 1], values[:, :, : step + 1], scale)
        return merge(prefix, new).flatten(1, 2).unsqueeze(1).to(query.dtype)

    def _prefix_terms(self, index: int, query: Tensor, grouped: Tensor, scale: float) -> Terms:
        """Terms of all rows, [E * A, Hkv, G, ...], from each group's."""
        parts = []
        for group in self.groups:
            chosen = self._of_arms(grouped, group.arms)
            log_query, summary = None, None
            if group.summaries is not None and group.query_maps is not None:
                summary = group.summaries[index]
                log_query = map_queries(group.query_maps[index], self._of_arms(query, group.arms), grouped.shape[1])
                log_query = _by_example(log_query, len(group.arms))
            terms = prefix_terms(
                _by_example(chosen, len(group.arms)), log_query, self.layers[index], summary,
                self._rows(group, grouped.shape[2]), scale,
            )  # fmt: skip
            parts.append([_by_arm(term, len(group.arms)) for term in terms])
        return Terms(*(torch.cat(pieces, dim=1)[:, self.order].flatten(0, 1) for pieces in zip(*parts, strict=True)))

    def _of_arms(self, x: Tensor, arms: list[int]) -> Tensor:
        """The rows of some arms: [E * A, ...] -> [E * len(arms), ...]."""
        return x.unflatten(0, (-1, len(self.arms)))[:, arms].flatten(0, 1)

    def keep(self, examples: list[int], arms: list[int]) -> None:
        """Goes on with some examples and arms, given by their present places; the rest is forgotten."""
        device = self.layers[0].keys.device
        if len(examples) < len(self.lengths):
            chosen = torch.tensor(examples, device=device)
            self.layers = [layer.at(chosen) for layer in self.layers]
            for group in self.groups:
                group.summaries = group.summaries and [summary.at(chosen) for summary in group.summaries]
        rows = [e * len(self.arms) + a for e in examples for a in arms]
        self.generated = [(keys[rows], values[rows]) for keys, values in self.generated]
        self.lengths, self.arms = [self.lengths[e] for e in examples], [self.arms[a] for a in arms]
        for group in self.groups:
            group.arms = [arms.index(a) for a in group.arms if a in arms]
        self.groups = [group for group in self.groups if group.arms]
        self._plan()

    def require_calls(self, steps: int) -> None:
        """Raises RuntimeError unless every layer went through here once per step: a bypassed hook would report Full's
        numbers.
        """
        if self.calls != [steps] * len(self.calls):
            raise RuntimeError(f"attention hook calls per layer {sorted(set(self.calls))}, expected {steps} in each")


def _by_example(x: Tensor, num_arms: int) -> Tensor:
    """[E * A, Hkv, G, ...] -> [E, Hkv, A * G, ...]."""
    return x.unflatten(0, (-1, num_arms)).transpose(1, 2).flatten(2, 3)


def _by_arm(x: Tensor, num_arms: int) -> Tensor:
    """[E, Hkv, A * G, ...] -> [E, A, Hkv, G, ...]."""
    return x.unflatten(2, (num_arms, -1)).transpose(1, 2)
