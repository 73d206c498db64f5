"""Positive feature maps phi = exp(log phi), one per head, stacked over the heads of a layer.

Shape letters: H = heads, N = vectors, D = head dimension, M = features, I = inner width (d_emb).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LEAST = -80.0
"""Lower bound of exponents: exp(LEAST) is a normal float32, and subnormal numbers are thirty times slower on CPUs."""


class FoldedMap:
    """log phi(x) = A x + B gelu(C x + c) + e: a ReZero map with consecutive linear layers multiplied out."""

    def __init__(self, a: Tensor, b: Tensor, c: Tensor, c_bias: Tensor, e_bias: Tensor) -> None:
        """A: [H, D, M], B: [H, I, M], C: [H, D, I], c_bias: [H, 1, I], e_bias: [H, 1, M] (applied from the right)."""
        self.a = a
        self.b = b
        self.c = c
        self.c_bias = c_bias
        self.e_bias = e_bias
        self.width = c.shape[-1]

    def __call__(self, x: Tensor) -> Tensor:
        """Computes log phi: [H, N, D] -> [H, N, M]."""
        inner = F.gelu(torch.baddbmm(self.c_bias, x, self.c))
        linear = torch.baddbmm(self.e_bias, x, self.a)
        return torch.baddbmm(linear, inner, self.b)


class ReZeroMap(nn.Module):
    """The paper's one-block ReZero MLP, one per head (its appendix on the phi architecture).

    g0 = W_s x + b_s;  g1 = g0 + alpha (W_2 gelu(W_1 g0 + b_1) + b_2);  phi = exp(W_o g1 + b_o).
    """

    def __init__(self, heads: int, d_in: int, d_emb: int, d_phi: int) -> None:
        super().__init__()
        self.stem, self.stem_bias = _linear(heads, d_in, d_emb)
        self.up, self.up_bias = _linear(heads, d_emb, d_emb)
        self.down, self.down_bias = _linear(heads, d_emb, d_emb)
        self.out, self.out_bias = _linear(heads, d_emb, d_phi)
        # ReZero: the block starts as the identity.
        self.alpha = nn.Parameter(torch.zeros(heads, 1, 1, dtype=torch.float32))

    def unfolded(self, x: Tensor) -> Tensor:
        """Computes log phi layer by layer as in the paper: [H, N, D] -> [H, N, M]."""
        stem = torch.baddbmm(self.stem_bias, x, self.stem)
        inner = F.gelu(torch.baddbmm(self.up_bias, stem, self.up))
        block = torch.baddbmm(self.down_bias, inner, self.down)
        mixed = stem + self.alpha * block
        return torch.baddbmm(self.out_bias, mixed, self.out)

    def fold(self) -> FoldedMap:
        """Folds the map into one with 8 times fewer multiplications, differentiable in the original parameters."""
        # W_o (g0 + alpha (W_2 gelu(W_1 g0 + b_1) + b_2)) + b_o with g0 = W_s x + b_s, multiplied out:
        # A = W_o W_s, B = alpha W_o W_2, C = W_1 W_s.
        a = self.stem @ self.out
        b = self.alpha * (self.down @ self.out)
        c = self.stem @ self.up
        c_bias = torch.baddbmm(self.up_bias, self.stem_bias, self.up)
        mixed_bias = self.stem_bias + self.alpha * self.down_bias
        e_bias = torch.baddbmm(self.out_bias, mixed_bias, self.out)
        return FoldedMap(a, b, c, c_bias, e_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Computes log phi through the folded map: [H, N, D] -> [H, N, M]."""
        return self.fold()(x)

    @torch.no_grad()
    def set_log_linear(self, directions: Tensor, bias: Tensor) -> None:
        """Sets log phi(x) = directions x + bias exactly, for directions [H, M, D] and bias [H, M].

        Raises:
            ValueError: d_emb is smaller than D.
        """
        heads, _, d_in = directions.shape
        d_emb = self.stem.shape[-1]
        if d_emb < d_in:
            raise ValueError(f"map.init positive_random_features needs d_emb >= head dimension ({d_emb} < {d_in})")
        stem = self.stem
        # With alpha = 0 and g0 = [x, 0], W_o applies the directions to x itself.
        identity = torch.eye(d_in, d_emb, dtype=stem.dtype, device=stem.device)
        self.stem.copy_(identity.expand(heads, -1, -1))
        self.stem_bias.zero_()
        weights = directions.transpose(-1, -2)
        self.out[:, :d_in].copy_(weights)
        self.out[:, d_in:].zero_()
        self.out_bias.copy_(bias.unsqueeze(1))
        self.alpha.zero_()


class HedgehogMap(nn.Module):
    """The ablation's map phi = [exp z, exp -z] with z = x W + b: d_phi / 2 projections give d_phi features."""

    def __init__(self, heads: int, d_in: int, d_phi: int) -> None:
        super().__init__()
        if d_phi % 2:
            raise ValueError(f"map.d_phi must be even for the hedgehog map, got {d_phi}")
        self.weight, self.bias = _linear(heads, d_in, d_phi // 2)
        self.width = d_phi // 2

    def forward(self, x: Tensor) -> Tensor:
        """Computes log phi: [H, N, D] -> [H, N, M]."""
        z = torch.baddbmm(self.bias, x, self.weight)
        return torch.cat((z, -z), dim=-1)

    def fold(self) -> HedgehogMap:
        """Returns the map itself, which is already linear before the exponential."""
        return self


def orthogonal_directions(heads: int, d_phi: int, d_in: int, generator: torch.Generator) -> Tensor:
    """Draws rows [H, M, D] with Gaussian lengths, orthogonal in blocks of D (orthogonal positive random features)."""
    blocks = []

    def normal() -> Tensor:
        shape = heads, d_in, d_in
        return torch.randn(shape, generator=generator, dtype=torch.float32, device=generator.device)

    for _ in range(math.ceil(d_phi / d_in)):
        q, r = torch.linalg.qr(normal())
        # QR's Q is uniform over rotations only with the signs fixed.
        signs = r.diagonal(dim1=-2, dim2=-1).sign()
        q = q * signs.unsqueeze(-2)
        # Lengths of independent Gaussian vectors: each row alone is then Gaussian.
        lengths = normal().norm(dim=-1, keepdim=True)
        blocks.append(q * lengths)
    return torch.cat(blocks, dim=1)[:, :d_phi]


def log_kernel(log_query: Tensor, log_key: Tensor) -> Tensor:
    """Computes log z = log <phi_q, phi_k>: [..., R, M] and [..., L, M] -> [..., R, L].

    Factors out the rows' maxima and clamps the remaining z at 1e-30, so that 1/z stays finite in the gradient.
    """
    # log z does not depend on the shifts, so gradients through them would cancel.
    query_shift = log_query.amax(-1, keepdim=True).detach()
    key_shift = log_key.amax(-1, keepdim=True).detach()
    query = (log_query - query_shift).clamp_min(LEAST).exp()
    key = (log_key - key_shift).clamp_min(LEAST).exp()
    z = query @ key.transpose(-1, -2)
    log_z = z.clamp_min(1e-30).log()
    return log_z + query_shift + key_shift.transpose(-1, -2)


def _linear(heads: int, d_in: int, d_out: int) -> tuple[nn.Parameter, nn.Parameter]:
    """Creates weight [H, in, out] and bias [H, 1, out] with torch.nn.Linear's default initialisation."""
    bound = 1 / math.sqrt(d_in)
    weight = torch.empty(heads, d_in, d_out, dtype=torch.float32)
    weight.uniform_(-bound, bound)
    bias = torch.empty(heads, 1, d_out, dtype=torch.float32)
    bias.uniform_(-bound, bound)
    return nn.Parameter(weight), nn.Parameter(bias)
