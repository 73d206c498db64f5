"""Quantised caches that are read whole: which tokens they keep exactly, and whose values they read."""

from __future__ import annotations

import math

import pytest
import torch
from tests.needs import KERNELS
from tests.unit.core.test_moments import D, random_tokens
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from residual_mass import Text, backend_for
from residual_mass.core.accounting import merge
from residual_mass.decode.packed_backend import PackedBackend
from residual_mass.decode.prefix import build_prefix
from residual_mass.decode.terms import arm_rows, prefix_terms
from residual_mass.decode.torch_backend import TorchBackend
from residual_mass.methods import METHODS, CacheOnly, Method, QuantisedScan, QuantisedValues, Rotated, method_named
from residual_mass.methods.arms import Arm, arm_of
from residual_mass.methods.selectors import restored
from residual_mass.methods.served import packing_of
from residual_mass.spec.settings import AnchorSpec

CACHES = [method for method in METHODS if isinstance(method.selector, CacheOnly)]
PACKED = [method for method in METHODS if packing_of(method) and not method.whole_prefix]
L, ANCHORS = 70, AnchorSpec(3, 5)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, initializer_range=0.1,
    )  # fmt: skip
    return LlamaForCausalLM(config).double().eval()


def continued(model: LlamaForCausalLM, method: str | Method, packed: bool) -> Tensor:
    """Logits of 40 given tokens, one at a time, after a prompt of 20, which are the first 4 and the last 16."""
    ids = torch.randint(2, 64, (1, 60), generator=torch.Generator().manual_seed(0))
    rule = method_named(method)
    arm = arm_of(rule, 0.02 if rule.chooses else None)
    text = Text(model, backend_for(model, arm, kinds=[PackedBackend if packed else TorchBackend]))
    with torch.no_grad():
        text.read(ids[:, :20])
        return torch.cat([text.step(token) for token in ids[:, 20:].split(1, 1)], 1)


@pytest.mark.parametrize("method", CACHES, ids=lambda method: method.name)
def test_first_last_and_generated_tokens_are_exact(model: LlamaForCausalLM, method: Method) -> None:
    torch.testing.assert_close(continued(model, method, False), continued(model, "full", False), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", PACKED, ids=lambda method: method.name)
def test_they_are_exact_in_packed_caches_of_all_methods(model: LlamaForCausalLM, method: Method) -> None:
    """In float32; rounded to the formats of the blocks, they would move the logits by 1e-3 or more."""
    KERNELS.met() or KERNELS.skip()
    torch.testing.assert_close(continued(model, method, True), continued(model, "full", False), rtol=1e-5, atol=1e-5)


def attended(method: Method, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Outputs [R, D] of queries [R, D] over keys and values [L, D]."""
    layer = build_prefix(keys[None, None], values[None, None], torch.ones(1, L, dtype=torch.bool), ANCHORS)
    rows = arm_rows([Arm(method, 10.0)], len(queries), [L], ANCHORS, None, queries.device)
    return merge(prefix_terms(queries[None, None], None, layer, None, rows, 1.0))[0, 0]


@pytest.mark.parametrize("tail", [0, 1, 9, 62, 500])
def test_a_tail_is_exact_and_the_tokens_before_it_are_not(tail: int) -> None:
    """By single tokens: a query that sees one token alone returns its value, as it is or in 2 bits."""
    method = Method("mine", "", CacheOnly(Rotated(QuantisedScan(8, 16)), tail=tail), QuantisedValues(2, D))
    keys, values = random_tokens(L)
    keys = torch.nn.functional.normalize(keys, dim=-1)
    found = attended(method, 1e4 * keys, keys, values)
    exact = (found - values).abs().amax(-1) < 1e-9
    mid = range(ANCHORS.sink, L - ANCHORS.tail)
    expected = [i not in mid or i >= mid.stop - tail for i in range(L)]
    assert exact.tolist() == expected


def test_outliers_at_the_ends_do_not_coarsen_other_keys() -> None:
    """As sinks have: keys a thousand times as large as their neighbours in a block."""
    keys, values = random_tokens(L)
    queries = torch.randn(3, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    away = keys.clone()
    away[[*range(ANCHORS.sink), *range(L - ANCHORS.tail, L)]] -= 1000 * torch.sign(queries[0])
    for method in (Method("mine", "", CacheOnly(QuantisedScan(4, 16)), QuantisedValues(4, D)), *CACHES):
        selector = method.selector
        mid = (torch.arange(L) >= ANCHORS.sink) & (torch.arange(L) < L - ANCHORS.tail)
        one, other = (selector.prepare(x, mid) for x in (keys, away))
        assert torch.equal(one.step, other.step) and torch.equal(one.low, other.low)
        assert torch.equal(one.codes[mid], other.codes[mid])


@pytest.mark.parametrize("highest", ["mid-region", "anchor"])
@pytest.mark.parametrize("bound", [1e-6, 1e-3, 0.1, 0.9])
def test_values_below_the_bound_count_in_the_mass_alone(bound: float, highest: str) -> None:
    """The bound is on e^(s - m), m the largest score of the prompt, be it an anchor's or not."""
    scan, residual = QuantisedScan(8, 16), QuantisedValues(8, D, bound)
    keys, values = random_tokens(L)
    queries = 3 * torch.randn(4, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mid = (torch.arange(L) >= ANCHORS.sink) & (torch.arange(L) < L - ANCHORS.tail)
    for query in queries:
        moved = keys.clone()
        if highest == "anchor":
            moved[1] = 2 * keys[(keys @ query).argmax()]
        found = attended(Method("mine", "", CacheOnly(scan), residual), query[None], moved, values)[0]
        scanned = restored(scan.prepare(moved, mid), 16, torch.float64) @ query
        scores = torch.where(mid, scanned, moved @ query)
        assert highest == "mid-region" or not mid[scores.argmax()]
        codes = residual.prepare(moved, values, mid)
        stored = codes.low + codes.codes.double() * codes.step.double()
        top, numerator, mass = float(scores.max()), torch.zeros(D, dtype=torch.float64), 0.0
        for i in range(L):
            weight = math.exp(float(scores[i]) - top)
            mass += weight
            if not mid[i]:
                numerator += weight * values[i]
            elif weight > bound:
                numerator += weight * stored[i]
        torch.testing.assert_close(found, numerator / mass, rtol=1e-9, atol=1e-9)


def test_a_larger_bound_is_farther_from_the_cache_that_reads_every_value() -> None:
    keys, values = random_tokens(L)
    queries = 3 * torch.randn(8, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    whole = attended(Method("cache", "", CacheOnly(QuantisedScan(8)), QuantisedValues(8)), queries, keys, values)
    gaps = []
    for bound in (1e-9, 1e-4, 1e-2, 0.3):
        method = Method("mine", "", CacheOnly(QuantisedScan(8)), QuantisedValues(8, bound=bound))
        gaps.append(float((attended(method, queries, keys, values) - whole).abs().max()))
    assert gaps[0] < 1e-6 and gaps == sorted(gaps) and gaps[-1] > 100 * gaps[1]
