"""Packed weights, read code by code."""

from __future__ import annotations

import torch
from torch import Tensor

from residual_mass.model.packed_linear import Linear8, PackedLinear

BF16 = 2.0**-8
"""Largest relative error of rounding to bfloat16."""


def by_hand(layer: PackedLinear) -> Tensor:
    """The weight [N, K] in float64, code by code."""
    rows, columns = layer.out_features, layer.in_features
    if isinstance(layer, Linear8):
        return layer.codes[:, :columns].double() * layer.scales.double()[:, None]
    block, apart = layer.layout
    flat = layer.codes.flatten().tolist()
    width = 2 * layer.codes.shape[1]
    weight = torch.empty(rows, columns, dtype=torch.float64)
    for row in range(rows):
        within = row % block
        high = within // apart % 2
        byte = within // 2 if apart == 1 else within % apart
        for column in range(columns):
            start = row // block * block * width // 2
            packed = flat[start + column * block // 2 + byte]
            code = packed >> 4 if high else packed & 15
            scale, zero = layer.scales[column // layer.group, row].double()
            weight[row, column] = (code - 8) * scale + zero
    return weight
