"""Decodes given continuations of one prompt from packed caches of the CPU kernels, after the prefill of the engine.

Shape letters: T = forced tokens, V = vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from residual_mass.decode.packed_backend import PackedBackend, PackedCache
from residual_mass.model.hook import Prefill, attention_hook
from residual_mass.spec.arms import ArmSpec

if TYPE_CHECKING:  # the engine takes long to import
    from residual_mass.decode.forced import ForcedDecoder


class PackedPrompt:
    """Packed caches of the prompt that a `ForcedDecoder` has read; a method packs it once for all budgets."""

    def __init__(self, decoder: ForcedDecoder) -> None:
        self.decoder = decoder
        self._packed: dict[str, PackedCache] = {}

    def cache(self, arm: ArmSpec) -> PackedCache:
        """Returns a cache of the arm's method that holds the prompt alone."""
        if arm.method not in self._packed:
            engine = self.decoder.engine
            model = engine.backbone.model
            cache = PackedCache(model, arm.rule)
            layers = {}
            for index, layer in enumerate(self.decoder.prefix):
                layers[index] = layer.keys, layer.values
            PackedBackend(model, arm, engine.anchors, cache).take(Prefill(layers))
            self._packed[arm.method] = cache
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
        engine = self.decoder.engine
        model = engine.backbone.model
        if cache is None:
            cache = self.cache(arm)
        backend = PackedBackend(model, arm, engine.anchors, cache)

        def one_by_one(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
        ) -> Tensor:
            outputs = []
            for q, k, v in zip(query.split(1, 2), key.split(1, 2), value.split(1, 2), strict=True):
                outputs.append(backend.step(module, q, k, v, None, scale))
            return torch.cat(outputs, 1)

        with attention_hook(model, one_by_one):
            logits = engine.forward([list(tokens)], [self.decoder.length])
        logits = logits[0]
        if not logits.isfinite().all():
            raise engine.not_finite(0, "the continuation", arm)
        return logits
