"""Linear layers whose weights are in 4 or 8 bits, for a CPU, and an embedding that reads the rows of one.

A product of few rows, a decode step's, reads the codes: `aten::_weight_int4pack_mm_for_cpu` or
`aten::_weight_int8pack_mm`. They are fast in bfloat16 alone, so activations and outputs are rounded to it; the best
logits of a head are then computed again (`PackedHead`). A product of many rows, a prompt's, dequantises this one layer
to the dtype of the activations. Both read the same codes.

Shape letters: M = rows of activations, N / K = output / input features, g = group of weights with a scale and a zero.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from residual_mass.model.weight_codes import MIDDLE, codes_of_4_bits, codes_of_8_bits

GROUPS = (32, 64, 128, 256)
"""Weights of a group that torch's 4-bit product knows."""
ROW_MULTIPLE = 64
"""Output features are a multiple of this in 4 bits, so that torch packs them in whole blocks; others are 0."""
COLUMN_MULTIPLE = 32
"""Input features are a multiple of this in 8 bits: torch reads beyond the end of rows of other lengths."""
LAYOUTS = ((64, 32), (32, 16), (32, 1))
"""Rows of a block, and how far apart the two rows of a byte are: with AVX-512, AVX2, and neither."""


class PackedLinear(nn.Module):
    """A linear layer whose weight is in codes.

    Attributes:
        codes: as torch's product reads them; integers, which `model.to(dtype)` leaves as they are.
        scales: bfloat16, which they stay.
        bias: [N] or None, in the dtype of the model.
        error: of the weights, relative, root mean square.
    """

    most_rows: int
    """Rows up to which the product of packed weights is the faster one."""
    codes: Tensor
    scales: Tensor
    error: float

    def __init__(self, rows: int, columns: int, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.in_features = columns
        self.out_features = rows
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """Computes [..., N] in the dtype of x [..., K]; x and products of few rows are rounded to bfloat16."""
        if self.codes.device.type != "cpu":
            raise ValueError(
                f"the weights are packed for a CPU, and the model is on {self.codes.device}: move it back with "
                'model.to("cpu"), or load it again for that device'
            )
        rows = math.prod(x.shape[:-1])
        if rows > self.most_rows:
            return F.linear(x, self.dequantised(x.dtype), self.bias)
        flat = x.reshape(rows, self.in_features).to(torch.bfloat16).contiguous()
        output = self.product(flat)[:, : self.out_features]
        output = output.to(x.dtype).reshape(*x.shape[:-1], self.out_features)
        return output if self.bias is None else output + self.bias

    def product(self, x: Tensor) -> Tensor:
        """Computes [M, N or more] in bfloat16 of x [M, K] in bfloat16 by torch's product of packed weights."""
        raise NotImplementedError

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Returns the weight [N, K]."""
        raise NotImplementedError

    @property
    def weight(self) -> Tensor:
        """The weight [N, K], made anew in the dtype of the bias or the scales; it can neither be set nor be tied."""
        return self.dequantised(self.scales.dtype if self.bias is None else self.bias.dtype)

    def how(self) -> str:
        """Returns how the weights are kept, in words."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def _apply(self, fn: Any, recurse: bool = True) -> PackedLinear:
        scales = self.scales
        super()._apply(fn, recurse)
        if self.scales.dtype != scales.dtype:
            self.scales = scales.to(self.scales.device)  # not rounded twice, and the dtype that torch's product takes
        return self


class Linear4(PackedLinear):
    """A linear layer with weights in 4 bits; where they are dequantised codes, with these codes.

    Attributes:
        codes: [N', K' / 2] uint8 in the layout of this CPU, N' and K' the next multiples of `ROW_MULTIPLE` and g.
        scales: [K' / g, N', 2] bfloat16, scale and zero.
        kept: whether the weights were dequantised from these codes.
    """

    most_rows = 32

    def __init__(self, weight: Tensor, bias: nn.Parameter | None, group: int) -> None:
        super().__init__(*weight.shape, bias)
        self.group = group
        self.layout = layout_here()
        codes, scale, zero, self.kept, self.error = codes_of_4_bits(weight, group)
        more = -len(codes) % ROW_MULTIPLE
        scales = F.pad(torch.stack((scale, zero), -1), (0, 0, 0, 0, 0, more))
        codes = F.pad(codes.to(torch.int32), (0, 0, 0, more))
        self.register_buffer("codes", packed_codes(codes))
        self.register_buffer("scales", scales.transpose(0, 1).contiguous())

    def product(self, x: Tensor) -> Tensor:
        more = -self.in_features % self.group
        if more:
            x = F.pad(x, (0, more))
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.codes, self.group, self.scales)

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Returns the weight [N, K], of strides (1, N'): both are faster by column."""
        codes = unpacked_codes(self.codes, self.layout)
        signed = codes.sub_(MIDDLE).view(torch.int8)  # wraps around below 0
        groups = signed.to(dtype).unflatten(0, (-1, self.group))
        scale = self.scales[:, None, :, 0].to(dtype).contiguous()
        zero = self.scales[:, None, :, 1].to(dtype).contiguous()
        weight = torch.addcmul(zero, groups, scale).flatten(0, 1)
        return weight[: self.in_features, : self.out_features].T

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, bits=4, group={self.group}"

    def how(self) -> str:
        return f"in 4 bits in groups of {self.group}, {'codes kept' if self.kept else 'rounded'}"

    def get_extra_state(self) -> Tensor:
        """Returns the layout of the codes, which other CPUs read as other weights."""
        return torch.tensor(self.layout)

    def set_extra_state(self, state: Tensor) -> None:
        require_layout(state.tolist())

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        require_layout(self.layout)


class Linear8(PackedLinear):
    """A linear layer with weights in 8 bits.

    Attributes:
        codes: [N, K'] int8, K' the next multiple of `COLUMN_MULTIPLE`.
        scales: [N] bfloat16.
    """

    most_rows = 16

    def __init__(self, weight: Tensor, bias: nn.Parameter | None) -> None:
        super().__init__(*weight.shape, bias)
        codes, scales, self.error = codes_of_8_bits(weight)
        self.register_buffer("codes", F.pad(codes, (0, -codes.shape[1] % COLUMN_MULTIPLE)))
        self.register_buffer("scales", scales)

    def product(self, x: Tensor) -> Tensor:
        more = -self.in_features % COLUMN_MULTIPLE
        if more:
            x = F.pad(x, (0, more))
        return torch.ops.aten._weight_int8pack_mm(x, self.codes, self.scales)

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        weight = self.codes.to(dtype)
        weight *= self.scales.to(dtype)[:, None]
        return weight[:, : self.in_features]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, bits=8"

    def how(self) -> str:
        return "in 8 bits, rounded"


class PackedHead(Linear8):
    """A language-model head: of few rows of activations, the best logits are not rounded.

    torch's product rounds logits of 16 to 32 to multiples of 1/8, so that the greatest ones tie and change places. The
    best of each row of activations are scored again, from the codes.
    """

    rescored = 256

    def forward(self, x: Tensor) -> Tensor:
        """Computes [..., N]: of few rows x [..., K] in float32, in float64 if x is; of many as every layer."""
        logits = super().forward(x)
        if math.prod(x.shape[:-1]) > self.most_rows:
            return logits
        dtype = torch.promote_types(x.dtype, torch.float32)
        best = logits.topk(min(self.rescored, self.out_features), sorted=False).indices
        codes = F.embedding(best, self.codes)[..., : self.in_features]  # faster than self.codes[best]
        scores = (codes * x.to(dtype).unsqueeze(-2)).sum(-1) * self.scales[best]
        if self.bias is not None:
            scores = scores + self.bias[best]
        return logits.to(dtype).scatter(-1, best, scores)


class PackedEmbedding(nn.Module):
    """An embedding that reads the rows of the head to which it was tied.

    Args:
        head: its codes and scales stay those of the head.
        padding_idx: as in `nn.Embedding`; it matters for gradients alone.
    """

    like: Tensor
    """No numbers, in the dtype that is returned."""

    def __init__(self, head: Linear8, padding_idx: int | None, dtype: torch.dtype) -> None:
        super().__init__()
        self._head = [head]  # in a list, so that it is no module of this one, too
        self.num_embeddings = head.out_features
        self.embedding_dim = head.in_features
        self.padding_idx = padding_idx
        self.register_buffer("like", torch.empty(0, dtype=dtype), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Returns the vectors [..., K] of ids [...]."""
        head = self._head[0]
        codes = head.codes[ids][..., : self.embedding_dim]
        return codes.to(self.like.dtype) * head.scales[ids].to(self.like.dtype).unsqueeze(-1)

    @property
    def weight(self) -> Tensor:
        """The embedding [N, K], made anew; it can neither be set nor be tied."""
        return self._head[0].dequantised(self.like.dtype)


def packed_codes(codes: Tensor) -> Tensor:
    """Packs codes [N', K'] int32 as torch's product reads them on this CPU: [N', K' / 2] uint8."""
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.contiguous(), 1)


def unpacked_codes(packed: Tensor, layout: tuple[int, int]) -> Tensor:
    """Returns the codes [K', N'] uint8 of packed ones [N', K' / 2]."""
    block, apart = layout
    rows = packed.shape[0]
    blocks = packed.view(rows // block, -1, block // 2)  # of all columns, one after the other
    pair = (blocks & 15, blocks >> 4)
    codes = torch.stack(pair, -1 if apart == 1 else 2)
    return codes.transpose(0, 1).reshape(-1, rows)


@cache
def layout_here() -> tuple[int, int]:
    """Returns the layout in which torch packs 4-bit codes on this CPU, one of `LAYOUTS`.

    Raises:
        ValueError: it is none of them.
    """
    codes = torch.arange(ROW_MULTIPLE * 4, dtype=torch.int32).view(ROW_MULTIPLE, 4) * 7 % 15
    packed = packed_codes(codes)
    for layout in LAYOUTS:
        if torch.equal(unpacked_codes(packed, layout).T, codes.to(torch.uint8)):
            return layout
    raise ValueError(f"torch {torch.__version__} packs weights of 4 bits in an unknown layout here: take bits=8")


def require_layout(layout: Any) -> None:
    """Raises ValueError unless codes in a layout are read rightly on this CPU."""
    if tuple(layout) != layout_here():
        raise ValueError(
            f"the weights were packed for another CPU (blocks of {layout[0]} rows, here {layout_here()[0]}): load the "
            "model again and pack its weights here"
        )
