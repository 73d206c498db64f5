"""A quantised cache that is read whole, against loops over blocks of tokens and groups of channels in float64."""

from __future__ import annotations

import pytest
import torch
from tests.unit.core.test_moments import random_tokens, sums
from torch import Tensor

from residual_mass.backbones.prefix import arm_rows, build_prefix, prefix_terms
from residual_mass.core.accounting import merge
from residual_mass.core.settings import AnchorSpec
from residual_mass.methods import (
    CacheOnly,
    Method,
    Moments,
    QuantisedScan,
    QuantisedValues,
    Rotated,
    ScanRegression,
    Seen,
    Selector,
    TopK,
)
from residual_mass.methods.arms import Arm
from residual_mass.methods.interface import Layout

L, D = 70, 6


def bf16(x: Tensor) -> Tensor:
    return x.bfloat16().double()


def quantised(x: Tensor, bits: int) -> Tensor:
    """The numbers of one group, to the nearest of 2^bits values from its least to its largest."""
    low = bf16(x.min())
    step = bf16((x.max() - low) / (2**bits - 1))
    return low + step * ((x - low) / step.clamp_min(1e-38)).round().clamp(0, 2**bits - 1)


def hadamard(width: int) -> Tensor:
    """Sylvester's matrix, with rows of length 1."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < width:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / width**0.5


@pytest.mark.parametrize("budget", [10.0, 90.0])
@pytest.mark.parametrize("rotated", [False, True], ids=["plain", "rotated"])
@pytest.mark.parametrize(("key_bits", "value_bits"), [(4, 4), (4, 3), (2, 2), (8, 1)])
def test_attention_is_that_of_the_quantised_cache(key_bits: int, value_bits: int, rotated: bool, budget: float) -> None:
    """Whatever the budget: anchors exactly, all others by their codes; keys in blocks of 16 tokens, values in groups of
    4 and 2 channels.
    """
    keys, values = (x[None, None] for x in random_tokens(L))
    queries, anchors = torch.randn(1, 1, 2, D, generator=torch.Generator().manual_seed(1)).double(), AnchorSpec(3, 5)
    scan: Selector = QuantisedScan(key_bits, 16)
    method = Method("mine", CacheOnly(Rotated(scan) if rotated else scan), QuantisedValues(value_bits, 4))
    layer = build_prefix(keys, values, torch.ones(1, L, dtype=torch.bool), anchors)
    rows = arm_rows([Arm(method, budget)], 2, [L], anchors, None, queries.device)
    found = merge(prefix_terms(queries, None, layer, None, rows, 0.7))[0, 0]

    turn = torch.block_diag(*[hadamard(2)] * 3) if rotated else torch.eye(D).double()
    stored, kept = keys[0, 0] @ turn, values[0, 0].clone()
    for start in range(0, L, 16):
        own = [i for i in range(start, min(start + 16, L)) if 3 <= i < L - 5]
        for channel in range(D):
            stored[own, channel] = quantised(stored[own, channel], key_bits)
    for i in range(3, L - 5):
        kept[i, :4], kept[i, 4:] = quantised(kept[i, :4], value_bits), quantised(kept[i, 4:], value_bits)
    for row, query in enumerate(queries[0, 0]):
        scores = 0.7 * stored @ (query @ turn)
        torch.testing.assert_close(found[row], scores.softmax(-1) @ kept, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("width", [1, 2, 6, 64, 96])
def test_rotation_leaves_exact_scores_as_they_are(width: int) -> None:
    keys, queries = torch.randn(2, 40, width, generator=torch.Generator().manual_seed(0)).double()
    scores, inside, none = queries[:3] @ keys.T, torch.ones(40, dtype=torch.bool), torch.zeros(1, 1).long()
    plain = QuantisedScan(8, 40).select(
        queries[:3], scores, QuantisedScan(8, 40).prepare(keys, inside), inside, none, None
    )
    turned = Rotated(QuantisedScan(8, 40))
    found = turned.select(queries[:3], scores, turned.prepare(keys, inside), inside, none, Layout(3))
    torch.testing.assert_close(plain.scanned, scores, rtol=0.05, atol=0.1 * width**0.5)
    torch.testing.assert_close(found.scanned, scores, rtol=0.05, atol=0.1 * width**0.5)


def test_values_that_join_are_quantised_as_all_at_once() -> None:
    keys, values = random_tokens(L)
    inside, residual = torch.ones(L, dtype=torch.bool), QuantisedValues(3, 4)
    grown = residual.prepare(keys[:40], values[:40], inside[:40])
    for start in (40, 41, 55):
        end = {40: 41, 41: 60, 55: L}[start]  # the last five columns of before come again
        grown = residual.update(grown, keys[start:end], values[start:end], inside[start:end], start)
    for ours, theirs in zip(grown, residual.prepare(keys, values, inside), strict=True):
        assert torch.equal(ours, theirs)


def test_eight_bits_of_equal_and_extreme_values() -> None:
    for values in (torch.full((5, D), 3.1), torch.zeros(5, D), torch.full((5, D), -1e30), torch.eye(5, D) * 1e30):
        inside, residual = torch.ones(5, dtype=torch.bool), QuantisedValues(8)
        scores = torch.zeros(1, 5)
        seen = Seen(values[:1], scores[:, 0], None, inside[None], scores, values, scores)
        nu, z = sums(residual.terms(seen, residual.prepare(values, values, inside)))
        torch.testing.assert_close(nu / z.unsqueeze(-1), values.mean(0, keepdim=True), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: QuantisedValues(0), "bits is 0, not between 1 and 8"),
        (lambda: QuantisedValues(4, 0), "group is 0, not 1 or more channels"),
        (lambda: CacheOnly(TopK()), "CacheOnly needs a scan of what is kept in place of keys, not TopK"),
        (lambda: Method("m", CacheOnly(QuantisedScan(4)), Moments()), "keeps no values: CacheOnly goes with Quant"),
        (lambda: Method("m", CacheOnly(QuantisedScan(4)), ScanRegression()), "keeps no values"),
        (lambda: Method("m", CacheOnly(QuantisedScan(4))), "keeps no values"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(make: object, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        make()
