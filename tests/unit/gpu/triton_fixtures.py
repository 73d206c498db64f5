"""Fixtures that the checks of Triton kernels share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_scratch() -> Iterator[None]:
    """Fresh memory holds NaN, and the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(9).isnan().all() and torch.zeros(2).new_empty(9).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that few columns and rows make many blocks, several rounds, and an unfilled last one of each."""
    from residual_mass.gpu import path

    sizes = {"SCORE_BLOCK": 16, "TILE_ROWS": 16, "SELECT_CHUNK": 32, "SLOTS": 16, "MOST_SPLITS": 2}
    for name, size in sizes.items():
        monkeypatch.setattr(path, name, size)
