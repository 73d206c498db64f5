"""Codes of weights by groups of columns: 4 bits on a grid of 16 levels, or 8 bits around 0.

A weight is (code - middle) * scale, or code * scale + minimum. Scales and minimums are in half precision, times a power
of 2 for each row, so that their range does not matter. Weights that lie on grids of 16 levels already, as those of a
GGUF file in Q4_0, Q4_1 or Q4_K that was dequantised, keep their codes, so that nothing but scale and minimum is
rounded, and those of Q4_0 and Q4_1 not even these. So do those of Q8_0.

Errors are relative: the root mean square of what weights are off by, over that of the weights.

Shape letters: N = output features, K = input features, g = group, G = K / g rounded up, R = any number of groups.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LEVELS = 16
MIDDLE = 8
"""The code of 0 in Q4_0."""
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
SPARE = 8
"""Bits of the largest scale or minimum of a row that are above 1: others are as precise if up to 2^22 times smaller."""


class Codes(NamedTuple):
    """A weight [N, K] in codes.

    Attributes:
        codes: [N, G * g] uint8; those beyond K repeat the last column's.
        scales: [N, G, 1 or 2] float16: scale, and minimum where there is one.
        exponents: [N] int32, of the powers of 2 by which scales and minimums are multiplied.
        bits: of a code.
        group: g.
        middle: the code of 0, where there is no minimum; else 0.
        kept: whether the weights were dequantised from these codes.
        error: relative.
    """

    codes: Tensor
    scales: Tensor
    exponents: Tensor
    bits: int
    group: int
    middle: int
    kept: bool
    error: float


def codes_of_4_bits(weight: Tensor, group: int) -> Codes:
    """Rounds a weight [N, K] to 4 bits, or finds the codes from which it was dequantised."""
    parts = _parts(weight, group)
    own = own_codes(parts, torch.finfo(weight.dtype)) if lies_on_grids(weight) else None
    codes = own or [rounded(part.flatten(0, 1)).view_as(part) for part in parts]
    real = _real_columns(weight, group)
    fits = [fitted(part, each, real) for part, each in zip(parts, codes, strict=True)]
    return _joined(weight, parts, codes, fits, bits=4, middle=0, kept=own is not None)


def codes_of_8_bits(weight: Tensor, group: int) -> Codes:
    """Rounds a weight [N, K] to 255 levels around 0, the outermost at the largest magnitude of a group."""
    codes = []
    fits = []
    parts = _parts(weight, group)
    for part in parts:
        scale = part.abs().amax(-1) / 127
        exponents = exponents_of(scale)
        scales = halves_of(scale, exponents)[..., None]
        # Codes are for the scale as it is kept, so that its rounding adds no error of its own.
        step = whole_of(scales, exponents)
        # Scales far below the largest of their row are subnormal: rounded down, they put weights beyond 127.
        codes.append((part / _divisor(step)).round_().clamp_(-127, 127) + 128)
        fits.append((scales, exponents))
    precision = torch.finfo(weight.dtype)
    kept = all(_are_own(part, each, fit, precision) for part, each, fit in zip(parts, codes, fits, strict=True))
    return _joined(weight, parts, codes, fits, bits=8, middle=128, kept=kept)


def _are_own(part: Tensor, codes: Tensor, fit: tuple[Tensor, Tensor], precision: torch.finfo) -> bool:
    """Returns whether each weight of [n, G, g] is its code of 8 bits times the scale, but for its dtype's rounding.

    The mean error would not tell in bfloat16, whose rounding is coarser than 8 bits of the largest weights.
    """
    back = (codes - 128) * whole_of(*fit)
    # Half a unit in the last place for the weight, for the largest of its group, and for the scale that this gave.
    bounds = 1.5 * precision.eps * part.abs().clamp_min(precision.tiny)
    return bool(((back - part).abs() <= bounds).all())


def _parts(weight: Tensor, group: int) -> list[Tensor]:
    """Returns rows of a weight [N, K] in groups, [n, G, g] float32; the last column fills up the last group, which
    changes neither extremes nor grids.
    """
    columns = weight.shape[1]
    more = -columns % group
    parts = []
    for part in weight.detach().split(max(1, PART // columns)):
        wide = part.float()
        if more:
            wide = torch.cat((wide, wide[:, -1:].expand(-1, more)), 1)
        parts.append(wide.unflatten(1, (-1, group)))
    return parts


def _real_columns(weight: Tensor, group: int) -> Tensor:
    """Returns which columns of which groups a weight has, [G, g] in float32."""
    columns = weight.shape[1]
    places = torch.arange(columns + -columns % group)
    return (places < columns).float().view(-1, group)


def fitted(groups: Tensor, codes: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """Returns scales [n, G, 2] in half precision and exponents [n] that bring codes [n, G, g] closest to weights
    [n, G, g] by least squares over the real columns [G, g].

    The minimum takes up what rounding the scale shifts the mean by.
    """
    count = real.sum(-1)
    mean = (groups * real).sum(-1) / count
    middle = (codes * real).sum(-1) / count
    centred = (codes - middle[..., None]) * real
    # cov(code, weight) / var(code): with centred codes the mean of the weights drops out.
    slope = (centred * groups).sum(-1) / _divisor(centred.square().sum(-1))
    exponents = exponents_of(torch.maximum(slope.abs(), (mean - middle * slope).abs()))
    scale = halves_of(slope, exponents)
    minimum = mean - middle * whole_of(scale, exponents)
    return torch.stack((scale, halves_of(minimum, exponents)), -1), exponents


def _joined(
    weight: Tensor, parts: list[Tensor], codes: list[Tensor], fits: list[tuple[Tensor, Tensor]],
    *, bits: int, middle: int, kept: bool,
) -> Codes:  # fmt: skip
    """Returns the codes of all parts, with the error of the weight."""
    off = weight.new_zeros((), dtype=torch.float64)
    real = _real_columns(weight, parts[0].shape[-1])
    for part, each, (scales, exponents) in zip(parts, codes, fits, strict=True):
        factors = whole_of(scales, exponents)[:, :, None]
        back = (each - middle) * factors[..., 0]
        if scales.shape[-1] == 2:
            back += factors[..., 1]
        off += ((back - part) * real).square().sum(dtype=torch.float64)
    size = sum(part.mul(real).square().sum(dtype=torch.float64) for part in parts)
    scales, exponents = (torch.cat(each) for each in zip(*fits, strict=True))
    whole = torch.cat([each.to(torch.uint8) for each in codes]).flatten(1)
    error = float((off / _divisor(size)).sqrt())
    return Codes(whole, scales, exponents, bits, parts[0].shape[-1], middle, kept, error)


def exponents_of(sizes: Tensor) -> Tensor:
    """Returns the exponents [N] int32 with which the largest of sizes [N, G] keeps `SPARE` bits above 1."""
    _, exponents = torch.frexp(sizes.amax(-1))  # 0 for 0
    # frexp gives m 2^e with 1/2 <= m < 1, so the largest half is in [2^SPARE, 2^(SPARE + 1)).
    return (exponents - 1 - SPARE).clamp_(-126, 127)


def halves_of(numbers: Tensor, exponents: Tensor) -> Tensor:
    """Returns numbers [N, ..] in half precision, over powers of 2 with exponents [N]."""
    return torch.ldexp(numbers, -exponents.view(-1, *(1,) * (numbers.ndim - 1))).half()


def whole_of(halves: Tensor, exponents: Tensor) -> Tensor:
    """Returns the numbers [N, ..] of `halves_of` in float32."""
    return torch.ldexp(halves.float(), exponents.view(-1, *(1,) * (halves.ndim - 1)))


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
    off = numbers - (numbers / _divisor(steps)).round() * steps  # [R, most, g]
    return (off.abs() <= bounds[:, None]).all(-1).any(-1)


def rounded(groups: Tensor) -> Tensor:
    """Returns the codes [R, g] of groups on 16 levels between their lowest and their highest weight."""
    low, high = groups.aminmax(dim=-1)
    step = _divisor((high - low) / (LEVELS - 1))
    codes = (groups - low[:, None]) / step[:, None]
    return codes.round_()


def _divisor(numbers: Tensor) -> Tensor:
    """Returns the numbers with 1 in place of 0: groups of equal weights have no step."""
    return numbers.masked_fill(numbers == 0, 1)


def own_codes(parts: list[Tensor], precision: torch.finfo) -> list[Tensor] | None:
    """Returns the codes of all parts [n, G, g] by `codes_on_grids`; None unless all lie on grids of 16 levels."""
    found = []
    for part in parts:
        codes = codes_on_grids(part.flatten(0, 1), precision)
        if codes is None:
            return None
        found.append(codes.view_as(part))
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
    # The largest step comes first: weights on a grid also lie on any finer one that contains it.
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
    # Every weight lies within half a step of a level, so the bound has to stay below that to tell anything.
    bound = torch.minimum(units * largest, step.abs() / 4)
    bound = torch.where(step == 0, units * largest, bound)
    low, high = codes.aminmax(dim=-1)
    return codes, (off <= bound) & (low >= 0) & (high < LEVELS)
