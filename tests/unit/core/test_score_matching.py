"""The streamed objective against autograd through the written terms, in float64, and its memory."""

from __future__ import annotations

import pytest
import torch
from tests.unit.core.written_objective import written_losses
from torch import Tensor

from residual_mass.core import score_matching
from residual_mass.core.score_matching import Weights, score_matching_losses

H, R, L, D, M = 2, 6, 50, 8, 5
SCALE = 0.4
LAST = torch.tensor([0, 3, 20, 49, 30, 49])
WEIGHTS = Weights(kl=0.3, top=0.7, fp=1.4, z=2.8, tau=10.0, band=3.0, huber_delta=1.0)


def inputs(seed: int, spread: float = 2.0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)

    def draw(rows: int, width: int, size: float) -> Tensor:
        return torch.randn(H, rows, width, generator=g, dtype=dtype) * size

    log_query, log_key = draw(R, M, spread), draw(L, M, spread)
    return log_query.requires_grad_(), log_key.requires_grad_(), draw(R, D, 3), draw(L, D, 3)


@pytest.mark.parametrize("pairs", [2**18, 16 * H * R, 20 * H * R], ids=["one block", "blocks of 16", "uneven blocks"])
@pytest.mark.parametrize("spread", [0.1, 2.0, 20.0])
@pytest.mark.parametrize("seed", range(3))
def test_losses_and_gradients_are_those_of_the_written_terms(
    monkeypatch: pytest.MonkeyPatch, seed: int, spread: float, pairs: int
) -> None:
    monkeypatch.setitem(score_matching.PAIRS_AT_ONCE, "cpu", pairs)
    log_query, log_key, queries, keys = inputs(seed, spread)
    upstream = torch.rand(H, R, dtype=torch.float64)
    ours = score_matching_losses(log_query, log_key, queries, keys, SCALE, LAST, WEIGHTS)
    expected = written_losses(log_query, log_key, queries, keys, SCALE, LAST, WEIGHTS)
    torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-12)
    gradients = torch.autograd.grad((ours * upstream).sum(), (log_query, log_key))
    wanted = torch.autograd.grad((expected * upstream).sum(), (log_query, log_key))
    for gradient, reference in zip(gradients, wanted, strict=True):
        assert reference.norm() > 1e-3
        torch.testing.assert_close(gradient, reference, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("only", ["kl", "top", "fp", "z"])
def test_every_term_alone(only: str) -> None:
    log_query, log_key, queries, keys = inputs(5)
    weights = WEIGHTS._replace(**{name: float(name == only) for name in ("kl", "top", "fp", "z")})
    ours = score_matching_losses(log_query, log_key, queries, keys, SCALE, LAST, weights)
    expected = written_losses(log_query, log_key, queries, keys, SCALE, LAST, weights)
    torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-12)
    (gradient,) = torch.autograd.grad(ours.sum(), log_key)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), log_key)[0], rtol=1e-9, atol=1e-11)


def test_what_no_row_sees_changes_nothing() -> None:
    log_query, log_key, queries, keys = inputs(6)
    last = LAST.clamp_max(30)
    plain = score_matching_losses(log_query, log_key, queries, keys, SCALE, last, WEIGHTS)
    poisoned = log_key.detach().clone()
    poisoned[:, 31:] = 1e4
    poisoned.requires_grad_()
    keys[:, 31:] = 1e3
    losses = score_matching_losses(log_query, poisoned, queries, keys, SCALE, last, WEIGHTS)
    torch.testing.assert_close(losses, plain, rtol=1e-12, atol=0)
    (gradient,) = torch.autograd.grad(losses.sum(), poisoned)
    assert bool((gradient[:, 31:] == 0).all()) and gradient[:, :31].abs().max() > 0


@pytest.mark.parametrize("size", [1e3, -1e3, 0.0])
def test_extreme_students_have_finite_losses_and_gradients(size: float) -> None:
    log_query, log_key, queries, keys = inputs(7, dtype=torch.float32)
    log_query = (log_query.detach() + size).requires_grad_()
    losses = score_matching_losses(log_query, log_key, queries * 30, keys, SCALE, LAST, WEIGHTS)
    losses.sum().backward()
    for x in (losses, log_query.grad, log_key.grad):
        assert x is not None and bool(x.isfinite().all())


def test_a_student_that_is_the_teacher_has_no_loss_and_ties_count_once_each() -> None:
    log_key = torch.randn(H, L, 1, dtype=torch.float64)
    log_key[:, 10] = log_key[:, 11] = 5.0  # two keys tie for the row maximum
    log_query = torch.zeros(H, R, 1, dtype=torch.float64)
    # One feature: s_hat = log phi_k, which a one-dimensional teacher with unit queries reproduces.
    losses = score_matching_losses(
        log_query, log_key.requires_grad_(), torch.ones_like(log_query), log_key.detach(), 1.0, LAST, WEIGHTS
    )
    torch.testing.assert_close(losses, torch.zeros_like(losses), rtol=0, atol=1e-12)
    (gradient,) = torch.autograd.grad(losses.sum(), log_key)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-12)


def test_nothing_of_the_size_of_all_scores_is_kept_or_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor of the forward and backward pass has at most a block's pairs, or the inputs' size."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                self.seen = max(self.seen, result.numel())
            return result

    length, rows = 4096, 40
    monkeypatch.setitem(score_matching.PAIRS_AT_ONCE, "cpu", H * rows * 64)
    log_query, queries = torch.randn(H, rows, M, requires_grad=True), torch.randn(H, rows, D)
    log_key, keys = torch.randn(H, length, M, requires_grad=True), torch.randn(H, length, D)
    last = torch.full((rows,), length - 1)
    with Largest() as largest:
        score_matching_losses(log_query, log_key, queries, keys, SCALE, last, WEIGHTS).sum().backward()
    assert largest.seen <= max(H * rows * 64, H * length * D) < H * rows * length / 4
