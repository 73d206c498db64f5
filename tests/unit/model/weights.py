"""Packed weights, read code by code."""

from __future__ import annotations

import torch
from torch import Tensor

from residual_mass.kernels.library import Weights
from residual_mass.model.packed_linear import PackedLinear

BF16 = 2.0**-8
"""Largest relative error of rounding to bfloat16."""
WORDS = {4: (0, 4, 1, 5, 2, 6, 3, 7), 8: (0, 2, 1, 3)}
"""By bits: where in a word the code of each of its columns is."""


def code_at(words: list[list[int]], bits: int, lane: int, column: int) -> int:
    """The code of a column within a span, whose words are [bits, 16]."""
    places = WORDS[8 if bits == 8 else 4]
    word, place = divmod(column, len(places))
    code = words[word][lane] >> (32 // len(places) * places[place]) & (255 if bits == 8 else 15)
    if bits in (5, 6):  # the rest of pair q is at its place, the second column's in the upper half
        width = bits - 4
        pair, second = divmod(column, 2)
        word, place = divmod(pair, 16 // width)
        rest = words[4 + word][lane] >> (width * place + 16 * second) & (2**width - 1)
        code |= rest << 4
    return code


def weight_by_hand(weights: Weights, columns: int) -> Tensor:
    """The weight [N, K] in float64, code by code."""
    bits = weights.words.shape[2]
    words = weights.words.tolist()
    scales = weights.scales.view(torch.float16).double().tolist()
    factors = [2.0**exponent for exponent in weights.exponents.tolist()]
    weight = torch.empty(weights.rows, columns, dtype=torch.float64)
    for row in range(weights.rows):
        block, lane = divmod(row, 16)
        for column in range(columns):
            code = code_at(words[block][column // 32], bits, lane, column % 32)
            own = [lanes[lane] * factors[row] for lanes in scales[block][column // weights.group]]
            weight[row, column] = (code - weights.middle) * own[0] + sum(own[1:])
    return weight


def by_hand(layer: PackedLinear) -> Tensor:
    return weight_by_hand(layer.weights, layer.in_features)
