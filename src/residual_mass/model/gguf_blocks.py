"""Codes of weights as the blocks of a GGUF file hold them: the formats that llama.cpp writes most.

A block is a run of columns of one row. In Q4_0 to Q8_0 and IQ4_NL it has 32 and a scale in half precision; in the K
formats and IQ4_XS it has 256, in groups of 32 or 16 whose scales are small integers times one or two numbers of the
block. Layouts are those of ggml-quants.c.

Shape letters: N = output features, B = blocks of a row, G = groups of a row, g = columns of a group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from residual_mass.model.weight_codes import Codes, exponents_of, halves_of, whole_of


class Grids(NamedTuple):
    """What blocks hold.

    Attributes:
        codes: [N, B, ..., g] uint8.
        scale, minimum: [N, B, ...] float32: a weight is (code - middle) * scale + minimum. No minimum is None.
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor | None = None


class Format(NamedTuple):
    """A format of blocks.

    Attributes:
        columns, bytes: of a block.
        bits: of a code.
        middle: the code of 0 where there is no minimum.
        read: reads blocks [N, B, bytes] uint8.
    """

    columns: int
    bytes: int
    bits: int
    middle: int
    read: Callable[[Tensor], Grids]


def codes_of_blocks(rows: Tensor, kind: str) -> Codes:
    """Returns the codes of a weight [N, K].

    Scales in half precision stay as they are. Those of formats with blocks of 256 columns have up to 17 significant
    bits and are rounded to 11; the minimum takes up what that shifts the mean of a group by.

    Args:
        rows: the blocks of every row, [N, bytes] uint8.
        kind: a key of `FORMATS`.
    """
    form = FORMATS[kind]
    codes, scale, minimum = form.read(rows.unflatten(1, (-1, form.bytes)))
    group = codes.shape[-1]
    codes = codes.flatten(1, -2)  # [N, G, g]
    numbers = [scale] if minimum is None else [scale, minimum]
    numbers = torch.stack([each.flatten(1) for each in numbers], -1)  # [N, G, 1 or 2]
    # One scale for the whole block, in half precision in the file: nothing is rounded.
    if form.columns == group:
        halves = numbers.half()
        exponents = torch.zeros(len(rows), dtype=torch.int32)
        return Codes(codes.flatten(1), halves, exponents, form.bits, group, form.middle, kept=True, error=0.0)
    centred = codes.float() - form.middle
    total = centred.sum(-1)
    squares = centred.square().sum(-1)
    exponents = exponents_of(numbers.abs().amax(-1))
    halves = halves_of(numbers, exponents)
    off = numbers - whole_of(halves, exponents)
    if minimum is not None:
        # m + (s - s') mean(c), with s' the rounded scale, keeps the mean of c s + m.
        minimums = numbers[..., 1] + off[..., 0] * total / group
        halves[..., 1] = halves_of(minimums, exponents)
        off = numbers - whole_of(halves, exponents)
    # Weights are linear in scale and minimum, so their errors have the same form as themselves.
    error = (_square(off, total, squares, group) / _square(numbers, total, squares, group)).sqrt()
    error = float(error.nan_to_num())  # 0 for weights that are all 0
    return Codes(codes.flatten(1), halves, exponents, form.bits, group, form.middle, kept=True, error=error)


def _square(numbers: Tensor, total: Tensor, squares: Tensor, group: int) -> Tensor:
    """Returns the sum of squares of weights with scales, and minimums, [N, G, 1 or 2], from the sums of their codes and
    of the squares of their codes in each group.

    (c s + m)^2 summed over a group of g is s^2 (sum of c^2) + 2 s m (sum of c) + g m^2.
    """
    scale = numbers[..., 0].double()
    whole = scale.square() * squares
    if numbers.shape[-1] == 2:
        minimum = numbers[..., 1].double()
        whole += 2 * scale * minimum * total + group * minimum.square()
    return whole.sum()


def _half(blocks: Tensor, first: int, count: int = 1) -> list[Tensor]:
    """Returns numbers [N, B] in half precision that begin at a byte of blocks, in float32."""
    numbers = blocks[..., first : first + 2 * count].contiguous().view(torch.float16)
    return list(numbers.float().unbind(-1))


def _nibbles(packed: Tensor) -> Tensor:
    """Returns the lower halves [.., n] of bytes [.., n], then the upper ones."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _bits(packed: Tensor) -> Tensor:
    """Returns the bits [.., 8 n] of bytes [.., n], the lowest of each first."""
    return ((packed[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(-2)


def _pairs(packed: Tensor) -> Tensor:
    """Returns the pairs of bits [.., 4, n] of bytes [.., n], the lowest of each first."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    return packed[..., None, :] >> shifts & 3


def _two_bits(packed: Tensor) -> Tensor:
    """Returns 2 bits of codes [N, B, 16, 16] from 64 bytes, of which 32 have those of four runs of 32."""
    return _pairs(packed.unflatten(-1, (2, 32))).flatten(-3).unflatten(-1, (16, 16))


def _q4_0(blocks: Tensor) -> Grids:
    (scale,) = _half(blocks, 0)
    return Grids(_nibbles(blocks[..., 2:]), scale)


def _q4_1(blocks: Tensor) -> Grids:
    return Grids(_nibbles(blocks[..., 4:]), *_half(blocks, 0, 2))


def _q5_0(blocks: Tensor) -> Grids:
    (scale,) = _half(blocks, 0)
    return Grids(_nibbles(blocks[..., 6:]) | _bits(blocks[..., 2:6]) << 4, scale)


def _q5_1(blocks: Tensor) -> Grids:
    return Grids(_nibbles(blocks[..., 8:]) | _bits(blocks[..., 4:8]) << 4, *_half(blocks, 0, 2))


def _q8_0(blocks: Tensor) -> Grids:
    (scale,) = _half(blocks, 0)
    return Grids(blocks[..., 2:] ^ 128, scale)  # signed bytes + 128


def _scales_of_6_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the scales and the minimums, [N, B, 8], of Q4_K and Q5_K in 12 bytes: those of the first four groups in 6
    bits of a byte, whose other 2 bits are the highest of the last four groups' 6.
    """
    first, second, low = packed.split(4, -1)
    scales = torch.cat((first & 63, low & 15 | first >> 6 << 4), -1)
    minimums = torch.cat((second & 63, low >> 4 | second >> 6 << 4), -1)
    return scales.float(), minimums.float()


def _with_minimums(blocks: Tensor, codes: Tensor) -> Grids:
    """Returns codes [N, B, 8, 32] of Q4_K or Q5_K with their scales and minimums."""
    whole, lowest = _half(blocks, 0, 2)
    scales, minimums = _scales_of_6_bits(blocks[..., 4:16])
    # The file's minimums are subtracted.
    return Grids(codes, whole[..., None] * scales, -lowest[..., None] * minimums)


def _two_groups(packed: Tensor) -> Tensor:
    """Returns 4 bits of codes [N, B, 8, 32] from 128 bytes: 32 have the lower halves of a group's and the upper ones of
    the next one's.
    """
    return _nibbles(packed.unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(2, 3)


def _q2_k(blocks: Tensor) -> Grids:
    scales = blocks[..., :16]
    whole, lowest = _half(blocks, 80, 2)
    minimum = -lowest[..., None] * (scales >> 4).float()
    return Grids(_two_bits(blocks[..., 16:80]), whole[..., None] * (scales & 15).float(), minimum)


def _q3_k(blocks: Tensor) -> Grids:
    runs = torch.arange(8, dtype=torch.uint8)[:, None]
    high = blocks[..., None, :32] >> runs & 1  # bit j of a byte belongs to run j of 32
    codes = _two_bits(blocks[..., 32:96]) | high.flatten(-2).unflatten(-1, (16, 16)) << 2
    scales = _nibbles(blocks[..., 96:104]) | _pairs(blocks[..., 104:108]).flatten(-2) << 4
    (whole,) = _half(blocks, 108)
    return Grids(codes, whole[..., None] * (scales.float() - 32))


def _q4_k(blocks: Tensor) -> Grids:
    return _with_minimums(blocks, _two_groups(blocks[..., 16:]))


def _q5_k(blocks: Tensor) -> Grids:
    low = _two_groups(blocks[..., 48:])
    groups = torch.arange(8, dtype=torch.uint8)[:, None]
    high = blocks[..., None, 16:48] >> groups & 1  # bit j of a byte belongs to group j
    return _with_minimums(blocks, low | high << 4)


def _q6_k(blocks: Tensor) -> Grids:
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64))).flatten(2).unflatten(-1, (16, 16))  # of each half
    (whole,) = _half(blocks, 208)
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float()
    return Grids(low | _two_bits(blocks[..., 128:192]) << 4, whole[..., None] * scales)


def _iq4_nl(blocks: Tensor) -> Grids:
    (scale,) = _half(blocks, 0)
    return Grids(UNEVEN[_nibbles(blocks[..., 2:]).long()], scale)


def _iq4_xs(blocks: Tensor) -> Grids:
    (whole,) = _half(blocks, 0)
    # Bytes have the scales of neighbours, unlike those of Q3_K.
    low = _nibbles(blocks[..., 4:8, None]).flatten(-2)
    high = _pairs(blocks[..., 2:4]).transpose(-1, -2).flatten(-2)
    scales = (low | high << 4).float() - 32
    codes = _nibbles(blocks[..., 8:].unflatten(-1, (8, 16)))
    return Grids(UNEVEN[codes.long()], whole[..., None] * scales)


UNEVEN = torch.tensor([1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241], dtype=torch.uint8)
"""The 16 levels of IQ4_NL and IQ4_XS as codes of 8 bits; 128 is 0."""
FORMATS = {
    "Q4_0": Format(32, 18, 4, 8, _q4_0),
    "Q4_1": Format(32, 20, 4, 0, _q4_1),
    "Q5_0": Format(32, 22, 5, 16, _q5_0),
    "Q5_1": Format(32, 24, 5, 0, _q5_1),
    "Q8_0": Format(32, 34, 8, 128, _q8_0),
    "Q2_K": Format(256, 84, 4, 0, _q2_k),
    "Q3_K": Format(256, 110, 4, 4, _q3_k),
    "Q4_K": Format(256, 144, 4, 0, _q4_k),
    "Q5_K": Format(256, 176, 5, 0, _q5_k),
    "Q6_K": Format(256, 210, 6, 32, _q6_k),
    "IQ4_NL": Format(32, 18, 8, 128, _iq4_nl),
    "IQ4_XS": Format(256, 136, 8, 128, _iq4_xs),
}
"""By the names of `gguf.GGMLQuantizationType`."""
