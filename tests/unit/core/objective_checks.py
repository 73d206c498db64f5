"""The paper's objective in reference form, row by row and term by term as in its appendix, and checks of every path:
`test_score_matching.py` runs them in torch, `gpu/score_matching_checks.py` in kernels.

Each of these modules has a fixture `precision`: the dtype of features, and the tolerances of losses and gradients.
Those of the kernels set `Problem.passes`, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn.functional import huber_loss

from residual_mass.core import rel_l1
from residual_mass.core.feature_maps import log_kernel
from residual_mass.core.score_matching import TorchPasses, Weights, score_matching_losses

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WEIGHTS = Weights(kl=0.3, top=0.7, fp=1.4, z=2.8, tau=10.0, band=3.0, huber_delta=1.0)
PAPERS = Weights(kl=0.99, top=0.01, fp=0.02, z=0.04, tau=10.0, band=12.0, huber_delta=1.0)
Precision = tuple[torch.dtype, float]


def written_objective(scores: Tensor, student: Tensor, weights: Weights) -> Tensor:
    """From the scores of teacher and student over the L keys that the row sees, both [L]."""

    def huber(x: Tensor) -> Tensor:
        return huber_loss(x, x.new_zeros(x.shape), reduction="none", delta=weights.huber_delta)

    r, r_hat = scores - scores.max(), student - scores.max()
    log_p, log_p_hat = ((x / weights.tau).log_softmax(-1) for x in (r, r_hat))
    kl = weights.tau**2 * (log_p.exp() * (log_p - log_p_hat)).sum()
    near = r >= -weights.band
    beyond = huber((r_hat + weights.band).clamp_min(0))[~near]
    false_positive = beyond.sum() / max(len(beyond), 1)
    z = huber((r_hat.logsumexp(-1) - r.logsumexp(-1)).clamp_min(0))
    top = huber(r_hat - r)[near].mean()
    return weights.kl * kl + weights.top * top + weights.fp * false_positive + weights.z * z


@dataclass
class Problem:
    """Queries whose last visible keys are `last`."""

    last: Tensor
    length: int
    d: int = 16
    m: int = 16
    heads: int = 2
    spread: float = 2.0
    """Of log features."""
    scale: float = 0.3
    dtype: torch.dtype = torch.float32
    """Of queries and keys."""
    seed: int = 0
    passes: ClassVar[Callable[..., TorchPasses]] = TorchPasses

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)

        def draw(count: int, width: int) -> Tensor:
            return torch.randn(self.heads, count, width, generator=generator)

        rows = len(self.last)
        self.log_query, self.log_key = draw(rows, self.m) * self.spread, draw(self.length, self.m) * self.spread
        self.queries, self.keys = draw(rows, self.d).to(self.dtype), (3 * draw(self.length, self.d)).to(self.dtype)
        self.upstream = torch.rand(self.heads, rows, generator=generator)

    def results(self, weights: Weights = WEIGHTS, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
        """Losses [H, R] and the gradients of both log features."""
        logs = [x.to(DEVICE, dtype, copy=True).requires_grad_() for x in (self.log_query, self.log_key)]
        vectors = [x.to(DEVICE, self.dtype if dtype == torch.float32 else dtype) for x in (self.queries, self.keys)]
        last = self.last.to(DEVICE)
        losses = score_matching_losses(*logs, *vectors, self.scale, last, weights, self.passes)
        gradients = torch.autograd.grad((losses * self.upstream.to(DEVICE)).sum(), logs)
        return tuple(x.cpu() for x in (losses.detach(), *gradients))

    def written(self, weights: Weights = WEIGHTS) -> tuple[Tensor, ...]:
        """The same in float64: each row sees the keys up to its own of `last`."""
        logs = [x.double().requires_grad_() for x in (self.log_query, self.log_key)]
        scores, student = self.queries.double() @ self.keys.double().mT * self.scale, log_kernel(*logs)
        losses = [
            torch.stack([written_objective(t[row, : end + 1], s[row, : end + 1], weights) for row, end in
                         enumerate(self.last.tolist())])
            for t, s in zip(scores, student, strict=True)
        ]  # fmt: skip
        losses = torch.stack(losses)
        return losses.detach(), *torch.autograd.grad((losses * self.upstream).sum(), logs)


def check(problem: Problem, precision: Precision, weights: Weights = WEIGHTS) -> None:
    dtype, tolerance = precision
    for ours, written in zip(problem.results(weights, dtype), problem.written(weights), strict=True):
        assert written.abs().sum() > 0
        assert rel_l1(ours.double().flatten(), written.flatten()).item() < tolerance


def some_rows(count: int, length: int, seed: int = 0) -> Tensor:
    """Positions in any order, of the first and the last key too."""
    last = torch.randint(length, (count,), generator=torch.Generator().manual_seed(seed))
    last[0], last[-1] = length - 1, 0
    return last


@pytest.mark.parametrize("weights", [WEIGHTS, PAPERS], ids=["of the test", "of the paper"])
@pytest.mark.parametrize("spread", [0.1, 2.0, 8.0])
@pytest.mark.parametrize(("rows", "length"), [(3, 10), (16, 32), (21, 77), (33, 100)])
def test_losses_and_gradients_are_those_of_the_written_terms(
    rows: int, length: int, spread: float, weights: Weights, precision: Precision
) -> None:
    check(Problem(some_rows(rows, length), length, spread=spread, seed=rows), precision, weights)


@pytest.mark.parametrize("only", ["kl", "top", "fp", "z"])
def test_every_term_alone(only: str, precision: Precision) -> None:
    weights = WEIGHTS._replace(**{name: float(name == only) for name in ("kl", "top", "fp", "z")})
    check(Problem(some_rows(20, 70), 70, seed=5), precision, weights)


@pytest.mark.parametrize("size", [60.0, -60.0])
def test_large_and_small_features_and_scores(size: float, precision: Precision) -> None:
    problem = Problem(some_rows(18, 70), 70, scale=3.0, seed=6)
    problem.log_query += size
    problem.log_key -= 0.5 * size
    check(problem, precision)


@pytest.mark.parametrize("size", [1e3, -1e3, 0.0])
def test_extreme_students_have_finite_losses_and_gradients(size: float) -> None:
    problem = Problem(some_rows(18, 70), 70, spread=20, scale=10.0, seed=7)
    problem.log_query += size
    assert all(bool(x.isfinite().all()) for x in problem.results())


def test_rows_with_equal_scores_and_one_key(precision: Precision) -> None:
    problem = Problem(torch.tensor([0, 0, 40, 40]), 41, seed=9)
    problem.keys[:] = problem.keys[:, :1]
    check(problem, precision)


def test_what_no_row_sees_changes_nothing() -> None:
    problem = Problem(some_rows(18, 40), 90, seed=10)
    plain = problem.results()
    problem.log_key[:, 40:], problem.keys[:, 40:] = torch.tensor(1e4), torch.tensor(1e3)
    poisoned = problem.results()
    assert all(torch.equal(a, b) for a, b in zip(plain, poisoned, strict=True))
    assert bool((poisoned[2][:, 40:] == 0).all()) and poisoned[2][:, :40].abs().max() > 0
