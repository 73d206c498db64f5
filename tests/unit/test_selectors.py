"""Selectors against selections written out, in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from residual_mass.core.accounting import exact_terms
from residual_mass.methods import METHODS, Pages, QuantisedScan, Selector, TopK

L, D = 70, 6
MID = (torch.arange(L) >= 3) & (torch.arange(L) < 66)


def problem(seed: int = 0, rows: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(L, D, generator=generator, dtype=torch.float64) * torch.logspace(-1, 1, D, dtype=torch.float64)
    return torch.randn(rows, D, generator=generator, dtype=torch.float64), keys


def chosen(
    selector: Selector, queries: Tensor, keys: Tensor, k: int, mid: Tensor = MID
) -> tuple[list[set[int]], Tensor]:
    wanted = torch.full((len(queries),), k)
    state = selector.prepare(keys, mid)
    read, threshold = selector.select(queries, queries @ keys.T, state, mid[None], wanted)
    return [set(read.indices[row][read.valid[row]].tolist()) for row in range(len(queries))], threshold


@pytest.mark.parametrize("bits", [8, 4, 3, 2, 1])
def test_a_scan_is_top_k_of_quantised_keys(bits: int) -> None:
    queries, keys = problem(bits)
    selector = QuantisedScan(bits, block=16)
    scanned = torch.full((len(queries), L), -torch.inf, dtype=torch.float64)
    for start in range(0, L, 16):
        inside = [i for i in range(start, min(start + 16, L)) if MID[i]]
        low = torch.stack([keys[i] for i in inside]).min(0).values.bfloat16()
        high = torch.stack([keys[i] for i in inside]).max(0).values
        step = ((high - low.double()) / (2**bits - 1)).bfloat16().double()
        for i in inside:
            code = ((keys[i] - low.double()) / step).round().clamp(0, 2**bits - 1)
            scanned[:, i] = queries @ (low.double() + step * code)
    for k in (1, 7):
        sets, threshold = chosen(selector, queries, keys, k)
        top = scanned.topk(k)
        assert sets == [set(row) for row in top.indices.tolist()]
        torch.testing.assert_close(threshold, top.values[:, -1])


def test_eight_bits_find_nearly_all_of_the_mass() -> None:
    """At least 0.995 of what the K best tokens hold, and more than two bits do."""
    queries, keys = problem(3, rows=40)
    scores = queries @ keys.T

    def mass(bits: int | None) -> Tensor:
        sets, _ = chosen(TopK() if bits is None else QuantisedScan(bits), queries, keys, 8)
        support = torch.tensor([[i in row for i in range(L)] for row in sets])
        return exact_terms(scores, keys, support).log_mass().exp()

    recall = {bits: float((mass(bits) / mass(None)).mean()) for bits in (8, 4, 2)}
    assert recall[8] >= 0.995 and recall[8] >= recall[4] > recall[2]


def test_a_whole_block_does_not_change_when_tokens_are_appended() -> None:
    _, keys = problem()
    selector, mid = QuantisedScan(4, block=16), torch.ones(L, dtype=torch.bool)
    whole, part = selector.prepare(keys, mid), selector.prepare(keys[:48], mid[:48])
    assert torch.equal(whole.codes[:48], part.codes) and torch.equal(whole.low[:3], part.low)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 30))
def test_page_bounds_are_never_below_a_score(seed: int, size: int) -> None:
    queries, keys = problem(seed)
    selector = Pages(size)
    bounds, scores = selector.bounds(queries, selector.prepare(keys, MID)), queries @ keys.T
    for token in range(L):
        if MID[token]:
            assert (scores[:, token] <= bounds[:, token // size] + 1e-9).all()


def test_pages_are_read_whole_in_the_order_of_their_bounds() -> None:
    queries, keys = problem(5)
    selector = Pages(8)
    sets, threshold = chosen(selector, queries, keys, 19)
    scores = queries @ keys.T
    for row, query in enumerate(queries):
        bounds = []
        for page in range(0, L, 8):
            own = [keys[i] for i in range(page, min(page + 8, L)) if MID[i]]
            low, high = (
                (torch.stack(own).amin(0), torch.stack(own).amax(0)) if own else (torch.zeros(D), torch.zeros(D))
            )
            bounds.append(sum(max(float(q * a), float(q * b)) for q, a, b in zip(query, low, high, strict=True)))
        order = sorted(range(len(bounds)), key=lambda page: -bounds[page])
        tokens = [i for page in order for i in range(8 * page, min(8 * page + 8, L)) if MID[i]]
        assert sets[row] == set(tokens[:19])
        assert float(threshold[row]) == min(float(scores[row, i]) for i in tokens[:19])


SELECTORS = list(dict.fromkeys(one.selector for one in METHODS if one.selector is not None))


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


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: QuantisedScan(9), "bits is 9, not between 1 and 8"),
        (lambda: QuantisedScan(4, block=0), "block is 0, not 1 or more tokens"),
        (lambda: Pages(0), "size is 0, not 1 or more tokens"),
    ],
)
def test_parameters_out_of_range_are_refused_in_one_line(make: object, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        make()
