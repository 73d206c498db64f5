"""Prompts that grow by folded tokens: states stay finite, keep learning, and are rebuilt when the prompt doubles."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from tests.unit.methods.test_residuals import seen_of
from torch import Tensor, nn

from residual_mass.core.accounting import merge
from residual_mass.decode.prefix import PrefixLayer, build_prefix, map_heads, summarise_prefix
from residual_mass.decode.terms import arm_rows, prefix_terms
from residual_mass.methods import (
    METHODS,
    Centroids,
    Channels,
    GroupSums,
    Mean,
    Method,
    Moments,
    Pages,
    QuantisedScan,
    Residual,
    ScanRegression,
    WholeClusters,
)
from residual_mass.methods.arms import Arm
from residual_mass.spec.settings import AnchorSpec

ANCHORS = AnchorSpec(4, 16)
D = 8
COMPOSED = (
    Method("clusters_of_3", "", WholeClusters(3), GroupSums()),
    Method("clusters_of_1", "", WholeClusters(1), GroupSums()),
    Method("regression_on_pages", "", Pages(3), ScanRegression(4)),
    Method("regression_on_two_channels", "", Channels(2), ScanRegression(4)),
    Method("shared_taken_from_scan", "", QuantisedScan(2, 8), Moments(3, shared=True)),
)


def drawn(tokens: int, seed: int = 0, examples: int = 1) -> Tensor:
    """Keys, values, and queries of two heads, [3, examples, 1, tokens, D] float32."""
    return torch.randn(3, examples, 1, tokens, D, generator=torch.Generator().manual_seed(seed))


def prefix_of(
    keys: Tensor, values: Tensor, length: int, before: PrefixLayer | None = None, real: Tensor | None = None
) -> PrefixLayer:
    real = torch.ones(keys.shape[0], length, dtype=torch.bool) if real is None else real[:, :length]
    make = build_prefix if before is None else before.grown
    return make(keys[:, :, :length], values[:, :, :length], real, ANCHORS)


def attended(layer: PrefixLayer, queries: Tensor, method: Method) -> Tensor:
    arms, lengths = [Arm(method, budget) for budget in (1.0, 60.0)], layer.partition.mid.sum(-1).flatten() + 20
    rows = arm_rows(arms, 2, lengths.tolist(), ANCHORS, None, queries.device)
    queries, log_query, summary = queries[:, :, :2].repeat(1, 1, 2, 1), None, None
    if method.needs_maps:  # features e^x
        log_query, summary = map_heads(nn.Identity(), queries), summarise_prefix(layer, nn.Identity())
    return merge(prefix_terms(queries, log_query, layer, summary, rows, D**-0.5))


SOME = (1, 19, 20, 21, 22, 24, 28, 36)
"""Lengths on both sides of what the anchors take, and of clusters, blocks and heads of so many."""


@pytest.mark.parametrize(
    "lengths", [SOME, pytest.param(set(range(1, 41)) - set(SOME), marks=pytest.mark.slow)], ids=["some", "the others"]
)
@pytest.mark.parametrize("method", [*(one for one in METHODS if one.selector), *COMPOSED], ids=lambda one: one.name)
def test_outputs_of_short_prompts_are_finite_however_they_grow(method: Method, lengths: Iterable[int]) -> None:
    """Prompts of 1 to 40 tokens, to which 1, 2 or 16 are folded, with nothing read and with a few tokens: each alone,
    folded twice, and all in one batch of 60 columns, whose states are therefore updated and not made anew.
    """
    for length in lengths:
        finite(method, *drawn(length + 32, length), [range(length, length + 2 * fold + 1, fold) for fold in (1, 2, 16)])
    real = torch.arange(60 + 32) >= 59 - torch.arange(40).unsqueeze(-1)
    finite(method, *drawn(60 + 32, examples=40), [range(60, 60 + 2 * fold + 1, fold) for fold in (1, 2, 16)], real)


def finite(
    method: Method, keys: Tensor, values: Tensor, queries: Tensor, grown: list[range], real: Tensor | None = None
) -> None:
    for lengths in grown:
        layer = None
        for length in lengths:
            layer = prefix_of(keys, values, length, layer, real)
            assert attended(layer, queries, method).isfinite().all(), lengths


GROWN = (Moments(), Mean(), ScanRegression(), Moments(8, shared=True), Centroids(8), ScanRegression(8))


@pytest.mark.parametrize("residual", GROWN, ids=str)
def test_tokens_that_join_one_by_one_count_as_much_as_all_at_once(residual: Residual) -> None:
    """From 500 to 2,000 tokens in float32, with values that drift: means of all parts together, and in one part all."""
    generator = torch.Generator().manual_seed(1)
    keys, noise = torch.randn(2, 2000, D, generator=generator)
    values = noise + torch.linspace(0, 5, 2000).unsqueeze(-1) + keys
    inside = torch.ones(2000, dtype=torch.bool)
    state = residual.prepare(keys[:500], values[:500], inside[:500])
    for i in range(500, 2000):
        one = slice(i, i + 1)
        state = residual.update(state, keys[one], values[one], inside[one], i)
    share = state.count / state.count.sum()
    assert int(state.count.sum()) == 2000
    mean = state.value_sum.sum(0) / 2000 if isinstance(residual, Centroids) else share @ state.mean_value
    torch.testing.assert_close(mean, values.double().mean(0).float(), rtol=2e-5, atol=2e-5)
    if state.count.shape[-1] == 1:
        at_once = residual.prepare(keys.double(), values.double(), inside)
        for ours, theirs in zip(state, at_once, strict=True):
            torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-4, atol=1e-4)
        seen = seen_of(keys, values, keys[:3] / 3, 50)
        seen = seen._replace(scanned=seen.scores)
        ours, theirs = (residual.terms(seen, each) for each in (state, residual.prepare(keys, values, inside)))
        for x, y in zip(ours, theirs, strict=True):
            torch.testing.assert_close(x, y, rtol=2e-3, atol=2e-3 * float(y.abs().max()))  # of rounding to bfloat16


@pytest.mark.parametrize("fold", [1, 16])
def test_a_prompt_that_has_doubled_is_clustered_anew(fold: int) -> None:
    """A prompt of 18 tokens, all of them anchors, has no clusters; grown to 500 it has those of 500 tokens."""
    keys, values, queries = drawn(500, 3)
    method = Method("mine", "", Channels(3), ScanRegression(16))
    layer, made_of = prefix_of(keys, values, 18), [18]
    for length in range(18 + fold, 501, fold):
        attended(layer, queries, method)
        layer = prefix_of(keys, values, length, layer)
        if not layer.states:
            made_of.append(length)
    state = layer.state(method.own)
    assert int((state.count > 0).sum()) == 16
    assert all(new - 20 >= 2 * (old - 20) for old, new in zip(made_of[:-1], made_of[1:], strict=True))
    last = prefix_of(keys, values, made_of[-1])
    assert torch.equal(layer.scan(method.selector)[1], last.scan(method.selector)[1])
    assert len(made_of) <= 2 + 9  # of 1, 2, 4 ... 256 tokens between the anchors, and of none
