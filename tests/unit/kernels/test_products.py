"""Products of weights in codes, for every kind of CPU that this CPU can run, against plain float64."""

from __future__ import annotations

import contextlib

import pytest
import torch
from tests.needs import KERNELS, needs
from tests.unit.model.weights import weight_by_hand
from torch import Tensor

from residual_mass.kernels import products
from residual_mass.kernels.library import Library, Weights, load
from residual_mass.kernels.operations import product_operations

pytestmark = needs(KERNELS)
COUNTS = (1, 2, 3, 8, 9, 17, 31, 70)
"""Rows of activations: of a step, of several, and of more than are in registers or are unpacked once for."""


def made(rows: int, columns: int, bits: int = 4, group: int = 32, minimums: bool = True) -> Weights:
    """A random weight; scales of rows differ by up to 2^40."""
    draw = torch.Generator().manual_seed(rows + columns)
    codes = torch.randint(0, 2**bits, (rows, columns), dtype=torch.uint8, generator=draw)
    groups = -(-columns // group)
    scales = torch.randn(rows, groups, 1 + minimums, generator=draw).half()
    exponents = torch.randint(-20, 21, (rows,), dtype=torch.int32, generator=draw)
    middle = 0 if minimums else 2 ** (bits - 1)
    return Weights(*products.packed(codes, bits, scales, exponents), rows, group, middle)


def product(library: Library, weights: Weights, x: Tensor) -> Tensor:
    output = x.new_empty(len(x), weights.rows)
    library.multiply(weights, x, output)
    return output


def assert_near(output: Tensor, x: Tensor, weight: Tensor, eps: float = 0.0) -> None:
    """16 bits for the activations of a group: half a step of a 32767th of the largest of them."""
    groups = torch.nn.functional.pad(x.double(), (0, -x.shape[1] % 32)).unflatten(1, (-1, 32))
    step = (groups.abs().amax(-1, keepdim=True) / 65534).expand_as(groups).flatten(1)[:, : x.shape[1]]
    expected = x.double() @ weight.T
    bound = step @ weight.abs().T + (eps + 1e-6) * (x.double().abs() @ weight.abs().T)
    assert bool(((output.double() - expected).abs() <= bound).all())


@pytest.mark.parametrize("rows, columns", [(1, 1), (16, 32), (17, 31), (40, 100), (33, 576)])
@pytest.mark.parametrize("minimums", [False, True])
@pytest.mark.parametrize("group", [16, 32, 64, 256])
@pytest.mark.parametrize("bits", [4, 5, 6, 8])
def test_products_are_those_of_the_codes(
    bits: int, group: int, minimums: bool, rows: int, columns: int, library: Library
) -> None:
    weights = made(rows, columns, bits, group, minimums)
    exact = weight_by_hand(weights, columns)
    found = products.rows_of(weights, torch.arange(rows), columns, torch.float64)
    torch.testing.assert_close(found, exact, rtol=1e-12, atol=0)
    for dtype in (torch.float32, torch.bfloat16):
        by_column = torch.empty(columns, -(-rows // 16) * 16, dtype=dtype)
        library.dequantise(weights, by_column)
        size = exact.abs() + 255 * (exact.abs().amax() if minimums else 0)  # a minimum may cancel
        off = (by_column.T[:rows].double() - exact).abs()
        assert bool((off <= torch.finfo(dtype).eps / 2 * (exact.abs() + 1e-5 * size) + 1e-12 * size).all())
        for count in COUNTS:
            x = torch.randn(count, columns, generator=torch.Generator().manual_seed(count)).to(dtype)
            assert_near(product(library, weights, x), x, exact, 0 if dtype == torch.float32 else 2.0**-8)


def test_a_row_of_activations_gives_the_same_beside_others(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, whatever their number, and in every thread: the text of a request does not depend on a batch."""
    weights = made(100, 300)
    x = torch.randn(70, 300, generator=torch.Generator().manual_seed(0))
    alone = torch.cat([product(library, weights, row[None]) for row in x])
    for threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        for count in COUNTS:
            assert torch.equal(product(library, weights, x[:count]), alone[:count])


def test_activations_of_any_size(library: Library) -> None:
    """Rows and groups of other sizes do not matter; what is not finite is not hidden, and stays in its row."""
    weights = made(20, 96, minimums=False)
    weights = weights._replace(exponents=torch.zeros_like(weights.exponents))
    exact = weight_by_hand(weights, 96)
    x = torch.randn(6, 96, generator=torch.Generator().manual_seed(0))
    x[0] *= 1e30
    x[1] *= 1e-25
    x[2, 32:] *= 1e8
    x[3] = 0
    assert_near(product(library, weights, x), x, exact)
    assert bool((product(library, weights, x[3:4]) == 0).all())
    for wrong in (float("nan"), float("inf"), -float("inf")):
        x[4, 40] = wrong
        output = product(library, weights, x)
        assert bool(output[4].isnan().all()) and bool(output[[0, 1, 2, 3, 5]].isfinite().all())


def test_weights_of_any_size(library: Library) -> None:
    weights = made(48, 64)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    for exponent in (-100, 90):
        weights = weights._replace(exponents=torch.full_like(weights.exponents, exponent))
        assert_near(product(library, weights, x), x, weight_by_hand(weights, 64))


def test_no_rows(library: Library) -> None:
    assert product(library, made(20, 64), torch.empty(0, 64)).shape == (0, 20)
    words = made(20, 64)
    assert torch.ops.residual_mass.multiply(torch.empty(0, 64), *words).shape == (0, 20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (2, 0), (1, 1, 9), (100,)])
def test_operations_without_python_compute_the_same(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(*shape, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    weights = [made(20, 64), made(16, 64, 8, 16, minimums=False), made(33, 64, 6), made(5, 64, 5)]
    for threads in (1, 2):
        for count, operation in enumerate(product_operations(), 1):
            whole = operation(x, threads, *sum(map(tuple, weights[:count]), ()))
            parts = [product(load(), each, x.view(-1, 64)).view(*shape, each.rows) for each in weights[:count]]
            assert whole.dtype == dtype and whole.is_contiguous()
            assert torch.equal(whole, torch.cat(parts, -1))


def test_operations_without_python_refuse_what_they_do_not_read() -> None:
    one = product_operations()[0]
    weights = made(20, 64)
    for x in (torch.ones(2, 64).double(), torch.ones(64, 2).T, torch.ones(*9 * [1], 64)):
        with pytest.raises(ValueError, match="activations are contiguous, in float32 or bfloat16"):
            one(x, 1, *weights)


def test_operations_without_python_keep_nothing() -> None:
    one = product_operations()[0]
    x, weights = torch.ones(1, 64), made(20, 64)
    for wrong in (False, True):
        before = [each._use_count() for each in (x, *weights[:3])]
        with contextlib.suppress(ValueError):
            one(x.double() if wrong else x, 1, *weights)
        assert [each._use_count() for each in (x, *weights[:3])] == before
