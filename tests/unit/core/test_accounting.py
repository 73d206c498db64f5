"""Accounting identities against float64 references written token by token."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from reference import ReferenceRow, attention, topk_phi
from torch import Tensor

from residual_mass import core
from residual_mass.core.accounting import sink_terms
from residual_mass.spec.settings import AnchorSpec

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

    def one_gather(self, k: int, adds: Tensor, subtracts: Tensor) -> core.Terms:
        state, features = self.state()
        estimate = core.Estimate(state, features, self.log_q, adds, subtracts.nonzero().flatten())
        anchors = core.members(self.anchors[None], self.most_anchors)
        return core.one_gather_terms(self.scores, self.v, anchors, self.selected(k), estimate)

    def gathered(self, features: Tensor, k: int) -> core.Retrieved:
        indices, valid = self.selected(k)
        return core.Retrieved(features[indices] * valid.unsqueeze(-1), self.v[indices])

    def state(self) -> tuple[core.SummaryState, Tensor]:
        features, log_shift = core.key_features(self.log_k, self.mid)
        return core.summarise(features, log_shift, self.v), features


def close(ours: Tensor, reference: list[list[float]], tolerance: float) -> None:
    expected = torch.tensor(reference, dtype=torch.float64)
    assert core.rel_l1(ours.double(), expected).max() < tolerance


@pytest.mark.parametrize(
    ("length", "sink", "tail", "ks"),
    [(24, SINK, TAIL, (0, 1, 7, 19, 30)), (24, 3, 5, (0, 6, 16)), (24, 0, 4, (0, 7)), (24, 6, 0, (1, 18)),
     (1, SINK, TAIL, (2,)), (4, SINK, TAIL, (2,)), (5, SINK, TAIL, (0, 2)), (6, SINK, TAIL, (0, 1))],
)  # fmt: skip
def test_both_forms_equal_the_token_by_token_reference(length: int, sink: int, tail: int, ks: tuple[int, ...]) -> None:
    """A row each of TopK, NoSub and TopK+phi, in one call."""
    for k in ks:
        p = Problem(seed=k, length=length, sink=sink, tail=tail)
        phi_q, nothing_left = p.log_q.exp(), k >= length - sink - tail
        if nothing_left:
            p.log_q[2] += 1000  # a residual of nothing must not matter, however large phi is
        state, features = p.state()
        exact = core.exact_terms(p.scores, p.v, p.anchors | p.retrieved(k))
        everything = torch.ones(2, dtype=torch.bool)
        generated = core.exact_terms(core.attention_scores(p.q, p.new_k, p.scale), p.new_v, everything)
        whole, rest = (core.residual_terms(state, p.log_q, each) for each in (None, p.gathered(features, k)))
        assert not nothing_left or not (rest.denominator[2] or rest.numerator[2].any())
        explicit = [core.merge(exact, *more, generated)[r] for r, more in enumerate(([], [whole], [rest]))]
        keys, values, new = p.k.tolist(), p.v.tolist(), (p.new_k.tolist(), p.new_v.tolist())
        read = [*range(length, length + 2), *(p.anchors | p.retrieved(k)[0]).nonzero().flatten().tolist()]
        expected = [attention(p.q[0].tolist(), keys + new[0], values + new[1], p.scale, read)] + [
            topk_phi(p.q[r].tolist(), keys, values, p.scale, sink, tail, k, phi_q[r].tolist(), p.log_k.exp().tolist(),
                     r == 2, new)
            for r in (1, 2)
        ]  # fmt: skip
        close(torch.stack(explicit), expected, 1e-12)
        adds = torch.tensor([False, True, True])
        close(core.merge(p.one_gather(k, adds, torch.tensor([False, False, True])), generated), expected, 1e-12)


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


def test_rows_select_k_of_their_highest_scores_also_where_these_tie() -> None:
    scores = torch.zeros(3, 30)
    scores[1, 10:14] = 1.0
    mid = core.partition(torch.ones(30, dtype=torch.bool), SINK, TAIL).mid
    retrieved = core.exhaustive_topk(scores, mid, torch.tensor([0, 6, 100])).mask(30)
    assert retrieved.sum(-1).tolist() == [0, 6, 25] and bool(retrieved[1, 10:14].all())
    assert not bool((retrieved & ~mid).any())


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


def test_any_split_gives_the_same_and_an_empty_branch_does_not_push_low_scores_out_of_the_floats() -> None:
    """An empty branch has the shift 0, beside which e^-200 is nothing in float32."""
    p = Problem(seed=67, dtype=torch.float32)
    everything, nothing = torch.ones(24, dtype=torch.bool), torch.zeros(24, dtype=torch.bool)
    low, empty = core.exact_terms(p.scores - 200, p.v, everything), core.exact_terms(p.scores, p.v, nothing)
    keys, values = p.k.double().tolist(), p.v.double().tolist()
    full = [attention(q.tolist(), keys, values, p.scale, range(24)) for q in p.q.double()]
    first, second = (
        core.exact_terms(p.scores - 200, p.v, mask) for mask in (torch.arange(24) < 9, torch.arange(24) > 8)
    )
    for branches in ((low, empty), (empty, low), (first, empty, second)):
        close(core.merge(*branches), full, 1e-4)


def test_a_sink_is_a_token_without_a_value() -> None:
    """Its logit may be far from the scores on either side."""
    p, seen, nothing = Problem(seed=71), torch.ones(24, dtype=torch.bool), torch.zeros(24, dtype=torch.bool)
    for sinks in (torch.tensor([-900.0, 0.3, 900.0]).double(), torch.zeros(3).double()):
        ours = core.merge(core.exact_terms(p.scores, p.v, seen), sink_terms(sinks))
        weights = torch.cat((p.scores, sinks[:, None]), 1).softmax(-1)
        torch.testing.assert_close(ours, weights[:, :-1] @ p.v, rtol=1e-12, atol=1e-12)
    assert not core.merge(core.exact_terms(p.scores, p.v, nothing), sink_terms(sinks)).any()


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


def test_mass_curve_of_rows_with_ties_and_extremes() -> None:
    scores = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(5)) * 6
    scores[0, 0, 10:20] = 2.5
    scores[1, 2, 17] = 300.0
    mid = torch.zeros(40, dtype=torch.bool)
    mid[4:24] = True
    curve, place = core.mass_curve(scores, mid, [1, 7, 20]), AnchorSpec(4, 16)
    for row in product(range(2), range(3)):
        exact = ReferenceRow(scores[row].double().numpy(), np.zeros(40), np.zeros((40, 1)), place)
        assert curve[row].tolist() == pytest.approx([exact.at(k)["c_mid"] for k in (1, 7, 20)], rel=1e-5)
