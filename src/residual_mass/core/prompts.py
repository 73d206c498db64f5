"""Causal attention of a prompt of which blocks of queries read few keys, with a residual for the others.

The mean query of a block scores all keys before it. Those with the largest weights are read exactly by every query of
the block. The others become pseudo-tokens, one for each part of the keys. With weights e^{p.k} of the mean query p, a
part has the mass Z, the mean key k~ and the mean value v~, and counts Z e^{(q - p).k~} v~ for a query q: its value is
exact for p, and its mass is for queries near p.

Shape letters: L = tokens, R = queries of a block, N = keys up to its end, P = parts of them, D = head dimension.
Leading `...` are free, and the same for all arguments.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from residual_mass.core.accounting import Terms, attention_scores, exact_terms, merge

STEPS = 4
"""Thresholds of weights in an octave."""
OCTAVES = 24
"""Octaves of the thresholds: tokens with weights below 2^-24 of the largest are never read for their weight."""


class PromptCut(NamedTuple):
    """Numbers of tokens by which a prompt is read in part."""

    block: int = 128
    """Consecutive queries that have one mean and read the same keys."""
    window: int = 64
    """Keys before a block that it reads beside its own."""
    sink: int = 16
    """First keys of the prompt, which every block reads."""
    part: int = 256
    """Consecutive keys of which the unread ones become one pseudo-token; 0 drops them."""


def attention_in_part(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, left: float, cut: PromptCut | None = None
) -> Tensor:
    """Computes outputs [..., L, D] of queries [..., L, D], each over the keys up to itself, [..., L, D].

    Args:
        left: share of the mass of a block's mean query that may stay unread; 0 reads all keys but those whose weight
            is below 2^-24 of the largest.
        cut: `PromptCut()` if None.
    """
    cut = PromptCut() if cut is None else cut
    length = queries.shape[-2]
    outputs = []
    for start in range(0, length, cut.block):
        end = min(length, start + cut.block)
        seen = keys[..., :end, :], values[..., :end, :]
        outputs.append(merge(*block_terms(queries[..., start:end, :], *seen, scale, left, cut)))
    return torch.cat(outputs, -2)


def block_terms(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, left: float, cut: PromptCut
) -> tuple[Terms, ...]:
    """Computes the terms of the keys that a block reads, and those of its pseudo-tokens, if there are any.

    Args:
        queries: [..., R, D], of the last R of N tokens.
        keys, values: [..., N, D].
    """
    count, length = queries.shape[-2], keys.shape[-2]
    place = torch.arange(length, device=keys.device)
    mean = queries.mean(-2, keepdim=True)
    scores = attention_scores(mean, keys, scale)
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top).exp()  # [..., 1, N]
    middle = (place >= cut.sink) & (place < length - count - cut.window)
    unread = middle & (weights < weight_threshold(weights, middle, left))
    visible = place <= place[length - count :, None]
    exact = exact_terms(attention_scores(queries, keys, scale), values, visible & ~unread)
    if cut.part == 0:
        return (exact,)

    rest = torch.where(unread, weights, 0).squeeze(-2)
    mass, mean_keys, mean_values = part_means(rest, keys, values, cut.part)
    there = (mass > 0).unsqueeze(-2)
    logs = torch.where(mass > 0, mass, 1).log().unsqueeze(-2) + top
    along = attention_scores(queries - mean, mean_keys, scale)  # [..., R, P]
    return exact, exact_terms(along + logs, mean_values, there)


def weight_threshold(weights: Tensor, middle: Tensor, left: float) -> Tensor:
    """Returns the largest threshold [..., 1] on a grid below which weights of the middle have at most a share `left`
    of the mass of all: equal weights are on one side of it.

    Args:
        weights: [..., N] in units of the largest.
        middle: [N] bool.
    """
    octaves = 2.0 ** -torch.arange(OCTAVES, -1, -1, dtype=weights.dtype, device=weights.device)
    steps = 1 + torch.arange(STEPS, dtype=weights.dtype, device=weights.device) / STEPS
    grid = (octaves[:, None] * steps).flatten()[: OCTAVES * STEPS + 2]  # the last is above all weights
    ascending = torch.where(middle, weights, 0).sort(-1).values
    below = pad(ascending.cumsum(-1), (1, 0))
    index = torch.searchsorted(ascending, grid.expand(*weights.shape[:-1], -1).contiguous())
    allowed = below.gather(-1, index) <= left * weights.sum(-1, keepdim=True)
    last = allowed.long().sum(-1, keepdim=True).clamp_min(1) - 1  # masses ascend with thresholds
    return grid[last]


def part_means(weights: Tensor, keys: Tensor, values: Tensor, part: int) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the masses [..., P] of parts of N tokens, and their mean keys and values [..., P, D] by weight, which
    are 0 where a part has no mass.

    Args:
        weights: [..., N]; keys and values: [..., N, D].
    """
    room = -weights.shape[-1] % part
    parts = pad(weights, (0, room)).unflatten(-1, (-1, part))
    mass = parts.sum(-1)
    shares = (parts / torch.where(mass > 0, mass, 1).unsqueeze(-1)).unsqueeze(-2)  # [..., P, 1, part]
    mean_keys, mean_values = (
        (shares @ pad(x, (0, 0, 0, room)).unflatten(-2, (-1, part))).squeeze(-2) for x in (keys, values)
    )
    return mass, mean_keys, mean_values
