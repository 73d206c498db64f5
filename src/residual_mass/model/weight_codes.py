"""WeightCodes of weights: 4 bits on a grid of 16 levels by group, or 8 bits on one grid by row.

A weight of 4 bits is (code - 8) * scale + zero, with codes from 0 to 15; one of 8 bits is code * scale, with codes from
-127 to 127. Scales and zeros are in bfloat16. Weights that lie on grids of 16 levels already, as those of a GGUF file
in Q4_0, Q4_1 or Q4_K that was dequantised, keep their codes, so that nothing but scale and zero is rounded.

Shape letters: N = output features, K = input features, g = group, G = K / g.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LEVELS = 16
MIDDLE = 8
"""The code that stands for `zero` alone."""
PART = 2**18
"""Weights that are looked at together: they fit a processor's cache."""


class WeightCodes(NamedTuple):
    """Weights in 4 bits."""

    codes: Tensor
    """[N, K] float32, whole numbers from 0 to 15."""
    scale: Tensor
    """[N, G] bfloat16."""
    zero: Tensor
    """[N, G] bfloat16."""


def codes_of_4_bits(weight: Tensor, group: int) -> WeightCodes:
    """Rounds a weight [N, K], K a multiple of `group`, to 4 bits, or finds the codes from which it was dequantised."""
    groups = weight.detach().float().view(-1, group)
    parts = groups.split(PART // group)
    precision = torch.finfo(weight.dtype)
    codes = []
    for part in parts:
        found = codes_on_grids(part, precision)
        if found is None:
            codes = [rounded(each) for each in parts]
            break
        codes.append(found)
    fits = [fitted(part, part_codes) for part, part_codes in zip(parts, codes, strict=True)]
    scale = torch.cat([fit[0] for fit in fits])
    zero = torch.cat([fit[1] for fit in fits])
    rows = len(weight)
    return WeightCodes(torch.cat(codes).view(rows, -1), scale.view(rows, -1), zero.view(rows, -1))


def codes_of_8_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds a weight [N, K] to int8 by row. Returns the codes [N, K] and the scales [N] in bfloat16."""
    codes = []
    scales = []
    for part in weight.detach().split(max(1, PART // weight.shape[1])):
        rows = part.float()
        scale = (rows.abs().amax(1) / 127).bfloat16()
        steps = rows / _divisor(scale.float())[:, None]
        codes.append(steps.round_().clamp_(-127, 127).to(torch.int8))
        scales.append(scale)
    return torch.cat(codes), torch.cat(scales)


def rounded(groups: Tensor) -> Tensor:
    """Returns the codes [R, g] of groups on 16 levels between their lowest and their highest weight."""
    low, high = groups.aminmax(dim=-1)
    step = _divisor((high - low) / (LEVELS - 1))
    codes = (groups - low[:, None]) / step[:, None]
    return codes.round_()


def fitted(groups: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Returns scales and zeros [R] in bfloat16 that bring given codes [R, g] closest to weights [R, g] (least squares).

    The zero takes up what rounding the scale shifts the mean by.
    """
    mean = groups.mean(-1)
    middle = codes.mean(-1)
    centred = codes - middle[:, None]
    slope = (centred * groups).sum(-1) / _divisor(centred.square().sum(-1))
    scale = slope.bfloat16()
    zero = mean - (middle - MIDDLE) * scale.float()
    return scale, zero.bfloat16()


def _divisor(numbers: Tensor) -> Tensor:
    """Returns the numbers with 1 in place of 0: groups of equal weights have no step."""
    return numbers.masked_fill(numbers == 0, 1)


def codes_on_grids(groups: Tensor, precision: torch.finfo) -> Tensor | None:
    """Returns the codes [R, g] of groups [R, g] that lie on grids of 16 levels; None unless all of them do.

    The grid of Q4_0 has the weight of largest magnitude at code 0 and 0 at code 8, that of Q4_1 the extremes at codes 0
    and 15. Other grids may have no weight on their outer levels: their step is the largest of which all differences
    are multiples.

    Args:
        precision: of the dtype that the weights were kept in; they may be off their grids by its rounding.
    """
    low, high = groups.aminmax(dim=-1)
    largest = torch.where(high > -low, high, low)
    trials = [(largest, largest / -MIDDLE), (low, (high - low) / (LEVELS - 1))]
    trials += [(low, (high - low) / steps) for steps in range(1, LEVELS - 1)]
    codes = torch.empty_like(groups)
    left = torch.arange(len(groups))
    for first, step in trials:
        tried, fits = _on_grid(groups[left], first[left], step[left], precision)
        done = left[fits]
        codes[done] = tried[fits]
        left = left[~fits]
        if len(left) == 0:
            return codes
    return None


def _on_grid(groups: Tensor, first: Tensor, step: Tensor, precision: torch.finfo) -> tuple[Tensor, Tensor]:
    """Returns the codes [R, g] of groups on grids with a first level and a step [R], and which groups [R] lie there."""
    codes = (groups - first[:, None]) / _divisor(step)[:, None]
    codes.round_()
    off = (groups - first[:, None] - codes * step[:, None]).abs_().amax(-1)
    # Half a unit in the last place for the weight, for the first level, and for the two that gave the step; and as much
    # for what is computed here in float32.
    units = 2 * precision.eps + 4 * torch.finfo(torch.float32).eps
    largest = groups.abs().amax(-1).clamp_min(precision.tiny)
    bound = torch.minimum(units * largest, step.abs() / 4)
    bound = torch.where(step == 0, units * largest, bound)
    low, high = codes.aminmax(dim=-1)
    return codes, (off <= bound) & (low >= 0) & (high < LEVELS)
