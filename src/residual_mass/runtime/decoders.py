"""Greedy decoding through a backend, ours or the prototype's, and its timing."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from residual_mass.decode.backend import Backend
from residual_mass.decode.text import Text
from residual_mass.timing import Clock, device_clock, timed


class TextDecoder:
    """Greedy decoding of a batch of prompts of equal length, which a backend holds.

    Args:
        steps: T, tokens of a run.
    """

    def __init__(self, model: PreTrainedModel, backend: Backend, steps: int) -> None:
        self.text = Text(model, backend)
        self.length = self.text.tokens
        self.steps = steps
        backend.repeats = True

    @property
    def recorded(self) -> bool:
        """Whether steps are replayed from CUDA graphs."""
        return self.text.backend.records

    def prepare(self) -> None:
        """Removes generated tokens; call before every run."""
        self.text.crop(self.text.tokens - self.length)

    @torch.no_grad()
    def run(self, first: Tensor) -> Tensor:
        """Decodes tokens [B, T] after the tokens `first` [B]."""
        token = first.unsqueeze(1)
        tokens = []
        for _ in range(self.steps):
            self.logits = self.text.step(token)[:, -1]
            token = self.logits.argmax(-1, keepdim=True)
            tokens.append(token)
        return torch.cat(tokens, dim=1)


@dataclass(frozen=True)
class DecodingTimes:
    """Times of a decoder.

    Attributes:
        build: seconds for a method's buffers, features and summaries after the prefill.
        recording: seconds of the first run, which records CUDA graphs; None without graphs.
        steps: mean seconds of a step, one per repeat.
        peak: peak bytes of GPU memory while recording and decoding, without model, maps and prefill; None on a CPU.
        tokens: [B, T] decoded tokens.
    """

    build: float
    recording: float | None
    steps: list[float]
    peak: int | None
    tokens: Tensor

    @property
    def step(self) -> float:
        return statistics.median(self.steps)


def time_decoder(build: Callable[[], TextDecoder], first: Tensor, repeats: int, clock: Clock) -> DecodingTimes:
    """Times the second of two decoders that `build` returns, and its runs after the tokens `first` [B].

    The first build and the first run are slower than the next ones and are not counted, but for `recording`.
    """
    device = first.device
    on_gpu = device.type == "cuda"
    now = device_clock(device, clock)
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    decoder: TextDecoder | None
    for _ in range(2):
        decoder = None  # frees its buffers first
        decoder, build_seconds = timed(build, now)
    if on_gpu:  # after building; graphs allocate their memory while they are recorded, not when they run
        torch.cuda.reset_peak_memory_stats(device)
    decoder.prepare()
    tokens, recording = timed(lambda: decoder.run(first), now)
    steps = []
    for _ in range(repeats):
        decoder.prepare()
        _, seconds = timed(lambda: decoder.run(first), now)
        steps.append(seconds / tokens.shape[1])
    peak = torch.cuda.max_memory_allocated(device) - before if on_gpu else None
    return DecodingTimes(build_seconds, recording if decoder.recorded else None, steps, peak, tokens)
