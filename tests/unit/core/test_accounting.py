"""Accounting identities against float64 references written token by token."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from reference import attention, split, top, topk_phi
from torch import Tensor

from residual_mass import core

SINK, TAIL, D, M = 2, 3, 5, 4


class Problem:
    """Random queries, keys, values and log-features; one prefix, R rows."""

    def __init__(
        self,
        seed: int,
        rows: int = 3,
        length: int = 24,
        dtype: torch.dtype = torch.float64,
        spread: float = 1.0,
        sink: int = SINK,
        tail: int = TAIL,
    ):
        g = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

        self.q, self.k, self.v = draw(rows, D) * spread, draw(length, D) * spread, draw(length, D)
        self.log_q, self.log_k = draw(rows, M), draw(length, M)
        self.new_k, self.new_v = draw(2, D) * spread, draw(2, D)
        self.scale = D**-0.5
        self.scores = core.attention_scores(self.q, self.k, self.scale)
        self.most_anchors = sink + tail
        self.anchors, self.mid = core.partition(torch.ones(length, dtype=torch.bool), sink, tail)

    def retrieved(self, k: int) -> Tensor:
        return self.selected(k).mask(len(self.k))

    def selected(self, k: int) -> core.Selected:
        return core.exhaustive_topk(self.scores, self.mid, torch.full((len(self.q),), k))

    def one_gather(self, k: int, adds: Tensor, subtracts: Tensor, log_query: Tensor | None = None) -> core.Terms:
        state, features = self.state()
        log_query = self.log_q if log_query is None else log_query
        estimate = core.Estimate(state, features, log_query, adds, subtracts.nonzero().flatten())
        anchors = core.members(self.anchors[None], self.most_anchors)
        return core.one_gather_terms(self.scores, self.v, anchors, self.selected(k), estimate)

    def gathered(self, features: Tensor, k: int) -> core.Retrieved:
        return core.gather_retrieved(features, self.v, self.selected(k))

    def state(self) -> tuple[core.SummaryState, Tensor]:
        features, log_shift = core.key_features(self.log_k, self.mid)
        return core.summarise(features, log_shift, self.v), features


def close(ours: Tensor, reference: list[list[float]], tolerance: float) -> None:
    expected = torch.tensor(reference, dtype=torch.float64)
    assert core.rel_l1(ours.double(), expected).max() < tolerance


@pytest.mark.parametrize(("sink", "tail"), [(SINK, TAIL), (3, 5), (0, 4), (6, 0)])
@pytest.mark.parametrize("k", [0, 1, 7, 19, 30])
@pytest.mark.parametrize("subtract", [True, False])
def test_both_forms_equal_the_token_by_token_reference(k: int, subtract: bool, sink: int, tail: int) -> None:
    p = Problem(seed=k, sink=sink, tail=tail)
    state, features = p.state()
    retrieved = p.retrieved(k)
    exact = core.exact_terms(p.scores, p.v, p.anchors | retrieved)
    generated = core.exact_terms(core.attention_scores(p.q, p.new_k, p.scale), p.new_v, torch.ones(2, dtype=torch.bool))
    explicit = core.residual_terms(state, p.log_q, p.gathered(features, k) if subtract else None)
    rows = torch.ones(len(p.q), dtype=torch.bool)
    gathered = p.one_gather(k, rows, rows & subtract)
    expected = [
        topk_phi(
            p.q[r].tolist(), p.k.tolist(), p.v.tolist(), p.scale, sink, tail, k,
            p.log_q[r].exp().tolist(), p.log_k.exp().tolist(), subtract,
            (p.new_k.tolist(), p.new_v.tolist()),
        )
        for r in range(len(p.q))
    ]  # fmt: skip
    close(core.merge(exact, explicit, generated), expected, 1e-12)
    close(core.merge(gathered, generated), expected, 1e-12)


def test_one_gather_flags_give_topk_nosub_and_sub_in_one_call() -> None:
    p = Problem(seed=5)
    state, features = p.state()
    retrieved = p.retrieved(6)
    adds, subtracts = torch.tensor([False, True, True]), torch.tensor([False, False, True])
    ours = core.merge(p.one_gather(6, adds, subtracts))
    exact = core.exact_terms(p.scores, p.v, p.anchors | retrieved)
    nosub = core.merge(exact, core.residual_terms(state, p.log_q))
    sub = core.merge(exact, core.residual_terms(state, p.log_q, p.gathered(features, 6)))
    torch.testing.assert_close(ours, torch.stack((core.merge(exact)[0], nosub[1], sub[2])), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("k", [0, 1, 21])
def test_exact_sub_is_full_attention(dtype: torch.dtype, tolerance: float, k: int) -> None:
    p = Problem(seed=11, length=300, dtype=dtype, spread=1.5)
    retrieved = p.retrieved(k)
    ours = core.merge(
        core.exact_terms(p.scores, p.v, p.anchors | retrieved), core.exact_terms(p.scores, p.v, p.mid & ~retrieved)
    )
    full = [
        attention(q.tolist(), p.k.double().tolist(), p.v.double().tolist(), p.scale, range(300)) for q in p.q.double()
    ]
    close(ours, full, tolerance)


def test_exact_nosub_counts_the_retrieved_tokens_twice() -> None:
    p = Problem(seed=12)
    retrieved = p.retrieved(5)
    ours = core.merge(core.exact_terms(p.scores, p.v, p.anchors | retrieved), core.exact_terms(p.scores, p.v, p.mid))
    for row, q in enumerate(p.q):
        scores = p.scores[row].tolist()
        _, mid = split(24, SINK, TAIL)
        twice = list(range(24)) + top(scores, mid, 5)
        keys, values = [p.k[i].tolist() for i in twice], [p.v[i].tolist() for i in twice]
        close(ours[row : row + 1], [attention(q.tolist(), keys, values, p.scale, range(len(twice)))], 1e-12)


@pytest.mark.parametrize("k", [0, 4])
def test_subset_bias_equation(k: int) -> None:
    p = Problem(seed=13 + k)
    retrieved = p.retrieved(k)
    exact = core.exact_terms(p.scores, p.v, p.anchors | retrieved)
    residual = core.exact_terms(p.scores, p.v, p.mid & ~retrieved)
    full = core.exact_terms(p.scores, p.v, torch.ones_like(p.mid))
    bias = core.subset_bias(exact, residual)
    torch.testing.assert_close(core.merge(full) - core.merge(exact), bias, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("k", [0, 3, 19])
def test_phi_with_an_oracle_kernel_recovers_full_attention(k: int) -> None:
    """phi that factorises exp(q.k) on the tokens at hand: one feature per key."""
    p = Problem(seed=17)
    length = len(p.k)
    p.log_k = torch.full((length, length), -torch.inf, dtype=torch.float64).fill_diagonal_(0)  # phi_k(k_i) = e_i
    all_rows = torch.ones(len(p.q), dtype=torch.bool)
    ours = core.merge(p.one_gather(k, all_rows, all_rows, log_query=p.scores))
    full = [attention(q.tolist(), p.k.tolist(), p.v.tolist(), p.scale, range(length)) for q in p.q]
    close(ours, full, 1e-12)


@pytest.mark.parametrize("length", [1, 4, 5, 6])
def test_prefix_no_longer_than_the_anchors_is_full_attention(length: int) -> None:
    p = Problem(seed=length, length=length)
    p.log_q += 200.0  # a residual of nothing must not matter, however large phi is
    rows = torch.ones(len(p.q), dtype=torch.bool)
    ours = core.merge(p.one_gather(2, rows, rows))
    full = [attention(q.tolist(), p.k.tolist(), p.v.tolist(), p.scale, range(length)) for q in p.q]
    close(ours, full, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_retrieving_the_whole_mid_region_drops_the_residual(dtype: torch.dtype) -> None:
    p = Problem(seed=19, length=200, dtype=dtype)
    p.log_q += 150.0
    state, features = p.state()
    retrieved = p.retrieved(1000)
    assert bool((retrieved == p.mid).all())
    rows = torch.ones(len(p.q), dtype=torch.bool)
    gathered = p.one_gather(1000, rows, rows)
    explicit = core.residual_terms(state, p.log_q, p.gathered(features, 1000))
    assert bool((explicit.denominator == 0).all()) and bool((explicit.numerator == 0).all())
    full = core.merge(core.exact_terms(p.scores, p.v, torch.ones_like(p.mid)))
    torch.testing.assert_close(core.merge(gathered), full)


@pytest.mark.parametrize(("share", "kept"), [(1e-2, True), (1e-4, True), (3e-6, True), (3e-7, False), (1e-9, False)])
def test_a_residual_is_kept_down_to_a_millionth_of_the_mid_regions_mass(share: float, kept: bool) -> None:
    """One row. What it leaves has `share` of phi's mass in the mid-region, but weighs as much as all that is exact."""
    p = Problem(seed=53, rows=1)
    chosen = torch.zeros_like(p.mid).index_fill(0, p.selected(6).indices[0], True)
    left = p.mid & ~chosen
    z = (p.log_q + p.log_k).exp().sum(-1)
    p.log_k[left] += (share / (1 - share) * z[chosen].sum() / z[left].sum()).log()
    p.log_q += (p.scores[0, ~left].exp().sum() / (p.log_q + p.log_k[left]).exp().sum()).log()
    tokens = [p.q[0].tolist(), p.k.tolist(), p.v.tolist(), p.scale]
    with_residual = topk_phi(*tokens, SINK, TAIL, 6, p.log_q[0].exp().tolist(), p.log_k.exp().tolist())
    without = attention(*tokens, (~left).nonzero().flatten().tolist())
    assert math.dist(with_residual, without) > 0.1 * math.hypot(*without)
    state, features = p.state()
    explicit = core.residual_terms(state, p.log_q, p.gathered(features, 6))
    exact, row = core.exact_terms(p.scores, p.v, ~left), torch.tensor([True])
    for ours in (core.merge(exact, explicit), core.merge(p.one_gather(6, row, row))):
        close(ours, [with_residual if kept else without], 1e-7)


def test_features_that_are_not_finite_do_not_pass_for_a_dropped_residual() -> None:
    p = Problem(seed=59)
    p.log_q[1] = torch.nan
    state, features = p.state()
    explicit = core.residual_terms(state, p.log_q, p.gathered(features, 4))
    exact, rows = core.exact_terms(p.scores, p.v, p.anchors | p.retrieved(4)), torch.ones(3, dtype=torch.bool)
    for ours in (core.merge(exact, explicit), core.merge(p.one_gather(4, rows, rows))):
        assert ours.isnan().all(-1).tolist() == [False, True, False]
        assert bool(ours[[0, 2]].isfinite().all())


@pytest.mark.parametrize("spread", [60.0, 1e4])
def test_extreme_logits_stay_finite_and_right(spread: float) -> None:
    p = Problem(seed=23, dtype=torch.float32)
    p.scores = p.scores * spread
    gauge = torch.tensor([300.0, -250.0, 120.0, 0.0])  # exp of these overflows; phi_q phi_k does not notice
    p.log_q, p.log_k = p.log_q - gauge + p.scores.amax(-1, keepdim=True) - 2, p.log_k + gauge
    retrieved = p.retrieved(1)
    rows = torch.ones(len(p.q), dtype=torch.bool)
    ours = core.merge(p.one_gather(1, rows, rows))
    z = p.log_q.double().unsqueeze(1) + p.log_k.double()  # log phi_q phi_k per feature [R, L, M]
    log_weight = torch.where(p.anchors | retrieved, p.scores.double(), torch.where(p.mid, z.logsumexp(-1), -torch.inf))
    expected = log_weight.softmax(-1) @ p.v.double()
    torch.testing.assert_close(ours.double(), expected, rtol=2e-4, atol=2e-4)


def test_ties_select_k_tokens_of_the_right_scores() -> None:
    scores = torch.zeros(2, 30)
    scores[1, 10:14] = 1.0
    mid = core.partition(torch.ones(30, dtype=torch.bool), SINK, TAIL).mid
    retrieved = core.exhaustive_topk(scores, mid, torch.tensor([6, 6])).mask(30)
    assert retrieved.sum(-1).tolist() == [6, 6] and bool(retrieved[1, 10:14].all())
    assert not bool((retrieved & ~mid).any())


def test_rows_with_their_own_k_in_one_call() -> None:
    p = Problem(seed=29)
    together = core.exhaustive_topk(p.scores, p.mid, torch.tensor([0, 4, 100])).mask(24)
    assert together.sum(-1).tolist() == [0, 4, int(p.mid.sum())]
    alone = core.exhaustive_topk(p.scores[1:2], p.mid, torch.tensor([4])).mask(24)
    assert torch.equal(together[1:2], alone)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(side: str) -> None:
    p = Problem(seed=31)
    rows = torch.ones(3, dtype=torch.bool)
    expected = core.merge(p.one_gather(4, rows, rows))

    def pad(real: Tensor, value: float) -> Tensor:
        poison = torch.full((6, *real.shape[1:]), value, dtype=real.dtype)
        return torch.cat((poison, real) if side == "left" else (real, poison))

    p.k, p.v, p.log_k = pad(p.k, 1e3), pad(p.v, 1e3), pad(p.log_k, 300.0)
    p.anchors, p.mid = core.partition(pad(torch.ones(24, dtype=torch.bool), False), SINK, TAIL)
    p.scores = core.attention_scores(p.q, p.k, p.scale)
    torch.testing.assert_close(core.merge(p.one_gather(4, rows, rows)), expected, rtol=1e-12, atol=1e-14)


def test_merge_ignores_empty_branches_and_any_split_gives_the_same() -> None:
    p = Problem(seed=37)
    everything = torch.ones(24, dtype=torch.bool)
    left, nothing = torch.arange(24) < 9, torch.zeros(24, dtype=torch.bool)
    parts = [core.exact_terms(p.scores * 50, p.v, mask) for mask in (left, nothing, ~left)]
    whole = core.exact_terms(p.scores * 50, p.v, everything)
    torch.testing.assert_close(core.merge(*parts), core.merge(whole), rtol=1e-12, atol=1e-14)


def test_an_empty_branch_does_not_push_scores_far_below_its_shift_out_of_the_floats() -> None:
    """An empty branch has the shift 0, beside which e^-200 is nothing in float32."""
    p = Problem(seed=67, dtype=torch.float32)
    everything, nothing = torch.ones(24, dtype=torch.bool), torch.zeros(24, dtype=torch.bool)
    low, empty = core.exact_terms(p.scores - 200, p.v, everything), core.exact_terms(p.scores, p.v, nothing)
    keys, values = p.k.double().tolist(), p.v.double().tolist()
    full = [attention(q.tolist(), keys, values, p.scale, range(24)) for q in p.q.double()]
    close(core.merge(low, empty), full, 1e-4)
    close(core.merge(empty, low), full, 1e-4)


@pytest.mark.parametrize(
    ("percent", "length", "expected"),
    [(1, 4096, 21), (1, 16384, 144), (1, 65536, 636), (0.5, 4096, 1), (0.5, 4000, 0), (2, 1024, 1), (4, 1024, 21),
     (8, 1024, 62), (7, 100, 0), (29, 100, 9), (100, 50, 30), (0.001, 10, 0)],
)  # fmt: skip
def test_retrieved_count(percent: float, length: int, expected: int) -> None:
    assert core.retrieved_count(percent, length, 20) == expected


@pytest.mark.parametrize(("length", "num_anchors"), [(100, 0), (4000, 8), (20_000, 90), (65_536, 20)])
def test_retrieved_count_has_no_rounding(length: int, num_anchors: int) -> None:
    """0.55 % of 20,000 are 110 tokens; in floats 110.00000000000001, of which the ceiling is 111."""
    for hundredths in range(5, 10_001, 5):
        tokens = (hundredths * length + 9_999) // 10_000
        assert core.retrieved_count(hundredths / 100, length, num_anchors) == max(0, tokens - num_anchors), hundredths


@pytest.mark.parametrize("percent", [0, -1, 100.5, math.nan])
def test_budget_outside_its_range_is_refused(percent: float) -> None:
    with pytest.raises(ValueError, match="outside"):
        core.retrieved_count(percent, 100, 20)


def test_measures_against_plain_sums() -> None:
    p = Problem(seed=41)
    retrieved = p.retrieved(3)
    _, mid = split(24, SINK, TAIL)
    for row in range(len(p.q)):
        weights = {i: math.exp(p.scores[row, i].item()) for i in range(24)}
        mass = sum(weights[i] for i in mid)
        entropy = -sum(weights[i] / mass * math.log(weights[i] / mass) for i in mid) / math.log(len(mid))
        assert core.mid_entropy(p.scores, p.mid)[row].item() == pytest.approx(entropy, rel=1e-12)
        chosen = top(p.scores[row].tolist(), mid, 3)
        recovered = sum(weights[i] for i in chosen) / mass
        assert core.mass_recovery(p.scores, p.mid, retrieved)[row].item() == pytest.approx(recovered, rel=1e-12)
        residual = core.exact_terms(p.scores, p.v, p.mid & ~retrieved)
        exact = core.exact_terms(p.scores, p.v, p.anchors | retrieved)
        outside = sum(weights[i] for i in mid if i not in chosen)
        share = outside / sum(weights.values())
        assert core.residual_share(exact, residual)[row].item() == pytest.approx(share, rel=1e-12)
        assert residual.log_mass()[row].item() == pytest.approx(math.log(outside), rel=1e-12)


def test_entropy_of_uniform_and_of_one_hot_rows() -> None:
    mid = torch.ones(16, dtype=torch.bool)
    one_hot = torch.full((1, 16), -1e4).index_fill_(1, torch.tensor([3]), 0.0)
    assert core.mid_entropy(torch.zeros(1, 16), mid).item() == pytest.approx(1.0)
    assert core.mid_entropy(one_hot, mid).item() == 0.0
    assert math.isnan(core.mid_entropy(torch.zeros(1, 16), torch.arange(16) == 2).item())


@pytest.mark.parametrize("k", [0, 5])
def test_row_measures_against_the_token_by_token_reference(k: int) -> None:
    p = Problem(seed=43)
    state, features = p.state()
    masks = core.Partition(p.anchors[None], p.mid[None])
    ours = {
        name: value[..., 1]
        for name, value in core.row_measures(p.scores, p.v, masks, (2, k, 7), state, features, p.log_q).items()
    }
    plain = [p.k.tolist(), p.v.tolist(), p.scale]
    for row, q in enumerate(p.q.tolist()):
        full = attention(q, *plain, range(24))
        anchors, mid = split(24, SINK, TAIL)
        chosen = top(p.scores[row].tolist(), mid, k)

        def error(estimate: list[float], full: list[float] = full) -> float:
            return sum(abs(a - b) for a, b in zip(estimate, full, strict=True)) / sum(map(abs, full))

        phi = (SINK, TAIL, k, p.log_q[row].exp().tolist(), p.log_k.exp().tolist())
        expected = {
            "e_topk": error(attention(q, *plain, anchors + chosen)),
            "e_sub": error(topk_phi(q, *plain, *phi)),
            "e_nosub": error(topk_phi(q, *plain, *phi, subtract=False)),
        }
        left = [i for i in mid if i not in chosen]
        z = p.log_q[row].exp() @ p.log_k.exp()[left].sum(0)
        expected["log_z_hat"] = math.log(z)
        exact = sum(math.exp(p.scores[row, i]) for i in anchors + chosen)
        expected["residual_share_hat"] = (z / (z + exact)).item()
        for name, value in expected.items():
            assert ours[name][row].item() == pytest.approx(value, rel=1e-10), name
    assert ours["e_exact_sub"].max() < 1e-14 and not bool(ours["clamped"].any())


def test_mass_curve_of_rows_with_ties_and_extremes() -> None:
    scores = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(5)) * 6
    scores[0, 0, 10:20] = 2.5
    scores[1, 2, 17] = 300.0
    mid = torch.zeros(40, dtype=torch.bool)
    mid[4:24] = True
    curve = core.mass_curve(scores, mid, [1, 7, 20])
    for row in product(range(2), range(3)):
        highest = scores[row][4:24].max().item()
        p = sorted((math.exp(s - highest) for s in scores[row][4:24].tolist()), reverse=True)
        expected = [math.fsum(p[:k]) / math.fsum(p) for k in (1, 7, 20)]
        assert curve[row].tolist() == pytest.approx(expected, rel=1e-5)
