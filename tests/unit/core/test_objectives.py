"""Objectives against float64 sums over Python loops, and their gradients against finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from residual_mass.core import objectives as ob

R, L = 4, 9
TAU, BAND, DELTA = 10.0, 3.0, 1.0


def rows(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    scores = torch.randn(R, L, generator=g, dtype=torch.float64) * 3
    student = scores + torch.randn(R, L, generator=g, dtype=torch.float64) * 2
    visible = torch.arange(L) <= torch.tensor([[0], [3], [6], [8]])
    return scores, student, visible


def seen(scores: Tensor, visible: Tensor, row: int) -> list[float]:
    return [s for s, keep in zip(scores[row].tolist(), visible[row].tolist(), strict=True) if keep]


def rho(x: float) -> float:
    return 0.5 * x * x if abs(x) <= DELTA else DELTA * (abs(x) - DELTA / 2)


def softmax(x: list[float]) -> list[float]:
    total = sum(math.exp(v) for v in x)
    return [math.exp(v) / total for v in x]


def mean(x: list[float]) -> float:
    return sum(x) / len(x) if x else 0.0


@pytest.mark.parametrize("seed", range(5))
def test_terms_equal_the_written_formulas(seed: int) -> None:
    scores, student, visible = rows(seed)
    x = ob.shifted(scores, student, visible)
    kl, top, fp, z = [], [], [], []
    for row in range(R):
        s, s_hat = seen(scores, visible, row), seen(student, visible, row)
        b = max(s)
        r, r_hat = [v - b for v in s], [v - b for v in s_hat]
        p, p_hat = softmax([v / TAU for v in r]), softmax([v / TAU for v in r_hat])
        kl.append(TAU**2 * sum(a * math.log(a / c) for a, c in zip(p, p_hat, strict=True)))
        pairs = list(zip(r, r_hat, strict=True))
        top.append(mean([rho(h - t) for t, h in pairs if t >= -BAND]))
        fp.append(mean([rho(max(h + BAND, 0)) for t, h in pairs if t < -BAND]))
        z.append(rho(max(math.log(sum(map(math.exp, r_hat))) - math.log(sum(map(math.exp, r))), 0)))
    assert ob.kl_term(x, TAU).item() == pytest.approx(mean(kl), rel=1e-12)
    assert ob.top_term(x, BAND, DELTA).item() == pytest.approx(mean(top), rel=1e-12)
    assert ob.false_positive_term(x, BAND, DELTA).item() == pytest.approx(mean(fp), rel=1e-12)
    assert ob.partition_term(x, DELTA).item() == pytest.approx(mean(z), rel=1e-12)
    expected = mean(top) + 2 * mean(fp) + 4 * mean(z)
    assert ob.aux_term(x, 1, 2, 4, BAND, DELTA).item() == pytest.approx(expected, rel=1e-12)


def test_lolcats_is_the_squared_distance_of_the_two_outputs() -> None:
    scores, student, visible = rows(7)
    values = torch.randn(L, 3, dtype=torch.float64)
    errors = []
    for row in range(R):
        p, p_hat = softmax(seen(scores, visible, row)), softmax(seen(student, visible, row))
        for d in range(3):
            v = values[: len(p), d].tolist()
            errors.append(sum((a - b) * c for a, b, c in zip(p_hat, p, v, strict=True)) ** 2)
    x = ob.shifted(scores, student, visible)
    assert ob.lolcats_term(x, values).item() == pytest.approx(mean(errors), rel=1e-12)


@pytest.mark.parametrize("term", ["kl", "aux", "lolcats"])
def test_gradients_equal_finite_differences_and_ignore_hidden_keys(term: str) -> None:
    scores, student, visible = rows(8)
    values = torch.randn(L, 3, dtype=torch.float64)

    def loss(student: Tensor) -> Tensor:
        x = ob.shifted(scores, student, visible)
        if term == "kl":
            return ob.kl_term(x, TAU)
        return ob.aux_term(x, 1, 2, 4, BAND, DELTA) if term == "aux" else ob.lolcats_term(x, values)

    student.requires_grad_(True)
    assert torch.autograd.gradcheck(loss, student)
    (gradient,) = torch.autograd.grad(loss(student), student)
    assert bool((gradient[~visible] == 0).all()) and gradient.abs().max() > 0


def test_hidden_keys_change_nothing() -> None:
    scores, student, visible = rows(9)
    poisoned = torch.where(visible, student, 1e6)
    assert ob.kl_term(ob.shifted(torch.where(visible, scores, 1e6), poisoned, visible), TAU).item() == pytest.approx(
        ob.kl_term(ob.shifted(scores, student, visible), TAU).item(), rel=1e-12
    )


def test_a_perfect_student_has_no_loss() -> None:
    scores, _, visible = rows(10)
    x = ob.shifted(scores, scores.clone(), visible)
    assert ob.kl_term(x, TAU).item() == pytest.approx(0, abs=1e-12)
    assert ob.aux_term(x, 1, 2, 4, 12.0, DELTA).item() == 0


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_closed_form_gradient_is_autograd_through_the_terms(seed: int, spread: float) -> None:
    scores, student, visible = rows(seed)
    scores, student = scores * spread, student * spread
    weights = ob.Weights(kl=0.3, top=0.7, fp=1.4, z=2.8, tau=TAU, band=BAND, huber_delta=DELTA)
    written, fused = student.clone().requires_grad_(True), student.clone().requires_grad_(True)
    x = ob.shifted(scores, written, visible)
    expected = 0.3 * ob.kl_term(x, TAU) + ob.aux_term(x, 0.7, 1.4, 2.8, BAND, DELTA)
    ours = ob.weighted_terms(scores, fused, visible, weights)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-13)
    (3 * expected).backward()
    (3 * ours).backward()
    assert written.grad.abs().max() > 0
    torch.testing.assert_close(fused.grad, written.grad, rtol=1e-10, atol=1e-13)


def residual_by_hand(
    s: list[float], s_hat: list[float], v: list[list[float]], mid: list[bool], k: int, weight_z: float
) -> float:
    """One row, over its visible keys alone."""
    best = sorted((j for j in range(len(s)) if mid[j]), key=lambda j: -s[j])[:k]
    left = [j for j in range(len(s)) if mid[j] and j not in best]
    if not left:
        return 0.0
    full_z = sum(math.exp(x) for x in s)
    full = [sum(math.exp(s[j]) * v[j][d] for j in range(len(s))) / full_z for d in range(len(v[0]))]
    mixed = [s_hat[j] if j in left else s[j] for j in range(len(s))]
    z = sum(math.exp(x) for x in mixed)
    output = [sum(math.exp(mixed[j]) * v[j][d] for j in range(len(s))) / z for d in range(len(v[0]))]
    error = sum(abs(a - b) for a, b in zip(output, full, strict=True)) / sum(map(abs, full))
    gap = math.log(sum(math.exp(s_hat[j]) for j in left)) - math.log(sum(math.exp(s[j]) for j in left))
    return error + weight_z * rho(gap)


@pytest.mark.parametrize("seed", range(5))
def test_residual_term_is_the_error_of_subtractive_completion(seed: int) -> None:
    scores, student, visible = rows(seed)
    values = torch.randn(L, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    positions = torch.tensor([[0], [3], [6], [8]])
    mid = (torch.arange(L) >= 1) & (torch.arange(L) <= positions - 2)
    ks = [torch.tensor([0, 0, 0, 0]), torch.tensor([1, 1, 2, 3]), torch.tensor([9, 9, 9, 9])]
    expected = []
    for k in ks:
        for row in range(R):
            keep = visible[row].nonzero().flatten().tolist()
            args = ([t[row][j].item() for j in keep] for t in (scores, student))
            of_row = [mid[row][j].item() for j in keep]
            expected.append(residual_by_hand(*args, values[keep].tolist(), of_row, int(k[row]), 0.05))
    assert mean(expected) > 0.01
    assert ob.residual_term(scores, student, values, visible, mid, ks, 0.05).item() == pytest.approx(
        mean(expected), rel=1e-12
    )
    exact = ob.residual_term(scores, scores.clone(), values, visible, mid, ks, 0.05)
    assert exact.item() < 1e-14


def test_residual_term_has_the_gradient_of_its_value_and_survives_extremes() -> None:
    scores, student, visible = rows(7)
    values = torch.randn(L, 3, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    mid = (torch.arange(L) >= 1) & (torch.arange(L) <= torch.tensor([[0], [3], [6], [8]]) - 2)
    ks = [torch.tensor(1).expand(R), torch.tensor(3).expand(R)]

    def loss(x: Tensor) -> Tensor:
        return ob.residual_term(scores, x, values, visible, mid, ks, 0.05)

    assert torch.autograd.gradcheck(loss, student.requires_grad_())
    for size in (1e3, -1e3):
        x = torch.full_like(scores, size, dtype=torch.float32).requires_grad_()
        value = ob.residual_term(scores.float() * 50, x, values.float(), visible, mid, ks, 0.05)
        value.backward()
        assert value.isfinite() and x.grad is not None and bool(x.grad.isfinite().all())
