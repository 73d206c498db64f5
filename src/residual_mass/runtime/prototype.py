"""Decoding as the paper describes its prototype, the baseline of the measurement.

Full is exact attention over a dynamic cache of transformers. The partial methods run as separate torch operations:
exhaustive top-K, feature maps layer by layer (not folded), recomputed features of retrieved tokens, S_R formed for
every query head, a cache that grows by concatenation. Nothing is slowed down on purpose: values of retrieved tokens are
gathered, query heads are batched, and summaries are computed once.

Shape letters: B = batch rows, Hq / Hkv = query / KV heads, G = Hq / Hkv, L = prompt tokens, D = head dimension, M =
features.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from residual_mass.core.accounting import (
    Retrieved,
    SummaryState,
    Terms,
    attention_scores,
    exact_terms,
    key_features,
    merge,
    residual_terms,
    summarise,
)
from residual_mass.core.feature_maps import ReZeroMap
from residual_mass.core.selection import Selected, full_prefix, partition
from residual_mass.decode.backend import Backend, LayerCall, Prefill
from residual_mass.decode.prefix import KEY_CHUNK
from residual_mass.methods import method_named
from residual_mass.model.hook import exact_attention
from residual_mass.model.layers import device_of
from residual_mass.model.phi_maps import PhiMaps
from residual_mass.spec.settings import AnchorSpec


class PrototypeBackend(Backend):
    """Attention of one method over prompts of equal length.

    Args:
        read: the prompts, which are moved into the backend's cache, so that a long prompt is not in memory twice.
        method: one of the paper's methods.
        k: retrieved tokens per query head; unused by `full`.
        phi: required by methods with feature maps.
    """

    name = "prototype"

    def __init__(
        self, model: PreTrainedModel, read: Prefill, method: str, k: int, anchors: AnchorSpec, phi: PhiMaps | None
    ) -> None:
        self.rule = method_named(method)
        self.device = device_of(model)
        self.phi = None if phi is None else phi.on(model)
        length = next(iter(read.layers.values()))[0].shape[2]
        self.length = length
        self.k = min(k, length)
        sinks = min(anchors.sink, length)
        tails = max(length - anchors.tail, sinks)
        self.always_exact = (slice(0, sinks), slice(tails, None))
        self.mid = partition(full_prefix(length, self.device), anchors.sink, anchors.tail).mid
        self.summaries: dict[int, SummaryState] = {}
        self.cache = DynamicCache()
        for index in sorted(read.layers):
            keys, values = read.layers.pop(index)
            if self.rule.needs_maps:
                self.summaries[index] = self._summary(index, keys, values)
            self.cache.update(keys, values, index)

    @property
    def tokens(self) -> int:
        return self.cache.get_seq_length()

    def read(self, call: LayerCall) -> Tensor:
        raise ValueError("the prototype decodes after prompts that were read before")

    def stored(self, call: LayerCall) -> tuple[Tensor, Tensor]:
        return self.cache.update(call.key, call.value, call.index)

    def crop(self, tokens: int) -> None:
        if tokens:
            self.cache.crop(-tokens)

    @torch.no_grad()
    def _summary(self, index: int, keys: Tensor, values: Tensor) -> SummaryState:
        key_map = self.phi.key[index]
        chunks = [_as_written(key_map, chunk) for chunk in keys.split(KEY_CHUNK, dim=2)]
        log_features = torch.cat(chunks, dim=2)
        features, log_shift = key_features(log_features, self.mid)
        return summarise(features, log_shift, values.float())

    def step(self, call: LayerCall) -> Tensor:
        key, value = self.stored(call)
        query = call.query
        if self.rule.whole_prefix:
            return exact_attention(call.module, query, key, value, call.mask, call.scale)
        by_kv_head = (key.shape[1], -1)
        grouped = query.float().unflatten(1, by_kv_head).squeeze(3)  # [B, Hkv, G, D]
        scores = attention_scores(grouped, key.float(), call.scale)
        mid_scores = scores[..., : self.length].masked_fill(~self.mid, -torch.inf)
        top, chosen = mid_scores.topk(self.k, dim=-1, sorted=False)
        retrieved = Selected(chosen, top > -torch.inf)
        values = _rows_at(value, chosen).float()
        # Each query head has tokens of its own, so it is a batch row here, with one query.
        own = exact_terms(top.unsqueeze(-2), values, retrieved.valid.unsqueeze(-2))
        of_retrieved = Terms(own.numerator.squeeze(-2), own.denominator.squeeze(-1), own.shift.squeeze(-1))
        parts = [of_retrieved]
        for tokens in self.always_exact:  # anchors and generated tokens
            exact_values = value[:, :, tokens].float()
            all_tokens = full_prefix(exact_values.shape[2], self.device)
            parts.append(exact_terms(scores[..., tokens], exact_values, all_tokens))
        if self.rule.needs_maps:
            index = call.index
            subtracted = None
            if self.rule.subtracts:
                features = self._features_again(index, key, retrieved)
                subtracted = Retrieved(features, values)
            log_features = _as_written(self.phi.query[index], query)  # [B, Hq, 1, M]
            log_query = log_features.squeeze(2).unflatten(1, by_kv_head)
            parts.append(residual_terms(self.summaries[index], log_query, subtracted))
        output = merge(*parts).flatten(1, 2)
        return output.unsqueeze(1).to(query.dtype)

    def _features_again(self, index: int, keys: Tensor, retrieved: Selected) -> Tensor:
        """Recomputes phi_k of the retrieved keys [B, Hkv, G, K, M] in the summary's units; zero in empty slots."""
        chosen = _rows_at(keys, retrieved.indices)
        log_features = _as_written(self.phi.key[index], chosen.flatten(2, 3))
        log_features = log_features.unflatten(2, retrieved.indices.shape[2:])
        log_shift = self.summaries[index].log_shift[:, :, None, None]
        features = (log_features - log_shift).exp()
        return torch.where(retrieved.valid.unsqueeze(-1), features, 0)


def _as_written(feature_map: nn.Module, x: Tensor) -> Tensor:
    """Computes log phi layer by layer: [B, H, N, D] -> [B, H, N, M]."""
    function = feature_map.unfolded if isinstance(feature_map, ReZeroMap) else feature_map
    batch, heads, n, d = x.shape
    stacked = x.float().transpose(0, 1).reshape(heads, batch * n, d)
    return function(stacked).unflatten(1, (batch, n)).transpose(0, 1)


def _rows_at(x: Tensor, indices: Tensor) -> Tensor:
    """Gathers rows of x [B, Hkv, L, D] at indices [B, Hkv, G, K]: [B, Hkv, G, K, D]."""
    flat = indices.flatten(2).unsqueeze(-1)
    rows = x.gather(2, flat.expand(-1, -1, -1, x.shape[-1]))
    return rows.unflatten(2, indices.shape[2:])
