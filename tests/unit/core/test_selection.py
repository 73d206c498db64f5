"""The selection of the highest scores, of any number and kind of scores."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from residual_mass.core.selection import LONG_ROW, Selected, exhaustive_topk, largest, least_read, unordered_topk


def hostile_scores(length: int) -> dict[str, Tensor]:
    """Rows of scores [length] float32; the kernels compare groups of 16 first, torch columns far apart."""
    random = torch.randn(length, generator=torch.Generator().manual_seed(10))
    one, rising = torch.ones(length), torch.arange(length).float()
    return {
        "random": random,
        "all equal": one,
        "all equal and negative": -one,
        "one rounding apart": torch.nextafter(one, 2 * one).where(random > 0, one),
        "a narrow range": 1 + random.abs().clamp(max=3) / 32,
        "neighbouring floats": 1 + rising.flip(0) * 2.0**-23,
        "few values": (random * 2).round(),
        "mostly -inf": random.masked_fill(random < 1, -torch.inf),
        "all -inf": torch.full_like(random, -torch.inf),
        "both infinities": random.masked_fill(random < 1, -torch.inf).masked_fill(random > 1.5, torch.inf),
        "zeros of both signs": torch.where(random > 0, 0.0, -0.0),
        "near the largest floats": random * 1e38,
        "the smallest floats": (rising - 50) * 2.0**-149,
        "rising": rising,
        "falling": -rising,
        "the highest are neighbours": random.where((rising < 40) | (rising > 61), random + 9),
        "the highest are spread": random.where(rising % 16 != 3, random + 9),
        "one high score in each group": torch.where(rising % 16 == 3, rising, -1.0),
        "the highest of each group tie": torch.where(rising % 16 == 3, 9.0, random),
        "anchors are the highest": rising.sub(length / 2).abs(),
    }


@pytest.mark.parametrize("length", [50, LONG_ROW, LONG_ROW + 29])
def test_the_largest_are_those_of_topk(length: int) -> None:
    scores = torch.stack(list(hostile_scores(length).values()))
    for k in (0, 1, 7, 50, 300, length, length + 1):
        columns, values = largest(scores, k)
        expected = scores.topk(min(k, length), dim=-1).values
        assert torch.equal(values.sort(dim=-1, descending=True).values, expected)
        assert torch.equal(scores.gather(-1, columns), values)
        assert all(len(set(row)) == len(row) for row in columns.tolist())


@pytest.mark.parametrize("wanted", [[[3, 3, 3]], [[0, 3, 99]], [[0, 0, 0]], [[1, 4, 9], [2, 4, 0]]])
def test_the_order_of_slots_changes_nothing_else(wanted: list[list[int]]) -> None:
    g = torch.Generator().manual_seed(8)
    scores = torch.randn(len(wanted), 1, 3, LONG_ROW + 10, generator=g).round(decimals=1)  # with ties
    mid = torch.zeros(len(wanted), 1, 1, scores.shape[-1], dtype=torch.bool)
    mid[..., 5:70] = True
    mid[-1, ..., 40:] = False
    k = torch.tensor(wanted)[:, None]
    read, least = unordered_topk(scores, mid, k)
    ordered = exhaustive_topk(scores, mid, k)
    assert torch.equal(least, least_read(scores, mid, ordered))
    assert torch.equal(read.mask(scores.shape[-1]).sum(-1), k.minimum(mid.sum(-1)))
    assert not (read.mask(scores.shape[-1]) & ~mid).any()
    assert torch.equal(_in_order(scores, read), _in_order(scores, ordered))


def _in_order(scores: Tensor, read: Selected) -> Tensor:
    return torch.where(read.valid, scores.gather(-1, read.indices), -torch.inf).sort(dim=-1).values
