"""Moments and the truncated Gaussian against explicit sums, quadrature and sampling, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from residual_mass.core import moments as module
from residual_mass.core.accounting import Terms
from residual_mass.core.moments import (
    MomentState,
    clusters,
    clusters_of,
    moments_of,
    truncated_terms,
)

D = 6


def whole(n: int) -> Tensor:
    return torch.zeros(n, dtype=torch.int64)


def random_tokens(n: int, seed: int = 0, spread: float = 0.7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(n, D, generator=generator, dtype=torch.float64) * spread + 0.3
    mixing = torch.randn(D, D, generator=generator, dtype=torch.float64)
    return keys, keys @ mixing + torch.randn(n, D, generator=generator, dtype=torch.float64)


def sums(terms: Terms) -> tuple[Tensor, Tensor]:
    """Numerator and denominator without their common shift."""
    scale = terms.shift.exp()
    return terms.numerator * scale.unsqueeze(-1), terms.denominator * scale


def by_quadrature(moments: MomentState, query: Tensor, tau: float) -> tuple[Tensor, float]:
    """nu and Z of one part: the score Gaussian, values linear in it, integrated over scores below tau."""
    m = float(query @ moments.mean_key[0])
    s = math.sqrt(float(query @ moments.key_covariance[0] @ query))
    slope = moments.value_key_covariance[0] @ query / s**2
    scores = torch.linspace(m - 14 * s, min(tau, m + s * s + 14 * s), 400_001, dtype=torch.float64)
    density = (-0.5 * ((scores - m) / s) ** 2).exp() / (s * math.sqrt(2 * math.pi)) * scores.exp()
    values = moments.mean_value[0] + (scores - m).unsqueeze(-1) * slope
    n = float(moments.count[0])
    nu = n * torch.trapezoid(density.unsqueeze(-1) * values, scores, dim=0)
    return nu, n * float(torch.trapezoid(density, scores))


@pytest.mark.parametrize("shift", [-3.0, -0.5, 0.0, 1.0, 4.0, 1e6], ids=lambda x: f"cut at mean {x:+g} sd")
def test_truncated_terms_are_those_of_a_truncated_normal(shift: float) -> None:
    keys, values = random_tokens(50)
    moments = moments_of(keys, values, whole(50))
    query = torch.tensor([0.4, -0.2, 0.9, 0.1, -0.6, 0.3], dtype=torch.float64)
    mean = float(query @ moments.mean_key[0])
    tau = mean + shift * math.sqrt(float(query @ moments.key_covariance[0] @ query))
    nu, z = sums(truncated_terms(query[None], moments, torch.tensor([tau], dtype=torch.float64)))
    expected_nu, expected_z = by_quadrature(moments, query, tau)
    assert float(z) == pytest.approx(expected_z, rel=1e-8)
    torch.testing.assert_close(nu[0], expected_nu, rtol=1e-7, atol=1e-7 * expected_z)


@pytest.mark.parametrize("size", [1e-3, 1.0, 100.0, 1e4])
def test_extreme_scores_stay_finite_in_float32(size: float) -> None:
    """Against float64: the mass where it is not negligible beside the tokens read, never NaN or infinite."""
    keys, values = random_tokens(200)
    queries = torch.randn(8, D, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * size
    scores = queries @ keys.T
    for rank in (0, 20, 199):
        tau = scores.sort(-1, descending=True).values[:, rank]
        wide = truncated_terms(queries, moments_of(keys, values, whole(200)), tau)
        narrow_moments = moments_of(keys.float(), values.float(), whole(200))
        narrow = truncated_terms(queries.float(), narrow_moments, tau.float())
        assert all(x.isfinite().all() for x in (*wide, *narrow))
        ratio = narrow.log_mass().double() - wide.log_mass()
        assert ratio.abs().max() < 1e-3 + 1e-4 * size**2, "rounding of scores of that size"


def test_equal_scores_count_half() -> None:
    """As the documentation says: also a single token, of which none is read."""
    for n in (9, 1):
        keys = random_tokens(1)[0].expand(n, D)
        scores = keys @ keys[0]
        _, z = sums(truncated_terms(keys[:1], moments_of(keys, keys, whole(n)), scores[:1]))
        assert float(z) == pytest.approx(n / 2 * float(scores[0].exp()), rel=1e-3)


def test_clusters_deal_out_the_mid_region() -> None:
    generator = torch.Generator().manual_seed(0)
    mid = torch.rand(2, 50, generator=generator) < 0.7
    keys = torch.randn(2, 50, D, generator=generator)
    part = clusters(keys, mid, 4)
    assert torch.equal(part >= 0, mid) and part.max() < 4
    # Well separated groups are found, whatever their order in the text.
    centres = torch.tensor([[10.0, 0], [0, 10], [-10, 0], [0, -10]])
    group = torch.arange(40) % 4
    points = centres[group] + 0.1 * torch.randn(40, 2, generator=generator)
    found = clusters(points, torch.ones(40, dtype=torch.bool), 4)
    assert len({(int(a), int(b)) for a, b in zip(group, found, strict=True)}) == 4
    few = clusters(keys, torch.zeros(2, 50, dtype=torch.bool), 4)
    assert (few == -1).all()


def test_long_prompts_are_clustered_in_chunks_as_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of seven tokens against the whole [L, P] matrix, written out."""
    keys, mid = random_tokens(100)[0], torch.arange(100) % 9 > 0
    part = torch.where(mid, torch.arange(100) * 7 % 5, -1)
    centres = torch.stack([keys[part == p].mean(0) for p in range(5)])
    distances = (keys.unsqueeze(1) - centres).square().sum(-1)
    together = clusters_of(keys, mid, 8)
    monkeypatch.setattr(module, "ELEMENTS_AT_ONCE", 7 * 5)
    assert torch.equal(module.nearest(keys, mid, centres, None), torch.where(mid, distances.argmin(-1), -1))
    expected = torch.stack([keys[part == p].sum(0) for p in range(5)])
    torch.testing.assert_close(module.totals(keys, part, 5), expected)
    assert torch.equal(clusters_of(keys, mid, 8), together)
