"""Objectives on attention outputs against loops over keys in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from residual_mass.core.output_matching import (
    Targets,
    Window,
    complete,
    exact_targets,
    log_mass_error,
    lolcats_losses,
    output_errors,
    residual_losses,
)

H, Q, G, L, D, M = 2, 4, 3, 30, 3, 5
SINK, TAIL = 2, 3
LAST = torch.tensor([25, 2, 12, 29])  # out of order; the second sees fewer keys than there are anchors
KS = torch.tensor([[0, 1, 5, 99], [0, 0, 0, 0], [0, 2, 4, 99], [0, 1, 7, 25]])


class Case:
    def __init__(
        self, seed: int, spread: float = 1.0, dtype: torch.dtype = torch.float64, sink: int = SINK, tail: int = TAIL
    ):
        g = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, dtype=dtype)

        self.scores, self.values = draw(H, Q, G, L) * 2, draw(H, L, D)
        self.log_query = (draw(H, Q, G, M) * spread).requires_grad_()
        self.log_key = (draw(H, L, M) * spread).requires_grad_()
        self.window = Window(LAST, sink, tail)

    def targets(self, ks: Tensor = KS) -> Targets:
        return exact_targets(self.scores, self.values, self.window, ks)

    def student(self, h: int, q: int, g: int) -> list[float]:
        """z_j = <phi_q, phi_k(k_j)> for every key."""
        return (self.log_query[h, q, g] + self.log_key[h]).exp().sum(-1).tolist()


def mix(weights: dict[int, float], values: Tensor) -> list[float]:
    total = sum(weights.values())
    return [sum(w * values[j, d].item() for j, w in weights.items()) / total for d in range(D)]


def rho(x: float) -> float:
    return 0.5 * x * x if abs(x) <= 1 else abs(x) - 0.5


def by_hand(case: Case, h: int, q: int, g: int, k: int) -> tuple[float, float, float, float] | None:
    """e_topk, e_sub, e_nosub and log Z_R hat - log Z_R of one row and support; None if nothing is left."""
    last = LAST[q].item()
    s = case.scores[h, q, g].tolist()
    mid = [j for j in range(last + 1) if case.window.sink <= j <= last - case.window.tail]
    best = sorted(mid, key=lambda j: -s[j])[:k]
    rest = [j for j in mid if j not in best]
    if not rest:
        return None
    z = case.student(h, q, g)
    exact = {j: math.exp(s[j]) for j in range(last + 1) if j not in rest}
    full = mix({j: math.exp(s[j]) for j in range(last + 1)}, case.values[h])

    def error(output: list[float]) -> float:
        return sum(abs(a - b) for a, b in zip(output, full, strict=True)) / sum(map(abs, full))

    sub = mix(exact | {j: z[j] for j in rest}, case.values[h])
    with_all = {j: exact.get(j, 0) + (z[j] if j in mid else 0) for j in range(last + 1)}
    gap = math.log(sum(z[j] for j in rest)) - math.log(sum(math.exp(s[j]) for j in rest))
    return error(mix(exact, case.values[h])), error(sub), error(mix(with_all, case.values[h])), gap


ROWS = [(h, q, g, s) for h in range(H) for q in range(Q) for g in range(G) for s in range(KS.shape[1])]


@pytest.mark.parametrize(("seed", "sink", "tail"), [(0, SINK, TAIL), (1, SINK, TAIL), (2, 3, 5), (3, 3, 5)])
def test_errors_and_losses_equal_loops_over_the_keys(seed: int, sink: int, tail: int) -> None:
    case = Case(seed, sink=sink, tail=tail)
    targets = case.targets()
    completion = complete(case.log_query, case.log_key, case.values, case.window, targets)
    nothing = torch.zeros_like(completion.whole)
    topk, sub, nosub = (
        output_errors(x, completion.unit, targets)
        for x in (nothing, completion.rest, completion.whole + torch.zeros_like(completion.rest))
    )
    gaps, losses = log_mass_error(completion, targets), residual_losses(completion, targets, 0.05)
    expected_losses = torch.zeros(H, Q, G, dtype=torch.float64)
    nowhere = 0
    for row in ROWS:
        h, q, g, s = row
        expected = by_hand(case, h, q, g, int(KS[q, s]))
        if expected is None:
            nowhere += 1
            assert targets.log_rest[row] == -torch.inf and not gaps[row].isfinite()
            continue
        found = [x[row].item() for x in (topk, sub, nosub, gaps)]
        assert found == pytest.approx(list(expected), rel=1e-9, abs=1e-11)
        expected_losses[h, q, g] += (expected[1] + 0.05 * rho(expected[3])) / KS.shape[1]
    assert nowhere >= H * G * (4 + 2 + 1)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-9, atol=1e-11)


def test_relative_losses_divide_a_supports_errors_by_topks_mean_error_with_it() -> None:
    """TopK's errors fall by half from K = 0 to the largest K, so that one mean over all supports would be another."""
    case = Case(13)
    targets = case.targets()
    losses = residual_losses(
        complete(case.log_query, case.log_key, case.values, case.window, targets), targets, 0.05, relative=True
    )
    by_row = {(h, q, g, s): by_hand(case, h, q, g, int(KS[q, s])) for h, q, g, s in ROWS}
    rows = H * Q * G
    topk = [sum(found[0] for (*_, s), found in by_row.items() if s == support and found) / rows for support in range(4)]
    assert topk[0] > 2 * topk[2] > 0
    expected = torch.zeros(H, Q, G, dtype=torch.float64)
    for (*row, s), found in by_row.items():
        if found is not None:
            expected[tuple(row)] += (found[1] / topk[s] + 0.05 * rho(found[3])) / KS.shape[1]
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("share", "kept"), [(1e-4, True), (3e-6, True), (3e-7, False)])
def test_a_residual_is_kept_down_to_a_millionth_of_the_mid_regions_mass(share: float, kept: bool) -> None:
    """As in decoding. Of one row and support; what it leaves has `share` of phi's mass, but weighs as much as all that
    is exact.
    """
    row, k = (1, 3, 2), 7
    case = Case(14)
    s, window = case.scores[row], case.window
    mid = torch.arange(window.sink, int(LAST[row[1]]) + 1 - window.tail)
    chosen = mid[s[mid].topk(k).indices]
    left = torch.tensor([j for j in mid.tolist() if j not in chosen.tolist()])
    exact = torch.tensor([j for j in range(int(LAST[row[1]]) + 1) if j not in left.tolist()])
    with torch.no_grad():
        log_query, log_key = case.log_query[row], case.log_key[row[0]]
        z = (log_query + log_key).exp().sum(-1)
        log_key[left] += (share / (1 - share) * z[chosen].sum() / z[left].sum()).log()
        log_query += (s[exact].exp().sum() / (log_query + log_key[left]).exp().sum()).log()
    targets = case.targets()
    completion = complete(case.log_query, case.log_key, case.values, window, targets)
    found = output_errors(completion.rest, completion.unit, targets)[row][2].item()
    gap = log_mass_error(completion, targets)[row][2].item()
    expected = by_hand(case, *row, k)
    assert expected is not None
    topk, sub, _, true_gap = expected
    assert abs(topk - sub) > 0.1
    assert found == pytest.approx(sub if kept else topk, rel=1e-6)
    assert gap == (pytest.approx(true_gap, abs=1e-6) if kept else -math.inf)


def test_lolcats_is_the_squared_distance_of_the_two_outputs() -> None:
    case = Case(6)
    targets = case.targets(torch.zeros(Q, 0, dtype=torch.long))
    losses = lolcats_losses(case.log_query, case.log_key, case.values, case.window, targets)
    for h, q, g, _ in ROWS[:: KS.shape[1]]:
        seen, s, z = range(int(LAST[q]) + 1), case.scores[h, q, g].tolist(), case.student(h, q, g)
        exact = mix({j: math.exp(s[j]) for j in seen}, case.values[h])
        student = mix({j: z[j] for j in seen}, case.values[h])
        expected = sum((a - b) ** 2 for a, b in zip(student, exact, strict=True)) / D
        assert losses[h, q, g].item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", ["residual", "lolcats"])
def test_gradients_are_those_of_the_values(name: str) -> None:
    case = Case(7)
    targets = case.targets()

    def loss(log_query: Tensor, log_key: Tensor) -> Tensor:
        if name == "lolcats":
            return lolcats_losses(log_query, log_key, case.values, case.window, targets)
        completion = complete(log_query, log_key, case.values, case.window, targets)
        return residual_losses(completion, targets, 0.05)

    assert torch.autograd.gradcheck(loss, (case.log_query, case.log_key), atol=1e-6)
    (gradient,) = torch.autograd.grad(loss(case.log_query, case.log_key).sum(), case.log_key)
    assert gradient.abs().max() > 1e-3


@pytest.mark.parametrize("size", [1e3, -1e3, 60.0])
def test_extreme_students_have_finite_losses_and_gradients(size: float) -> None:
    """An estimate far above everything exact still has a gradient that leads back."""
    case = Case(9, dtype=torch.float32)
    case.scores *= 30
    targets = case.targets()
    log_query = (case.log_query.detach() + size).requires_grad_()
    completion = complete(log_query, case.log_key, case.values, case.window, targets)
    residual_losses(completion, targets, 0.05).sum().backward()
    for x in (log_query.grad, case.log_key.grad):
        assert x is not None and bool(x.isfinite().all())
    if size > 0:
        assert log_query.grad is not None and log_query.grad[:, 0].abs().max() > 1e-3


def test_rows_without_a_mid_region_alone_have_no_loss() -> None:
    case = Case(12)
    only = torch.tensor([1])
    targets, window = case.targets().at(only), case.window._replace(last=LAST[only])
    completion = complete(case.log_query[:, only], case.log_key, case.values, window, targets)
    losses = residual_losses(completion, targets, 0.05)
    assert bool((losses == 0).all())
    losses.sum().backward()
    assert case.log_query.grad is not None and bool((case.log_query.grad == 0).all())


def test_positions_and_supports_can_be_picked_from_targets() -> None:
    case = Case(11)
    targets = case.targets()
    rows, supports = torch.tensor([3, 0]), [1, 2]
    picked = targets.at(rows).select_supports(supports)
    window = case.window._replace(last=LAST[rows])
    direct = exact_targets(case.scores[:, rows], case.values, window, KS[rows][:, supports])
    most = direct.best.shape[-1]
    for name, ours in picked._asdict().items():
        ours = ours[..., :most] if name == "best" else ours
        torch.testing.assert_close(ours, getattr(direct, name), rtol=1e-12, atol=0)
