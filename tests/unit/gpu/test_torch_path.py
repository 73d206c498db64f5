"""The reference of Triton's kernels: the checks of every path (`step_checks.py`), and packed keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from step_checks import *  # noqa: F403  # its tests run here with the fixture below
from step_checks import Decode, close
from step_problems import METHODS, SCAN, DecodeProblem, mid_columns, selecting_scores
from torch_path import decode_attention, scanned_scores

from residual_mass.methods.selectors import restored


@pytest.fixture
def decode() -> Decode:
    return lambda arguments: decode_attention(**arguments)


@pytest.mark.parametrize("k", [0, 5, 16])
@pytest.mark.parametrize(
    "shape",
    [
        {"groups": 1, "kv_heads": 3, "sink": 3, "tail": 5, "generated": 1},
        {"groups": 4, "kv_heads": 1, "sink": 0, "tail": 4, "generated": 3},
        {"groups": 4, "kv_heads": 2, "sink": 6, "tail": 0, "generated": 4},
        {"groups": 8, "kv_heads": 1, "sink": 1, "tail": 1, "generated": 1},
        {"groups": 4, "d": 64, "features": 64},
        {"groups": 3, "d": 128, "features": 64, "dtype": torch.bfloat16},
    ],
    ids=str,
)
@pytest.mark.parametrize("method", METHODS)
def test_any_number_of_heads_anchors_and_generated_tokens(
    decode: Decode, method: str, shape: dict[str, Any], k: int
) -> None:
    """A cache of bfloat16 is rounded, and nothing else."""
    close(decode, DecodeProblem(seed=k + 30, spans=[(2, 24), (0, 21)], length=24, **shape), k, method)


def test_codes_that_tie_in_the_scan_and_not_in_truth(decode: Decode) -> None:
    """Keys of two values and a little noise, which 4 bits do not see: whichever is chosen, the rest is cut at the
    scanned score, above some exact scores.
    """
    p = DecodeProblem(seed=16, spans=[(0, 37)], length=37, groups=2, kv_heads=1, d=16, dtype=torch.float32)
    mid = slice(p.sink, 34)
    g = torch.Generator().manual_seed(1)
    p.cache.keys[:, :, mid] = torch.where(torch.arange(32)[:, None] % 2 == 0, 1.0, -1.0)
    p.cache.keys[:, :, mid] += 1e-2 * torch.rand(32, 16, generator=g)
    p.cache.values[:, :, mid] = p.cache.values[:, :, p.sink, None]  # so that ties differ in weight alone
    for k in (1, 5, 16):
        close(decode, p, k, "scan, moments", 2e-2)


def test_scanned_scores_are_those_of_the_keys_that_the_selector_restores() -> None:
    p = DecodeProblem(seed=17, spans=[(6, 100), (0, 93)], length=103, groups=4, d=64)
    arguments = p.arguments(7, "scan")
    mid = mid_columns(arguments)[:, None]
    keys = torch.where(mid.unsqueeze(-1), p.cache.keys[:, :, :103], 0)
    decoded = restored(SCAN.prepare(keys, mid), SCAN.block, torch.float64)
    queries = p.query.unflatten(1, (2, -1)) * p.scale
    expected = (queries.double() @ decoded.mT).flatten(1, 2).masked_fill(~mid, -torch.inf)
    scanned = scanned_scores(queries, arguments["cache"].scan).flatten(1, 2)[..., :103].masked_fill(~mid, -torch.inf)
    for ours in (scanned.double(), selecting_scores(arguments)):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
