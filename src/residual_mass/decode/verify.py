"""Verification of drafts: speculative decoding with one model (Leviathan et al. 2023, "Fast inference from transformers
via speculative decoding", algorithm 1).

Shape letter: V = vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Pass(NamedTuple):
    """Record of one pass: tokens drafted, drafts accepted into the text, seconds of drafting and of verifying."""

    drafted: int
    accepted: int
    drafting: float
    verifying: float


def accept_or_sample(p: Tensor, q: Tensor, drafted: Tensor) -> tuple[Tensor, bool]:
    """Accepts a token drawn from q with probability min(1, p / q), otherwise draws one from the normalised positive
    part of p - q. The returned token has the distribution p.

    Args:
        p, q: probabilities [V] of full attention and of the draft.
        drafted: [1].

    Returns:
        The token [1], and whether the drafted one was accepted.
    """
    full = float(p[drafted])
    draft = float(q[drafted])
    if full >= draft or (full > 0 and float(torch.rand((), dtype=torch.float64, device="cpu")) * draft < full):
        return drafted, True
    rest = (p - q).clamp_min(0)
    if not bool(rest.any()):  # p and q differ only by rounding errors
        rest = p
    return sample(rest), False


def sample(p: Tensor) -> Tensor:
    """Draws a token [1] from probabilities or weights [V], without a random number if only one is possible."""
    if int(p.count_nonzero()) == 1:
        return p.argmax(-1, keepdim=True)
    return torch.multinomial(p, 1)
