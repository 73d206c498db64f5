"""What holds of the objective's kernels, under Triton's interpreter as on a GPU; `test_fused_triton.py` runs it.

Autograd through the terms as the paper writes them, in float64 and row by row, says what is right.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from tests.unit.core.written_objective import written_losses
from torch import Tensor

from residual_mass.core import rel_l1, score_matching
from residual_mass.core.fused import triton_score_matching
from residual_mass.core.score_matching import Weights, score_matching_losses

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WEIGHTS = Weights(kl=0.3, top=0.7, fp=1.4, z=2.8, tau=10.0, band=3.0, huber_delta=1.0)
PAPERS = Weights(kl=0.99, top=0.01, fp=0.02, z=0.04, tau=10.0, band=12.0, huber_delta=1.0)


@pytest.fixture(autouse=True)
def kernels_on_poisoned_scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fresh memory holds NaN; the interpreter stands in for the GPU, with small blocks and shares."""
    monkeypatch.setattr(score_matching, "kernels_run_on", lambda device: True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(9).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


AS_ON_GPUS = {name: getattr(triton_score_matching, name) for name in ("ROW_BLOCK", "KEY_BLOCK", "KEYS_OF_SHARE")}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that few keys and rows make several of each, and an unfilled last one."""
    rows = dict.fromkeys(triton_score_matching.ROW_BLOCK, 16)
    for name, size in {"ROW_BLOCK": rows, "KEY_BLOCK": 16, "KEYS_OF_SHARE": 32}.items():
        monkeypatch.setattr(triton_score_matching, name, size)


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

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)

        def draw(count: int, width: int) -> Tensor:
            return torch.randn(self.heads, count, width, generator=generator)

        rows = len(self.last)
        self.log_query, self.log_key = draw(rows, self.m) * self.spread, draw(self.length, self.m) * self.spread
        self.queries, self.keys = draw(rows, self.d).to(self.dtype), (3 * draw(self.length, self.d)).to(self.dtype)
        self.upstream = torch.rand(self.heads, rows, generator=generator)

    def results(
        self, weights: Weights, products: torch.dtype | None = None, passes: type = triton_score_matching.TritonPasses
    ) -> tuple[Tensor, ...]:
        """Losses [H, R] and the gradients of both log features, computed by `passes`."""
        logs = [x.to(DEVICE).detach().clone().requires_grad_() for x in (self.log_query, self.log_key)]
        given = self.queries.to(DEVICE), self.keys.to(DEVICE), self.scale, self.last.to(DEVICE), weights, products
        losses = score_matching_losses(logs[0], logs[1], *given)
        assert isinstance(losses.grad_fn.key_passes, passes)
        gradients = torch.autograd.grad((losses * self.upstream.to(DEVICE)).sum(), logs)
        return tuple(x.cpu() for x in (losses.detach(), *gradients))

    def written(self, weights: Weights) -> tuple[Tensor, ...]:
        logs = [x.double().requires_grad_() for x in (self.log_query, self.log_key)]
        queries, keys = self.queries.double(), self.keys.double()
        losses = written_losses(*logs, queries, keys, self.scale, self.last, weights)
        return losses.detach(), *torch.autograd.grad((losses * self.upstream).sum(), logs)


def check(problem: Problem, weights: Weights = WEIGHTS, tolerance: float = 1e-4) -> None:
    for ours, written in zip(problem.results(weights), problem.written(weights), strict=True):
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
    rows: int, length: int, spread: float, weights: Weights
) -> None:
    check(Problem(some_rows(rows, length), length, spread=spread, seed=rows), weights)


@pytest.mark.parametrize("only", ["kl", "top", "fp", "z"])
def test_every_term_alone(only: str) -> None:
    weights = WEIGHTS._replace(**{name: float(name == only) for name in ("kl", "top", "fp", "z")})
    check(Problem(some_rows(20, 70), 70, seed=5), weights)


@pytest.mark.parametrize(("d", "m", "heads"), [(64, 64, 1), (128, 64, 1), (64, 32, 3), (32, 128, 1)])
def test_every_shape_of_heads(d: int, m: int, heads: int) -> None:
    check(Problem(some_rows(18, 50), 50, d=d, m=m, heads=heads, scale=d**-0.5, seed=d))


def test_blocks_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in AS_ON_GPUS.items():
        monkeypatch.setattr(triton_score_matching, name, size)
    check(Problem(some_rows(70, 150), 150, d=64, m=64, heads=1, seed=8))


@pytest.mark.parametrize("size", [60.0, -60.0])
def test_large_and_small_features_and_scores(size: float) -> None:
    problem = Problem(some_rows(18, 70), 70, scale=3.0, seed=6)
    problem.log_query += size
    problem.log_key -= 0.5 * size
    check(problem)


@pytest.mark.parametrize("size", [1e3, -1e3, 0.0])
def test_extreme_students_have_finite_losses_and_gradients(size: float) -> None:
    problem = Problem(some_rows(18, 70), 70, spread=20, scale=10.0, seed=7)
    problem.log_query += size
    assert all(bool(x.isfinite().all()) for x in problem.results(WEIGHTS))


def test_rows_with_equal_scores_and_one_key() -> None:
    problem = Problem(torch.tensor([0, 0, 40, 40]), 41, seed=9)
    problem.keys[:] = problem.keys[:, :1]
    check(problem)


def test_what_no_row_sees_changes_nothing() -> None:
    problem = Problem(some_rows(18, 40), 90, seed=10)
    plain = problem.results(WEIGHTS)
    problem.log_key[:, 40:], problem.keys[:, 40:] = torch.tensor(1e4), torch.tensor(1e3)
    poisoned = problem.results(WEIGHTS)
    assert all(torch.equal(a, b) for a, b in zip(plain, poisoned, strict=True))
    assert bool((poisoned[2][:, 40:] == 0).all()) and poisoned[2][:, :40].abs().max() > 0


def test_the_same_bits_every_time() -> None:
    problem = Problem(some_rows(21, 77), 77, seed=11)
    first, second = problem.results(WEIGHTS), problem.results(WEIGHTS)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_bfloat16_queries_and_keys_lose_nothing() -> None:
    check(Problem(some_rows(21, 77), 77, dtype=torch.bfloat16, seed=12))


def test_features_rounded_to_bfloat16_are_rounded_alike_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(some_rows(21, 77), 77, seed=13)
    exact = problem.written(WEIGHTS)
    rounded = problem.results(WEIGHTS, torch.bfloat16)
    monkeypatch.setattr(score_matching, "kernels_run_on", lambda device: False)
    in_torch = problem.results(WEIGHTS, torch.bfloat16, score_matching._TorchPasses)
    for ours, other, reference in zip(rounded, in_torch, exact, strict=True):
        distance = rel_l1(other.double().flatten(), reference.flatten()).item()
        assert 1e-4 < distance < 2e-2
        assert rel_l1(ours.double().flatten(), reference.flatten()).item() < 1.5 * distance
