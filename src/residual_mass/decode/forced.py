"""Decodes given continuations of one prompt under several arms, from the shared prefill of the engine.

Shape letters: A = arms, T = forced tokens, V = vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import Cache

from residual_mass.decode.arms import ArmsBackend, Layers
from residual_mass.decode.backend import LayerCall, Prefill
from residual_mass.decode.backends import backend_for
from residual_mass.decode.engine import RowBatch, SharedPrefillEngine
from residual_mass.decode.prefix import PrefixLayer
from residual_mass.decode.terms import retrieved_by
from residual_mass.decode.text import Text
from residual_mass.model.finite import end_tokens
from residual_mass.spec.arms import ArmSpec

TOKENS_OF_A_PASS = 512
"""Most tokens, over all arms, of one pass through the model, which bounds the memory of their logits."""
SCORES_OF_A_PASS = 2**24
"""Most scores of a layer that are computed at once, unless one arm has more."""


class ForcedDecoder:
    """Decodes given continuations of one prompt under the arms of an engine.

    Args:
        engine: holds the backbone, the arms and their maps.
        tokens: the prefix, which is read exactly.
        layers: of the prefix, if it was read already.

    Raises:
        NotFiniteError: the prefill, or a summary of it, is not finite.
    """

    @torch.no_grad()
    def __init__(
        self, engine: SharedPrefillEngine, tokens: Sequence[int], layers: Sequence[PrefixLayer] | None = None
    ) -> None:
        self.engine = engine
        self.length = len(tokens)
        if layers is None:
            layers, _ = engine.read([list(tokens)])
        self.prefix = layers
        self.summaries = engine.summaries(self.prefix)
        self._caches: dict[str, Cache] = {}

    def k(self, arm: ArmSpec) -> int:
        """Returns the number of mid-region tokens that an arm retrieves per query head and step."""
        return retrieved_by(arm, self.length, self.engine.anchors, self.engine.nominal_length)

    @torch.no_grad()
    def full(self, tokens: Sequence[int]) -> tuple[Tensor, Layers]:
        """Returns logits [T, V] of full attention after each token, and the tokens' keys and values under it."""
        decoder = self._decoder([ArmSpec("full")], len(tokens))
        (full,) = decoder.parts
        full.masked = True
        logits = self._logits(decoder, tokens)[0]
        layers = []
        for by_example in full.caches:
            keys, values = by_example[0]
            new_keys = keys[:, :, self.length :]
            new_values = values[:, :, self.length :]
            layers.append((new_keys, new_values))
        return logits, layers

    @torch.no_grad()
    def logits(self, arms: Sequence[ArmSpec], tokens: Sequence[int], dense: Layers | None = None) -> Iterator[Tensor]:
        """Yields logits [T, V] of each partial arm after each token.

        Args:
            dense: keys and values that `full` returned for the same tokens, for later tokens; None for the arms' own.

        Raises:
            NotFiniteError: a logit is not finite; names the arm and the layer.
            RuntimeError: an attention layer bypassed the hook.
        """
        size = max(1, TOKENS_OF_A_PASS // len(tokens))
        for start in range(0, len(arms), size):
            chunk = arms[start : start + size]
            decoder = self._decoder(chunk, len(tokens), dense)
            yield from self._logits(decoder, tokens)

    @torch.no_grad()
    def greedy(self, first: int, limit: int) -> list[int]:
        """Returns up to `limit` tokens that full attention appends to the prefix and the token `first`; an
        end-of-sequence token is the last.

        Raises:
            ValueError: the model's rotary frequencies change within the text.
        """
        model = self.engine.backbone.model
        self.engine.frequencies.require_growing([self.length + 1], [limit - 1])
        # The batch counts `first` as generated, too.
        batch = RowBatch([first], [limit + 1], 1, end_tokens(model), None)
        decoder = self._decoder([ArmSpec("full")], limit)
        self.engine.decode(decoder, batch, [self.length])
        return batch.tokens[0][0][1:]

    @torch.no_grad()
    def served(self, arm: ArmSpec, tokens: Sequence[int], cache: Cache | None = None) -> Tensor:
        """Returns logits [T, V] of an arm after each token, by the backend that serves it here when it decodes.

        Args:
            cache: holds the prefix, and takes in the tokens; None for a copy of `served_cache`.

        Raises:
            NotFiniteError: a logit is not finite; names the arm.
        """
        model = self.engine.backbone.model
        given = copy.deepcopy(self.served_cache(arm)) if cache is None else cache
        text = Text(model, backend_for(model, arm, self.engine.anchors, cache=given))
        logits = text.step(torch.tensor([list(tokens)], device=self.engine.backbone.device))[0]
        if not logits.isfinite().all():
            raise self.engine.not_finite(0, "the continuation", arm)
        return logits

    def served_cache(self, arm: ArmSpec) -> Cache:
        """Returns the packed cache of an arm's method that holds the prefix; a method packs it once for all budgets."""
        if arm.method not in self._caches:
            backend = backend_for(self.engine.backbone.model, arm, self.engine.anchors)
            backend.take(Prefill({index: (layer.keys, layer.values) for index, layer in enumerate(self.prefix)}))
            self._caches[arm.method] = backend.cache
        return self._caches[arm.method]

    def _decoder(self, arms: Sequence[ArmSpec], room: int, dense: Layers | None = None) -> ArmsBackend:
        engine = self.engine
        scores_of_an_arm = engine.backbone.shape.query_heads * room * self.length
        max_arms = max(1, SCORES_OF_A_PASS // scores_of_an_arm)
        lengths = [self.length]
        return engine.decoder(self.prefix, lengths, arms, room, self.summaries, max_arms, dense)

    def _logits(self, decoder: ArmsBackend, tokens: Sequence[int]) -> Tensor:
        """Runs all tokens of all arms through the model at once: [A, T, V]."""
        ids = torch.tensor([list(tokens)] * len(decoder.arms), device=self.engine.backbone.device)
        logits = self.engine.text(decoder, [self.length]).step(ids)
        extremes = torch.stack(logits.flatten(1).aminmax(dim=1))  # both NaN if a logit is; less memory than a mask
        finite = extremes.isfinite().all(0).tolist()
        if not all(finite):
            row = finite.index(False)
            arm = decoder.arms[row]
            layer = self._layer_at_fault(decoder, ids, row)
            place = "" if layer is None else f", from layer {layer} on,"
            raise self.engine.not_finite(0, "the continuation", arm, place)
        return logits

    def _layer_at_fault(self, decoder: ArmsBackend, ids: Tensor, row: int) -> int | None:
        """Reads the tokens again to find the first layer in which a row's attention is not finite."""
        at_fault: list[int] = []
        step = decoder.step

        def watched(call: LayerCall) -> Tensor:
            output = step(call)
            if not output[row].isfinite().all():
                at_fault.append(call.index)
            return output

        decoder.generated = [0] * len(self.prefix)
        decoder.step = watched
        self.engine.text(decoder, [self.length]).step(ids)
        return next(iter(at_fault), None)
