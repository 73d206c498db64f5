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


@pytest.mark.parametrize("term", ["kl", "aux"])
def test_gradients_equal_finite_differences_and_ignore_hidden_keys(term: str) -> None:
    scores, student, visible = rows(8)

    def loss(student: Tensor) -> Tensor:
        x = ob.shifted(scores, student, visible)
        return ob.kl_term(x, TAU) if term == "kl" else ob.aux_term(x, 1, 2, 4, BAND, DELTA)

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
