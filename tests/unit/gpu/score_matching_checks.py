"""Checks of the objective's kernels, under Triton's interpreter and on a GPU; `test_triton.py` runs them.

Tests of `objective_checks.py` run here too.
"""

from __future__ import annotations

import pytest
import torch
from tests.unit.core.objective_checks import *  # noqa: F403  # its tests run here with the fixtures below
from tests.unit.core.objective_checks import Precision, Problem, check, some_rows
from triton_fixtures import poisoned_scratch  # noqa: F401

from residual_mass.gpu import training
from residual_mass.gpu.training import TritonPasses

AS_ON_GPUS = {name: getattr(training, name) for name in ("ROW_BLOCK", "KEY_BLOCK", "KEYS_OF_SHARE")}


@pytest.fixture
def precision() -> Precision:
    return torch.float32, 1e-4


@pytest.fixture(autouse=True)
def kernels_with_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few keys and rows make several blocks, and an unfilled last one."""
    monkeypatch.setattr(Problem, "passes", TritonPasses)
    for name, size in {"ROW_BLOCK": 16, "KEY_BLOCK": 16, "KEYS_OF_SHARE": 32}.items():
        monkeypatch.setattr(training, name, size)


@pytest.mark.parametrize(("d", "m", "heads"), [(64, 64, 1), (128, 64, 1), (64, 32, 3), (32, 128, 1)])
def test_every_shape_of_heads(d: int, m: int, heads: int, precision: Precision) -> None:
    check(Problem(some_rows(18, 50), 50, d=d, m=m, heads=heads, scale=d**-0.5, seed=d), precision)


def test_blocks_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, precision: Precision) -> None:
    for name, size in AS_ON_GPUS.items():
        monkeypatch.setattr(training, name, size)
    check(Problem(some_rows(70, 150), 150, d=64, m=64, heads=1, seed=8), precision)


def test_the_same_bits_every_time() -> None:
    problem = Problem(some_rows(21, 77), 77, seed=11)
    first, second = problem.results(), problem.results()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_bfloat16_queries_and_keys_lose_nothing(precision: Precision) -> None:
    check(Problem(some_rows(21, 77), 77, dtype=torch.bfloat16, seed=12), precision)
