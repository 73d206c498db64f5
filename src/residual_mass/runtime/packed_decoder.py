"""Decoding over packed caches by the CPU kernels, as the runtime stage measures it."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from residual_mass.core.settings import AnchorSpec
from residual_mass.methods.arms import ArmSpec
from residual_mass.model.hook import Prefill, attention_hook
from residual_mass.model.packed import PackedCache, PackedSession


class PackedDecoder:
    """Greedy decoding of a batch, token by token, with the steps of `partial_generate` on a CPU."""

    def __init__(
        self, model: PreTrainedModel, read: Prefill, method: str, budget: float, anchors: AnchorSpec, steps: int
    ) -> None:
        """Packs the prompts, which are of equal length and without padding.

        Args:
            budget: percent of a prompt that is read exactly, unused by methods that read all of it.
            steps: tokens of a run, at most 64, which stay out of the blocks.

        Raises:
            ValueError: the kernels do not serve the method, the model or this machine.
        """
        self.model, self.steps = model, steps
        self.cache = PackedCache(model, method)
        self.session = PackedSession(ArmSpec(method, None if method == "full" else budget), anchors, self.cache)
        self.session.take(read)
        self.length = self.cache.get_seq_length()

    def prepare(self) -> None:
        """Returns to the end of the prompt."""
        if generated := self.cache.get_seq_length() - self.length:
            self.cache.crop(-generated)

    @torch.no_grad()
    def run(self, first: Tensor) -> Tensor:
        """Decodes the tokens [B, steps] that follow `first` [B]."""
        tokens = []
        with attention_hook(self.model, self.session):
            for _ in range(self.steps):
                logits = self.model((tokens or [first])[-1].unsqueeze(1), past_key_values=self.cache).logits
                tokens.append(logits[:, -1].argmax(-1))
        return torch.stack(tokens, 1)
