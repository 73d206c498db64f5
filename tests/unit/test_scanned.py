"""Residuals that use what a selector saw, and those of pages and clusters, against sums written out in float64."""

from __future__ import annotations

import math

import pytest
import torch
from tests.unit.core.test_moments import D, random_tokens, seen_of, sums
from torch import Tensor

from residual_mass.core.parts import blocks, clusters, clusters_of
from residual_mass.methods import (
    ExactMass,
    GroupMoments,
    GroupSums,
    Method,
    Pages,
    PagesByMean,
    PerGroup,
    QuantisedScan,
    Residual,
    ScanRegression,
    Seen,
    Selector,
    TopK,
    WholeClusters,
)

L = 60
MID = (torch.arange(L) >= 4) & (torch.arange(L) < 55)
NEAR = {"rtol": 1e-9, "atol": 1e-12}


def problem(k: int, seed: int = 0, size: float = 1.0) -> tuple[Tensor, Tensor, Seen]:
    """Tokens, and three queries that read any k of the mid-region, with scores off by some noise."""
    keys, values = random_tokens(L, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    queries = size * torch.randn(3, D, generator=generator, dtype=torch.float64)
    seen = seen_of(keys, values, queries, max(k, 1))
    inside = MID.nonzero().flatten()
    indices = torch.stack([inside[torch.randperm(len(inside), generator=generator)[: max(k, 1)]] for _ in range(3)])
    read = seen.read._replace(indices=indices, valid=torch.full(indices.shape, k > 0))
    unread = MID & ~read.mask(L)
    noise = 0.1 * size * torch.randn(3, L, generator=generator, dtype=torch.float64)
    return keys, values, seen._replace(read=read, unread=unread, scanned=seen.scores + noise)


def groups_of(part: Tensor) -> list[list[int]]:
    """[L], -1 for none -> the tokens of each group that has any."""
    return [(part == p).nonzero().flatten().tolist() for p in part.unique().tolist() if p >= 0]


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().double()


@pytest.mark.parametrize("k", [0, 1, 7, 50])
@pytest.mark.parametrize("count", [1, 4, 64])
def test_values_are_regressed_on_the_scanned_scores(count: int, k: int) -> None:
    keys, values, seen = problem(k)
    residual = ScanRegression(count)
    nu, z = sums(residual.terms(seen, residual.prepare(keys, values, MID)))
    groups = groups_of(clusters(keys, MID, count)) if count > 1 else [MID.nonzero().flatten().tolist()]
    inside = [i for own in groups for i in own]
    covariance = torch.zeros(D, D, dtype=torch.float64)
    for own in groups:
        for i in own:
            covariance += torch.outer(values[i] - values[own].mean(0), keys[i] - keys[own].mean(0)) / len(inside)
    for row, query in enumerate(seen.queries):
        scores = seen.scanned[row]
        mean = {i: float(scores[own].mean()) for own in groups for i in own}
        variance = max(sum((float(scores[i]) - mean[i]) ** 2 for i in inside) / len(inside), 1e-8)
        expected_z, expected_nu = 0.0, torch.zeros(D, dtype=torch.float64)
        for own in groups:
            for i in (i for i in own if seen.unread[row, i]):
                weight = math.exp(scores[i])
                slope = (float(scores[i]) - mean[i]) / variance * (rounded(covariance) @ query)
                expected_z += weight
                expected_nu += weight * (rounded(values[own].mean(0)) + slope)
        assert float(z[row]) == pytest.approx(expected_z, rel=1e-9)
        torch.testing.assert_close(nu[row], expected_nu, **NEAR)


def test_a_linear_value_is_found_exactly_whatever_was_read() -> None:
    """Values linear in the score, and a scan without noise: mass and value sum of the rest are exact."""
    generator = torch.Generator().manual_seed(3)
    keys = torch.zeros(L, D, dtype=torch.float64)
    keys[:, 0] = torch.randn(L, generator=generator, dtype=torch.float64)
    keys[:, 0] -= keys[MID, 0].mean()
    values = 2 * keys
    queries = torch.zeros(1, D, dtype=torch.float64)
    queries[0, 0] = 1.5
    seen = seen_of(keys, values, queries, 9)
    unread = MID & (torch.arange(L) % 3 > 0)
    seen = seen._replace(unread=unread[None], scanned=seen.scores)
    nu, z = sums(ScanRegression().terms(seen, ScanRegression().prepare(keys, values, MID)))
    weights = torch.where(unread, seen.scores[0].exp(), 0)
    assert float(z) == pytest.approx(float(weights.sum()))
    torch.testing.assert_close(nu[0], weights @ values, rtol=1e-2, atol=1e-9)  # C is rounded to bfloat16


@pytest.mark.parametrize("size", [1e-3, 1e4])
def test_extreme_scores_stay_finite(size: float) -> None:
    keys, values, seen = problem(5, size=size)
    narrow = Seen(
        *(x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in seen[:6]), seen.scanned.float()
    )
    for residual in (ScanRegression(), ScanRegression(4), GroupSums(), GroupMoments(8)):
        terms = residual.terms(narrow, residual.prepare(keys.float(), values.float(), MID))
        assert all(x.isfinite().all() for x in terms)


def test_equal_keys_have_no_slope() -> None:
    keys, values, seen = problem(3)
    keys = keys[:1].expand(L, D)
    seen = seen._replace(scanned=torch.zeros(3, L, dtype=torch.float64))
    nu, z = sums(ScanRegression().terms(seen, ScanRegression().prepare(keys, values, MID)))
    torch.testing.assert_close(z, seen.unread.sum(-1).double())
    torch.testing.assert_close(nu / z[:, None], rounded(values[MID].mean(0)).expand(3, D))


def test_group_sums_give_unread_tokens_what_the_selector_saw() -> None:
    _, values, seen = problem(9)
    nu, z = sums(GroupSums().terms(seen, ()))
    for row in range(3):
        left = [i for i in range(L) if seen.unread[row, i]]
        torch.testing.assert_close(z[row], sum(seen.scanned[row, i].exp() for i in left))
        torch.testing.assert_close(nu[row], sum(seen.scanned[row, i].exp() * values[i] for i in left))


@pytest.mark.parametrize("k", [0, 1, 20])
@pytest.mark.parametrize("split", ["pages", "clusters"])
def test_moments_of_groups_are_cut_at_their_largest(split: str, k: int) -> None:
    keys, values, seen = problem(k)
    residual = GroupMoments(8, split)
    nu, z = sums(residual.terms(seen, residual.prepare(keys, values, MID)))
    pages = [[i for i in range(start, min(start + 8, L)) if MID[i]] for start in range(0, L, 8)]
    groups = [own for own in pages if own] if split == "pages" else groups_of(clusters_of(keys, MID, 8))
    assert sum(map(len, groups)) == int(MID.sum())
    sigma, slope = torch.zeros(2, D, D, dtype=torch.float64)
    for own in groups:
        away = keys[own] - keys[own].mean(0)
        sigma += away.T @ away / int(MID.sum())
        slope += (values[own] - values[own].mean(0)).T @ away / int(MID.sum())
    for row, query in enumerate(seen.queries):
        expected_z, expected_nu = 0.0, torch.zeros(D, dtype=torch.float64)
        for own in groups:
            spread = float(keys[own].var(0, correction=0).sum() / sigma.trace())
            s = math.sqrt(max(spread * float(query @ rounded(sigma) @ query), 1e-8))
            m, top = float(keys[own].mean(0) @ query), math.sqrt(2 * math.log(len(own)))
            below = [0.5 * math.erfc(-x / math.sqrt(2)) for x in (top - s, top)]
            left = sum(bool(seen.unread[row, i]) for i in own)
            mass = left * math.exp(m + s * s / 2) * below[0] / below[1]
            factor = 1 - math.exp(-((top - s) ** 2) / 2) / math.sqrt(2 * math.pi) / (s * below[0])
            expected_z += mass
            expected_nu += mass * (values[own].mean(0) + factor * spread * rounded(slope) @ query)
        assert float(z[row]) == pytest.approx(expected_z, rel=1e-6)
        torch.testing.assert_close(nu[row], expected_nu, rtol=1e-6, atol=1e-9)


def test_a_group_of_one_token_is_that_token() -> None:
    keys, values, seen = problem(5)
    residual = GroupMoments(1, "pages")
    nu, z = sums(residual.terms(seen, residual.prepare(keys, values, MID)))
    weights = torch.where(seen.unread, seen.scores.exp(), 0)
    torch.testing.assert_close(z, weights.sum(-1), rtol=1e-3, atol=0)  # variances count as 1e-8 at least
    torch.testing.assert_close(nu, weights @ values, rtol=1e-3, atol=1e-9)


def test_clusters_of_a_size_do_not_depend_on_columns_outside() -> None:
    keys, _ = random_tokens(L)
    padded = torch.cat((keys, torch.full((40, D), 7.0).double()))
    alone = clusters_of(keys, MID, 8)
    company = clusters_of(padded, torch.cat((MID, torch.zeros(40, dtype=torch.bool))), 8)
    assert torch.equal(company[:L], alone) and (company[L:] == -1).all()
    assert int(alone.max()) < math.ceil(int(MID.sum()) / 8)


@pytest.mark.parametrize("count", [1, 4])
def test_tokens_that_join_move_their_clusters_regression(count: int) -> None:
    keys, values = random_tokens(L, seed=5)
    early, joined = MID[:40], MID[40:] & (torch.arange(40, L) != 50)
    residual = ScanRegression(count)
    first = residual.prepare(keys[:40], values[:40], early)
    grown = residual.update(first, keys[40:], values[40:], joined, 40)
    part = torch.full((L,), -1)
    part[:40] = clusters(keys[:40], early, count) if count > 1 else blocks(early, 1)
    centres = [keys[:40][part[:40] == p].mean(0) for p in range(count)]
    for i in range(40, L):
        if joined[i - 40]:
            part[i] = min(range(count), key=lambda p: float((keys[i] - centres[p]).norm()))
    assert torch.equal(grown.cluster, part.to(torch.int16))
    assert grown.count.tolist() == [int((part == p).sum()) for p in range(count)]
    covariance, variance = torch.zeros(D, D, dtype=torch.float64), torch.zeros(D, dtype=torch.float64)
    for p, own in enumerate(groups_of(part)):
        torch.testing.assert_close(grown.mean_key[p], keys[own].mean(0))
        torch.testing.assert_close(grown.mean_value[p], values[own].mean(0))
        away = values[own] - values[own].mean(0)
        covariance += away.T @ (keys[own] - keys[own].mean(0)) / int((part >= 0).sum())
        variance += away.square().sum(0) / int((part >= 0).sum())
    torch.testing.assert_close(grown.value_key_covariance, covariance)
    torch.testing.assert_close(grown.value_variance, variance)


def test_tokens_that_join_make_groups_of_their_own() -> None:
    keys, values = random_tokens(L, seed=6)
    residual = GroupMoments(8, "pages")
    first = residual.prepare(keys[:40], values[:40], MID[:40])
    grown = residual.update(first, keys[40:], values[40:], MID[40:], 40)
    alone = residual.prepare(keys[40:], values[40:], MID[40:])
    assert torch.equal(grown.mean_key, torch.cat((first.mean_key, alone.mean_key)))
    assert torch.equal(grown.group[:40], first.group)
    assert torch.equal(grown.group[40:], torch.where(alone.group < 0, -1, alone.group + 5))
    sums = torch.zeros(D, D, dtype=torch.float64)
    for page, own in enumerate(groups_of(grown.group)):
        away = keys[own] - keys[own].mean(0)
        sums += away.T @ away
        found = grown.spread[grown.count > 0][page] * grown.key_covariance.diagonal(dim1=-2, dim2=-1).sum()
        torch.testing.assert_close(found, away.square().sum() / len(own))
    torch.testing.assert_close(grown.key_covariance[0], sums / int(MID.sum()))


def test_groups_are_the_selectors() -> None:
    assert Method("one", PagesByMean(32), GroupSums()).residual == GroupSums(32)
    assert Method("two", PerGroup(WholeClusters(8)), GroupMoments()).residual == GroupMoments(8, "clusters")
    told = Method("three", PagesByMean(16), GroupMoments(16, "pages"))
    assert Method("three", PagesByMean(), GroupMoments()).identity == told.identity


@pytest.mark.parametrize(
    ("selector", "residual", "line"),
    [
        (TopK(), GroupSums(), "GroupSums needs a selector of groups by mean keys .*, not TopK"),
        (Pages(32), GroupMoments(16), "GroupMoments needs a selector of groups by mean keys .*, not Pages"),
        (
            PagesByMean(32),
            GroupMoments(16),
            "has size=16 and PagesByMean 32: leave it out of GroupMoments",
        ),
        (WholeClusters(), GroupMoments(split="pages"), "has split='pages' and WholeClusters 'clusters'"),
        (QuantisedScan(4), ExactMass(), "ExactMass needs a selector that reads every key .TopK., not QuantisedScan"),
        (None, ScanRegression(), "method 'mine' reads the whole prompt, which leaves nothing for a residual"),
    ],
)
def test_a_residual_that_does_not_fit_its_selector_is_refused(
    selector: Selector | None, residual: Residual, line: str
) -> None:
    with pytest.raises(ValueError, match=line):
        Method("mine", selector, residual)


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: ScanRegression(0), "clusters is 0, not between 1 and 32766"),
        (lambda: GroupMoments(0), "size is 0, not 1 or more tokens"),
        (lambda: GroupMoments(split="blocks"), "split 'blocks' is unknown; known are pages, clusters"),
    ],
)
def test_parameters_out_of_range_are_refused_in_one_line(make: object, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        make()


@pytest.mark.parametrize("size", [1, 100, 10_000])
def test_a_slope_over_equal_scores_is_cut(size: float) -> None:
    """Keys that differ across the queries and not along them: their scores differ by rounding alone, and C q by that of
    C to bfloat16. Attention in float32 against the same formula in float64, where scores are equal.
    """
    generator = torch.Generator().manual_seed(0)
    keys = size * torch.randn(400, 16, generator=generator, dtype=torch.float64)
    keys[:, 0] = 1
    values = keys @ torch.randn(16, 16, generator=generator, dtype=torch.float64) / size
    rotation = torch.linalg.qr(torch.randn(16, 16, generator=generator, dtype=torch.float64)).Q
    queries = torch.tensor([0.5, 1, 3]).double().unsqueeze(-1) * torch.eye(16, dtype=torch.float64)[:1]
    keys, queries, inside = keys @ rotation, queries @ rotation, torch.ones(400, dtype=torch.bool)

    def attention(dtype: torch.dtype) -> Tensor:
        seen = seen_of(*(x.to(dtype) for x in (keys, values, queries)), 10)
        state = ScanRegression().prepare(keys.to(dtype), values.to(dtype), inside)
        nu, z = sums(ScanRegression().terms(seen._replace(scanned=seen.scores), state))
        return (nu / z.unsqueeze(-1)).double()

    error = (attention(torch.float32) - attention(torch.float64)).abs().mean()
    assert error < 0.2 * values.std(), "by at most some tenths of the deviation of values"
