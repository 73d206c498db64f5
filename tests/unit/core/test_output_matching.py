"""Objectives on attention outputs against loops over keys in float64."""

from __future__ import annotations

import pytest
import torch
from reference import ReferenceRow, mean
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
from residual_mass.spec.settings import AnchorSpec

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

    def row(self, h: int, q: int, g: int) -> ReferenceRow:
        """Of the keys that the query position sees."""
        seen = slice(int(LAST[q]) + 1)
        kernel = (self.log_query[h, q, g] + self.log_key[h, seen]).logsumexp(-1).detach()
        anchors = AnchorSpec(self.window.sink, self.window.tail)
        return ReferenceRow(self.scores[h, q, g, seen].numpy(), kernel.numpy(), self.values[h, seen].numpy(), anchors)


def rho(x: float) -> float:
    return 0.5 * x * x if abs(x) <= 1 else abs(x) - 0.5


def by_hand(case: Case, h: int, q: int, g: int, k: int) -> tuple[float, float, float, float] | None:
    """e_topk, e_sub, e_nosub and log Z_R hat - log Z_R of one row and support; None if nothing is left."""
    row = case.row(h, q, g)
    found = row.at(k)
    gap = found["log_z_hat"] - found["log_z_true"]
    return (found["e_topk"], found["e_sub"], found["e_nosub"], gap) if k < len(row.mid) else None


ROWS = [(h, q, g, s) for h in range(H) for q in range(Q) for g in range(G) for s in range(KS.shape[1])]


@pytest.mark.parametrize(("seed", "sink", "tail"), [(0, SINK, TAIL), (13, SINK, TAIL), (2, 3, 5), (3, 3, 5)])
def test_errors_and_losses_equal_loops_over_the_keys(seed: int, sink: int, tail: int) -> None:
    """Relative losses divide a support's errors by TopK's mean error with it, which falls with K."""
    case = Case(seed, sink=sink, tail=tail)
    targets = case.targets()
    completion = complete(case.log_query, case.log_key, case.values, case.window, targets)
    nothing = torch.zeros_like(completion.whole)
    topk, sub, nosub = (
        output_errors(x, completion.unit, targets)
        for x in (nothing, completion.rest, completion.whole + torch.zeros_like(completion.rest))
    )
    gaps = log_mass_error(completion, targets)
    by_row = {(h, q, g, s): by_hand(case, h, q, g, int(KS[q, s])) for h, q, g, s in ROWS}
    for row, expected in by_row.items():
        if expected is None:
            assert targets.log_rest[row] == -torch.inf and not gaps[row].isfinite()
        else:
            found = [x[row].item() for x in (topk, sub, nosub, gaps)]
            assert found == pytest.approx(list(expected), rel=1e-9, abs=1e-11)
    assert list(by_row.values()).count(None) >= H * G * (4 + 2 + 1)
    by_support = [[found[0] for (*_, s), found in by_row.items() if s == support and found] for support in range(4)]
    for relative, units in ((False, [1.0] * 4), (True, [sum(errors) / (H * Q * G) for errors in by_support])):
        expected = torch.zeros(H, Q, G, dtype=torch.float64)
        for (h, q, g, s), found in by_row.items():
            if found is not None:
                expected[h, q, g] += (found[1] / units[s] + 0.05 * rho(found[3])) / KS.shape[1]
        losses = residual_losses(completion, targets, 0.05, relative)
        torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("share", "kept"), [(1e-4, True), (3e-6, True), (3e-7, False)])
def test_a_residual_is_kept_down_to_a_millionth_of_the_mid_regions_mass(share: float, kept: bool) -> None:
    """As in decoding. Of one row and support; what it leaves has `share` of phi's mass, but weighs as much as all that
    is exact.
    """
    place, k = (1, 3, 2), 7
    case = Case(14)
    row = case.row(*place)
    chosen, left, exact = row.mid[:k], row.mid[k:], [*row.anchors, *row.mid[:k]]
    with torch.no_grad():
        log_query, log_key = case.log_query[place], case.log_key[place[0]]
        z = (log_query + log_key).exp().sum(-1)
        log_key[left] += (share / (1 - share) * z[chosen].sum() / z[left].sum()).log()
        log_query += (case.scores[place][exact].exp().sum() / (log_query + log_key[left]).exp().sum()).log()
    row, targets = case.row(*place), case.targets()
    completion = complete(case.log_query, case.log_key, case.values, case.window, targets)
    expected = row.at(k)
    assert abs(row.error((row.scores, exact), (row.kernel, left)) - expected["e_topk"]) > 0.1
    assert output_errors(completion.rest, completion.unit, targets)[place][2].item() == pytest.approx(
        expected["e_sub"], rel=1e-6
    )
    gap = log_mass_error(completion, targets)[place][2].item()
    assert gap == pytest.approx(expected["log_z_hat"] - expected["log_z_true"], abs=1e-6) and (gap > -9) == kept


def test_lolcats_is_the_squared_distance_of_the_two_outputs() -> None:
    case = Case(6)
    targets = case.targets(torch.zeros(Q, 0, dtype=torch.long))
    losses = lolcats_losses(case.log_query, case.log_key, case.values, case.window, targets)
    for h, q, g, _ in ROWS[:: KS.shape[1]]:
        row = case.row(h, q, g)
        expected = ((mean(row.values, (row.kernel, range(len(row.scores)))) - row.full) ** 2).sum() / D
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
