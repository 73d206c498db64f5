"""Attention of prompts by every kind of kernel, against a plain softmax in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.needs import KERNELS, needs
from tests.unit.kernels.reference import eight, paired, planes, real_places
from tests.unit.kernels.test_steps import made
from torch import Tensor

from residual_mass.kernels import LayerCache
from residual_mass.kernels import cache as kernels_cache
from residual_mass.kernels.library import WIDTHS, Library
from residual_mass.kernels.prompt import LEAST_TOKENS, prompt_attention, prompt_library, reads_at_once

pytestmark = needs(KERNELS)


def reference(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Outputs [B, T, H G, D] and log masses [B, T, H G] of the last T of C tokens, one query after the other."""
    batch, heads, count, width = query.shape
    group, earlier = heads // keys.shape[1], keys.shape[2] - count
    outputs, masses = torch.empty(batch, count, heads, width).double(), torch.empty(batch, count, heads).double()
    for row in range(batch):
        for head in range(heads):
            for t in range(count):
                seen = slice(0 if window is None else max(0, earlier + t + 1 - window), earlier + t + 1)
                scores = keys[row, head // group, seen].double() @ query[row, head, t].double() * scale
                outputs[row, t, head] = scores.softmax(0) @ values[row, head // group, seen].double()
                masses[row, t, head] = scores.logsumexp(0)
    return outputs, masses


def prompt(
    tokens: int,
    *,
    width: int = 64,
    heads: int = 2,
    group: int = 3,
    batch: int = 1,
    earlier: int = 0,
    factor: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B, H G, T, D], keys and values [B, H, C, D], as a model's projections lie in memory."""
    draw = torch.Generator().manual_seed(tokens + width + group)
    shapes = ((tokens, heads * group), (tokens + earlier, heads), (tokens + earlier, heads))
    query, key, value = (torch.randn(batch, *shape, width, generator=draw).transpose(1, 2) for shape in shapes)
    return factor * query, key, value


def check(
    library: Library, query: Tensor, key: Tensor, value: Tensor, window: int | None = None, tolerance: float = 3e-6
) -> None:
    """Compares outputs and masses with the reference, and results of 1 to 3 threads with each other."""
    batch, heads, count, width = query.shape
    scale = width**-0.5
    log_mass = torch.empty(batch, count, heads)
    output = prompt_attention(library, query, key, value, scale, window=window, threads=1, log_mass=log_mass)
    assert output.dtype == query.dtype and output.is_contiguous()
    expected, expected_mass = reference(query, key, value, scale, window)
    size = torch.linalg.vector_norm(value.double(), dim=-1).max()
    assert float((output - expected).abs().max()) < tolerance * float(size)
    assert float((log_mass - expected_mass).abs().max()) < 3e-6 * max(1, float(expected_mass.abs().max()))
    for threads in (2, 3):
        again = torch.empty_like(log_mass)
        other = prompt_attention(library, query, key, value, scale, window=window, threads=threads, log_mass=again)
        assert other.equal(output) and again.equal(log_mass)


SHAPES = [
    *({"tokens": tokens} for tokens in (1, 2, 63, 64, 65, 330)),
    *({"tokens": 97, "width": width} for width in WIDTHS),
    *({"tokens": 130, "group": group, "heads": 1} for group in (1, 2, 7)),
    {"tokens": 70, "batch": 3},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_prompt(library: Library, shape: dict[str, Any]) -> None:
    check(library, *prompt(**shape))


@pytest.mark.slow
def test_a_long_prompt(library: Library) -> None:
    check(library, *prompt(1000, heads=1))


@pytest.mark.parametrize("earlier", [1, 63, 64, 500])
@pytest.mark.parametrize("tokens", [1, 65])
def test_a_further_piece(library: Library, tokens: int, earlier: int) -> None:
    check(library, *prompt(tokens, earlier=earlier))


@pytest.mark.parametrize("window", [1, 2, 63, 64, 100, 1000])
@pytest.mark.parametrize("earlier", [0, 99])
def test_a_window(library: Library, window: int, earlier: int) -> None:
    check(library, *prompt(220, earlier=earlier, heads=1), window)


@pytest.mark.parametrize("factor", [0.0, 30.0, 3000.0])
def test_flat_and_extreme_scores(library: Library, factor: float) -> None:
    """Scores of hundreds in float32 have errors of 1e-5, which weights have as well; of equal scores all keys count."""
    query, key, value = prompt(150, factor=factor)
    check(library, query, key, value, tolerance=3e-6 * max(1, factor))


def test_equal_keys(library: Library) -> None:
    query, key, value = prompt(150)
    check(library, query, key[:, :, :1].expand_as(key), value)


@pytest.mark.parametrize(
    "shape", [{"tokens": 1}, {"tokens": 65}, {"tokens": 131, "width": 80}, {"tokens": 97, "earlier": 31}], ids=str
)
def test_bfloat16(library: Library, shape: dict[str, Any]) -> None:
    """The sums are in float32; weights may have 8 bits, outputs do."""
    check(library, *(x.bfloat16() for x in prompt(**shape)), tolerance=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strides_change_nothing(library: Library, dtype: torch.dtype) -> None:
    query, key, value = (x.to(dtype) for x in prompt(70))
    plain = prompt_attention(library, query, key, value, 0.125)
    spread = [torch.stack((x, -x), -1)[..., 0] for x in (query, key, value)]
    assert spread[0].stride(-1) == 2
    assert prompt_attention(library, *spread, 0.125).equal(plain)


def test_nan_is_not_hidden(library: Library) -> None:
    query, key, value = prompt(130)
    key[0, 0, 100] = math.nan
    output = prompt_attention(library, query, key, value, 0.125)
    assert output[0, 100:, :3].isnan().all() and output[0, :100].isfinite().all() and output[0, :, 3:].isfinite().all()


@pytest.mark.parametrize(
    ("bits", "dtype"), [(4, torch.float32), (8, torch.float32), (16, torch.float32), (16, torch.bfloat16)]
)
@pytest.mark.parametrize("length", [3, 20, 84, 300])
def test_a_turn_over_a_packed_cache(
    library: Library, bits: int, dtype: torch.dtype, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, also where pieces are faster, to what is held and to the turn exactly; then the cache holds both."""
    monkeypatch.setattr(kernels_cache, "reads_at_once", lambda *_: True)
    keys, values, query = made(length + 200)
    queries = (query[:, :, None] * torch.linspace(0.5, 1, 200)[:, None]).to(dtype)
    first, more = ([x[:, :, part].to(dtype) for x in (keys, values)] for part in (slice(length), slice(length, None)))
    caches = [LayerCache(library, *first, [0], bits=bits, clusters=4) for _ in range(2)]
    held = [x.to(dtype) for x in contents(caches[0])]
    log_mass = torch.empty(1, 200, 6)
    output = caches[0].read(queries, *more, 0.125, 2, log_mass)
    assert output.dtype == dtype
    both = [torch.cat(pair, 2) for pair in zip(held, more, strict=True)]
    expected, expected_mass = reference(queries, *both, 0.125)
    tolerance = 2e-3 if dtype == torch.bfloat16 else 1e-5
    assert float((output - expected).abs().max()) < tolerance * float(values.norm(dim=-1).max())
    assert float((log_mass - expected_mass).abs().max()) < 1e-5 * float(expected_mass.abs().max())
    monkeypatch.setattr(kernels_cache, "reads_at_once", lambda *_: False)
    caches[1].read(queries, *more, 0.125)
    one, other = (cache.state() for cache in caches)
    assert one[1] == other[1] and all(one[0][name].equal(other[0][name]) for name in one[0])


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_few_tokens_of_a_turn_are_read_in_pieces(library: Library, bits: int) -> None:
    query, _, _ = prompt(LEAST_TOKENS)
    assert not reads_at_once(library, bits, query[:, :, 1:])
    assert reads_at_once(library, bits, query) == (library.target != "avx512")


def contents(cache: LayerCache) -> list[Tensor]:
    """Keys and values [1, H, C, D] that a cache of one row holds, those of its blocks rounded as they are there."""
    found = []
    for head in range(cache.heads):
        places = real_places(cache, 0)
        recent = cache.recent[0, head, : int(cache.recents)].double()
        if cache.bits == 16:
            keys, values = paired(cache, 0, head)
        else:
            if cache.bits == 8:
                codes, values = eight(cache, 0, head)
            else:
                high, low, values = planes(cache, 0, head)
                codes = 16 * high + low
            middle, step = (x.repeat_interleave(64, 0) for x in cache.scales[0, head].double().unbind(1))
            keys = middle + step * (codes - 127.5)
        found.append((torch.cat((keys[places], recent[:, 0])), torch.cat((values[places], recent[:, 1]))))
    return [torch.stack(x)[None] for x in zip(*found, strict=True)]


def test_where_the_kernels_serve() -> None:
    query, key, value = prompt(LEAST_TOKENS)
    served = prompt_library(query, key, value)
    assert served is None or served.target != "portable"
    assert prompt_library(query[:, :, 1:], key, value) is None
    assert prompt_library(query.double(), key.double(), value.double()) is None
    assert prompt_library(query.bfloat16(), key, value) is None
    assert prompt_library(query[..., :48], key[..., :48], value[..., :48]) is None
    assert prompt_library(query.to("meta"), key.to("meta"), value.to("meta")) is None
    assert prompt_library(query.requires_grad_(), key, value) is None
    with torch.no_grad():
        assert prompt_library(query, key, value) is served
