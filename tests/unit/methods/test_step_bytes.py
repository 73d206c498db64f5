"""Bytes of a decode step against the sizes of the tensors that it reads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from residual_mass.methods import (
    METHODS,
    GroupSums,
    Method,
    QuantisedScan,
    Selector,
    Step,
    WholeClusters,
    method_named,
)
from residual_mass.methods.interface import BFLOAT16
from residual_mass.methods.step_bytes import (
    full_bytes,
    kept_bytes,
    most_retrieved,
    step_bytes,
)

STEP = Step(tokens=2048, width=64, heads=3, anchors=20, retrieved=43)
TOKEN = 2 * 64 * BFLOAT16
"""Bytes of a key and a value."""


def test_what_a_step_reads_by_hand() -> None:
    assert full_bytes(STEP) == 2048 * TOKEN == step_bytes(method_named("full"), STEP).total
    keys, values, summary = 2048 * 64 * 2, 63 * 64 * 2, 64 * 65 * 4
    codes = 2048 * 64 / 2 + 2048 / 64 * 2 * 64 * 2
    for name, expected in {
        "topk": (keys, values, 0),
        "topk_phi_nosub": (keys, values, summary),
        "topk_phi": (keys, values, summary + 43 * 64 * 4),  # and the features of what is subtracted
        "scan4_moments": (codes, 63 * TOKEN, 4 * (2 * 64**2 + 2 * 64 + 2)),
        "cache4_rotated": (codes, 20 * TOKEN, 2048 * (64 / 2 + 4)),
        "cache4_rotated_tail128": (codes, 132 * TOKEN, 2048 * (64 / 2 + 4)),
        "cache8_sparse_v_1e-4": (2048 * 64 + 2048 / 64 * 2 * 64 * 2, 20 * TOKEN, 43 * (64 + 4)),  # values of 43 tokens
        "topk_centroids": (keys, values, 4 * 64 * (2 * 64 + 1) + 2 * 43),
        "topk_importance": (keys, values, 4 * 64 * 65 + 32 * 3 * TOKEN),
        "scan3_regression_32": (2048 * 64 * 3 / 8 + 2048 / 128 * 2 * 64 * 2, 63 * TOKEN, 2 * 96 * 65 + 2048),
    }.items():
        assert step_bytes(method_named(name), STEP) == expected
    assert step_bytes(method_named("topk_phi_nosub"), STEP._replace(features=128)).summary == 2 * summary


SELECTORS = dict.fromkeys([*(one.selector for one in METHODS if one.selector), QuantisedScan(2)])


@pytest.mark.parametrize("selector", SELECTORS, ids=str)
def test_what_selectors_keep_is_what_a_step_scans(selector: Selector) -> None:
    """Summaries of random keys, counted at 2 bytes a number; codes at their bits."""
    keys = torch.randn(2048, 64, generator=torch.Generator().manual_seed(0))
    mid = torch.ones(2048, dtype=torch.bool)
    inner = selector
    while hasattr(inner, "scan"):
        inner = inner.scan
    state = inner.prepare(keys, mid)
    bits = getattr(inner, "bits", 8)

    def size(part: Tensor) -> float:
        if part.dtype == torch.int32:
            return 0  # the cluster of a token, which only tokens that join need
        return part.numel() * (bits / 8 if part.dtype == torch.uint8 else BFLOAT16)

    expected = sum(map(size, state)) if state else 2048 * 64 * BFLOAT16
    assert inner.scan_bytes(STEP) == pytest.approx(expected, rel=1e-9)


def test_what_is_kept_of_a_prompt_by_hand() -> None:
    """As shares of a bfloat16 cache of 2,048 tokens, heads 64 wide."""
    cache, width = 2048 * TOKEN, 64
    assert kept_bytes(method_named("full"), STEP) == kept_bytes(method_named("topk"), STEP) == (cache, 0)
    scan = 2048 * width / 2 + 2048 / 64 * 2 * width * 2
    regression = 2 * (width * (width + 1) + 64 * (2 * width + 1)) + 2048
    assert kept_bytes(method_named("scan4_regression_64"), STEP) == (cache, scan + regression)
    features = 4 * (64 * 65 + 2048 * 64)
    assert kept_bytes(method_named("topk_phi"), STEP) == (cache, features)
    assert kept_bytes(method_named("topk_phi_nosub"), STEP) == (cache, 4 * 64 * 65)
    whole = Method("mine", "", WholeClusters(16), GroupSums())
    assert kept_bytes(whole, STEP) == (cache, 2 * 64 * 128 + 2 * 2048 + 2 * 65 * 128)
    values = 2048 * (width / 2 + 4)
    assert kept_bytes(method_named("cache4_rotated"), STEP) == (20 * TOKEN, scan + values)
    assert kept_bytes(method_named("cache4_rotated_tail128"), STEP) == (132 * TOKEN, scan + values)
    assert kept_bytes(method_named("cache4_rotated_tail128"), STEP._replace(tokens=100)).cache == 100 * TOKEN
    assert kept_bytes(method_named("cache8_sparse_v_1e-4"), STEP) == kept_bytes(method_named("cache8"), STEP)


def test_no_more_tokens_are_retrieved_than_there_are() -> None:
    for name, k, most in (
        ("topk", 21, 63),
        ("topk", 5000, 2028),
        ("group4_regression_64", 21, 21),
        ("group4_regression_64", 5000, 2028),
    ):
        assert most_retrieved(method_named(name), k, STEP) == most
