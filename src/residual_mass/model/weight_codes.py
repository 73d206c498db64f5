"""Codes of weights: 4 bits on a grid of 16 levels by group, or 8 bits on one grid by row.

A weight of 4 bits is (code - 8) * scale + zero, with codes from 0 to 15; one of 8 bits is code * scale, with codes from
-127 to 127. Scales and zeros are in bfloat16. Weights that lie on grids of 16 levels already, as those of a GGUF file
in Q4_0, Q4_1 or Q4_K that was dequantised, keep their codes, so that nothing but scale and zero is rounded.

Errors are relative: the root mean square of what weights are off by, over that of the weights.

Shape letters: N = output features, K = input features, g = group, G = K / g rounded up, R = any number of groups.
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
SAMPLE = 128
"""Groups that tell whether a weight was dequantised."""
SAMPLE_WIDTH = 16
"""Weights of each: as many or more share a grid in every format of GGUF."""
STEPS_FROM_ZERO = 128
"""Most steps between 0 and a weight on a grid that has 0: those of Q8_0 have 127, those of Q6_K 32."""
STEPS_FROM_LOWEST = 31
"""Most steps between two weights on any other grid: those of Q5_1 and Q5_K."""


class Codes4(NamedTuple):
    """Weights in 4 bits.

    Attributes:
        codes: [N, G * g] float32, whole numbers from 0 to 15; those beyond K repeat the last.
        scale, zero: [N, G] bfloat16.
        kept: whether the weights were dequantised from these codes.
        error: relative.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor
    kept: bool
    error: float


class Codes8(NamedTuple):
    """Weights in 8 bits.

    Attributes:
        codes: [N, K] int8.
        scale: [N] bfloat16.
        error: relative.
    """

    codes: Tensor
    scale: Tensor
    error: float


def codes_of_4_bits(weight: Tensor, group: int) -> Codes4:
    """Rounds a weight [N, K] to 4 bits, or finds the codes from which it was dequantised."""
    rows, columns = weight.shape
    last = columns % group
    wide = weight.detach().float()
    if last:
        wide = torch.cat((wide, wide[:, -1:].expand(-1, group - last)), 1)  # changes neither extremes nor grids
    parts = wide.reshape(-1, group).split(PART // group)
    own = own_codes(parts, torch.finfo(weight.dtype)) if lies_on_grids(weight) else None
    codes = own or [rounded(part) for part in parts]
    fits = [fitted(part, part_codes) for part, part_codes in zip(parts, codes, strict=True)]
    scale, zero = (torch.cat(each).view(rows, -1) for each in zip(*fits, strict=True))
    grid = torch.cat(codes).view(rows, -1)
    if last:  # the repeated weights take no part in the fit
        tail = slice(columns - last, columns)
        scale[:, -1], zero[:, -1] = fitted(wide[:, tail], grid[:, tail])
    steps = (grid - MIDDLE).view(rows, -1, group)
    back = torch.addcmul(zero.float()[..., None], steps, scale.float()[..., None]).view(rows, -1)
    off = (back - wide)[:, :columns]
    return Codes4(grid, scale, zero, own is not None, _ratio(off.norm(), wide[:, :columns].norm()))


def codes_of_8_bits(weight: Tensor) -> Codes8:
    """Rounds a weight [N, K] to int8 by row."""
    found = []
    for part in weight.detach().split(max(1, PART // weight.shape[1])):
        rows = part.float()
        scale = (rows.abs().amax(1) / 127).bfloat16()
        step = scale.float()[:, None]
        codes = (rows / _divisor(step)).round_().clamp_(-127, 127)
        off = (codes * step - rows).norm()
        found.append((codes.to(torch.int8), scale, off[None], rows.norm()[None]))
    codes, scale, off, size = (torch.cat(each) for each in zip(*found, strict=True))
    return Codes8(codes, scale, _ratio(off.norm(), size.norm()))


def _ratio(off: Tensor, size: Tensor) -> float:
    return float(off / _divisor(size))


def lies_on_grids(weight: Tensor) -> bool:
    """Returns whether a weight [N, K] was dequantised, from 4 bits or from more, as a sample of its groups says.

    On grids that have 0, all weights of a group are multiples of their largest by the number of its steps; on others,
    so are their distances to the lowest.
    """
    rows, columns = weight.shape
    width = min(SAMPLE_WIDTH, columns)
    draw = torch.Generator().manual_seed(0)
    row = torch.randint(rows, (SAMPLE, 1), generator=draw)
    first = torch.randint(columns // width, (SAMPLE, 1), generator=draw) * width
    kept = weight.detach()[row, first + torch.arange(width)]
    groups = kept.float()
    precision = torch.finfo(kept.dtype)
    # Half a unit in the last place for the weight and as much for the step; and for what is computed here in float32.
    units = precision.eps + 4 * torch.finfo(torch.float32).eps
    sizes = groups.abs().clamp_min(precision.tiny)
    above = groups - groups.amin(-1, keepdim=True)
    from_zero = _multiples(groups, STEPS_FROM_ZERO, units * sizes)
    from_lowest = _multiples(above, STEPS_FROM_LOWEST, 2 * units * sizes.amax(-1, keepdim=True).expand_as(sizes))
    return bool((from_zero | from_lowest).all())


def _multiples(numbers: Tensor, most: int, bounds: Tensor) -> Tensor:
    """Returns which groups [R] of numbers [R, g] are multiples, within bounds [R, g], of their largest by some k up to
    `most`.
    """
    steps = numbers.abs().amax(-1, keepdim=True) / torch.arange(1, most + 1)  # [R, most]
    steps = steps[..., None]
    numbers = numbers[:, None]
    off = numbers - (numbers / _divisor(steps)).round() * steps
    return (off.abs() <= bounds[:, None]).all(-1).any(-1)


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


def own_codes(parts: tuple[Tensor, ...], precision: torch.finfo) -> list[Tensor] | None:
    """Returns the codes of all parts [R, g] by `codes_on_grids`; None unless all lie on grids of 16 levels."""
    found = []
    for part in parts:
        codes = codes_on_grids(part, precision)
        if codes is None:
            return None
        found.append(codes)
    return found


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
