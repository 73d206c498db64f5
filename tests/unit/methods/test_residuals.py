"""Residuals against explicit sums, token by token in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from tests.unit.core.test_moments import D, random_tokens, sums
from torch import Tensor

from residual_mass import methods
from residual_mass.core.accounting import merge
from residual_mass.core.moments import clusters, clusters_of
from residual_mass.core.selection import Selected
from residual_mass.decode.prefix import build_prefix
from residual_mass.decode.terms import arm_rows, prefix_terms
from residual_mass.methods import (
    METHODS,
    CacheOnly,
    Centroids,
    ExactMass,
    GroupSums,
    ImportanceSample,
    Mean,
    Method,
    Moments,
    Pages,
    PerGroup,
    Phi,
    QuantisedScan,
    QuantisedValues,
    Residual,
    Rotated,
    ScanRegression,
    Seen,
    Selector,
    TopK,
    WholeClusters,
    method_named,
)
from residual_mass.methods.arms import Arm
from residual_mass.spec.arms import ArmSpec
from residual_mass.spec.settings import AnchorSpec

L, JOIN = 60, 40
MID = (torch.arange(L) >= 4) & (torch.arange(L) < 55) & (torch.arange(L) != 50)
INSIDE = MID.nonzero().flatten().tolist()
ONE_PART = (Moments(), Mean(), ExactMass(), ScanRegression(), QuantisedValues(4, 4))
PARTS = (Moments(8), Moments(8, shared=True), Centroids(1), Centroids(8), ScanRegression(4))
MORE_PARTS_THAN_TOKENS = (Moments(64), Centroids(64), ScanRegression(64))
WRITTEN_OUT = (*ONE_PART, *PARTS, *MORE_PARTS_THAN_TOKENS, GroupSums(8))


def seen_of(keys: Tensor, values: Tensor, queries: Tensor, k: int) -> Seen:
    scores = queries @ keys.T
    top = scores.topk(k)
    unread = torch.ones_like(scores, dtype=torch.bool).scatter_(-1, top.indices, False)
    read = Selected(top.indices, torch.ones_like(top.indices, dtype=torch.bool))
    return Seen(queries, top.values[:, -1], read, unread, scores, values)


def problem(residual: Residual, k: int, size: float = 1.0) -> tuple[Tensor, Tensor, Seen]:
    """Tokens, and three queries that read k of the mid-region: the best for moments, any for others; what was scanned
    is off by some noise.
    """
    keys, values = random_tokens(L, k)
    generator = torch.Generator().manual_seed(k + 1)
    queries, noise = (torch.randn(3, n, generator=generator, dtype=torch.float64) * size for n in (D, L))
    scores = (queries @ keys.T).masked_fill(~MID, -torch.inf)
    if not isinstance(residual, Moments):
        scores = torch.where(MID, torch.randn(3, L, generator=generator, dtype=torch.float64), -torch.inf)
    best = scores.topk(max(k, 1))
    seen = seen_of(keys, values, queries, max(k, 1))
    read = seen.read._replace(indices=best.indices, valid=torch.full(best.indices.shape, k > 0))
    unread, scanned = MID & ~read.mask(L), seen.scores + 0.1 * noise
    return keys, values, seen._replace(read=read, unread=unread, threshold=best.values[:, -1], scanned=scanned)


def groups_of(part: Tensor) -> list[list[int]]:
    """[L], -1 for none -> the tokens of each group that has any."""
    return [(part == p).nonzero().flatten().tolist() for p in part.unique().tolist() if p >= 0]


def part_of(residual: Residual, keys: Tensor, mid: Tensor) -> Tensor:
    """[L], the part of every token as `core.moments` deals them out, -1 outside the mid-region."""
    return clusters(keys, mid, getattr(residual, "clusters", getattr(residual, "parts", 1)))


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().double()


def quantised(x: Tensor, bits: int) -> Tensor:
    """The numbers of one group, to the nearest of 2^bits values from its least to its largest."""
    low = rounded(x.min())
    step = rounded((x.max() - low) / (2**bits - 1))
    return low + step * ((x - low) / step.clamp_min(1e-38)).round().clamp(0, 2**bits - 1)


def gaussian_part(n: float, m: float, s2: float, b: Tensor, v: Tensor, tau: float) -> tuple[Tensor, float]:
    """nu and Z of one part by the formula as it is written in the documentation."""
    s = math.sqrt(max(s2, 1e-8))
    a = (tau - m) / s - s
    phi = 0.5 * math.erfc(-a / math.sqrt(2))
    if not phi:
        return torch.zeros_like(v), 0.0
    z = n * math.exp(m + s * s / 2) * phi
    return z * (v + b * (1 - math.exp(-a * a / 2) / math.sqrt(2 * math.pi) / (s * phi))), z


def moments_written_out(
    residual: Moments, groups: list[list[int]], keys: Tensor, values: Tensor, query: Tensor, tau: float
) -> tuple[Tensor, float]:
    def covariances(own: list[int]) -> tuple[Tensor, Tensor]:
        away_k, away_v = (sum((torch.outer(x[i] - x[own].mean(0), keys[i] - keys[own].mean(0)) for i in own), 0)
                          for x in (keys, values))  # fmt: skip
        return away_k, away_v

    total = sum(map(len, groups))
    both = [sum(each) / total for each in zip(*map(covariances, groups), strict=True)]
    nu, z = torch.zeros(D, dtype=torch.float64), 0.0
    for own in groups:
        sigma, slope = (x / len(own) for x in covariances(own))
        if residual.shared:
            spread = sigma.trace() / both[0].trace()
            sigma, slope = (spread * x for x in both)
        mean, s2 = float(keys[own].mean(0) @ query), float(query @ sigma @ query)
        part = gaussian_part(len(own), mean, s2, slope @ query, values[own].mean(0), tau)
        nu, z = nu + part[0], z + part[1]
    return nu, z


def regression_written_out(
    groups: list[list[int]], keys: Tensor, values: Tensor, query: Tensor, scanned: Tensor, unread: list[int]
) -> tuple[Tensor, float]:
    inside = [i for own in groups for i in own]
    covariance = torch.zeros(D, D, dtype=torch.float64)
    for own in groups:
        for i in own:
            covariance += torch.outer(values[i] - values[own].mean(0), keys[i] - keys[own].mean(0)) / len(inside)
    mean = {i: float(scanned[own].mean()) for own in groups for i in own}
    variance = max(sum((float(scanned[i]) - mean[i]) ** 2 for i in inside) / len(inside), 1e-8)
    nu, z = torch.zeros(D, dtype=torch.float64), 0.0
    for own in groups:
        for i in set(own) & set(unread):
            weight = math.exp(scanned[i])
            slope = (float(scanned[i]) - mean[i]) / variance * (rounded(covariance) @ query)
            nu, z = nu + weight * (rounded(values[own].mean(0)) + slope), z + weight
    return nu, z


def written_out(
    residual: Residual, groups: list[list[int]], keys: Tensor, values: Tensor, seen: Seen, row: int
) -> tuple[Tensor, float]:
    """nu and Z of one query, the tokens of the mid-region being in these groups."""
    query, tau, inside = seen.queries[row], float(seen.threshold[row]), [i for own in groups for i in own]
    unread = [i for i in inside if seen.unread[row, i]]
    if isinstance(residual, Moments):
        return moments_written_out(residual, groups, keys, values, query, tau)
    if isinstance(residual, ScanRegression):
        return regression_written_out(groups, keys, values, query, seen.scanned[row], unread)
    if isinstance(residual, Mean):
        z = len(inside) * math.exp(keys[inside].mean(0) @ query)
        return z * values[inside].mean(0), z
    weights = {i: math.exp(seen.scores[row, i]) for i in unread}
    if isinstance(residual, ExactMass):
        return sum(weights.values()) * values[inside].mean(0), sum(weights.values())
    if isinstance(residual, Centroids):
        weights = {i: math.exp(keys[own].mean(0) @ query) for own in groups for i in own if i in unread}
    else:
        weights = {i: math.exp(seen.scanned[row, i]) for i in unread}
    if isinstance(residual, QuantisedValues):
        codes = [[quantised(group, residual.bits) for group in x.split(residual.group)] for x in values]
        values = torch.stack([torch.cat(groups) for groups in codes])
    return sum(w * values[i] for i, w in weights.items()), sum(weights.values())


def assert_written_out(
    residual: Residual, state: tuple[Tensor, ...], part: Tensor, keys: Tensor, values: Tensor, seen: Seen
) -> None:
    nu, z = sums(residual.terms(seen, state))
    for row in range(len(seen.queries)):
        expected_nu, expected_z = written_out(residual, groups_of(part), keys, values, seen, row)
        assert float(z[row]) == pytest.approx(expected_z, rel=1e-6)
        torch.testing.assert_close(nu[row], expected_nu, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("k", [0, 1, 7, 49])
@pytest.mark.parametrize("residual", WRITTEN_OUT, ids=str)
def test_terms_are_those_written_out(residual: Residual, k: int) -> None:
    keys, values, seen = problem(residual, k)
    state, part = residual.prepare(keys, values, MID), part_of(residual, keys, MID)
    assert_written_out(residual, state, part, keys, values, seen)


@pytest.mark.parametrize("residual", (*ONE_PART, *PARTS, *MORE_PARTS_THAN_TOKENS), ids=str)
def test_tokens_that_join_go_to_the_nearest_cluster(residual: Residual) -> None:
    """The sixth column of the new ones is not in the mid-region yet."""
    keys, values, seen = problem(residual, 4)
    state = residual.prepare(keys[:JOIN], values[:JOIN], MID[:JOIN])
    part = torch.full((L,), -1)
    part[:JOIN] = part_of(residual, keys[:JOIN], MID[:JOIN])
    centres = {p: keys[part == p].mean(0) for p in part[part >= 0].unique().tolist()}
    for i in (i for i in INSIDE if i >= JOIN):
        distances = {p: float((keys[i] - centre).norm()) for p, centre in centres.items()}
        part[i] = min(distances, key=distances.get)
    state = residual.update(state, keys[JOIN:], values[JOIN:], MID[JOIN:], JOIN)
    assert_written_out(residual, state, part, keys, values, seen)


def test_a_sample_joins_tokens_as_its_clusters_do() -> None:
    keys, values, _ = problem(Mean(), 4)
    grown = [
        one.update(one.prepare(keys[:JOIN], values[:JOIN], MID[:JOIN]), keys[JOIN:], values[JOIN:], MID[JOIN:], JOIN)
        for one in (ImportanceSample(5, clusters=3), Centroids(3))
    ]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(grown[0][1:], grown[1], strict=True))
    assert torch.equal(grown[0][0], ImportanceSample(5, clusters=3).prepare(keys, values, MID)[0])


MANY = (*WRITTEN_OUT, Moments(64, shared=True), ImportanceSample(3))


@pytest.mark.parametrize("size", [1e-3, 1e4])
@pytest.mark.parametrize("residual", MANY, ids=str)
def test_extreme_scores_stay_finite(residual: Residual, size: float) -> None:
    for k in (0, 5):
        keys, values, seen = problem(residual, k, size)
        narrow = Seen(*(x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in seen))
        terms = residual.terms(narrow, residual.prepare(keys.float(), values.float(), MID))
        assert all(x.isfinite().all() for x in terms)


@pytest.mark.parametrize("count", [1, 3])
def test_samples_are_unbiased(count: int) -> None:
    """The mean over seeds is the exact rest, within four standard errors."""
    keys, values, seen = problem(Mean(), 6)
    weights = torch.where(seen.unread[0], seen.scores[0].exp(), 0)
    truth, found = torch.cat((weights @ values, weights.sum()[None])), []
    for seed in range(400):
        one = ImportanceSample(5, count, seed)
        nu, z = sums(one.terms(seen, one.prepare(keys, values, MID)))
        found.append(torch.cat((nu[0], z[:1])))
    drawn = torch.stack(found)
    error = (drawn.mean(0) - truth).abs() / (drawn.std(0) / math.sqrt(len(found)))
    assert error.max() < 4, error


def test_a_sample_reads_only_tokens_that_were_not_read() -> None:
    """With one token left, every draw is that token, and the estimate is exact."""
    keys, values, seen = problem(Mean(), len(INSIDE) - 1)
    residual = ImportanceSample(4, clusters=2)
    nu, z = sums(residual.terms(seen, residual.prepare(keys, values, MID)))
    last = seen.unread.int().argmax(-1)
    exact = seen.scores.gather(-1, last[:, None])[:, 0].exp()
    torch.testing.assert_close(z, exact)
    torch.testing.assert_close(nu, exact[:, None] * values[last])


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


def test_clusters_of_a_size_do_not_depend_on_columns_outside() -> None:
    keys, _ = random_tokens(L)
    padded = torch.cat((keys, torch.full((40, D), 7.0).double()))
    alone = clusters_of(keys, MID, 8)
    company = clusters_of(padded, torch.cat((MID, torch.zeros(40, dtype=torch.bool))), 8)
    assert torch.equal(company[:L], alone) and (company[L:] == -1).all()
    assert int(alone.max()) < math.ceil(int(MID.sum()) / 8)


# ---- a quantised cache that is read whole ----------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [10.0, 90.0])
@pytest.mark.parametrize("rotated", [False, True], ids=["plain", "rotated"])
@pytest.mark.parametrize(("key_bits", "value_bits"), [(4, 4), (4, 3), (2, 2), (8, 1)])
def test_attention_is_that_of_the_quantised_cache(key_bits: int, value_bits: int, rotated: bool, budget: float) -> None:
    """Whatever the budget: anchors exactly, all others by their codes; keys in blocks of 16 tokens, values in groups of
    4 and 2 channels.
    """
    keys, values = (x[None, None] for x in random_tokens(70))
    queries, anchors = torch.randn(1, 1, 2, D, generator=torch.Generator().manual_seed(1)).double(), AnchorSpec(3, 5)
    scan: Selector = QuantisedScan(key_bits, 16)
    method = Method("mine", "Mine", CacheOnly(Rotated(scan) if rotated else scan), QuantisedValues(value_bits, 4))
    layer = build_prefix(keys, values, torch.ones(1, 70, dtype=torch.bool), anchors)
    rows = arm_rows([Arm(method, budget)], 2, [70], anchors, None, queries.device)
    found = merge(prefix_terms(queries, None, layer, None, rows, 0.7))[0, 0]

    half = torch.tensor([[1, 1], [1, -1]]).double() / 2**0.5
    turn = torch.block_diag(half, half, half) if rotated else torch.eye(D).double()
    stored, kept = keys[0, 0] @ turn, values[0, 0].clone()
    for start in range(0, 70, 16):
        own = [i for i in range(start, min(start + 16, 70)) if 3 <= i < 65]
        for channel in range(D):
            stored[own, channel] = quantised(stored[own, channel], key_bits)
    for i in range(3, 65):
        kept[i, :4], kept[i, 4:] = quantised(kept[i, :4], value_bits), quantised(kept[i, 4:], value_bits)
    for row, query in enumerate(queries[0, 0]):
        scores = 0.7 * stored @ (query @ turn)
        torch.testing.assert_close(found[row], scores.softmax(-1) @ kept, rtol=1e-9, atol=1e-9)


def test_eight_bits_of_equal_and_extreme_values() -> None:
    for values in (torch.full((5, D), 3.1), torch.zeros(5, D), torch.full((5, D), -1e30), torch.eye(5, D) * 1e30):
        inside, residual = torch.ones(5, dtype=torch.bool), QuantisedValues(8)
        scores = torch.zeros(1, 5)
        seen = Seen(values[:1], scores[:, 0], None, inside[None], scores, values, scores)
        nu, z = sums(residual.terms(seen, residual.prepare(values, values, inside)))
        torch.testing.assert_close(nu / z.unsqueeze(-1), values.mean(0, keepdim=True), rtol=1e-2, atol=1e-2)


# ---- methods ---------------------------------------------------------------------------------------------------------


def test_identities_tell_methods_apart() -> None:
    assert method_named("full").identity == {"method": "full", "selector": None, "residual": None}
    assert method_named("topk_phi").identity == {
        "method": "topk_phi",
        "selector": {"name": "TopK", "recipe": 1},
        "residual": {"name": "Phi", "recipe": 1, "subtracts": True},
    }
    identities = [str(one.identity) for one in METHODS]
    assert len(set(identities)) == len(METHODS)
    assert method_named("topk_moments_8").identity["residual"] == {
        "name": "Moments", "recipe": 1, "parts": 8, "shared": False
    }  # fmt: skip
    scan = method_named("group4_regression_64").identity["selector"]["scan"]
    assert scan == {"name": "QuantisedScan", "recipe": 1, "bits": 4, "block": 64}
    assert Method("topk_moments_8", residual=Moments(9)).identity != method_named("topk_moments_8").identity


def test_a_method_without_a_title_is_called_by_its_name() -> None:
    assert Method("mine").title == "mine" and Method("mine", "My own").title == "My own"
    assert replace(method_named("topk"), title="Other").identity == method_named("topk").identity


def test_a_name_that_two_methods_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "METHODS", (*METHODS, Method("topk", residual=Mean())))
    with pytest.raises(ValueError, match="METHODS has two methods named 'topk'; rename one"):
        method_named("topk")


def test_groups_are_the_selectors() -> None:
    for selector in (WholeClusters(8), PerGroup(WholeClusters(8))):
        assert Method("one", "", selector, GroupSums()).residual == GroupSums(8)
        assert Method("two", "", selector, GroupSums(8)).residual == GroupSums(8)


@dataclass(frozen=True)
class Newest(TopK):
    """A selector that says of itself that it sees no scores."""

    cuts = scans = False


@pytest.mark.parametrize(
    ("selector", "residual", "line"),
    [
        (TopK(), GroupSums(), "GroupSums needs WholeClusters, not TopK"),
        (Pages(32), GroupSums(32), "GroupSums needs WholeClusters, not Pages"),
        (WholeClusters(32), GroupSums(16), "has size=16, WholeClusters 32: leave it out of GroupSums"),
        (QuantisedScan(4), ExactMass(), "ExactMass needs a selector that reads every key .TopK., not QuantisedScan"),
        (None, ScanRegression(), "method 'mine' reads the whole prompt, which leaves nothing for a residual"),
        (Pages(32), Moments(), "Moments needs a selector with cuts = True, which Pages lacks"),
        (PerGroup(QuantisedScan(4)), Moments(8), "Moments needs a selector with cuts = True, which PerGroup lacks"),
        (Newest(), ScanRegression(), "ScanRegression needs a selector with scans = True, which Newest lacks"),
        (CacheOnly(QuantisedScan(4)), Moments(), "keeps no values: CacheOnly goes with QuantisedValues"),
        (CacheOnly(QuantisedScan(4)), Phi(), "keeps no values"),
        (CacheOnly(QuantisedScan(4)), None, "keeps no values"),
    ],
)
def test_a_residual_that_does_not_fit_its_selector_is_refused(
    selector: Selector | None, residual: Residual, line: str
) -> None:
    with pytest.raises(ValueError, match=line):
        Method("mine", "Mine", selector, residual)


@pytest.mark.parametrize(
    ("kind", "parameters", "line"),
    [
        (Method, ("mine", QuantisedScan(4)), "title QuantisedScan.* is no text: Method takes name, title"),
        (Moments, (0,), "parts is 0, not 1 or more"),
        (Centroids, (2**15,), "clusters is 32768, not between 1 and 32767"),
        (ScanRegression, (2**15 - 1,), "clusters is 32767, not between 1 and 32766"),
        (QuantisedValues, (4, 0), "group is 0, not 1 or more"),
        (QuantisedValues, (8, 64, 1.0), "bound is 1.0, not between 0 and 1 .0 reads every value."),
        (QuantisedValues, (8, 64, float("nan")), "bound is nan, not between 0 and 1"),
        (Pages, (0,), "size is 0, not 1 or more"),
        (ArmSpec, ("topk",), "arm 'topk': full takes no budget_percent, every other method needs one"),
        (ArmSpec, ("full", 2.0), "arm 'full': full takes no budget_percent"),
        (ArmSpec, ("topk", 100.5), "budget_percent 100.5 is outside"),
        (ArmSpec, ("topk", 2.0, "2k"), "arm 'topk': uses no feature maps, but names '2k'"),
        (CacheOnly, (TopK(),), "CacheOnly needs a scan that does not read the keys, not TopK"),
        (CacheOnly, (QuantisedScan(4), -1), "tail is -1, not 0 or more"),
    ],
)
def test_parameters_out_of_range_are_refused_in_one_line(kind: type, parameters: tuple[object, ...], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        kind(*parameters)
