"""The fused decode in torch against a reference that forms S_R token by token, in Python floats."""

from __future__ import annotations

import pytest
import torch
from fused_problems import MOMENTS, SCANS, DecodeProblem, nearly_all_retrieved, tolerance
from torch import Tensor

from residual_mass.core import rel_l1
from residual_mass.core.fused.one_part import one_part, one_part_terms
from residual_mass.core.fused.packed import packed, scanned_scores, unpacked
from residual_mass.core.fused.torch_path import decode_attention
from residual_mass.core.moments import truncated_parts
from residual_mass.core.selection import LONG_ROW, Selected, exhaustive_topk, largest, least_read, unordered_topk
from residual_mass.methods import Moments

METHODS = ["topk", "topk_phi", "topk_phi_nosub", *MOMENTS, *SCANS]
SPANS = {
    "whole rows": [(0, 24), (0, 24)],
    "left padding": [(7, 24), (0, 24)],
    "right padding": [(0, 24), (0, 15)],
    "no mid-region": [(20, 24), (3, 8)],
    "one token": [(23, 24), (0, 1)],
}


@pytest.mark.parametrize("k", [0, 1, 5, 19, 40])
@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize("method", METHODS)
def test_equals_the_token_by_token_reference(method: str, spans: str, k: int) -> None:
    p = DecodeProblem(seed=k, spans=SPANS[spans], length=24)
    ours = decode_attention(**p.arguments(k, method))
    assert rel_l1(ours.double(), p.expected(k, method)).max() < tolerance(method)


@pytest.mark.parametrize("k", [0, 5, 16])
@pytest.mark.parametrize(
    ("groups", "kv_heads", "sink", "tail", "generated"),
    [(1, 3, 3, 5, 1), (4, 1, 0, 4, 3), (4, 2, 6, 0, 4), (8, 1, 1, 1, 1)],
)
@pytest.mark.parametrize("method", METHODS)
def test_any_number_of_heads_anchors_and_generated_tokens(
    method: str, groups: int, kv_heads: int, sink: int, tail: int, generated: int, k: int
) -> None:
    p = DecodeProblem(
        seed=k + 30, spans=[(2, 24), (0, 21)], length=24, groups=groups, kv_heads=kv_heads, sink=sink, tail=tail,
        generated=generated,
    )  # fmt: skip
    ours = decode_attention(**p.arguments(k, method))
    assert rel_l1(ours.double(), p.expected(k, method)).max() < tolerance(method)


@pytest.mark.parametrize("method", METHODS)
def test_logits_far_beyond_what_float32_can_exponentiate(method: str) -> None:
    p = DecodeProblem(seed=5, spans=[(0, 24)], length=24, spread=6.0)
    ours = decode_attention(**p.arguments(4, method))
    assert rel_l1(ours.double(), p.expected(4, method)).max() < 1e-4


@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize("method", MOMENTS)
def test_moments_of_scores_of_a_huge_spread(method: str, k: int) -> None:
    """From about -10^4 to 10^4, which float32 knows to 1e-3."""
    p = DecodeProblem(seed=13, spans=[(0, 60)], length=60, d=16, spread=100.0, dtype=torch.float32)
    assert rel_l1(decode_attention(**p.arguments(k, method)).double(), p.expected(k, method)).max() < 5e-3


@pytest.mark.parametrize("k", [0, 1, 7, 18])
@pytest.mark.parametrize("method", MOMENTS)
def test_moments_where_all_scores_tie(method: str, k: int) -> None:
    """Copies of one token, half of which are below the cut: which of them are read makes no difference."""
    p = DecodeProblem(seed=14, spans=[(0, 24)], length=24)
    for buffer in (p.cache.keys, p.cache.values):
        buffer[:, :, p.sink : p.cache.length - p.tail] = buffer[:, :, p.sink, None]
    ours = decode_attention(**p.arguments(k, method))
    assert ours.isfinite().all()
    assert rel_l1(ours.double(), p.expected(k, method)).max() < 5e-3


@pytest.mark.parametrize("method", MOMENTS)
def test_moments_add_nothing_where_all_is_read(method: str) -> None:
    p = DecodeProblem(seed=15, spans=[(0, 24), (4, 20)], length=24)
    for k in (19, 40):
        ours, exact = (decode_attention(**p.arguments(k, name)) for name in (method, "topk"))
        torch.testing.assert_close(ours, exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("spread", [1e-3, 1.0, 30.0])
def test_one_part_is_a_special_case_of_several(spread: float) -> None:
    g = torch.Generator().manual_seed(3)
    keys, values, queries = (torch.randn(2, 3, n, 16, generator=g) * spread for n in (40, 40, 4))
    mid = torch.ones(2, 1, 40, dtype=torch.bool)
    mid[1] = False  # a row without tokens
    moments = Moments().prepare(keys, values, mid)
    for threshold in (-torch.inf, -spread, 0.0, spread, torch.inf):
        thresholds = torch.full((2, 3, 4), threshold)
        expected = truncated_parts(queries, moments, thresholds)
        ours = one_part_terms(queries, one_part(moments), thresholds)
        weights = torch.rand(2, 3, 4, 1, generator=g)
        torch.testing.assert_close(ours.log_mass, expected.log_mass, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            ours.values(weights, moments), expected.values(weights, moments), rtol=1e-4, atol=1e-5 * spread**3
        )
    assert one_part(Moments(2).prepare(keys, values, mid)) is None


@pytest.mark.parametrize(("groups", "d"), [(1, 64), (3, 128), (4, 64), (8, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", SCANS)
def test_scans_of_heads_of_llama(method: str, dtype: torch.dtype, groups: int, d: int) -> None:
    p = DecodeProblem(seed=d, spans=[(9, 100), (0, 83)], length=105, groups=groups, d=d, dtype=dtype)
    for k in (0, 11, 300):
        ours = decode_attention(**p.arguments(k, method))
        assert rel_l1(ours.double(), p.expected(k, method)).max() < max(1e-4, tolerance(method))


@pytest.mark.parametrize("method", SCANS)
def test_scans_of_one_token_again_and_again(method: str) -> None:
    """All scores tie, in the scan too."""
    p = DecodeProblem(seed=14, spans=[(0, 40)], length=40)
    for buffer in (p.cache.keys, p.cache.values):
        buffer[:, :, p.sink : p.cache.length - p.tail] = buffer[:, :, p.sink, None]
    for k in (0, 1, 20, 34):
        ours = decode_attention(**p.arguments(k, method))
        assert rel_l1(ours.double(), p.expected(k, method)).max() < 5e-3


def test_codes_that_tie_in_the_scan_and_not_in_truth() -> None:
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
        ours = decode_attention(**p.arguments(k, "scan, moments"))
        assert rel_l1(ours.double(), p.expected(k, "scan, moments")).max() < 2e-2


@pytest.mark.parametrize(("length", "block", "d"), [(24, 8, 2), (130, 64, 64), (64, 64, 128), (1, 16, 8)])
def test_packed_codes_are_those_that_were_packed(length: int, block: int, d: int) -> None:
    codes = torch.randint(0, 16, (2, 3, length, d), dtype=torch.uint8)
    scales = torch.zeros(2, 2, 3, -(-length // block), d, dtype=torch.bfloat16)
    keys = packed(codes, *scales, block)
    assert keys.codes.is_contiguous() and 2 * keys.codes.numel() == 2 * 3 * d * block * scales.shape[3]
    restored = unpacked(keys.codes).transpose(-1, -2).flatten(2, 3)
    assert torch.equal(restored[:, :, :length], codes) and not restored[:, :, length:].any()


@pytest.mark.parametrize("k", [1, 7, 60])
def test_the_scan_sees_the_scores_and_chooses_the_tokens_of_the_method(k: int) -> None:
    p = DecodeProblem(seed=17, spans=[(6, 100), (0, 93)], length=103, groups=4, d=64, dtype=torch.float32)
    arguments = p.arguments(k, "scan")
    cache = arguments["cache"]
    queries = p.query.unflatten(1, (2, -1)) * p.scale
    scores = scanned_scores(queries, cache.scan).flatten(1, 2)[..., : p.cache.length]
    for b, (first, last) in enumerate(p.spans):
        for h in range(8):
            columns, threshold, expected = p.chosen(b, h, k)
            mid = slice(first + p.sink, last - p.tail)
            torch.testing.assert_close(scores[b, h, mid].double(), expected[mid], rtol=1e-5, atol=1e-5)
            ordered = expected[mid].sort(descending=True).values
            assert ordered[k - 1] - ordered[k] > 1e-5, "scores that are apart"
            ours = scores[b, h, mid].topk(k).indices + mid.start
            assert set(ours.tolist()) == set(columns)
            assert threshold == pytest.approx(float(ordered[k - 1]))


@pytest.mark.parametrize("offset", [-200.0, 200.0])
def test_features_far_beyond_the_floats(offset: float) -> None:
    """phi_k e^offset and phi_q e^-offset have the same products."""
    p = DecodeProblem(seed=6, spans=[(0, 24)], length=24)
    arguments = p.arguments(4, "topk_phi")
    moved = p.cache._replace(log_shift=p.cache.log_shift + offset)
    ours = decode_attention(**arguments | {"cache": moved, "log_query": arguments["log_query"] - offset})
    torch.testing.assert_close(ours, decode_attention(**arguments), rtol=1e-4, atol=1e-5)


def test_when_all_is_retrieved_nothing_of_the_estimate_is_left() -> None:
    p = DecodeProblem(seed=7, spans=[(0, 24)], length=24)
    arguments = p.arguments(100, "topk_phi") | {"log_query": p.log_query.float() + 60}
    exact = decode_attention(**p.arguments(100, "topk"))
    torch.testing.assert_close(decode_attention(**arguments), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("share", [1e-2, 1e-4])
def test_a_residual_of_little_of_the_mid_regions_mass_is_kept(share: float) -> None:
    p = nearly_all_retrieved(6, share)
    expected = p.expected(6, "topk_phi")
    assert rel_l1(p.expected(6, "topk"), expected).min() > 0.1
    assert rel_l1(decode_attention(**p.arguments(6, "topk_phi")).double(), expected).max() < 1e-6 / share


@pytest.mark.parametrize("method", ["topk_phi", "topk_phi_nosub"])
def test_features_that_are_not_finite_do_not_pass_for_a_dropped_residual(method: str) -> None:
    p = DecodeProblem(seed=7, spans=[(0, 24)], length=24)
    arguments = p.arguments(4, method)
    arguments["log_query"] = torch.full_like(arguments["log_query"], torch.nan)
    assert decode_attention(**arguments).isnan().all()


def test_summaries_are_of_the_rounded_features() -> None:
    """Subtracting what was cached leaves rounding of float32, however coarse the cache."""
    p = DecodeProblem(seed=8, spans=[(0, 24)], length=24, dtype=torch.bfloat16)
    assert p.cache.features is not None and p.cache.summary is not None
    assert p.cache.features.dtype == torch.bfloat16
    mass = p.cache.features.double().sum(2)
    torch.testing.assert_close(p.cache.summary[..., -1].double(), mass, rtol=1e-6, atol=1e-6)
    values = p.cache.values[:, :, :24].double()
    numerator = p.cache.features.double().transpose(-1, -2) @ values
    torch.testing.assert_close(p.cache.summary[..., :-1].double(), numerator, rtol=1e-5, atol=1e-5)


def _adversarial(length: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(length)
    random = torch.randn(3, length, generator=g)
    one = torch.ones(3, length)
    return {
        "random": random,
        "all equal": one,
        "a rounding apart": torch.nextafter(one, 2 * one).where(random > 0, one),
        "mostly -inf": random.masked_fill(random < 2, -torch.inf),
        "all -inf": torch.full_like(random, -torch.inf),
        "best in the last block": torch.arange(length).float().expand(3, -1),
        "negative zero": torch.where(random > 0, 0.0, -0.0),
    }


@pytest.mark.parametrize("length", [50, LONG_ROW, LONG_ROW + 29])
@pytest.mark.parametrize("name", _adversarial(50))
def test_the_largest_are_those_of_topk(name: str, length: int) -> None:
    scores = _adversarial(length)[name]
    for k in (0, 1, 7, 50, 300, length, length + 1):
        columns, values = largest(scores, k)
        expected = scores.topk(min(k, length), dim=-1).values
        assert torch.equal(values.sort(dim=-1, descending=True).values, expected)
        assert torch.equal(scores.gather(-1, columns), values)
        assert all(len(set(row)) == len(row) for row in columns.tolist())


@pytest.mark.parametrize("wanted", [[[3, 3, 3]], [[0, 3, 99]], [[0, 0, 0]], [[1, 4, 9], [2, 4, 0]]])
def test_the_order_of_slots_changes_nothing_else(wanted: list[list[int]]) -> None:
    g = torch.Generator().manual_seed(8)
    scores = torch.randn(len(wanted), 1, 3, LONG_ROW + 10, generator=g).round(decimals=1)  # with ties
    mid = torch.zeros(len(wanted), 1, 1, scores.shape[-1], dtype=torch.bool)
    mid[..., 5:70] = True
    mid[-1, ..., 40:] = False
    k = torch.tensor(wanted)[:, None]
    read, least = unordered_topk(scores, mid, k)
    ordered = exhaustive_topk(scores, mid, k)
    assert torch.equal(least, least_read(scores, mid, ordered))
    assert torch.equal(read.mask(scores.shape[-1]).sum(-1), k.minimum(mid.sum(-1)))
    assert not (read.mask(scores.shape[-1]) & ~mid).any()
    assert torch.equal(_in_order(scores, read), _in_order(scores, ordered))


def _in_order(scores: Tensor, read: Selected) -> Tensor:
    return torch.where(read.valid, scores.gather(-1, read.indices), -torch.inf).sort(dim=-1).values
