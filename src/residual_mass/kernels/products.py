"""Products of activations with weights in codes, by the kernels: the form of the codes, and an operation for graphs.

Shape letters: N = output features, K = input features, G = groups of input features with a scale; B = blocks of 16
output features, C = spans of 32 input features, both rounded up.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from residual_mass.kernels.cpu import has_bfloat16
from residual_mass.kernels.library import Weights, load
from residual_mass.kernels.operations import product_operations

LANES = 16
"""Output features of a block."""
SPAN = 32
"""Input features that have `bits` words of codes."""
PACKED_AT_ONCE = 2**17
"""Codes that are packed together: as integers of 32 bits they fit a processor's cache."""
MANY = 128
"""Rows of activations in bfloat16 from which on weights are dequantised for torch's product, where that is fast."""
ORDER = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}
"""Columns of a word, the lowest bits first."""


def packed(codes: Tensor, bits: int, scales: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns words, scales and exponents of `Weights` for codes [N, K] uint8 of so many bits, scales [N, G, 1 or 2]
    float16 and exponents [N].
    """
    more = -len(codes) % LANES
    padded = F.pad(scales, (0, 0, 0, 0, 0, more))
    blocks = padded.view(torch.int16).unflatten(0, (-1, LANES))  # [B, 16, G, 1 or 2]
    by_lane = blocks.permute(0, 2, 3, 1).contiguous()  # [B, G, 1 or 2, 16]
    return words_of(codes, bits), by_lane, F.pad(exponents, (0, more))


def words_of(codes: Tensor, bits: int) -> Tensor:
    """Returns the words [B, C, bits, 16] of codes [N, K] uint8; what is beyond them has code 0."""
    rows, columns = codes.shape
    codes = F.pad(codes, (0, -columns % SPAN, 0, -rows % LANES))
    blocks = codes.unflatten(0, (-1, LANES)).unflatten(2, (-1, SPAN))
    spans = blocks.permute(0, 2, 3, 1)  # [B, C, 32, 16]
    at_once = max(1, PACKED_AT_ONCE // (LANES * codes.shape[1]))
    words = []
    for part in spans.split(at_once):
        wide = part.to(torch.int32)
        words.append(_words_of_spans(wide, bits))
    return torch.cat(words)


def _words_of_spans(spans: Tensor, bits: int) -> Tensor:
    """Returns the words [B, C, bits, 16] of codes [B, C, 32, 16] int32."""
    if bits == 8:
        return _filled(spans, ORDER[8])
    words = _filled(spans & 15, ORDER[4])
    if bits > 4:
        order = _order_of_high_bits(bits - 4)
        words = torch.cat((words, _filled(spans >> 4, order)), 2)
    return words


def _filled(codes: Tensor, order: tuple[int, ...]) -> Tensor:
    """Returns words [B, C, w, 16] with the bits of codes [B, C, 32, 16], the columns of each word in an order."""
    width = 32 // len(order)
    words = codes.unflatten(2, (-1, len(order)))
    columns = words[:, :, :, list(order)]
    shifts = torch.arange(0, 32, width, dtype=torch.int32)[:, None]
    return (columns << shifts).sum(3, dtype=torch.int32)  # no two have a bit in common


def _order_of_high_bits(width: int) -> tuple[int, ...]:
    """Returns the columns of a word of fifth, or fifth and sixth, bits: the first of each pair, then the second."""
    columns = range(32 // width)
    return (*columns[::2], *columns[1::2])


def codes_of(words: Tensor, bits: int) -> Tensor:
    """Returns the codes [.., C * 32] int32 of words [.., C, bits]."""
    if bits == 8:
        return _emptied(words, ORDER[8]).flatten(-2)
    codes = _emptied(words[..., :4], ORDER[4]).flatten(-2)
    if bits > 4:
        high = _emptied(words[..., 4:], _order_of_high_bits(bits - 4)).flatten(-2)
        codes = codes | (high << 4)
    return codes


def _emptied(words: Tensor, order: tuple[int, ...]) -> Tensor:
    """Returns the codes [.., C, 32] of words [.., C, w], whose columns are in an order."""
    width = 32 // len(order)
    places = [order.index(column) * width for column in range(len(order))]
    codes = words[..., None] >> torch.tensor(places, dtype=torch.int32)
    # The shift of signed words copies their sign bit, which the mask removes.
    return (codes & (1 << width) - 1).flatten(-2)


def rows_of(weights: Weights, rows: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Returns rows [.., K] of a weight, by their numbers [..]."""
    block = rows // LANES
    lane = rows % LANES
    bits = weights.words.shape[2]
    # Two index tensors with slices between them put their axes first: [.., C, bits].
    codes = codes_of(weights.words[block, :, :, lane], bits)
    steps = (codes - weights.middle)[..., :columns]  # spans reach beyond the last column
    halves = weights.scales[block, :, :, lane].view(torch.float16)  # [.., G, 1 or 2]
    exponents = weights.exponents[rows][..., None, None]
    scales = torch.ldexp(halves.to(torch.promote_types(dtype, torch.float32)), exponents)
    wide = scales.repeat_interleave(weights.group, -2)[..., :columns, :]
    numbers = steps * wide[..., 0]
    if wide.shape[-1] == 2:
        numbers = numbers + wide[..., 1]
    return numbers.to(dtype)


def dequantised(weights: Weights, columns: int, dtype: torch.dtype) -> Tensor:
    """Returns the weight [N, K]."""
    library = load()
    if library is None or dtype not in (torch.float32, torch.bfloat16):
        return rows_of(weights, torch.arange(weights.rows), columns, dtype)
    by_column = torch.empty(columns, weights.words.shape[0] * LANES, dtype=dtype)
    library.dequantise(weights, by_column)
    return by_column[:, : weights.rows].T


def multiply(x: Tensor, words: Tensor, scales: Tensor, exponents: Tensor, rows: int, group: int, middle: int) -> Tensor:
    """Computes the product [.., N] of activations x [.., K] with a weight, in the dtype of x.

    Kernels round activations to 16 bits, by group of at most 32, and add in float32. The weight is dequantised for a
    product of torch's where there are no kernels for it (`kernels_serve`).

    Args:
        words and others: of `Weights`.
    """
    weights = Weights(words, scales, exponents, rows, group, middle)
    if not kernels_serve(x):
        return F.linear(x, dequantised(weights, x.shape[-1], x.dtype))
    # Kernels read float32 and bfloat16, so float16 goes through float32.
    wide = x if x.dtype == torch.bfloat16 else x.float()
    one = product_operations()[0]
    return one(wide.contiguous(), torch.get_num_threads(), *weights).to(x.dtype)


def kernels_serve(x: Tensor) -> bool:
    """Returns whether kernels multiply activations [.., K]: not in float64, nor many rows where bfloat16 is fast."""
    if load() is None or x.dtype == torch.float64:
        return False
    return x.dtype != torch.bfloat16 or math.prod(x.shape[:-1]) < MANY or not has_bfloat16()


# Not `custom_op`, whose wrapper takes as long as a small product.
torch.library.define(
    "residual_mass::multiply",
    "(Tensor x, Tensor words, Tensor scales, Tensor exponents, int rows, int group, int middle) -> Tensor",
)
torch.library.impl("residual_mass::multiply", "CPU")(multiply)


@torch.library.register_fake("residual_mass::multiply")
def _(x: Tensor, words: Tensor, scales: Tensor, exponents: Tensor, rows: int, group: int, middle: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], rows)
