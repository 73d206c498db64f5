"""Residuals with parameters of their own against sums written out token by token, in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tests.unit.core.test_moments import D, random_tokens, seen_of, sums
from torch import Tensor

from residual_mass.core.accounting import Terms
from residual_mass.core.moments import rest_terms, shared_moments_of
from residual_mass.core.parts import blocks, clusters
from residual_mass.methods import (
    METHODS,
    Centroids,
    FirstOrder,
    Gaussian,
    GroupMoments,
    ImportanceSample,
    Method,
    Moments,
    PhiDirection,
    Residual,
    ScanRegression,
    UniformSample,
    method_named,
    state_bytes,
)

COMPOSED = (
    Method("phi_direction", residual=PhiDirection()),
    Method("moments_of_blocks", residual=Moments(4, "blocks")),
    Method("moments_of_the_rest", residual=Moments(takes_out=True)),
    Method("moments_bf16", residual=Moments(dtype="bfloat16")),
    Method("first_order", residual=FirstOrder()),
    Method("gaussian", residual=Gaussian()),
    Method("uniform_sample", residual=UniformSample(32)),
)
OWN = [*(one for one in METHODS if one.own is not None), *COMPOSED]


def queries_of(rows: int, seed: int = 1) -> Tensor:
    return torch.randn(rows, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gaussian_part(n: float, m: float, s2: float, b: Tensor, v: Tensor, tau: float) -> tuple[Tensor, float]:
    """nu and Z of one part by the formula as it is written in the documentation."""
    s = math.sqrt(s2)
    a = (tau - m - s2) / s
    phi = 0.5 * math.erfc(-a / math.sqrt(2))
    z = n * math.exp(m + s2 / 2) * phi
    return z * (v + b * (1 - math.exp(-a * a / 2) / math.sqrt(2 * math.pi) / (s * phi))), z


def test_shared_covariances_are_those_within_parts_scaled_by_each_ones_spread() -> None:
    keys, values = random_tokens(60)
    part = torch.where(torch.arange(60) < 55, torch.arange(60) % 3, -1)  # the last part has no token
    state = shared_moments_of(keys, values, part, 4)
    members = [[i for i in range(60) if part[i] == p] for p in range(4)]
    away = [(keys[i] - keys[own].mean(0), values[i] - values[own].mean(0)) for own in members for i in own]
    sigma = sum(torch.outer(k, k) for k, _ in away) / 55
    slope = sum(torch.outer(v, k) for k, v in away) / 55
    torch.testing.assert_close(state.key_covariance[0], sigma)
    torch.testing.assert_close(state.value_key_covariance[0], slope)
    query, tau = queries_of(1)[0], 1.3
    expected_nu, expected_z = torch.zeros(D, dtype=torch.float64), 0.0
    for own in members[:3]:
        spread = float(torch.cov(keys[own].T, correction=0).trace() / sigma.trace())
        mean, s2 = float(query @ keys[own].mean(0)), spread * float(query @ sigma @ query)
        nu, z = gaussian_part(len(own), mean, s2, spread * slope @ query, values[own].mean(0), tau)
        expected_nu, expected_z = expected_nu + nu, expected_z + z
    residual = Moments(4, shared=True)
    seen = seen_of(keys, values, query[None], 3)._replace(threshold=torch.tensor([tau], dtype=torch.float64))
    nu, z = sums(residual.terms(seen, state))
    assert float(z) == pytest.approx(expected_z)
    torch.testing.assert_close(nu[0], expected_nu)


@pytest.mark.parametrize("k", [0, 1, 7, 29])
def test_taking_out_leaves_the_moments_of_the_rest(k: int) -> None:
    keys, values = random_tokens(30)
    queries, residual = queries_of(4), Moments(takes_out=True)
    seen = seen_of(keys, values, queries, k) if k else seen_of(keys, values, queries, 1)
    if not k:
        read = seen.read._replace(valid=torch.zeros_like(seen.read.valid))
        seen = seen._replace(read=read, unread=torch.ones_like(seen.unread))
    nu, z = sums(residual.terms(seen, residual.prepare(keys, values, torch.ones(30, dtype=torch.bool))))
    for row, query in enumerate(queries):
        rest = [i for i in range(30) if seen.unread[row, i]]
        scores, v = keys[rest] @ query, values[rest]
        b = sum((s - scores.mean()) * (x - v.mean(0)) for s, x in zip(scores, v, strict=True)) / len(rest)
        s2 = max(float(scores.var(correction=0)), 1e-8)
        tau = float(seen.threshold[row])
        if len(rest) == 1:  # a point below the cut is itself
            expected = v[0] * scores.exp(), float(scores.exp())
        else:
            expected = gaussian_part(len(rest), float(scores.mean()), s2, b, v.mean(0), tau)
        assert float(z[row]) == pytest.approx(expected[1], rel=1e-6)
        torch.testing.assert_close(nu[row], expected[0].reshape(-1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("residual", [UniformSample(5), ImportanceSample(5, clusters=3)], ids=str)
def test_samples_are_unbiased(residual: UniformSample | ImportanceSample) -> None:
    """The mean over seeds is the exact rest, within four standard errors."""
    keys, values = random_tokens(40)
    seen, mid = seen_of(keys, values, queries_of(1), 6), torch.ones(40, dtype=torch.bool)
    weights = torch.where(seen.unread[0], seen.scores[0].exp(), 0)
    truth = torch.cat((weights @ values, weights.sum()[None]))
    found = []
    for seed in range(400):
        one = replace(residual, seed=seed)
        nu, z = sums(one.terms(seen, one.prepare(keys, values, mid)))
        found.append(torch.cat((nu[0], z)))
    drawn = torch.stack(found)
    error = (drawn.mean(0) - truth).abs() / (drawn.std(0) / math.sqrt(len(found)))
    assert error.max() < 4, error


def test_a_sample_reads_only_tokens_that_were_not_read() -> None:
    """With one token left, every draw is that token, and the estimate is exact."""
    keys, values = random_tokens(12)
    seen = seen_of(keys, values, queries_of(3), 11)
    for residual in (UniformSample(4), ImportanceSample(4, clusters=2)):
        nu, z = sums(residual.terms(seen, residual.prepare(keys, values, torch.ones(12, dtype=torch.bool))))
        last = seen.unread.int().argmax(-1)
        exact = seen.scores.gather(-1, last[:, None])[:, 0].exp()
        torch.testing.assert_close(z, exact)
        torch.testing.assert_close(nu, exact[:, None] * values[last])


def test_importance_lowers_the_variance() -> None:
    """For clustered keys, whose clusters tell the weights."""
    generator = torch.Generator().manual_seed(4)
    centres = 2 * torch.randn(4, D, generator=generator, dtype=torch.float64)
    keys = centres[torch.arange(200) % 4] + 0.1 * torch.randn(200, D, generator=generator, dtype=torch.float64)
    seen, mid = seen_of(keys, keys, queries_of(1), 2), torch.ones(200, dtype=torch.bool)

    def variance(kind: type[UniformSample] | type[ImportanceSample]) -> float:
        made = [kind(8, seed=seed) for seed in range(60)]
        return float(torch.stack([sums(one.terms(seen, one.prepare(keys, keys, mid)))[1] for one in made]).var())

    assert variance(ImportanceSample) < variance(UniformSample) / 10


class Grown:
    """Tokens that join a mid-region in two steps."""

    keys, values = random_tokens(50, seed=7)
    mid = torch.arange(50) >= 4
    """All but four anchors."""
    joined = torch.arange(50) < 47
    """Of the last twenty; the last three are not in yet."""


BY_LOOPS = (ScanRegression, GroupMoments)
"""Residuals whose updates have tests of their own, in test_scanned.py."""


@pytest.mark.parametrize("method", [one for one in OWN if not isinstance(one.own, BY_LOOPS)], ids=lambda one: one.name)
def test_an_update_equals_the_state_made_at_once(method: Method) -> None:
    """Where parts depend on the keys, from the parts that the update chooses."""
    keys, values, mid, joined = Grown.keys, Grown.values, Grown.mid, Grown.joined
    residual: Residual = method.own
    first = residual.prepare(keys[:30], values[:30], mid[:30])
    grown = residual.update(first, keys[30:], values[30:], joined[30:], 30)
    seen = seen_of(keys, values, queries_of(3), 4)._replace(unread=(mid & joined).expand(3, 50))
    if method.needs_maps:
        seen = seen._replace(phi=Terms(torch.ones(3, D).double(), torch.ones(3).double(), torch.zeros(3).double()))
    members = chosen_members(residual, first)
    if members is None:
        expected = residual.prepare(keys, values, mid & joined)
    elif isinstance(residual, Moments):
        from residual_mass.core.moments import moments_of

        expected = (shared_moments_of if residual.shared else moments_of)(keys, values, members, residual.parts)
    else:
        one_hot = (members.unsqueeze(-1) == torch.arange(residual.clusters)).double()
        count = one_hot.sum(0)
        centroids = one_hot.T @ keys / count.clamp_min(1)[:, None]
        expected = (centroids, count, one_hot.T @ values, members.clamp_min(0))
        grown = grown[-4:]
    for ours, theirs in zip(grown, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-11, atol=1e-11)


def chosen_members(residual: Residual, first: tuple[Tensor, ...]) -> Tensor | None:
    """[L], the parts of the tokens at hand, and for those that joined the nearest mean key by a loop."""
    keys, mid, joined = Grown.keys, Grown.mid, Grown.joined
    parts = getattr(residual, "clusters", getattr(residual, "parts", 1))
    if parts == 1:
        return None
    by_blocks = getattr(residual, "split", "clusters") == "blocks"
    before = blocks(mid[:30], parts) if by_blocks else clusters(keys[:30], mid[:30], parts)
    members = torch.full((50,), -1)
    members[:30] = before
    present = [p for p in before.unique().tolist() if p >= 0]
    centres = [keys[:30][before == p].mean(0) for p in present]
    for token in range(30, 50):
        if joined[token]:
            distances = [float((keys[token] - centre).norm()) for centre in centres]
            members[token] = parts - 1 if by_blocks else present[distances.index(min(distances))]
    return members


def test_phi_keeps_its_direction_and_takes_the_mass_of_the_moments() -> None:
    keys, values = random_tokens(30)
    queries, mid = queries_of(3), torch.ones(30, dtype=torch.bool)
    phi = Terms(queries_of(3, 5), torch.tensor([2.0, 0.5, 0.0]).double(), torch.tensor([700.0, -3, 0]).double())
    seen = seen_of(keys, values, queries, 4)
    nu, z = sums(PhiDirection().terms(seen._replace(phi=phi), PhiDirection().prepare(keys, values, mid)))
    own_nu, own_z = sums(Moments().terms(seen, Moments().prepare(keys, values, mid)))
    torch.testing.assert_close(z, own_z)
    for row in range(2):
        torch.testing.assert_close(nu[row] / z[row], phi.numerator[row] / phi.denominator[row])
    torch.testing.assert_close(nu[2], own_nu[2])


def test_rounding_the_state_to_bfloat16_moves_terms_by_a_percent() -> None:
    keys, values = random_tokens(300)
    seen, mid = seen_of(keys, values, queries_of(5), 10), torch.ones(300, dtype=torch.bool)
    wide, narrow = Moments(), Moments(dtype="bfloat16")
    state = narrow.prepare(keys, values, mid)
    assert state_bytes(state) == 8 * (2 * D * D + 2 * D + 2)  # kept as wide as the keys, for tokens that join
    exact, rounded = (sums(one.terms(seen, one.prepare(keys, values, mid))) for one in (wide, narrow))
    assert 0 < float((rounded[1] / exact[1] - 1).abs().max()) < 0.05


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: Moments(0), "parts is 0, not 1 or more"),
        (lambda: Moments(4, takes_out=True), "takes_out needs parts=1, not 4"),
        (lambda: Moments(2, split="pages"), "split 'pages' is unknown; known are blocks, clusters"),
        (lambda: Moments(dtype="int8"), "dtype 'int8' is unknown; known are float32, bfloat16"),
        (lambda: Centroids(0), "clusters is 0, not between 1 and 32767"),
        (lambda: UniformSample(0), "draws is 0, not 1 or more"),
        (lambda: ImportanceSample(3, clusters=0), "clusters is 0"),
    ],
)
def test_parameters_out_of_range_are_refused_in_one_line(make: object, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        make()


def test_identities_tell_methods_apart_and_leave_the_papers_alone() -> None:
    assert method_named("topk_phi").identity == {"method": "topk_phi"}
    identities = [str(one.identity) for one in METHODS]
    assert len(set(identities)) == len(METHODS)
    assert method_named("topk_moments_8").identity["residual"]["parts"] == 8
    scan = method_named("group4_regression_64").identity["selector"]["scan"]
    assert scan == {"name": "QuantisedScan", "recipe": 1, "bits": 4, "block": 64}
    assert Method("topk_moments_8", residual=Moments(9)).identity != method_named("topk_moments_8").identity


def test_more_parts_than_tokens_leave_each_token_a_part_of_its_own() -> None:
    keys, values = random_tokens(5)
    seen, mid = seen_of(keys, values, queries_of(2), 2), torch.ones(5, dtype=torch.bool)
    for residual in (Moments(9), Moments(9, shared=True), Moments(9, "blocks")):
        terms = residual.terms(seen, residual.prepare(keys, values, mid))
        assert all(x.isfinite().all() for x in terms)


def test_rest_terms_of_extreme_scores_stay_finite() -> None:
    keys, values = random_tokens(50)
    for size in (1e-3, 1e4):
        queries = queries_of(4).float() * size
        seen = seen_of(keys.float(), values.float(), queries, 3)
        state = Moments().prepare(keys.float(), values.float(), torch.ones(50, dtype=torch.bool))
        scores, read = seen.scores.gather(-1, seen.read.indices), values.float()[seen.read.indices]
        assert all(
            x.isfinite().all() for x in rest_terms(queries, state, seen.threshold, scores, read, seen.read.valid)
        )
