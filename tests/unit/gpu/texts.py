"""Texts that backends continue greedily, for tests that compare backends."""

from __future__ import annotations

from typing import NamedTuple

import torch
from tests.conftest import tiny_llama
from torch import Tensor
from transformers import PreTrainedModel

from residual_mass.decode.backend import Backend
from residual_mass.decode.text import Text
from residual_mass.methods import method_named
from residual_mass.methods.arms import Arm
from residual_mass.model.phi_maps import HeadShape, PhiMaps
from residual_mass.spec.settings import AnchorSpec, MapSpec

ANCHORS = AnchorSpec(2, 6)


def tiny_model(**sizes: int) -> PreTrainedModel:
    """A model whose embedding of padding is no zero vector: its scores would all tie."""
    model = tiny_llama(layers=2, heads=4, kv_heads=2, **sizes)
    model.get_input_embeddings().weight.data[1] = model.get_input_embeddings().weight.data[2:9].mean(0)
    return model


class Decoded(NamedTuple):
    """Tokens [B, T] after `first` [B, 1], and the logits [B, V] of the last step."""

    first: Tensor
    tokens: Tensor
    logits: Tensor


class Case:
    """A batch of random prompts of some lengths, padded on the left, and a method that continues them."""

    def __init__(self, model: PreTrainedModel, method: str, lengths: tuple[int, ...]) -> None:
        self.model = model
        rule = method_named(method)
        self.arm = Arm(rule, None if rule.whole_prefix else 30.0)
        self.phi = None
        if self.arm.needs_maps:
            torch.manual_seed(3)
            self.phi = PhiMaps(HeadShape.of(model.config), MapSpec(d_emb=24, d_phi=16)).requires_grad_(False)
        device = model.device
        longest = max(lengths)
        starts = torch.tensor([longest - length for length in lengths], device=device).unsqueeze(1)
        self.real = torch.arange(longest, device=device) >= starts
        draw = torch.Generator().manual_seed(1)
        ids = torch.randint(2, 258, (len(lengths), longest), generator=draw).to(device)
        self.ids = torch.where(self.real, ids, 1)

    @torch.no_grad()
    def text(self, kind: type[Backend], room: int) -> Text:
        """Returns the texts with their prompts read, after which `self.first` [B, 1] are the next tokens."""
        backend = kind.open(self.model, self.arm, ANCHORS, self.phi, None, room)
        text = Text(self.model, backend, None if bool(self.real.all()) else self.real)
        self.first = text.read(self.ids)[:, -1].argmax(-1, keepdim=True)
        return text

    @torch.no_grad()
    def decoded(self, kind: type[Backend], steps: int, runs: int = 1, room: int = 0) -> Decoded:
        """Decodes several times from the same prompt, and checks that each run repeats the first."""
        text = self.text(kind, room)
        length = text.tokens
        texts = []
        for _ in range(runs):
            text.crop(text.tokens - length)
            token = self.first
            tokens = []
            for _ in range(steps):
                logits = text.step(token)[:, -1]
                token = logits.argmax(-1, keepdim=True)
                tokens.append(token)
            texts.append(torch.cat(tokens, 1))
            assert text.backend.cache.get_seq_length() == length + steps
        assert all(torch.equal(each, texts[0]) for each in texts)
        return Decoded(self.first, texts[0], logits)


def same(ours: Decoded, expected: Decoded) -> None:
    """Asserts the same tokens, and logits within what float32 sums in another order."""
    assert torch.equal(ours.first, expected.first)
    assert torch.equal(ours.tokens, expected.tokens)
    torch.testing.assert_close(ours.logits, expected.logits, rtol=1e-3, atol=1e-3)
