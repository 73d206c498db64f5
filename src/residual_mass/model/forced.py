"""Forced decoding: the logits of every arm after each token of a given continuation, from one exact prefill.

Shape letters: T = forced tokens, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from residual_mass.methods.arms import ArmSpec
from residual_mass.model.decoder import ArmDecoder, Layers
from residual_mass.model.engine import SharedPrefillEngine
from residual_mass.model.hook import Handler, attention_hook, end_tokens, greedy
from residual_mass.model.prefix import retrieved_by

State = Literal["own", "dense"]
"""Whose keys and values the earlier forced tokens have: the arm's own, so that its errors feed on, or those of full
attention, which leaves the error of each step alone.
"""
ROWS = 512
"""Most tokens, over all arms, of one pass through the model, which bounds the memory of their logits."""
SCORES = 2**24
"""Most scores of a layer that are computed at once, unless one arm has more."""


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
        self.summaries = engine.summaries(self.prefix)

    def k(self, arm: ArmSpec) -> int:
        """Mid-region tokens that an arm retrieves per query head and step."""
        return retrieved_by(arm, self.length, self.engine.anchors, self.engine.nominal_length)

    @torch.no_grad()
    def full(self, tokens: Sequence[int]) -> tuple[Tensor, Layers]:
        """Returns logits [T, V] of full attention after each token, and the tokens' keys and values under it."""
        decoder = self._decoder([ArmSpec("full")], len(tokens))
        (full,) = decoder.parts
        full.masked = True
        return self._logits(decoder, tokens)[0], [
            tuple(x[:, :, self.length :] for x in cache[0]) for cache in full.caches
        ]

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
        for start in range(0, len(arms), size):
            yield from self._logits(self._decoder(arms[start : start + size], len(tokens), dense), tokens)

    @torch.no_grad()
    def greedy(self, first: int, limit: int) -> list[int]:
        """Returns up to `limit` tokens that full attention appends to the prefix and the token `first`; an
        end-of-sequence token is the last.
        """
        ends, decoder = end_tokens(self.engine.backbone.model), self._decoder([ArmSpec("full")], limit)
        newest, tokens = first, []
        with attention_hook(self.engine.backbone.model, decoder, hybrid=True):
            while len(tokens) < limit and (not tokens or newest not in ends):
                newest = int(greedy(self.engine.forward([[newest]], [self.length + len(tokens)]))[0])
                tokens.append(newest)
        decoder.require_read(len(tokens))
        return tokens

    def _decoder(self, arms: Sequence[ArmSpec], room: int, dense: Layers | None = None) -> ArmDecoder:
        most = max(1, SCORES // (self.engine.backbone.shape.query_heads * room * self.length))
        return self.engine.decoder(self.prefix, [self.length], arms, room, self.summaries, most, dense)

    def _logits(self, decoder: ArmDecoder, tokens: Sequence[int]) -> Tensor:
        """Runs all tokens of all arms through the model at once: [A, T, V]."""
        logits = self._forward(decoder, len(decoder.arms), tokens)
        decoder.require_read(len(tokens))
        extremes = torch.stack(logits.flatten(1).aminmax(dim=1))  # a NaN is both; less memory than a mask of all
        finite = extremes.isfinite().all(0).tolist()
        if not all(finite):
            arm, layer = decoder.arms[finite.index(False)], self._layer_at_fault(decoder, tokens, finite.index(False))
            place = "" if layer is None else f", from layer {layer} on,"
            raise self.engine.not_finite(0, "the continuation", arm, place)
        return logits

    def _layer_at_fault(self, decoder: ArmDecoder, tokens: Sequence[int], row: int) -> int | None:
        """Reads the tokens again to find the first layer in which a row's attention is not finite."""
        found: list[int] = []

        def watched(module: nn.Module, *tensors: Tensor | None | float) -> Tensor:
            output = decoder(module, *tensors)
            if not output[row].isfinite().all():
                found.append(module.layer_idx)
            return output

        decoder.read = [0] * len(self.prefix)
        self._forward(watched, len(decoder.arms), tokens)
        return next(iter(found), None)

    def _forward(self, handler: Handler, num_arms: int, tokens: Sequence[int]) -> Tensor:
        with attention_hook(self.engine.backbone.model, handler, hybrid=True):
            return self.engine.forward([list(tokens)] * num_arms, [self.length] * num_arms)
