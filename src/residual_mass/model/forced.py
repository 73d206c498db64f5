"""Forced decoding: the logits of every arm after each token of a given continuation, from one exact prefill.

The T tokens of a continuation are one chunk of T query rows an arm, in place of T steps: every row selects for itself,
and earlier tokens of the chunk are exact and causal.

Shape letters: A = arms, T = forced tokens, L = prefix tokens, Hq / Hkv = query / KV heads, G = Hq / Hkv, D = head
dimension, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from residual_mass.core.accounting import Terms, attention_scores, exact_terms, merge, promoted
from residual_mass.methods.arms import ArmSpec
from residual_mass.model.decoder import ArmDecoder, ArmGroup, FullRows
from residual_mass.model.engine import NotFiniteError, SharedPrefillEngine, maps_suffix
from residual_mass.model.hook import (
    Handler,
    Window,
    attention_hook,
    end_tokens,
    exact_attention,
    greedy,
    model_at_fault,
    window_of,
)
from residual_mass.model.phi_maps import MAPS_AT_FAULT
from residual_mass.model.prefix import PrefixLayer, arm_rows, head_sinks, map_heads, prefix_terms, retrieved_by

State = Literal["own", "dense"]
"""Whose keys and values the earlier forced tokens have: the arm's own, so that its errors feed on, or those of full
attention, which leaves the error of each step alone.
"""
ROWS = 512
"""Most tokens, over all arms, of one pass through the model, which bounds the memory of their logits."""
SCORES = 2**24
"""Most scores of a layer that are computed at once, unless one arm has more."""
Layers = dict[int, tuple[Tensor, Tensor]]
"""Keys and values [1, Hkv, T, D] of the forced tokens by layer."""


class ForcedDecoder:
    """Decodes given continuations of one prompt under the arms of an engine.

    Args:
        engine: holds the backbone, the arms and their maps.
        prefix: tokens that are read exactly.

    Raises:
        NotFiniteError: the prefill, or a summary of it, is not finite.
    """

    @torch.no_grad()
    def __init__(self, engine: SharedPrefillEngine, prefix: Sequence[int]) -> None:
        self.engine, self.length = engine, len(prefix)
        self.prefix, _ = engine.read([list(prefix)])
        self.partial = [arm for arm in engine.arms if not arm.is_full]
        self.groups = engine.groups(self.prefix, self.partial) if self.partial else []

    def k(self, arm: ArmSpec) -> int:
        """Mid-region tokens that an arm retrieves per query head and step."""
        return retrieved_by(arm, self.length, self.engine.anchors, self.engine.nominal_length)

    @torch.no_grad()
    def full(self, tokens: Sequence[int]) -> tuple[Tensor, Layers]:
        """Returns logits [T, V] of full attention after each token, and the tokens' keys and values under it."""
        chunk = _FullChunk(self.prefix)
        return self._logits([ArmSpec("full")], chunk, tokens)[0], chunk.layers

    @torch.no_grad()
    def logits(self, arms: Sequence[ArmSpec], tokens: Sequence[int], dense: Layers | None = None) -> Iterator[Tensor]:
        """Yields logits [T, V] of each partial arm after each token.

        Args:
            dense: what `full` returned for the same tokens, for the state `dense`; None for the arms' own.

        Raises:
            NotFiniteError: a logit is not finite; names the arm and the layer.
            RuntimeError: an attention layer bypassed the hook.
        """
        size = max(1, ROWS // len(tokens))
        for some in (arms[start : start + size] for start in range(0, len(arms), size)):
            yield from self._logits(some, _ArmsChunk(list(self._chunks(some, len(tokens), dense)), len(some)), tokens)

    def _chunks(self, arms: Sequence[ArmSpec], tokens: int, dense: Layers | None) -> Iterator[_MethodChunk]:
        """Yields the attention of arms that are computed together: those of one method and maps, while their scores
        are not too many.
        """
        shape = self.engine.backbone.shape
        most = max(1, SCORES // (shape.query_heads * tokens * self.length))
        together: dict[tuple[str, str | None], list[int]] = {}
        for place, arm in enumerate(arms):
            together.setdefault((arm.method, arm.maps), []).append(place)
        for places in together.values():
            group = next(group for group in self.groups if self.partial.index(arms[places[0]]) in group.arms)
            for some in (places[start : start + most] for start in range(0, len(places), most)):
                yield _MethodChunk(self, some, [arms[place] for place in some], group, dense)

    @torch.no_grad()
    def greedy(self, first: int, limit: int) -> list[int]:
        """Returns up to `limit` tokens that full attention appends to the prefix and the token `first`; an
        end-of-sequence token is the last.
        """
        model, ends = self.engine.backbone.model, end_tokens(self.engine.backbone.model)
        rows = FullRows.copy(self.prefix, [self.length], limit)
        decoder = ArmDecoder([ArmSpec("full")], rows, None, len(self.prefix))
        newest, tokens = first, []
        with attention_hook(model, decoder, hybrid=True):
            while len(tokens) < limit and (not tokens or newest not in ends):
                ids = torch.tensor([[newest]], device=self.engine.backbone.device)
                position = torch.tensor([[self.length + len(tokens)]], device=ids.device)
                newest = int(greedy(model(ids, position_ids=position, use_cache=False).logits)[0])
                tokens.append(newest)
        decoder.require_calls(len(tokens))
        return tokens

    def _logits(self, arms: Sequence[ArmSpec], chunk: _FullChunk | _ArmsChunk, tokens: Sequence[int]) -> Tensor:
        """Runs all tokens of all arms through the model at once, with the attention of `chunk`: [A, T, V]."""
        counted = _Recorded(chunk)
        logits = self._forward(counted, len(arms), tokens)
        if counted.calls != dict.fromkeys(range(len(self.prefix)), 1):
            raise RuntimeError(f"attention hook calls by layer {counted.calls}, expected one in each")
        extremes = torch.stack(logits.flatten(1).aminmax(dim=1))  # a NaN is both; less memory than a mask of all
        finite = extremes.isfinite().all(0).tolist()
        if not all(finite):
            self._forward(watched := _Recorded(chunk, finite.index(False)), len(arms), tokens)
            arm = arms[finite.index(False)]
            place = "" if watched.layer is None else f", from layer {watched.layer} on,"
            what = f"the logits of the continuation under {arm.method}{maps_suffix(arm.maps)}{place} are"
            cause = MAPS_AT_FAULT if arm.needs_maps else model_at_fault(self.engine.backbone.spec)
            raise NotFiniteError(0, what, cause)
        return logits

    def _forward(self, handler: Handler, num_arms: int, tokens: Sequence[int]) -> Tensor:
        ids = torch.tensor([list(tokens)] * num_arms, device=self.engine.backbone.device)
        positions = torch.arange(self.length, self.length + len(tokens), device=ids.device).expand(num_arms, -1)
        with attention_hook(self.engine.backbone.model, handler, hybrid=True):
            return self.engine.backbone.model(ids, position_ids=positions, use_cache=False).logits


class _Recorded:
    """Counts a handler's calls by layer, for a bypassed hook would give numbers of the tokens without their prefix, and
    finds the first layer in which the attention of `watched`, a row, is not finite.
    """

    def __init__(self, handler: Handler, watched: int | None = None) -> None:
        self.handler, self.watched = handler, watched
        self.calls: dict[int, int] = {}
        self.layer: int | None = None

    def __call__(self, module: nn.Module, *tensors: Tensor | None | float) -> Tensor:
        self.calls[module.layer_idx] = self.calls.get(module.layer_idx, 0) + 1
        output = self.handler(module, *tensors)
        if self.watched is not None and self.layer is None and not output[self.watched].isfinite().all():
            self.layer = module.layer_idx
        return output


class _FullChunk:
    """Attention handler of forced tokens that read the whole prefix."""

    def __init__(self, prefix: Sequence[PrefixLayer]) -> None:
        self.prefix = prefix
        self.layers: Layers = {}

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        self.layers[module.layer_idx] = (key, value)
        layer = self.prefix[module.layer_idx]
        keys, values = torch.cat((layer.keys, key), dim=2), torch.cat((layer.values, value), dim=2)
        visible = _visible(layer.keys.shape[2], query, window_of(module))
        return exact_attention(module, query, keys, values, visible[None, None], scale)


class _ArmsChunk:
    """Attention handler of the same forced tokens under several partial arms, a row each."""

    def __init__(self, chunks: Sequence[_MethodChunk], num_arms: int) -> None:
        self.chunks, self.num_arms = chunks, num_arms

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        output = query.new_empty(self.num_arms, query.shape[2], query.shape[1], value.shape[3])
        for chunk in self.chunks:
            output[chunk.places] = chunk(module, *(x[chunk.places] for x in (query, key, value)), scale)
        return output


class _MethodChunk:
    """Attention of forced tokens under partial arms of one method.

    Attributes:
        places: of the arms in a batch.
    """

    def __init__(
        self,
        decoder: ForcedDecoder,
        places: list[int],
        arms: Sequence[ArmSpec],
        group: ArmGroup,
        dense: Layers | None,
    ) -> None:
        self.decoder, self.places, self.arms, self.group, self.dense = decoder, places, arms, group, dense

    def __call__(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attends with query [A, Hq, T, D], key and value [A, Hkv, T, D] in a layer: [A, T, Hq, D]."""
        index, window = module.layer_idx, window_of(module)
        visible = _visible(self.decoder.length, query, window)
        rows = promoted(query).unflatten(1, (key.shape[1], -1))  # [A, Hkv, G, T, D]
        if window is None:
            prefix = _by_arm(self._prefix_terms(index, query, key.shape[1], scale), rows.shape)
        else:
            layer = self.decoder.prefix[index]
            keys, values = (promoted(x).unsqueeze(2) for x in (layer.keys, layer.values))
            prefix = exact_terms(attention_scores(rows, keys, scale), values, visible[:, : self.decoder.length])
        near = visible[:, self.decoder.length :]
        new = self._chunk_terms(index, rows, promoted(key).unsqueeze(2), promoted(value).unsqueeze(2), scale, near)
        sinks = [Terms(*(part.unsqueeze(2) for part in terms)) for terms in head_sinks(module, key.shape[1])]
        output = merge(prefix, *new, *sinks)  # [A, Hkv, G, T, D]
        return output.flatten(1, 2).transpose(1, 2).to(query.dtype)

    def _prefix_terms(self, index: int, query: Tensor, kv_heads: int, scale: float) -> Terms:
        """The terms of all rows over the prefix, [1, Hkv, A * G * T, ...]."""
        log_query, summary = None, None
        if self.arms[0].needs_maps and self.group.summaries is not None and self.group.query_maps is not None:
            summary = self.group.summaries[index]
            log_query = _rows_of_heads(map_heads(self.group.query_maps[index], query), kv_heads)
        engine, rows = self.decoder.engine, _rows_of_heads(query, kv_heads)
        settings = arm_rows(
            self.arms, rows.shape[2] // len(self.arms), [self.decoder.length], engine.anchors, engine.nominal_length,
            query.device, tokens=query.shape[2],
        )  # fmt: skip
        return prefix_terms(rows, log_query, self.decoder.prefix[index], summary, settings, scale)

    def _chunk_terms(
        self, index: int, rows: Tensor, key: Tensor, value: Tensor, scale: float, visible: Tensor
    ) -> list[Terms]:
        """The exact terms of the chunk's tokens for rows [A, Hkv, G, T, D]; key and value [A, Hkv, 1, T, D], visible
        [T, T] bool.
        """
        own = attention_scores(rows, key, scale)
        if self.dense is None:
            return [exact_terms(own, value, visible)]
        itself = torch.eye(rows.shape[3], dtype=torch.bool, device=rows.device)
        keys, values = (promoted(x).unsqueeze(2) for x in self.dense[index])
        earlier = exact_terms(attention_scores(rows, keys, scale), values, visible & ~itself)
        return [earlier, exact_terms(own, value, itself)]


def _visible(length: int, query: Tensor, window: Window | None) -> Tensor:
    """[T, L + T] bool, True where a token of the chunk may look: at itself and before, within the layer's window."""
    columns = torch.arange(length + query.shape[2], device=query.device)
    positions = columns[length:].unsqueeze(1)
    visible = columns <= positions
    return visible if window is None else visible & (columns >= window.first(positions))


def _rows_of_heads(x: Tensor, kv_heads: int) -> Tensor:
    """[A, Hq, T, C] -> [1, Hkv, A * G * T, C]."""
    return x.unflatten(1, (kv_heads, -1)).transpose(0, 1).flatten(1, 3)[None]


def _by_arm(terms: Terms, shape: torch.Size) -> Terms:
    """[1, Hkv, A * G * T, ...] -> [A, Hkv, G, T, ...], the first of `shape`."""
    arms, _, heads, tokens = shape[:4]
    return Terms(*(part[0].unflatten(1, (arms, heads, tokens)).transpose(0, 1) for part in terms))
