"""Decodes given continuations of one prompt under several arms, from the shared prefill of the engine.

Shape letters: A = arms, T = forced tokens, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from residual_mass.decode.arms import ArmDecoder, Layers
from residual_mass.decode.engine import RowBatch, SharedPrefillEngine
from residual_mass.decode.prefix import PrefixLayer
from residual_mass.decode.terms import retrieved_by
from residual_mass.model.finite import end_tokens
from residual_mass.model.hook import Handler, attention_hook
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
        self,
        engine: SharedPrefillEngine,
        tokens: Sequence[int],
        layers: Sequence[PrefixLayer] | None = None,
    ) -> None:
        self.engine = engine
        self.tokens = list(tokens)
        self.length = len(tokens)
        if layers is None:
            layers, _ = engine.read([self.tokens])
        self.prefix = layers
        self.summaries = engine.summaries(self.prefix)

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
        self.engine.frequencies.require_growing([self.length], [limit])
        batch = RowBatch([first], [limit + 1], 1, end_tokens(model), None)
        decoder = self._decoder([ArmSpec("full")], limit)
        self.engine.decode(decoder, batch, [self.length])
        return batch.tokens[0][0][1:]

    def _decoder(self, arms: Sequence[ArmSpec], room: int, dense: Layers | None = None) -> ArmDecoder:
        engine = self.engine
        scores_of_an_arm = engine.backbone.shape.query_heads * room * self.length
        max_arms = max(1, SCORES_OF_A_PASS // scores_of_an_arm)
        lengths = [self.length]
        return engine.decoder(self.prefix, lengths, arms, room, self.summaries, max_arms, dense)

    def _logits(self, decoder: ArmDecoder, tokens: Sequence[int]) -> Tensor:
        """Runs all tokens of all arms through the model at once: [A, T, V]."""
        logits = self._forward(decoder, len(decoder.arms), tokens)
        decoder.require_read(len(tokens))
        extremes = torch.stack(logits.flatten(1).aminmax(dim=1))  # both NaN if a logit is; less memory than a mask
        finite = extremes.isfinite().all(0).tolist()
        if not all(finite):
            row = finite.index(False)
            arm = decoder.arms[row]
            layer = self._layer_at_fault(decoder, tokens, row)
            place = "" if layer is None else f", from layer {layer} on,"
            raise self.engine.not_finite(0, "the continuation", arm, place)
        return logits

    def _layer_at_fault(self, decoder: ArmDecoder, tokens: Sequence[int], row: int) -> int | None:
        """Reads the tokens again to find the first layer in which a row's attention is not finite."""
        at_fault: list[int] = []

        def watched(module: nn.Module, *tensors: Tensor | None | float) -> Tensor:
            output = decoder(module, *tensors)
            if not output[row].isfinite().all():
                at_fault.append(module.layer_idx)
            return output

        decoder.read = [0] * len(self.prefix)
        self._forward(watched, len(decoder.arms), tokens)
        return next(iter(at_fault), None)

    def _forward(self, handler: Handler, num_arms: int, tokens: Sequence[int]) -> Tensor:
        with attention_hook(self.engine.backbone.model, handler, hybrid=True):
            rows = [list(tokens)] * num_arms
            first = [self.length] * num_arms
            return self.engine.forward(rows, first)
