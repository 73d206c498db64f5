"""Attention sinks against attention written out in float64, one head and one token at a time."""

from __future__ import annotations

import math

import pytest
import torch
from tests.unit.core import reference
from torch import Tensor, nn

from residual_mass.core.accounting import Terms, exact_terms, merge, sink_terms
from residual_mass.core.settings import AnchorSpec
from residual_mass.methods import method_named
from residual_mass.methods.arms import Arm
from residual_mass.model.hook import Window, exact_attention
from residual_mass.model.partial import PartialSession

HEADS, GROUPS, D, SCALE = 4, 2, 8, 0.3


class Layer(nn.Module):
    """As gpt-oss has them, of full attention."""

    def __init__(self, sinks: Tensor | None) -> None:
        super().__init__()
        self.layer_idx, self.num_key_value_groups, self.sinks = 0, GROUPS, sinks
        self.config = type("Config", (), {"layer_types": ["full_attention"]})()


def attention(query: Tensor, keys: Tensor, values: Tensor, sink: float, tokens: list[int]) -> list[float]:
    """One head's output over some tokens and the sink, in float64."""
    query, keys, values = (x.double().tolist() for x in (query, keys, values))
    weights = [math.exp(SCALE * reference.dot(query, keys[i])) for i in tokens]
    mass = sum(weights) + math.exp(sink)
    return [sum(w * values[i][d] for w, i in zip(weights, tokens, strict=True)) / mass for d in range(len(values[0]))]


def inputs(rows: int, length: int, width: int = D, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    torch.manual_seed(length)
    shapes = ((2, HEADS, rows, D), (2, HEADS // GROUPS, length, D), (2, HEADS // GROUPS, length, width))
    return *(torch.randn(shape, dtype=dtype) for shape in shapes), torch.tensor([-2.0, 0.5, 3.0, 30.0], dtype=dtype)


@pytest.mark.parametrize("width", [D, 5])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("rows", "length"), [(1, 1), (1, 9), (9, 9)])
def test_exact_attention_is_that_of_every_token_and_the_sink(rows: int, length: int, masked: bool, width: int) -> None:
    query, key, value, sinks = inputs(rows, length, width)
    mask = torch.ones(2, 1, length, length, dtype=torch.bool).tril()[:, :, -rows:]
    if masked and length > 1:
        mask[1, :, :, 0] = False
        mask[1, :, 0, 0] = rows == length  # a row of padding alone would be undefined without sinks
    ours = exact_attention(Layer(sinks), query, key, value, mask if masked else None, SCALE)
    assert ours.shape == (2, rows, HEADS, width)
    for b in range(2):
        for h in range(HEADS):
            for row in range(rows):
                tokens = mask[b, 0, row].nonzero().flatten().tolist()
                heads = query[b, h, row], key[b, h // GROUPS], value[b, h // GROUPS]
                expected = torch.tensor(attention(*heads, float(sinks[h]), tokens))
                torch.testing.assert_close(ours[b, row, h], expected, rtol=1e-5, atol=1e-6)


def test_a_sink_is_a_token_without_a_value() -> None:
    """Its logit may be far from the scores on either side."""
    torch.manual_seed(0)
    scores, values = torch.randn(3, 6, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    seen = torch.ones(6, dtype=torch.bool)
    for sinks in (torch.tensor([-900.0, 0.3, 900.0]).double(), torch.zeros(3).double()):
        ours = merge(exact_terms(scores, values, seen), sink_terms(sinks))
        weights = torch.cat((scores, sinks[:, None]), 1).softmax(-1)
        torch.testing.assert_close(ours, weights[:, :-1] @ values, rtol=1e-12, atol=1e-12)
    nothing = Terms(torch.zeros(3, 4), torch.zeros(3), torch.zeros(3))
    assert torch.equal(merge(nothing, sink_terms(torch.zeros(3))), torch.zeros(3, 4))


def test_a_decode_step_reads_its_tokens_and_the_sink() -> None:
    query, key, value, sinks = inputs(1, 31)
    session = PartialSession(Arm(method_named("topk"), 40.0), AnchorSpec(2, 3))
    layer = Layer(sinks)
    session(layer, torch.randn(2, HEADS, 30, D), key[:, :, :30], value[:, :, :30], None, SCALE)
    ours = session(layer, query, key, value, None, SCALE)
    for b in range(2):
        for h in range(HEADS):
            heads = query[b, h, 0], key[b, h // GROUPS], value[b, h // GROUPS]
            scores = [SCALE * reference.dot(heads[0].tolist(), k) for k in heads[1].tolist()]
            anchors, mid = reference.split(30, 2, 3)
            tokens = [*anchors, *reference.top(scores, mid, 12 - 5), 30]
            expected = torch.tensor(attention(*heads, float(sinks[h]), tokens))
            torch.testing.assert_close(ours[b, 0, h], expected, rtol=1e-5, atol=1e-6)


def test_windows_start_where_transformers_masks_do() -> None:
    from transformers.masking_utils import chunked_overlay, sliding_window_overlay

    keys, queries = torch.arange(20), torch.arange(20)[:, None]
    sliding = sliding_window_overlay(7)(0, 0, queries, keys)
    chunked = chunked_overlay(7, torch.zeros(1, dtype=torch.long))(0, 0, queries, keys)
    causal = keys <= queries
    assert torch.equal(keys >= Window(7).first(queries), sliding)
    assert torch.equal((keys >= Window(7, chunked=True).first(queries)) & causal, chunked & causal)
