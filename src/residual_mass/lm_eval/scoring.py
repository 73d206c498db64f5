"""Logits of given tokens under one method, each token after a prefix that is read exactly.

Shape letters: T = forced tokens, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from residual_mass.backbones.engine import SharedPrefillEngine
from residual_mass.backbones.forced import ForcedDecoder
from residual_mass.backbones.loading import adopted
from residual_mass.backbones.phi_maps import PhiMaps
from residual_mass.backbones.prefix import PrefixLayer, build_prefix
from residual_mass.core.settings import AnchorSpec
from residual_mass.methods.arms import ArmSpec


class Scorer:
    """Forces tokens on a loaded model under one method.

    Args:
        model, tokenizer: the model is set to evaluation mode, without gradients.
        phi: maps of this head shape, for the methods that need them.

    Raises:
        ValueError: the maps are missing, or of another head shape.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        arm: ArmSpec,
        anchors: AnchorSpec,
        phi: PhiMaps | None,
    ) -> None:
        # As in `partial_kv`, maps need only fit the heads: a folder's name says nothing of the weights in it.
        facts = phi.training_facts if phi is not None else {}
        backbone = adopted(model, tokenizer, facts.get("model_id", ""), facts.get("revision", ""))
        self.arm = arm
        self.engine = _TextEngine(backbone, [arm], anchors, phi if arm.needs_maps else None, None)

    def after(self, prefix: Sequence[int], continuations: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        """Yields logits [T, V] after each token of each continuation of one prefix, which is read once.

        Raises:
            NotFiniteError: a key, a value or a logit is not finite.
        """
        if prefix:
            decoder = ForcedDecoder(self.engine, prefix)
            yield from (self._forced(decoder, tokens) for tokens in continuations)
        else:
            yield from map(self._alone, continuations)

    def chunks(self, tokens: Sequence[int], start: int, stride: int) -> Iterator[Tensor]:
        """Yields logits [T, V] after the tokens from `start` on, `stride` at a time, each chunk after all the tokens
        before it.

        Raises:
            NotFiniteError: a key, a value or a logit is not finite.
        """
        starts = range(start, len(tokens), stride)
        if starts[-1] > 0:
            self.engine.hold(tokens[: starts[-1]])
        for first in starts:
            yield from self.after(tokens[:first], [tokens[first : first + stride]])

    def _forced(self, decoder: ForcedDecoder, tokens: Sequence[int]) -> Tensor:
        return decoder.full(tokens)[0] if self.arm.is_full else next(decoder.logits([self.arm], tokens))

    @torch.no_grad()
    def _alone(self, tokens: Sequence[int]) -> Tensor:
        """Without a prefix every method reads everything."""
        backbone = self.engine.backbone
        ids = torch.tensor([list(tokens)], device=backbone.device)
        return backbone.model(ids, use_cache=False).logits[0]


class _TextEngine(SharedPrefillEngine):
    """Reads a text once for all its beginnings: a token's keys and values do not depend on later tokens."""

    text: Sequence[int] = ()
    layers: Sequence[PrefixLayer] = ()

    @torch.no_grad()
    def hold(self, text: Sequence[int]) -> None:
        """Reads a text, in place of the one before."""
        self.text, self.layers = [], []
        self.layers, _ = super().read([list(text)])
        self.text = list(text)

    def read(self, prompts: Sequence[list[int]]) -> tuple[list[PrefixLayer], list[int]]:
        """As the engine's; of a beginning of the text that is held, the next token is not known and left out."""
        size = len(prompts[0])
        if len(prompts) > 1 or list(self.text[:size]) != list(prompts[0]):
            return super().read(prompts)
        real = torch.ones(1, size, dtype=torch.bool, device=self.backbone.device)
        pairs = ((layer.keys[:, :, :size], layer.values[:, :, :size]) for layer in self.layers)
        return [build_prefix(keys, values, real, self.anchors) for keys, values in pairs], []
