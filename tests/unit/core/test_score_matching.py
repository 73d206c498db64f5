"""The streamed objective in torch: the checks of every path (`objective_checks.py`), in float64, and its memory."""

from __future__ import annotations

import pytest
import torch
from objective_checks import *  # noqa: F403  # its tests run here with the fixtures below
from objective_checks import WEIGHTS, Precision
from torch import Tensor

from residual_mass.core import score_matching
from residual_mass.core.score_matching import score_matching_losses

H, D, M = 2, 8, 5


@pytest.fixture
def precision() -> Precision:
    return torch.float64, 1e-10


@pytest.fixture(autouse=True, params=[2**18, 900], ids=["one block", "uneven blocks"])
def pairs_at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(score_matching.PAIRS_AT_ONCE, "cpu", request.param)


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
        score_matching_losses(log_query, log_key, queries, keys, 0.4, last, WEIGHTS).sum().backward()
    assert largest.seen <= max(H * rows * 64, H * length * D) < H * rows * length / 4
