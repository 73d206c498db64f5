"""Selectors against explicit selections in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from residual_mass.core.moments import clusters_of
from residual_mass.methods import (
    METHODS,
    CacheOnly,
    Channels,
    Pages,
    PerGroup,
    QuantisedScan,
    Rotated,
    Selector,
    TopK,
    WholeClusters,
)
from residual_mass.methods.interface import Layout

L, D = 70, 6
MID = (torch.arange(L) >= 3) & (torch.arange(L) < 66)


def problem(seed: int = 0, rows: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(L, D, generator=generator, dtype=torch.float64) * torch.logspace(-1, 1, D, dtype=torch.float64)
    return torch.randn(rows, D, generator=generator, dtype=torch.float64), keys


def chosen(
    selector: Selector,
    queries: Tensor,
    keys: Tensor,
    k: int,
    mid: Tensor = MID,
    layout: Layout | None = None,
) -> tuple[list[set[int]], Tensor]:
    wanted = torch.full((len(queries),), k)
    state = selector.prepare(keys, mid)
    layout = layout or Layout(len(queries))
    read, threshold, _ = selector.select(queries, queries @ keys.T, state, mid[None], wanted, layout)
    return [set(read.indices[row][read.valid[row]].tolist()) for row in range(len(queries))], threshold


def scores_of(selector: Selector, query: Tensor, keys: Tensor) -> dict[int, float]:
    """What the tokens of the mid-region are chosen by, written out."""
    inside = [i for i in range(L) if MID[i]]
    if isinstance(selector, Channels):
        mean = keys[MID].mean(0)
        axes = torch.linalg.svd(keys[MID] - mean).Vh[: selector.channels]
        offsets = {i: sum(float(axis @ query) * float(axis @ (keys[i] - mean)) for axis in axes) for i in inside}
        return {i: float(query @ mean) + offset for i, offset in offsets.items()}
    scores = {}
    if isinstance(selector, WholeClusters):
        part = clusters_of(keys, MID, selector.size)
        groups = [(part == p).nonzero().flatten().tolist() for p in part.unique().tolist() if p >= 0]
    else:
        size = selector.size if isinstance(selector, Pages) else selector.block
        groups = [[i for i in range(start, min(start + size, L)) if MID[i]] for start in range(0, L, size)]
    for own in filter(None, groups):
        low, high = keys[own].amin(0), keys[own].amax(0)
        if isinstance(selector, WholeClusters):
            scores |= dict.fromkeys(own, float(keys[own].mean(0) @ query))
        elif isinstance(selector, Pages):
            bound = sum(max(float(q * a), float(q * b)) for q, a, b in zip(query, low, high, strict=True))
            scores |= dict.fromkeys(own, bound)
        else:
            low, steps = low.bfloat16().double(), 2**selector.bits - 1
            step = ((high - low) / steps).bfloat16().double()
            codes = {i: ((keys[i] - low) / step).round().clamp(0, steps) for i in own}
            scores |= {i: float(query @ (low + step * code)) for i, code in codes.items()}
    return scores


SCANS = [*(QuantisedScan(bits, block=16) for bits in (8, 4, 3, 2, 1)), *map(Channels, (1, 2, D, 50))]


@pytest.mark.parametrize("k", [1, 7, 19])
@pytest.mark.parametrize("selector", [*SCANS, Pages(8), WholeClusters(8)], ids=str)
def test_the_tokens_of_the_highest_scores_are_read(selector: Selector, k: int) -> None:
    """Pages and clusters whole. The threshold is the last score by which a token was chosen; where these are not of
    tokens, the least exact one.
    """
    queries, keys = problem(8)
    sets, threshold = chosen(selector, queries, keys, k)
    for row, query in enumerate(queries):
        scores = scores_of(selector, query, keys)
        read = sorted(scores, key=lambda i: (-scores[i], i))[:k]
        if selector in SCANS:  # tokens of equal codes tie
            assert sorted(scores[i] for i in sets[row]) == pytest.approx(sorted(scores[i] for i in read))
            assert float(threshold[row]) == pytest.approx(scores[read[-1]])
        else:
            assert sets[row] == set(read)
            assert float(threshold[row]) == pytest.approx(min(float(keys[i] @ query) for i in read))


BY_BLOCKS = (QuantisedScan(4, block=16), Pages(8), Rotated(QuantisedScan(2, block=16)))


@pytest.mark.parametrize("selector", BY_BLOCKS, ids=str)
def test_a_state_that_tokens_join_one_by_one_is_that_made_at_once(selector: Selector) -> None:
    """The last anchors move along, so that a column joins the mid-region some steps after it came."""
    _, keys = problem()
    tail = 3

    def mid_of(length: int) -> Tensor:
        return (torch.arange(length) >= 3) & (torch.arange(length) < length - tail)

    state = selector.prepare(keys[:21], mid_of(21))
    for length in range(22, L + 1):
        state = selector.update(state, keys[:length], mid_of(length), length - 1 - tail)
        for ours, theirs in zip(state, selector.prepare(keys[:length], mid_of(length)), strict=True):
            assert torch.equal(ours, theirs)


def test_principal_channels_stay_when_tokens_join_and_these_make_clusters_of_their_own() -> None:
    _, keys = problem()
    first, grown, _ = joined(Channels(3), keys)
    torch.testing.assert_close(grown[2], (keys - keys[:50][MID[:50]].mean(0)) @ first[1])
    first, grown, new = joined(WholeClusters(8), keys)
    assert torch.equal(grown[0], torch.cat((first[0], new[0])))
    assert torch.equal(grown[1], torch.cat((first[1][:45], new[1] + len(first[0]))))


def joined(selector: Selector, keys: Tensor) -> tuple[Any, Any, Any]:
    """Summaries of the first 50 tokens, of all after the others joined, and of the last 25."""
    first = selector.prepare(keys[:50], MID[:50])
    return first, selector.update(first, keys, MID, 45), selector.prepare(keys[45:], MID[45:])


@pytest.mark.parametrize("heads", [1, 3, 4, 8])
def test_a_group_reads_what_its_heads_attend_to_most_together(heads: int) -> None:
    """Rows of two arms, by head and then by token."""
    tokens = 3
    queries, keys = problem(10, rows=2 * heads * tokens)
    sets, _ = chosen(PerGroup(TopK()), queries, keys, 7, layout=Layout(heads, tokens))
    scores = (queries @ keys.T).masked_fill(~MID, -torch.inf).softmax(-1)
    for arm in range(2):
        for token in range(tokens):
            rows = [(arm * heads + head) * tokens + token for head in range(heads)]
            best = sum(scores[row] for row in rows).topk(7).indices.tolist()
            assert all(sets[row] == set(best) for row in rows)
    if heads == 1:
        assert sets == chosen(TopK(), queries, keys, 7)[0]


@pytest.mark.parametrize("width", [1, 2, 6, 64, 96])
def test_rotation_leaves_exact_scores_as_they_are(width: int) -> None:
    keys, queries = torch.randn(2, 40, width, generator=torch.Generator().manual_seed(0)).double()
    scores, inside, none = queries[:3] @ keys.T, torch.ones(40, dtype=torch.bool), torch.zeros(1, 1).long()
    for selector in (QuantisedScan(8, 40), Rotated(QuantisedScan(8, 40))):
        found = selector.select(queries[:3], scores, selector.prepare(keys, inside), inside, none, Layout(3))
        torch.testing.assert_close(found.scanned, scores, rtol=0.05, atol=0.1 * width**0.5)


SELECTORS = [
    *dict.fromkeys(one.selector for one in METHODS if one.selector and not isinstance(one.selector, CacheOnly)),
    Rotated(QuantisedScan(4)), QuantisedScan(8), PerGroup(QuantisedScan(2)),
    Pages(200), WholeClusters(200), QuantisedScan(4, block=200),  # one page for all
]  # fmt: skip


@pytest.mark.parametrize("selector", SELECTORS, ids=str)
def test_nothing_everything_ties_and_an_empty_mid_region(selector: Selector) -> None:
    queries, keys = problem()
    inside = {i for i in range(L) if MID[i]}
    sets, threshold = chosen(selector, queries, keys, 0)
    assert sets == [set()] * 4 and threshold.isfinite().all()
    assert chosen(selector, queries, keys, len(inside))[0] == [inside] * 4
    assert chosen(selector, queries, keys, 500)[0] == [inside] * 4
    equal = chosen(selector, queries, keys[:1].expand(L, D), 5)[0]
    assert all(len(row) == 5 and row <= inside for row in equal)
    nobody, threshold = chosen(selector, queries, keys, 3, MID & False)
    assert nobody == [set()] * 4 and threshold.isfinite().all()
