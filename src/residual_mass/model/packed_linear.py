"""Linear layers whose weights are in codes, for a CPU, and an embedding that reads the rows of one.

Shape letters: N / K = output / input features.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from residual_mass.kernels import products
from residual_mass.kernels.products import Weights
from residual_mass.model.weight_codes import Codes


class PackedLinear(nn.Module):
    """A linear layer whose weight is in codes (`kernels.products.multiply`).

    Args:
        bias: [N] or None.
        dtype: in which the weight is given to who asks for it.

    Attributes:
        words, scales, exponents: of `Weights`; integers, which `model.to(dtype)` leaves as they are.
        kept: whether the weights were dequantised from these codes.
        error: of the weights, relative, root mean square.
    """

    words: Tensor
    scales: Tensor
    exponents: Tensor
    like: Tensor
    """No numbers, in `dtype`."""

    def __init__(self, codes: Codes, columns: int, bias: nn.Parameter | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features = columns
        self.out_features = len(codes.codes)
        self.bias = bias
        self.group = codes.group
        self.middle = codes.middle
        self.kept = codes.kept
        self.error = codes.error
        # Without the codes that fill up the last group: words are filled up to spans of their own.
        weights = products.packed(codes.codes[:, :columns], codes.bits, codes.scales, codes.exponents)
        for name, buffer in zip(("words", "scales", "exponents"), weights, strict=True):
            self.register_buffer(name, buffer)
        self.register_buffer("like", torch.empty(0, dtype=dtype), persistent=False)

    @property
    def bits(self) -> int:
        return self.words.shape[2]

    @property
    def weights(self) -> Weights:
        """The weight as the kernels take it."""
        return Weights(self.words, self.scales, self.exponents, self.out_features, self.group, self.middle)

    def forward(self, x: Tensor) -> Tensor:
        """Computes [..., N] of x [..., K], in its dtype."""
        weights = self.weights
        if weights.words.device.type != "cpu":
            raise ValueError(
                f"the weights are packed for a CPU, and the model is on {weights.words.device}: move it back with "
                'model.to("cpu"), or load it again for that device'
            )
        # Graphs take it as one operation, whose way through the dispatcher to Python takes as long as a small product.
        multiply = torch.ops.residual_mass.multiply if torch.compiler.is_compiling() else products.multiply
        output = multiply(x, *weights)
        return output if self.bias is None else output + self.bias.to(x.dtype)

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Returns the weight [N, K]."""
        return products.dequantised(self.weights, self.in_features, dtype)

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns rows [..., K] of the weight."""
        return products.rows_of(self.weights, ids, self.in_features, dtype)

    @property
    def weight(self) -> Tensor:
        """The weight [N, K], made anew; it can neither be set nor be tied."""
        return self.dequantised(self.like.dtype)

    def how(self) -> str:
        """Returns how the weight is kept, in words."""
        return f"in {self.bits} bits in groups of {self.group}, {'codes kept' if self.kept else 'rounded'}"

    def extra_repr(self) -> str:
        shape = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{shape}, bits={self.bits}, group={self.group}"


class PackedHead(PackedLinear):
    """A language-model head: logits are in float32 at least, so that close ones do not become equal."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(torch.promote_types(x.dtype, torch.float32)))


class PackedEmbedding(nn.Module):
    """An embedding that reads the rows of a weight in codes.

    Args:
        weights: a layer with the rows.
        padding_idx: as in `nn.Embedding`; it matters for gradients alone.
        shared: whether the layer is the head to which the embedding was tied, and stays that of the model.
    """

    like: Tensor
    """No numbers, in the dtype that is returned."""

    def __init__(self, weights: PackedLinear, padding_idx: int | None, dtype: torch.dtype, shared: bool = True) -> None:
        super().__init__()
        self._rows = [weights]  # in a list, so that it is no module of this one, too
        if not shared:
            self.rows = weights
        self.num_embeddings = weights.out_features
        self.embedding_dim = weights.in_features
        self.padding_idx = padding_idx
        self.register_buffer("like", torch.empty(0, dtype=dtype), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Returns the vectors [..., K] of ids [...]."""
        return self._rows[0].rows(ids, self.like.dtype)

    @property
    def weight(self) -> Tensor:
        """The embedding [N, K], made anew; it can neither be set nor be tied."""
        return self._rows[0].dequantised(self.like.dtype)
