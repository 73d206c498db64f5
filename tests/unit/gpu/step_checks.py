"""Checks of a decode step over a `DecodeCache`: `test_torch_path.py` runs them in torch, `triton_checks.py` in kernels.

Each of these modules has a fixture `decode`, which computes a step from arguments of decode_attention on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from step_problems import METHODS, MOMENTS, SCANS, DecodeProblem, nearly_all_retrieved, tolerance
from torch import Tensor

from residual_mass.core import rel_l1

Decode = Callable[[dict[str, object]], Tensor]
CUT = [*MOMENTS, *SCANS]
"""Methods whose estimate, if any, is cut at the score of the last token read."""


def width(method: str) -> int:
    """The least head dimension that the kernels of a method take."""
    return 32 if method in SCANS else 16


def close(decode: Decode, p: DecodeProblem, k: int, method: str, allowed: float | None = None) -> None:
    ours = decode(p.arguments(k, method))
    assert ours.dtype == torch.float32
    assert rel_l1(ours.double(), p.expected(k, method)).max() < (allowed or tolerance(method))


@pytest.mark.parametrize(
    ("spans", "k"),
    [
        *(([(0, 50), (0, 50)], k) for k in (0, 1, 60)),
        ([(7, 50), (0, 41)], 9),
        ([(45, 50), (3, 7)], 9),  # no mid-region
        ([(49, 50), (0, 1)], 9),  # one token
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_a_step_is_that_of_every_column_in_float64(
    decode: Decode, method: str, spans: list[tuple[int, int]], k: int
) -> None:
    close(decode, DecodeProblem(seed=k, spans=spans, length=50, d=width(method)), k, method)


@pytest.mark.parametrize("method", METHODS)
def test_logits_far_beyond_what_float32_can_exponentiate(decode: Decode, method: str) -> None:
    p = DecodeProblem(seed=5, spans=[(0, 24)], length=24, d=width(method), spread=6.0)
    close(decode, p, 4, method, max(1e-4, tolerance(method)))


@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize("method", ["topk", *MOMENTS])
def test_scores_of_a_huge_spread(decode: Decode, method: str, k: int) -> None:
    """From about -10^4 to 10^4, which float32 knows to 1e-3."""
    close(decode, DecodeProblem(seed=13, spans=[(0, 60)], length=60, d=16, spread=100.0), k, method, 5e-3)


@pytest.mark.parametrize("offset", [-1000.0, 1000.0])
@pytest.mark.parametrize("method", METHODS)
def test_what_all_scores_and_the_residual_have_in_common_cancels(decode: Decode, method: str, offset: float) -> None:
    p = DecodeProblem(seed=12, spans=[(3, 60)], length=64, d=width(method))
    p.cache.keys[..., 0], p.query[..., 0] = 1, 0
    base = decode(p.arguments(6, method))
    p.query[..., 0] = offset / p.scale
    shifted = p.arguments(6, method)
    if shifted["log_query"] is not None:
        shifted["log_query"] = shifted["log_query"] + offset
    assert base.isfinite().all()
    assert rel_l1(decode(shifted), base).max() < 1e-3  # a score of 1000 is known to 6e-5


@pytest.mark.parametrize("k", [0, 1, 30])
@pytest.mark.parametrize("method", CUT)
def test_where_all_scores_tie(decode: Decode, method: str, k: int) -> None:
    """Half of the copies are below the cut: which of them are read makes no difference."""
    close(decode, DecodeProblem(seed=14, spans=[(0, 50)], length=50, d=width(method)).all_alike(), k, method, 5e-3)


@pytest.mark.parametrize("method", CUT)
def test_nothing_is_added_where_all_is_read(decode: Decode, method: str) -> None:
    p = DecodeProblem(seed=15, spans=[(0, 24), (4, 20)], length=24, d=width(method))
    for k in (19, 40):
        torch.testing.assert_close(decode(p.arguments(k, method)), decode(p.arguments(k, "topk")), rtol=1e-6, atol=1e-6)


def test_when_all_is_retrieved_nothing_of_maps_of_any_size_is_left(decode: Decode) -> None:
    p = DecodeProblem(seed=8, spans=[(0, 24)], length=24, d=16)
    arguments = p.arguments(100, "topk_phi") | {"log_query": p.log_query + 200}
    torch.testing.assert_close(decode(arguments), decode(p.arguments(100, "topk")), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("share", [1e-2, 1e-4])
def test_a_residual_of_little_of_the_mid_regions_mass_is_kept(decode: Decode, share: float) -> None:
    p = nearly_all_retrieved(6, share)
    assert rel_l1(p.expected(6, "topk"), p.expected(6, "topk_phi")).min() > 0.1
    close(decode, p, 6, "topk_phi", 1e-6 / share)


@pytest.mark.parametrize("offset", [-300.0, 300.0])
def test_a_residual_and_exact_terms_of_any_sizes_meet(decode: Decode, offset: float) -> None:
    """Whichever is e^300 times the other is all that is left."""
    p = DecodeProblem(seed=7, spans=[(0, 24)], length=24, d=16)
    p.log_query += offset
    close(decode, p, 4, "topk_phi", 1e-4)


@pytest.mark.parametrize("offset", [-200.0, 200.0])
def test_features_far_beyond_the_floats(decode: Decode, offset: float) -> None:
    """phi_k e^offset and phi_q e^-offset have the same products."""
    p = DecodeProblem(seed=6, spans=[(0, 24)], length=24, d=16)
    arguments = p.arguments(4, "topk_phi")
    shifted = p.cache._replace(log_shift=p.cache.log_shift + offset)
    ours = decode(arguments | {"cache": shifted, "log_query": arguments["log_query"] - offset})
    torch.testing.assert_close(ours, decode(arguments), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["topk_phi", "topk_phi_nosub"])
def test_features_that_are_not_finite_do_not_pass_for_a_dropped_residual(decode: Decode, method: str) -> None:
    arguments = DecodeProblem(seed=7, spans=[(0, 24)], length=24, d=16).arguments(4, method)
    arguments["log_query"] = torch.full_like(arguments["log_query"], torch.nan)
    assert decode(arguments).isnan().all()
