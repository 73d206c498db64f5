"""Products and sums over columns that each row chooses for itself, against loops in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from residual_mass.core import selection
from residual_mass.core.selection import products_at, weighted_sum

LEADING, R, L, D = (2, 3), 4, 50, 8
LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "in one piece": lambda: torch.randn(*LEADING, L, D),
    "part of a longer buffer": lambda: torch.randn(*LEADING, L + 30, D)[:, :, 7 : L + 7],
    "heads beside each other": lambda: torch.randn(2, L, 3, D).transpose(1, 2),
    "every other column": lambda: torch.randn(*LEADING, 2 * L, D)[:, :, ::2],
    "one for all": lambda: torch.randn(1, 3, L, D).expand(*LEADING, L, D),
    "columns of features": lambda: torch.randn(*LEADING, D, L).transpose(-1, -2),
    "half as wide as its storage": lambda: torch.randn(*LEADING, L, 2 * D)[..., :D],
    "one for every head": lambda: torch.randn(L, D).expand(*LEADING, L, D),
    "no multiple of the width": lambda: torch.randn(*LEADING, L, D + 3)[..., 1 : D + 1],
}


def drawn(k: int, length: int = L) -> Tensor:
    return torch.randint(length, (*LEADING, R, k))


def each_row(x: Tensor, indices: Tensor) -> Tensor:
    """Rows of x by a loop: [E, H, R, K, D] float64."""
    places = ((e, h) for e in range(LEADING[0]) for h in range(LEADING[1]))
    return torch.stack([x[e, h].double()[indices[e, h]] for e, h in places]).unflatten(0, LEADING)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("k", [1, 5, 60])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sums_and_products_of_rows(layout: str, k: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(selection.ROWS_AT_ONCE, "cpu", 64)  # several pieces, and less than one row's where k is 60
    torch.manual_seed(k)
    x, indices = LAYOUTS[layout]().to(dtype), drawn(k)  # `to` keeps strides
    expected = each_row(x, indices)
    wide = torch.promote_types(dtype, torch.float32)
    weights, query = torch.randn(*LEADING, R, k, dtype=wide), torch.randn(*LEADING, R, D, dtype=wide)
    summed, products = weighted_sum(weights, indices, x), products_at(query, x, indices)
    assert summed.dtype == products.dtype == wide
    tolerance = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(summed.double(), (weights.double().unsqueeze(-1) * expected).sum(-2), **tolerance)
    torch.testing.assert_close(products.double(), (expected @ query.double().unsqueeze(-1)).squeeze(-1), **tolerance)


@pytest.mark.parametrize("layout", list(LAYOUTS)[:5])
def test_nothing_is_copied_that_lies_in_rows(layout: str) -> None:
    x = LAYOUTS[layout]()
    table, _ = selection._table(x, drawn(3))
    assert table.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_no_columns_and_a_single_one() -> None:
    x = torch.randn(*LEADING, L, D)
    none, query = drawn(0), torch.randn(*LEADING, R, D)
    assert torch.equal(weighted_sum(torch.ones(none.shape), none, x), torch.zeros(*LEADING, R, D))
    assert products_at(query, x, none).shape == none.shape
    one = torch.zeros(*LEADING, R, 1, dtype=torch.int64)
    assert torch.equal(weighted_sum(one + 1.0, one, x[:, :, :1]), x[:, :, :1].expand(-1, -1, R, -1))


def test_gradients_are_those_of_a_dense_product() -> None:
    x = torch.randn(*LEADING, 9, 2, dtype=torch.float64, requires_grad=True)
    indices = drawn(4, 9)
    weights = torch.randn(indices.shape, dtype=torch.float64, requires_grad=True)
    query = torch.randn(*LEADING, R, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda w, x: weighted_sum(w, indices, x), (weights, x))
    assert torch.autograd.gradcheck(lambda q, x: products_at(q, x, indices), (query, x))
