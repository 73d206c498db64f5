"""Feature maps: folding, stacking over heads, positivity, initialisation."""

from __future__ import annotations

import math

import pytest
import torch
from reference import log_features

from residual_mass.core.feature_maps import (
    HedgehogMap,
    ReZeroMap,
    log_kernel,
    orthogonal_directions,
)

H, N, D, EMB, M = 3, 11, 6, 10, 4


def rezero(seed: int) -> ReZeroMap:
    torch.manual_seed(seed)
    module = ReZeroMap(H, D, EMB, M).double()
    module.alpha.data.normal_()  # alpha = 0 would hide half of the map
    return module


def test_maps_are_those_of_the_written_equations() -> None:
    x = torch.randn(H, N, D, dtype=torch.float64)
    for kind, module in {"rezero": rezero(0), "hedgehog": HedgehogMap(H, D, M).double()}.items():
        expected = torch.stack([torch.from_numpy(log_features(module, kind, h, x[h].numpy())) for h in range(H)])
        for ours in (module(x), *([module.unfolded(x)] if kind == "rezero" else [])):
            torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="even"):
        HedgehogMap(H, D, 3)


def test_folding_changes_no_gradient() -> None:
    module = rezero(1)
    x = torch.randn(H, N, D, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(H, N, M, dtype=torch.float64)
    parameters = [x, *module.parameters()]
    folded = torch.autograd.grad((module(x) * weight).sum(), parameters)
    unfolded = torch.autograd.grad((module.unfolded(x) * weight).sum(), parameters)
    for ours, expected in zip(folded, unfolded, strict=True):
        assert expected.abs().max() > 0
        torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-12)


def test_fold_needs_as_many_parameters_as_the_notes_say() -> None:
    with torch.device("meta"):
        module = ReZeroMap(1, 64, 512, 64)
        folded = module.fold()
    assert sum(p.numel() for p in module.parameters()) == 591_425
    assert sum(t.numel() for t in (folded.a, folded.b, folded.c, folded.c_bias, folded.e_bias)) == 70_208


def test_log_kernel_is_the_log_of_the_feature_product() -> None:
    torch.manual_seed(3)
    log_q, log_k = torch.randn(5, M, dtype=torch.float64) * 3, torch.randn(7, M, dtype=torch.float64) * 3
    expected = (log_q.exp() @ log_k.exp().T).log()
    torch.testing.assert_close(log_kernel(log_q, log_k), expected)
    huge = log_kernel((log_q * 100).float(), (log_k * 100).float())
    expected = (100 * (log_q[:, None] + log_k[None])).logsumexp(-1)
    near = expected > (100 * log_q).amax(-1, keepdim=True) + (100 * log_k).amax(-1) - 60  # above the floor
    assert bool(torch.isfinite(huge).all()) and bool(near.any())
    torch.testing.assert_close(huge[near].double(), expected[near], rtol=1e-5, atol=1e-3)


def test_positive_random_features_estimate_the_softmax_kernel() -> None:
    """With directions w and bias -|x|^2/2 - log(m)/2 the product of features is an unbiased estimate of exp(q.k)."""
    generator = torch.Generator().manual_seed(4)
    heads, d, m = 2000, 4, 8
    w = orthogonal_directions(heads, m, d, generator).double()
    q, k = torch.tensor([0.4, -0.2, 0.1, 0.3]).double(), torch.tensor([0.2, 0.5, -0.1, 0.2]).double()
    log_q = w @ q - q.square().sum() / 2 - math.log(m) / 2
    log_k = w @ k - k.square().sum() / 2 - math.log(m) / 2
    estimates = (log_q + log_k).exp().sum(-1)
    error = estimates.std() / math.sqrt(heads)
    assert abs(estimates.mean() - math.exp(q @ k)) < 4 * error


def gram_schmidt(columns: list[list[float]]) -> list[list[float]]:
    """The orthonormal columns of the one QR factorisation whose triangle has a positive diagonal."""
    done: list[list[float]] = []
    for column in columns:
        for other in done:
            along = sum(a * b for a, b in zip(column, other, strict=True))
            column = [a - along * b for a, b in zip(column, other, strict=True)]
        length = math.hypot(*column)
        done.append([a / length for a in column])
    return done


def test_directions_do_not_depend_on_the_signs_that_a_library_gives_to_qr() -> None:
    heads, d, m = 5, 4, 6
    ours = orthogonal_directions(heads, m, d, torch.Generator().manual_seed(7))
    drawn = torch.Generator().manual_seed(7)
    blocks = []
    for _ in range(2):
        gaussian, lengths = (torch.randn(heads, d, d, generator=drawn) for _ in range(2))
        columns = [gram_schmidt(matrix.T.tolist()) for matrix in gaussian.double()]
        blocks.append(torch.tensor(columns).transpose(-1, -2) * lengths.norm(dim=-1, keepdim=True))
    torch.testing.assert_close(ours, torch.cat(blocks, dim=1)[:, :m], rtol=1e-3, atol=1e-4)


def test_set_log_linear_makes_exactly_that_map() -> None:
    module = rezero(5)
    directions, bias = torch.randn(H, M, D, dtype=torch.float64), torch.randn(H, M, dtype=torch.float64)
    module.set_log_linear(directions, bias)
    x = torch.randn(H, N, D, dtype=torch.float64)
    expected = torch.einsum("hnd,hmd->hnm", x, directions) + bias[:, None]
    torch.testing.assert_close(module(x), expected)
    with pytest.raises(ValueError, match="d_emb"):
        ReZeroMap(H, D, 4, M).set_log_linear(directions, bias)


def test_default_initialisation_starts_without_the_block_and_has_linear_bounds() -> None:
    torch.manual_seed(6)
    module = ReZeroMap(H, D, EMB, M)
    assert bool((module.alpha == 0).all())
    assert module.stem.abs().max() <= 1 / math.sqrt(D) and module.stem.abs().max() > 0.8 / math.sqrt(D)
    assert module.up_bias.abs().max() <= 1 / math.sqrt(EMB)
