"""Keys of 4 bits, two to a byte, that are scored without being restored.

A key of block b is k_hat = low_b + step_b c with codes c from 0 to 15, so

    q.k_hat = q.low_b + sum_d (q_d step_bd) c_d:

the step is folded into the query once per block, and a code is only ever converted to a float.

Byte j holds the codes of channels j (low bits) and j + D / 2 (high bits), so that one mask and one shift give two whole
halves of channels, and nothing has to be interleaved. Within a block the tokens of a channel are neighbours: that is
the right operand of a matrix product, as it is.

Shape letters: B = batch rows, Hkv = KV heads, G = query heads of a KV head, L = prefix columns, N = blocks of columns,
S = columns of a block, D = head dimension.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 4
"""Query rows of a CPU's matrix product come in fours: it takes less time for four than for three."""
MOST_HEADS = 16
"""Query heads of a KV head that the Triton kernel scores, in one tile of a tensor core."""


class PackedKeys(NamedTuple):
    """Codes of a prefix's keys, and what they stand for."""

    codes: Tensor
    """[B, Hkv, N, D / 2, S] uint8; the last block is filled up with zeros."""
    low: Tensor
    """[B, Hkv, N, D] bfloat16, the value of code 0."""
    step: Tensor
    """[B, Hkv, N, D] bfloat16, the difference of neighbouring codes."""


def packed(codes: Tensor, low: Tensor, step: Tensor, block: int) -> PackedKeys:
    """Packs codes [B, Hkv, L, D] uint8 below 16, of blocks of so many columns."""
    filled = F.pad(codes, (0, 0, 0, -codes.shape[-2] % block))
    first, second = filled.unflatten(-2, (-1, block)).transpose(-1, -2).chunk(2, dim=-2)
    return PackedKeys((first | second << 4).contiguous(), low.contiguous(), step.contiguous())


def unpacked(codes: Tensor) -> Tensor:
    """Returns the codes of blocks: [..., D / 2, S] -> [..., D, S] uint8."""
    return torch.cat((codes & 15, codes >> 4), dim=-2)


def scanned_scores(queries: Tensor, keys: PackedKeys) -> Tensor:
    """Scores queries [B, Hkv, G, D] float32 with all packed keys: [B, Hkv, G, N S]."""
    group = queries.shape[-2]
    rows = F.pad(queries, (0, 0, 0, -group % ROWS))
    folded = rows.unsqueeze(-3) * keys.step.unsqueeze(-2)  # [B, Hkv, N, G, D]
    scores = (folded @ unpacked(keys.codes).float())[..., :group, :]
    return (scores.transpose(-2, -3) + (queries @ keys.low.float().transpose(-1, -2)).unsqueeze(-1)).flatten(-2)
