"""Backends written in the slow, obvious way, that texts are checked against.

Shape letters: B = batch rows, Hq / Hkv = query / KV heads, G = Hq / Hkv, T = new tokens, C = columns so far, L = prefix
columns, D = head dimension, V = vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
import torch.nn.functional as F
from tests.unit.core.reference import DROPPED, log_features, split, top
from torch import Tensor
from transformers import PreTrainedModel

from residual_mass.core.selection import Selected
from residual_mass.decode.backend import Backend, LayerCall
from residual_mass.decode.text import Text
from residual_mass.methods import Seen, TopK
from residual_mass.methods.arms import Arm
from residual_mass.methods.interface import Layout
from residual_mass.model.phi_maps import PhiMaps
from residual_mass.spec.settings import AnchorSpec

JOIN = 64
"""Generated tokens that join the prefix together."""


@dataclass
class Held:
    """Keys and values [Hkv, C, D] of a layer, and its prefix: the real ones among its first L columns, and states."""

    keys: Tensor
    values: Tensor
    real: list[bool] = field(default_factory=list)
    states: dict[Any, Any] = field(default_factory=dict)
    summarised: int = 0

    def mid(self, anchors: AnchorSpec) -> tuple[list[int], list[int]]:
        """The anchors, and the columns between them."""
        columns = [column for column, real in enumerate(self.real) if real]
        places, mid = split(len(columns), anchors.sink, anchors.tail)
        return [columns[i] for i in places], [columns[i] for i in mid]


class Slow(Backend):
    """One text: every token of every head sums over single tokens in float64 and divides once.

    Selectors beside exact top-K choose, and residuals beside feature maps estimate, as they define it, over a prefix
    of this row alone.

    Args:
        real: [C] bool, False on the prompt's padding; None without padding.
        joins: whether 64 generated tokens join the prefix together.
    """

    name = "slow"

    def __init__(
        self, arm: Arm, anchors: AnchorSpec, phi: PhiMaps | None = None, real: Tensor | None = None, joins: bool = True
    ) -> None:
        self.arm, self.anchors, self.phi, self.joins = arm, anchors, phi, joins
        self.padded = [] if real is None else (~real).nonzero().flatten().tolist()
        self.held: dict[int, Held] = {}

    @property
    def tokens(self) -> int:
        return max((held.keys.shape[1] for held in self.held.values()), default=0)

    def stored(self, call: LayerCall) -> tuple[Tensor, Tensor]:
        held = self._append(call)
        return held.keys[None], held.values[None]

    def _append(self, call: LayerCall) -> Held:
        key, value = call.key[0].double(), call.value[0].double()
        if call.index not in self.held:
            self.held[call.index] = Held(key, value)
        else:
            held = self.held[call.index]
            held.keys = torch.cat((held.keys, key), 1)
            held.values = torch.cat((held.values, value), 1)
        return self.held[call.index]

    def read(self, call: LayerCall) -> Tensor:
        held = self._append(call)
        columns = held.keys.shape[1]
        real = [column not in self.padded for column in range(columns)]
        held.real, held.states = real, {}
        outputs = []
        for token, column in enumerate(range(columns - call.query.shape[2], columns)):
            seen = [i for i in range(column + 1) if real[i]] or [column]
            outputs.append(self._exact(held, call.query[0, :, token].double(), seen, call.scale))
        return torch.stack(outputs)[None].to(call.query.dtype)

    def step(self, call: LayerCall) -> Tensor:
        outputs = []
        for token in range(call.query.shape[2]):
            at = slice(token, token + 1)
            held = self._append(call._replace(key=call.key[:, :, at], value=call.value[:, :, at]))
            query = call.query[0, :, token].double()
            if self.arm.is_full:
                columns = held.keys.shape[1]
                real = [*held.real, *[True] * (columns - len(held.real))]
                outputs.append(self._exact(held, query, [i for i in range(columns) if real[i]], call.scale))
                continue
            if self.joins and held.keys.shape[1] - 1 - len(held.real) >= JOIN:
                self._join(held)
            outputs.append(self._partial(call.index, held, query, call.scale))
        return torch.stack(outputs)[None].to(call.query.dtype)

    def _exact(self, held: Held, query: Tensor, seen: list[int], scale: float) -> Tensor:
        """[Hq, D] of queries [Hq, D] over some columns."""
        group = len(query) // len(held.keys)
        rows = []
        for head, own in enumerate(query):
            scores = scale * held.keys[head // group, seen] @ own
            rows.append(scores.softmax(0) @ held.values[head // group, seen])
        return torch.stack(rows)

    def _join(self, held: Held) -> None:
        """Takes 64 more columns into the prefix. Summaries take in what joins the mid-region, and are computed anew
        once it has doubled.
        """
        before = self._mask(held)
        start = max(0, len(held.real) - self.anchors.tail)
        held.real = [*held.real, *[True] * JOIN]
        after = self._mask(held)
        count = int(after.sum())
        if count >= 2 * held.summarised:
            held.states = {}
            return
        joined = after & ~F.pad(before, (0, JOIN))
        keys, values = (x[None, :, : len(held.real)] for x in (held.keys, held.values))
        for part, state in held.states.items():
            if part == self.arm.rule.selector:
                held.states[part] = part.update(state, keys, after, start)
            else:
                held.states[part] = part.update(
                    state, keys[:, :, start:], values[:, :, start:], joined[..., start:], start
                )

    def _mask(self, held: Held) -> Tensor:
        """The mid-region as [1, 1, L]."""
        _, mid = held.mid(self.anchors)
        mask = torch.zeros(1, 1, len(held.real), dtype=torch.bool)
        mask[..., mid] = True
        return mask

    def _partial(self, index: int, held: Held, query: Tensor, scale: float) -> Tensor:
        length, columns, kv_heads = len(held.real), held.keys.shape[1], len(held.keys)
        group = len(query) // kv_heads
        rows = query.unflatten(0, (kv_heads, group))[None]  # [1, Hkv, G, D]
        scores = scale * rows @ held.keys.mT  # [1, Hkv, G, C]
        anchors, mid = held.mid(self.anchors)
        mask = self._mask(held)
        budget = math.ceil(Fraction(self.arm.budget_percent or 100) / 100 * (len(anchors) + len(mid)))
        k = max(0, min(budget - len(anchors), len(mid)))
        read, seen = self._chosen(held, scale * rows, scores[..., :length], mask, mid, k)
        near = list(range(length, columns))
        own = self._own_terms(held, mask, seen)
        outputs = []
        for head in range(len(query)):
            kv, place = divmod(head, group)
            chosen = read[kv][place]
            exact = [*anchors, *chosen, *near]
            logs, values = [scores[0, kv, place, exact]], [held.values[kv, exact]]
            if self.arm.needs_maps:
                estimated = [i for i in mid if i not in chosen] if self.arm.rule.subtracts else mid
                z = self._kernel(index, head, kv, query[head], held.keys[kv])
                left = [i for i in mid if i not in chosen]
                share = math.exp(z[left].logsumexp(0) - z[mid].logsumexp(0)) if left else 0
                if share > DROPPED or not self.arm.rule.subtracts:
                    logs.append(z[estimated])
                    values.append(held.values[kv, estimated])
            weights, tokens = torch.cat(logs), torch.cat(values)
            adds = own is not None and len(chosen) < len(mid)
            shift = torch.maximum(weights.max(), own[2][kv, place]) if adds else weights.max()
            numerator = (weights - shift).exp() @ tokens
            denominator = (weights - shift).exp().sum()
            if adds:
                factor = (own[2][kv, place] - shift).exp()
                numerator = numerator + factor * own[0][kv, place]
                denominator = denominator + factor * own[1][kv, place]
            outputs.append(numerator / denominator)
        return torch.stack(outputs)

    def _chosen(
        self, held: Held, scaled: Tensor, scores: Tensor, mask: Tensor, mid: list[int], k: int
    ) -> tuple[list[list[list[int]]], Seen]:
        """The tokens that each query head reads, by KV head; and what a residual sees."""
        selector = self.arm.rule.selector
        group, length = scores.shape[2:]
        if selector == TopK():
            read = [[top(row.tolist(), mid, k) for row in rows] for rows in scores[0]]
            chosen = Selected(torch.tensor(read).view(*scores.shape[:3], k), torch.ones(*scores.shape[:3], k).bool())
            ranked = scores.masked_fill(~mask[:, None], -math.inf)
            least = ranked.amax(-1) if k == 0 else ranked.gather(-1, chosen.indices).amin(-1)
            threshold, scanned = (least if mid else torch.zeros_like(least)), scores
        else:
            if selector not in held.states:
                held.states[selector] = selector.prepare(held.keys[None, :, :length], mask)
                held.summarised = len(mid)
            state = held.states[selector]
            counts = torch.full((1, 1, group), k)
            chosen, threshold, scanned = selector.select(scaled, scores, state, mask[:, None], counts, Layout(group))
            members = chosen.mask(length)
            read = [[row.nonzero().flatten().tolist() for row in rows] for rows in members[0]]
        unread = mask[:, None] & ~chosen.mask(length)
        anchors, _ = held.mid(self.anchors)
        always = torch.zeros(1, 1, 1, length, dtype=torch.bool)
        always[..., anchors] = True
        values = held.values[None, :, :length]
        return read, Seen(scaled, threshold, chosen, unread, scores, values, scanned, always)

    def _own_terms(self, held: Held, mask: Tensor, seen: Seen) -> list[Tensor] | None:
        """Numerator [Hkv, G, D], denominator and shift [Hkv, G] of the method's own residual."""
        residual = self.arm.rule.own
        if residual is None:
            return None
        if residual not in held.states:
            length = mask.shape[-1]
            held.states[residual] = residual.prepare(held.keys[None, :, :length], held.values[None, :, :length], mask)
            held.summarised = int(mask.sum())
        return [part[0] for part in residual.terms(seen, held.states[residual])]

    def _kernel(self, index: int, head: int, kv: int, query: Tensor, keys: Tensor) -> Tensor:
        """log <phi_q, phi_k> [C] under a head's maps."""
        kind = self.phi.map.kind
        log_query = torch.from_numpy(log_features(self.phi.query[index], kind, head, query[None].numpy()))
        log_keys = torch.from_numpy(log_features(self.phi.key[index], kind, kv, keys.numpy()))
        return (log_query + log_keys).logsumexp(-1)


class MaskedTopK(Backend):
    """Top-K over a whole text in one pass: plain attention under a mask for the rows after the prefix."""

    name = "masked"
    tokens = 0

    def __init__(self, prefix: int, k: int, anchors: AnchorSpec) -> None:
        self.prefix, self.k, self.anchors = prefix, k, anchors

    def read(self, call: LayerCall) -> Tensor:
        raise NotImplementedError

    stored = read

    def step(self, call: LayerCall) -> Tensor:
        query, key, value = call.query, call.key, call.value
        n, first, last = query.shape[2], self.anchors.sink, self.prefix - self.anchors.tail
        groups = query.shape[1] // key.shape[1]
        keys, values = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        visible = torch.ones(n, n, dtype=torch.bool).tril().repeat(1, query.shape[1], 1, 1)
        scores = query[:, :, self.prefix :] @ keys[:, :, first:last].transpose(-1, -2)
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(self.k, dim=-1).indices, True)
        visible[:, :, self.prefix :, first:last] = chosen
        bias = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)
        return F.scaled_dot_product_attention(query, keys, values, bias, scale=call.scale).transpose(1, 2)


@torch.no_grad()
def masked_logits(model: PreTrainedModel, tokens: list[int], prefix: int, k: int, anchors: AnchorSpec) -> Tensor:
    """Logits [L, V] after each token of a text, under top-K from the token behind the prefix on."""
    return Text(model, MaskedTopK(prefix, k, anchors)).step(torch.tensor([tokens]))[0]
