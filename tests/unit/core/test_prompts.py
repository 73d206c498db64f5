"""Prompts read in part, against a float64 reference written query by query and token by token."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from residual_mass.core.prompts import PromptCut, attention_in_part, weight_threshold

CUTS = [
    PromptCut(block=8, window=4, sink=2, part=16),
    PromptCut(block=8, window=0, sink=0, part=5),
    PromptCut(block=13, window=20, sink=3, part=1),
    PromptCut(block=16, window=4, sink=40, part=64),
    PromptCut(block=1, window=4, sink=2, part=16),
    PromptCut(block=200, window=4, sink=2, part=16),
    PromptCut(block=8, window=4, sink=2, part=0),
]
THRESHOLDS = [(1 + step / 4) * 2.0**-octave for octave in range(24, 0, -1) for step in range(4)] + [1.0, 1.25]


def drawn(length: int, seed: int = 0, spread: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(length, 6, generator=draw, dtype=torch.float64) * spread for _ in range(3))


def reference(queries: Tensor, keys: Tensor, values: Tensor, scale: float, left: float, cut: PromptCut) -> Tensor:
    """Outputs [L, D]: each block chooses its tokens, then each query sums its terms one after the other."""
    q, k, v = (x.numpy() for x in (queries, keys, values))
    outputs = np.zeros_like(v)
    for start in range(0, len(q), cut.block):
        end = min(len(q), start + cut.block)
        mean = q[start:end].mean(0)
        weights = [math.exp(scale * float(mean @ k[i])) for i in range(end)]
        middle = [i for i in range(cut.sink, start - cut.window)]
        highest = 0.0
        for factor in THRESHOLDS:
            threshold = factor * max(weights)
            if math.fsum(weights[i] for i in middle if weights[i] < threshold) <= left * math.fsum(weights):
                highest = threshold
        unread = {i for i in middle if weights[i] < highest}
        for t in range(start, end):
            terms = [(math.exp(scale * float(q[t] @ k[i])), v[i]) for i in range(t + 1) if i not in unread]
            for first in range(0, end if cut.part else 0, cut.part or 1):
                part = sorted(unread & set(range(first, first + cut.part)))
                mass = math.fsum(weights[i] for i in part)
                if part:
                    key, value = (sum(weights[i] * x[i] for i in part) / mass for x in (k, v))
                    terms.append((mass * math.exp(scale * float((q[t] - mean) @ key)), value))
            outputs[t] = sum(weight * value for weight, value in terms) / math.fsum(weight for weight, _ in terms)
    return torch.from_numpy(outputs)


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("left", [0.02, 0.3, 1.0])
def test_a_prompt(cut: PromptCut, left: float) -> None:
    for length in (1, 61):
        prompt = drawn(length)
        torch.testing.assert_close(
            attention_in_part(*prompt, 0.7, left, cut), reference(*prompt, 0.7, left, cut), rtol=1e-11, atol=1e-11
        )


def test_leading_dimensions_are_free() -> None:
    prompts = [drawn(40, seed) for seed in range(6)]
    together = attention_in_part(*(torch.stack(x).unflatten(0, (2, 3)) for x in zip(*prompts, strict=True)), 0.7, 0.1)
    for prompt, output in zip(prompts, together.flatten(0, 1), strict=True):
        torch.testing.assert_close(output, attention_in_part(*prompt, 0.7, 0.1))


def test_nothing_left_is_full_attention() -> None:
    queries, keys, values = drawn(61)
    output = attention_in_part(queries, keys, values, 0.7, 0.0, CUTS[0])
    scores = (queries @ keys.T * 0.7).masked_fill(torch.ones(61, 61).triu(1).bool(), -math.inf)
    torch.testing.assert_close(output, scores.softmax(-1) @ values)


def test_one_key_again_and_again_is_read_whole_or_not_at_all_and_either_is_exact() -> None:
    """The pseudo-token of equal keys is that key, and its value their mean; nothing is lost."""
    queries, keys, values = drawn(61)
    same = keys[:1].expand_as(keys)
    means = values.cumsum(0) / torch.arange(1, 62)[:, None]
    for left in (0.0, 0.5, 1.0):
        torch.testing.assert_close(attention_in_part(queries, same, values, 0.7, left, CUTS[0]), means)


def test_equal_queries_get_exact_outputs() -> None:
    """The residual is exact for the mean query, whatever is read."""
    queries, keys, values = drawn(61)
    queries = queries[:1].expand_as(queries)
    for left in (0.1, 1.0):
        expected = torch.stack([(queries[0] @ keys[: t + 1].T * 0.7).softmax(0) @ values[: t + 1] for t in range(61)])
        torch.testing.assert_close(attention_in_part(queries, keys, values, 0.7, left, CUTS[0]), expected)


def test_thresholds() -> None:
    weights = torch.tensor([1.0, 0.5, 0.25, 0.25, 0.1, 0.0], dtype=torch.float64)
    middle = torch.tensor([False, True, True, True, True, True])
    for left, expected in ((0.0, 0.09375), (0.04, 0.09375), (0.05, 0.25), (0.2, 0.25), (0.3, 0.5), (0.6, 1.25)):
        assert weight_threshold(weights, middle, left).item() == expected
    assert weight_threshold(torch.ones(4), torch.ones(4).bool(), 0.9).item() == 1.0


def test_float32_and_extreme_scores() -> None:
    prompt = drawn(61, spread=4.0)
    expected = attention_in_part(*prompt, 3.0, 0.1, CUTS[0])
    single = attention_in_part(*(x.float() for x in prompt), 3.0, 0.1, CUTS[0])
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), expected, rtol=1e-3, atol=1e-3)
