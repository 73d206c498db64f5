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

from residual_mass.backbones.decoder import ArmDecoder, ArmGroup, FullRows
from residual_mass.backbones.engine import NotFiniteError, SharedPrefillEngine, under
from residual_mass.backbones.hook import Handler, attention_hook, exact_attention
from residual_mass.backbones.phi_maps import MAPS_AT_FAULT
from residual_mass.backbones.prefill import end_tokens, greedy, model_at_fault
from residual_mass.backbones.prefix import PrefixLayer, arm_rows, head_sinks, map_heads, prefix_terms, retrieved_by
from residual_mass.backbones.windows import Window, window_of
from residual_mass.core.accounting import Terms, attention_scores, exact_terms, merge, promoted
from residual_mass.methods.arms import ArmSpec

State = Literal["own", "dense"]
"""Whose keys and values the earlier forced tokens have: the arm's own, so that its errors feed on, or those of full
attention, which leaves the error of each step alone.
"""
ROWS = 512
"""Most tokens, over all arms, of one pass through the model, which bounds the memory of their logits."""
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
            yield from self._logits(some, _ArmsChunk([self._chunk(arm, dense) for arm in some]), tokens)

    def _chunk(self, arm: ArmSpec, dense: Layers | None) -> _ArmChunk:
        number = self.partial.index(arm)
        return _ArmChunk(self, arm, next(group for group in self.groups if number in group.arms), dense)

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
        counted = _Counted(chunk)
        logits = self._forward(counted, len(arms), tokens)
        if counted.calls != dict.fromkeys(range(len(self.prefix)), 1):
            raise RuntimeError(f"attention hook calls by layer {counted.calls}, expected one in each")
        finite = logits.isfinite().flatten(1).all(1).tolist()
        if not all(finite):
            self._forward(watched := _Watched(chunk, finite.index(False)), len(arms), tokens)
            arm = arms[finite.index(False)]
            place = "" if watched.layer is None else f", from layer {watched.layer} on,"
            what = f"the logits of the continuation under {arm.method}{under(arm.maps)}{place} are"
            cause = MAPS_AT_FAULT if arm.needs_maps else model_at_fault(self.engine.backbone.spec)
            raise NotFiniteError(0, what, cause)
        return logits

    def _forward(self, handler: Handler, num_arms: int, tokens: Sequence[int]) -> Tensor:
        ids = torch.tensor([list(tokens)] * num_arms, device=self.engine.backbone.device)
        positions = torch.arange(self.length, self.length + len(tokens), device=ids.device).expand(num_arms, -1)
        with attention_hook(self.engine.backbone.model, handler, hybrid=True):
            return self.engine.backbone.model(ids, position_ids=positions, use_cache=False).logits


class _Counted:
    """Counts a handler's calls by layer: a bypassed hook would give numbers of the tokens without their prefix."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.calls: dict[int, int] = {}

    def __call__(self, module: nn.Module, *tensors: Tensor | None | float) -> Tensor:
        self.calls[module.layer_idx] = self.calls.get(module.layer_idx, 0) + 1
        return self.handler(module, *tensors)


class _Watched:
    """Finds the first layer in which the attention of an arm is not finite."""

    def __init__(self, handler: Handler, arm: int) -> None:
        self.handler, self.arm = handler, arm
        self.layer: int | None = None

    def __call__(self, module: nn.Module, *tensors: Tensor | None | float) -> Tensor:
        output = self.handler(module, *tensors)
        if self.layer is None and not output[self.arm].isfinite().all():
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

    def __init__(self, arms: Sequence[_ArmChunk]) -> None:
        self.arms = arms

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        rows = zip(self.arms, query.split(1), key.split(1), value.split(1), strict=True)
        return torch.cat([arm(module, *tensors, scale) for arm, *tensors in rows])


class _ArmChunk:
    """Attention of forced tokens under one partial arm."""

    def __init__(self, decoder: ForcedDecoder, arm: ArmSpec, group: ArmGroup, dense: Layers | None) -> None:
        self.decoder, self.arm, self.group, self.dense = decoder, arm, group, dense

    def __call__(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attends with query [1, Hq, T, D], key and value [1, Hkv, T, D] in a layer: [1, T, Hq, D]."""
        index, window = module.layer_idx, window_of(module)
        visible = _visible(self.decoder.length, query, window)
        rows = promoted(query).unflatten(1, (key.shape[1], -1))  # [1, Hkv, G, T, D]
        if window is None:
            prefix = _by_token(self._prefix_terms(index, query, key.shape[1], scale), rows.shape[3])
        else:
            layer = self.decoder.prefix[index]
            keys, values = (promoted(x).unsqueeze(2) for x in (layer.keys, layer.values))
            prefix = exact_terms(attention_scores(rows, keys, scale), values, visible[:, : self.decoder.length])
        near = visible[:, self.decoder.length :]
        new = self._chunk_terms(index, rows, promoted(key).unsqueeze(2), promoted(value).unsqueeze(2), scale, near)
        sinks = [Terms(*(part.unsqueeze(2) for part in terms)) for terms in head_sinks(module, key.shape[1])]
        output = merge(prefix, *new, *sinks)  # [1, Hkv, G, T, D]
        return output.flatten(1, 2).transpose(1, 2).to(query.dtype)

    def _prefix_terms(self, index: int, query: Tensor, kv_heads: int, scale: float) -> Terms:
        """The terms of all rows over the prefix, [1, Hkv, G * T, ...]."""
        rows = query.unflatten(1, (kv_heads, -1)).flatten(2, 3)
        log_query, summary = None, None
        if self.arm.needs_maps and self.group.summaries is not None and self.group.query_maps is not None:
            summary = self.group.summaries[index]
            log_query = map_heads(self.group.query_maps[index], query).unflatten(1, (kv_heads, -1)).flatten(2, 3)
        engine = self.decoder.engine
        settings = arm_rows(
            [self.arm], rows.shape[2], [self.decoder.length], engine.anchors, engine.nominal_length, query.device,
            tokens=query.shape[2],
        )  # fmt: skip
        return prefix_terms(rows, log_query, self.decoder.prefix[index], summary, settings, scale)

    def _chunk_terms(
        self, index: int, rows: Tensor, key: Tensor, value: Tensor, scale: float, visible: Tensor
    ) -> list[Terms]:
        """The exact terms of the chunk's tokens for rows [1, Hkv, G, T, D]; key and value [1, Hkv, 1, T, D], visible
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


def _by_token(terms: Terms, tokens: int) -> Terms:
    """[1, Hkv, G * T, ...] -> [1, Hkv, G, T, ...]."""
    return Terms(*(part.unflatten(2, (-1, tokens)) for part in terms))
