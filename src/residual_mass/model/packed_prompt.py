"""Decodes given continuations of one prompt from packed caches of the CPU kernels, after the prefill of the engine.

Shape letters: T = forced tokens, V = vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from residual_mass.methods.arms import ArmSpec
from residual_mass.model.hook import Prefill, attention_hook
from residual_mass.model.packed import PackedCache, PackedSession

if TYPE_CHECKING:  # the engine takes long to import
    from residual_mass.model.engine import ForcedDecoder


class PackedPrompt:
    """Packed caches of the prompt that a `ForcedDecoder` has read; a method packs it once for all budgets."""

    def __init__(self, decoder: ForcedDecoder) -> None:
        self.decoder = decoder
        self._packed: dict[str, PackedCache] = {}

    def cache(self, arm: ArmSpec) -> PackedCache:
        """Returns a cache of the arm's method that holds the prompt alone."""
        if arm.method not in self._packed:
            cache = self._packed[arm.method] = PackedCache(self.decoder.engine.backbone.model, arm.rule)
            layers = {index: (layer.keys, layer.values) for index, layer in enumerate(self.decoder.prefix)}
            PackedSession(arm, self.decoder.engine.anchors, cache).take(Prefill(layers))
        return copy.deepcopy(self._packed[arm.method])

    @torch.no_grad()
    def logits(self, arm: ArmSpec, tokens: Sequence[int], cache: PackedCache | None = None) -> Tensor:
        """Returns logits [T, V] of an arm after each token. Attention goes token by token, as in decoding; what is
        around it takes all tokens at once.

        Args:
            cache: that takes in the tokens; None for `cache`.

        Raises:
            NotFiniteError: a logit is not finite; names the arm.
        """
        engine, cache = self.decoder.engine, self.cache(arm) if cache is None else cache
        session = PackedSession(arm, engine.anchors, cache)

        def one_by_one(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
        ) -> Tensor:
            layer, outputs = cache.layers[module.layer_idx], []
            for q, k, v in zip(*(x.split(1, dim=2) for x in (query, key, value)), strict=True):
                outputs.append(session(module, q, *layer.update(k, v), None, scale))
            return torch.cat(outputs, 1)

        with attention_hook(engine.backbone.model, one_by_one):
            logits = engine.forward([list(tokens)], [self.decoder.length])[0]
        if not logits.isfinite().all():
            raise engine.not_finite(0, "the continuation", arm)
        return logits
