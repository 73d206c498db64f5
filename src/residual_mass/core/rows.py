"""Gathers, weighted sums and products over the key columns that each query row selects.

Torch's `gather` takes several times as long on a CPU as the selection of whole rows from a table, and a weighted
`embedding_bag` sums such rows without writing them.

Shape letters: R = query rows that share L columns, K = columns that each of them reads, D = width, N = query rows over
all leading dimensions. Leading `...` are free, and the same for all arguments. `indices` are int64.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS_AT_ONCE = {"cpu": 2**13, "cuda": 2**21}
"""Rows that are gathered before they are multiplied: as many as stay in a core's cache on CPUs, a bound of the memory
on GPUs.
"""


def rows_at(x: Tensor, indices: Tensor) -> Tensor:
    """Gathers the columns `indices` [..., R, K] of x [..., L, D]: [..., R, K, D]."""
    table, flat = _table(x, indices)
    return table.index_select(0, flat.flatten()).view(*indices.shape, x.shape[-1])


def weighted_sum(weights: Tensor, indices: Tensor, x: Tensor) -> Tensor:
    """Returns sum_i weights_i x_i over the columns `indices` [..., R, K] of x [..., L, D]: [..., R, D], in the dtype of
    the weights [..., R, K].
    """
    shape = *indices.shape[:-1], x.shape[-1]
    if indices.shape[-1] == 0:
        return weights.new_zeros(shape)
    table, flat = _table(x, indices)
    if x.dtype == weights.dtype:
        return F.embedding_bag(flat, table, per_sample_weights=weights.flatten(0, -2), mode="sum").view(shape)
    of_rows = weights.flatten(0, -2).unsqueeze(-2)
    parts = [of_rows[some] @ rows.to(weights.dtype) for some, rows in _gathered(table, flat)]
    return torch.cat(parts).view(shape)


def products_at(query: Tensor, x: Tensor, indices: Tensor) -> Tensor:
    """Returns <query, x_i> for the columns `indices` [..., R, K] of x [..., L, D], query [..., R, D]: [..., R, K], in
    the dtype of the query.
    """
    of_rows = query.flatten(0, -2).unsqueeze(-2)  # on CPUs three times as fast as a matrix times a column
    parts = [of_rows[some] @ rows.to(query.dtype).transpose(-1, -2) for some, rows in _gathered(*_table(x, indices))]
    return torch.cat(parts).view(indices.shape)


def _gathered(table: Tensor, flat: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yields some of the N query rows of `flat` [N, K], and what these read [n, K, D]."""
    rows, columns = flat.shape
    at_once = max(1, ROWS_AT_ONCE.get(table.device.type, 2**21) // max(columns, 1))
    for start in range(0, max(rows, 1), at_once):
        some = flat[start : start + at_once]
        yield slice(start, start + at_once), table.index_select(0, some.flatten()).view(*some.shape, table.shape[1])


def _table(x: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Returns x [..., L, D] as a table of rows, a view where its strides allow one and otherwise a copy, and which rows
    of it the columns `indices` [..., R, K] are: [N, K].
    """
    width = x.shape[-1]
    if x.stride(-1) != 1 or any(step % width for step in _steps(x)):
        x = x.contiguous()
    *steps, own = (step // width for step in _steps(x))
    sizes = x.shape[:-1]
    last = sum((size - 1) * step for size, step in zip(sizes, (*steps, own), strict=True))
    table = x.as_strided((last + 1, width), (width, 1))
    flat = indices if own == 1 else indices * own
    for dim, (size, step) in enumerate(zip(sizes[:-1], steps, strict=True)):
        if step:
            heads = torch.arange(0, size * step, step, device=x.device)
            flat = flat + heads.view(-1, *[1] * (indices.ndim - 1 - dim))
    return table, flat.flatten(0, -2)


def _steps(x: Tensor) -> list[int]:
    """Strides of all dimensions but the last; 0 where there is only one place."""
    return [step if size > 1 else 0 for size, step in zip(x.shape[:-1], x.stride()[:-1], strict=True)]
