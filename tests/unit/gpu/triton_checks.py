"""Checks of the Triton kernels, under the interpreter and on a GPU; `test_triton.py` runs them in processes of
their own, because the interpreter must be chosen before Triton is imported. Tests of `step_checks.py` run here too.

Scratch memory, padding and unused columns of the problems are poisoned throughout.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from step_checks import *  # noqa: F403  # its tests run here with the fixture below
from step_checks import Decode, close
from step_problems import (
    METHODS,
    DecodeProblem,
    attention_in_float64,
    mid_columns,
    selecting_scores,
)
from tests.unit.core.test_selection import hostile_scores
from torch import Tensor
from torch.utils._pytree import tree_map_only
from triton_fixtures import poisoned_scratch, small_blocks  # noqa: F401

from residual_mass.core import rel_l1
from residual_mass.core.feature_maps import FoldedMap, ReZeroMap
from residual_mass.gpu import path
from residual_mass.gpu.cache import DecodeCache
from residual_mass.gpu.path import Launches, QueryMap, Region, Selection, decode_attention
from residual_mass.gpu.selection import SUB
from residual_mass.methods import QuantisedScan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def decode() -> Decode:
    return lambda arguments: decode_attention(**moved(arguments)).cpu()


@pytest.fixture(autouse=True)
def some_small_blocks(request: pytest.FixtureRequest) -> None:
    """In half of the tests of every method; the others have blocks larger than the problem."""
    if request.node.originalname in ("test_a_step_is_that_of_every_column_in_float64", "test_where_all_scores_tie"):
        request.getfixturevalue("small_blocks")


def moved(x: Any) -> Any:
    """Arguments of decode_attention, or parts of them, on the device at hand."""
    return tree_map_only(Tensor, lambda part: part.to(DEVICE), x)


def test_a_float32_query_is_not_rounded_to_the_type_of_the_cache(decode: Decode) -> None:
    p = DecodeProblem(seed=3, spans=[(0, 40)], length=40, d=16, dtype=torch.bfloat16)
    p.query = p.query.float() * 1.001
    close(decode, p, 7, "topk_phi")


@pytest.mark.parametrize(
    ("batch", "d", "inner", "features"), [(1, 64, 512, 64), (3, 128, 100, 64), (17, 16, 24, 32), (40, 32, 64, 16)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_terms_of_maps_add_up_to_the_folded_maps(
    dtype: torch.dtype, batch: int, d: int, inner: int, features: int
) -> None:
    """Of weights that have been rounded; rows beyond 16, and inner channels that fill no block."""
    torch.manual_seed(batch)
    rezero = ReZeroMap(5, d, inner, features).requires_grad_(False)
    rezero.alpha.normal_()
    folded = rezero.fold()
    query = torch.randn(batch, 5, d).to(dtype)
    terms = QueryMap(rezero.to(DEVICE).fold(), dtype)(query.to(DEVICE)).cpu()
    assert terms.shape[1:] == (batch, 5, features) and terms.dtype == torch.float32
    rounded = FoldedMap(*(x.to(dtype).double() for x in (folded.a, folded.b, folded.c)), folded.c_bias, folded.e_bias)
    rounded.c_bias, rounded.e_bias = rounded.c_bias.double(), rounded.e_bias.double()
    expected = rounded(query.double().transpose(0, 1)).transpose(0, 1)
    exact = 1e-5 if DEVICE == "cpu" or dtype == torch.float32 else 1e-2  # tensor cores take rounded inner channels
    torch.testing.assert_close(terms.sum(0).double(), expected, rtol=exact, atol=exact)


@pytest.mark.parametrize("method", ["topk_phi", "topk_phi_nosub"])
def test_a_step_adds_up_terms_of_log_features(decode: Decode, method: str) -> None:
    p = DecodeProblem(seed=2, spans=[(0, 40), (5, 31)], length=40, d=16, dtype=torch.float32)
    arguments = p.arguments(7, method)
    terms = torch.randn(3, *arguments["log_query"].shape)
    terms[2] = arguments["log_query"] - terms[:2].sum(0)
    torch.testing.assert_close(decode(arguments | {"log_query": terms}), decode(arguments), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("groups", "d"), [(3, 64), (4, 64), (8, 128)])
@pytest.mark.parametrize("method", ["topk", "scan"])
def test_maxima_are_those_of_the_mid_regions_scores(method: str, groups: int, d: int) -> None:
    real = [(5, 290), (0, 271), (150, 155)]
    p = DecodeProblem(seed=9, spans=real, length=293, groups=groups, d=d)
    arguments = moved(p.arguments(7, method))
    query, cache = arguments["query"], arguments["cache"]
    generated = torch.tensor([p.generated], dtype=torch.int32, device=DEVICE)
    step = Launches(query, cache, Region(7, p.sink, p.tail), p.scale, generated)
    scores, maxima = step.scan() if method == "scan" else step.score()
    spans = [(first + p.sink, last - p.tail) for first, last in real for _ in range(query.shape[1])]
    assert torch.equal(maxima.cpu(), maxima_of(scores.cpu(), spans))


def rising(scores: Tensor) -> Tensor:
    """Integers of the same order; NaN lies beyond the infinities, on the side of its sign."""
    bits = scores.contiguous().view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def maxima_of(scores: Tensor, spans: list[tuple[int, int]]) -> Tensor:
    """The highest key of every group of columns within a row's span: [rows, groups]."""
    column = torch.arange(scores.shape[1])
    inside = torch.stack([(column >= first) & (column < last) for first, last in spans])
    lowest = torch.iinfo(torch.int32).min
    return torch.where(inside, rising(scores), lowest).unflatten(-1, (-1, SUB.value)).amax(-1)


SINK, TAIL = 2, 3


@pytest.mark.parametrize("k", [0, 1, 6, 48, 200, 700])
@pytest.mark.parametrize("chunk", [32, 4096])
def test_selects_the_first_of_what_ties_in_rows_with_and_without_padding(
    chunk: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of given scores, which cross chunks of maxima, of groups and of columns where these are short; NaN has its place
    in the order of bits. The rows have 47, 25, 10 and 1 groups, the last one without a mid-region.
    """
    monkeypatch.setattr(path, "SELECT_CHUNK", chunk)
    length, spans = 743, [(0, 743), (301, 700), (37, 190), (400, 406), (100, 104)]
    of_any = torch.randn(length, generator=torch.Generator().manual_seed(11))
    nan = torch.where(of_any > 1, torch.nan, of_any).where(of_any > -1, -torch.nan)
    rows = torch.stack([*hostile_scores(length).values(), nan])
    scores = torch.full((len(spans), len(rows), -(-length // SUB.value) * SUB.value), torch.nan)
    mids = [(first + SINK, last - TAIL) for first, last in spans]
    for row, (begin, end) in enumerate(mids):
        scores[row, :, begin:end] = rows[:, begin:end]
    scores = scores.flatten(0, 1)
    each = [mid for mid in mids for _ in rows]
    maxima = maxima_of(scores, each)
    first, last = torch.tensor(spans, dtype=torch.int32).T.contiguous().to(DEVICE)
    buffer = torch.empty(len(spans), 1, length, 16, device=DEVICE)
    cache, region = DecodeCache(buffer, buffer, first, last, length), Region(min(k, length), SINK, TAIL)
    step = Launches(torch.empty(len(spans), len(rows), 16, device=DEVICE), cache, region, 1.0)
    selection = step.select(scores.to(DEVICE), maxima.to(DEVICE))
    wanted = [max(min(k, end - begin), 0) for begin, end in each]
    least = selection.least.cpu()
    for row, columns in enumerate(retrieved_columns(selection, wanted)):
        begin, end = each[row]
        order = rising(scores[row, begin : max(end, begin)]).sort(descending=True, stable=True).indices + begin
        assert columns == order[: wanted[row]].sort().values.tolist(), row
        if end > begin:
            assert rising(least)[row] == rising(scores[row])[order[max(wanted[row], 1) - 1]], row


def retrieved_columns(selection: Selection, wanted: list[int]) -> list[list[int]]:
    """Columns by query head."""
    return [columns[:n] for columns, n in zip(selection.chosen.tolist(), wanted, strict=True)]


def check_step(arguments: dict[str, object]) -> None:
    """A step on the device against float64 arithmetic on the very tokens that it retrieved, and these against the
    scores in float64.

    Two roundings may take different tokens of a near-tie, and both are right; so outputs of two implementations prove
    nothing where they differ, but a selection is right or wrong up to the rounding of its scores.
    """
    query, cache, mid = arguments["query"], arguments["cache"], mid_columns(arguments)
    k, sink, tail, scale = (arguments[name] for name in ("k", "sink", "tail", "scale"))
    wanted = mid.sum(-1).clamp(max=k).repeat_interleave(query.shape[1])
    generated = torch.tensor([arguments["generated"]], dtype=torch.int32, device=DEVICE)
    step = Launches(query, cache, Region(min(k, cache.length), sink, tail), scale, generated)
    selection = step.select(*(step.score() if cache.scan is None else step.scan()))
    chosen = torch.zeros(len(wanted), cache.length, dtype=torch.bool)
    for row, columns in enumerate(retrieved_columns(selection, wanted.tolist())):
        assert len(set(columns)) == len(columns) == wanted[row]
        chosen[row, columns] = True
    chosen = chosen.to(query.device).unflatten(0, query.shape[:2])
    assert not (chosen & ~mid[:, None]).any()
    scores, magnitudes = selecting_scores(arguments), selecting_scores(arguments, magnitudes=True)
    rounding = magnitudes.where(mid[:, None], 0) * query.shape[-1] * 2.0**-23
    lowest = (scores + rounding).masked_fill(~chosen, torch.inf).amin(-1)
    highest = (scores - rounding).masked_fill(chosen | ~mid[:, None], -torch.inf).amax(-1)
    assert (highest <= lowest).all(), "a token left out scores more than one taken, beyond the rounding of their sums"
    assert rel_l1(decode_attention(**arguments).double(), attention_in_float64(arguments, chosen)).max() < 1e-4


@pytest.mark.parametrize(("groups", "d", "features"), [(4, 64, 64), (3, 128, 64)], ids=["1B", "3B"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("method", METHODS)
def test_a_step_is_right_given_what_it_selects(
    method: str, dtype: torch.dtype, groups: int, d: int, features: int
) -> None:
    p = DecodeProblem(
        seed=14, spans=[(9, 300), (0, 280)], length=310, groups=groups, kv_heads=1, d=d, features=features, dtype=dtype
    )
    for k in (0, 21, 400):
        check_step(moved(p.arguments(k, method)))


def test_near_ties_are_right_either_way() -> None:
    """Keys a rounding apart: float64 may want others than float32, and the check must not mind."""
    p = DecodeProblem(seed=15, spans=[(0, 200)], length=200, d=64, groups=2, kv_heads=1, dtype=torch.float32)
    p.cache.keys[:] = p.cache.keys[:, :, :1]
    noise = torch.randn(p.cache.keys.shape, generator=torch.Generator().manual_seed(1))
    p.cache.keys.add_(noise * 2.0**-22)
    check_step(moved(p.arguments(20, "topk_phi")))


@pytest.mark.gpu
@pytest.mark.parametrize(("groups", "d", "features"), [(4, 64, 64), (3, 128, 64), (4, 128, 128), (3, 64, 32)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled_kernels_at_full_size(dtype: torch.dtype, groups: int, d: int, features: int) -> None:
    p = at_full_size(groups, d, features, dtype)
    for method in METHODS:
        check_step(p.arguments(181, method))
    for k in (0, 2602, 30_000):
        check_step(p.arguments(k, "topk_phi"))


def at_full_size(
    groups: int, d: int, features: int, dtype: torch.dtype, length: int = 20_011, kv_heads: int = 8
) -> DecodeProblem:
    return DecodeProblem(
        d + features, [(0, length - 300), (length // 3, length)], length, groups=groups, kv_heads=kv_heads, d=d,
        features=features, sink=4, tail=16, generated=5, room=37, dtype=dtype, scan=QuantisedScan(4), device=DEVICE,
    )  # fmt: skip


@pytest.mark.gpu
def test_a_step_repeats_to_the_bit_also_from_a_cuda_graph() -> None:
    arguments = at_full_size(4, 64, 64, torch.bfloat16).arguments(181, "topk_phi")
    new = {name: torch.randn_like(arguments[name]) for name in ("query", "log_query")}
    expected = [decode_attention(**arguments), decode_attention(**arguments | new)]
    assert torch.equal(decode_attention(**arguments), expected[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_attention(**arguments)
    graph.replay()
    assert torch.equal(out, expected[0])
    for name, x in new.items():
        arguments[name].copy_(x)
    graph.replay()
    assert torch.equal(out, expected[1])


@pytest.mark.gpu
def test_offsets_beyond_32_bits() -> None:
    """The last KV head of the last row, and the same alone."""
    arguments = at_full_size(4, 128, 32, torch.bfloat16, length=2**20, kv_heads=9).arguments(181, "topk_phi")
    assert arguments["cache"].keys.numel() > 2**31
    ours = decode_attention(**arguments)[1:, -4:]
    cache = tree_map_only(Tensor, lambda x: (x[1:] if x.ndim == 1 else x[1:, -1:]).contiguous(), arguments["cache"])
    queries = {name: arguments[name][1:, -4:].contiguous() for name in ("query", "log_query")}
    small = arguments | queries | {"cache": cache}
    check_step(small)
    assert rel_l1(ours, decode_attention(**small)).max() < 1e-5
