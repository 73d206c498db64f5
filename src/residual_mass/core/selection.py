"""Selects the tokens that a query row reads, and computes weighted sums and products over them.

Shape letters: R = query rows sharing L keys, K = tokens that a row reads (the largest count of all rows), D = width,
N = query rows over all leading dimensions. Leading `...` are free, and the same for all arguments. `indices` are int64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Partition(NamedTuple):
    """Anchor set A and mid-region M of a prefix (the paper's eq. 2) as disjoint masks; padding is in neither."""

    anchors: Tensor
    """[..., L] bool."""
    mid: Tensor
    """[..., L] bool."""


def retrieved_count(budget_percent: float, length: int, num_anchors: int) -> int:
    """Returns K = max(0, ceil(r L) - |A|), the mid-region tokens that a budget leaves after the anchors.

    Args:
        budget_percent: exact-support budget in percent of the prefix, in (0, 100].
        length: L in tokens, nominal or real.
        num_anchors: |A|, sink and tail tokens together.

    Raises:
        ValueError: the budget is outside (0, 100].
    """
    if not 0 < budget_percent <= 100:
        raise ValueError(f"budget {budget_percent:g} % is outside (0, 100]")
    # Exact rational arithmetic: 0.07 * 100 is 7.000000000000001 in floats, and its ceiling is one token too many.
    budget = math.ceil(Fraction(str(budget_percent)) * length / 100)
    return max(0, budget - num_anchors)


def partition(real: Tensor, num_sink: int, num_tail: int) -> Partition:
    """Splits each row's real tokens into anchors (first `num_sink`, last `num_tail`) and the mid-region between them.

    Args:
        real: [..., L] bool, False on padding (on either side); a row shorter than the anchors has an empty mid-region.
    """
    rank = real.long().cumsum(-1) - 1
    count = real.sum(-1, keepdim=True)
    anchors = real & ((rank < num_sink) | (rank >= count - num_tail))
    return Partition(anchors, real & ~anchors)


def full_prefix(length: int, device: torch.device | None = None) -> Tensor:
    """Returns the mask [L] bool of a prefix without padding."""
    return torch.ones(length, dtype=torch.bool, device=device)


LONG_ROW = 1024
"""Number of columns from which two-level selection is faster."""
LEAST_BLOCK = 3
"""Fewest columns of a block for which two-level selection is faster."""


class Selected(NamedTuple):
    """Tokens chosen per row, as slots with indices into L; only valid slots count."""

    indices: Tensor
    """[..., R, K] int64."""
    valid: Tensor
    """[..., R, K] bool."""

    def mask(self, length: int) -> Tensor:
        """Returns the chosen set as a mask [..., R, length] bool."""
        shape = (*self.indices.shape[:-1], length)
        times = torch.zeros(shape, dtype=torch.int8, device=self.indices.device)  # that a column is in a valid slot
        times.scatter_add_(-1, self.indices, self.valid.to(torch.int8))
        return times > 0


def exhaustive_topk(scores: Tensor, mid: Tensor, k: Tensor) -> Selected:
    """Selects the K highest-scoring mid-region tokens of every query row, the paper's oracle selector.

    Args:
        scores: [..., R, L] attention scores.
        mid: [..., 1 or R, L] bool, the mid-region.
        k: [..., R] or [R] integer, tokens wanted per row; more than |M| retrieves all of M.

    Returns:
        Slots in descending order of score; slots beyond a row's own K or |M| are invalid.
    """
    most = 0
    if k.numel():
        most = min(int(k.max()), scores.shape[-1])
    candidates = scores.masked_fill(~mid, -torch.inf)
    top, indices = candidates.topk(most, dim=-1)
    rank = torch.arange(most, device=scores.device)
    wanted = rank < k.unsqueeze(-1)
    return Selected(indices, wanted & (top > -torch.inf))


def unordered_topk(scores: Tensor, mid: Tensor, k: Tensor) -> tuple[Selected, Tensor]:
    """Selects the same tokens as `exhaustive_topk` from scores [..., R, L], faster and with slots in any order, and
    returns their `least_read` too. Synchronises with the device, to read k [..., R].
    """
    candidates = torch.where(mid, scores, -torch.inf)
    by_example = k.reshape(-1, k.shape[-1])
    by_example = by_example.clamp_max(scores.shape[-1]).tolist()
    most = [max(counts) for counts in zip(*by_example, strict=True)]
    columns, top = _rowwise_largest(candidates, most)
    filled = top > -torch.inf
    if any(counts != most for counts in by_example):  # examples of different lengths
        top, order = top.sort(dim=-1, descending=True)
        columns = columns.gather(-1, order)
        rank = torch.arange(top.shape[-1], device=k.device)
        filled = rank < k.clamp_min(1).unsqueeze(-1)
        filled = filled & (top > -torch.inf)
    least = torch.where(filled, top, torch.inf).amin(-1)
    slots = max(most, default=0)
    valid = filled[..., :slots]
    if any(0 in counts for counts in by_example):  # a row with k = 0 has its highest score in a slot, for `least`
        valid = valid & (k > 0).unsqueeze(-1)
    least = torch.where(least < torch.inf, least, 0)
    return Selected(columns[..., :slots], valid), least


def _rowwise_largest(candidates: Tensor, counts: list[int]) -> tuple[Tensor, Tensor]:
    """Same as `largest` with a count for each row, 0 meaning 1; slots beyond a row's count hold -inf."""
    if len(set(counts)) == 1:
        return largest(candidates, max(counts[0], 1))
    shape = (*candidates.shape[:-1], max(counts, default=1))
    top = candidates.new_full(shape, -torch.inf)
    columns = torch.zeros_like(top, dtype=torch.int64)
    for count in set(counts):
        same = [row for row, other in enumerate(counts) if other == count]
        rows = torch.tensor(same, device=top.device)
        wanted = max(count, 1)
        chosen, highest = largest(candidates.index_select(-2, rows), wanted)
        slots = highest.shape[-1]
        columns[..., :slots].index_copy_(-2, rows, chosen)
        top[..., :slots].index_copy_(-2, rows, highest)
    return columns, top


def least_read(scores: Tensor, mid: Tensor, read: Selected) -> Tensor:
    """Returns the lowest score among the tokens read, [..., R]; if none is read, the highest of the mid-region; 0 for
    an empty mid-region.
    """
    inside = scores.masked_fill(~mid, -torch.inf)
    highest = inside.amax(-1, keepdim=True)
    read_scores = scores.gather(-1, read.indices)
    least = torch.where(read.valid, read_scores, torch.inf)
    least = torch.cat((highest, least), dim=-1).amin(-1)
    return torch.where(least > -torch.inf, least, 0)


def largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Returns columns [..., K] and values [..., K] of the k highest scores [..., L], unordered; K = min(k, L).

    Long rows compare the maxima of blocks first. This is exact: each of the k highest tokens lies in one of the k
    blocks with the highest maxima, because k higher maxima would be k higher tokens. Blocks of sqrt(L / k) columns
    leave the fewest numbers to sort, 2 sqrt(k L).
    """
    length = scores.shape[-1]
    k = min(k, length)
    size = math.isqrt(length // max(k, 1))
    if length < LONG_ROW or size < LEAST_BLOCK:
        top, columns = scores.topk(k, dim=-1, sorted=False)
        return columns, top
    whole = length // size * size
    in_blocks = scores[..., :whole]
    blocks = in_blocks.unflatten(-1, (size, -1))  # columns of a block are far apart: maxima are vectorised
    best = blocks.amax(-2).topk(k, dim=-1, sorted=False).indices
    inside = torch.arange(0, whole, whole // size, device=scores.device)
    columns = (best.unsqueeze(-1) + inside).flatten(-2)
    rest = torch.arange(whole, length, device=scores.device)
    rest = rest.expand(*scores.shape[:-1], -1)
    columns = torch.cat((columns, rest), dim=-1)
    candidates = scores.gather(-1, columns)
    top, place = candidates.topk(k, dim=-1, sorted=False)
    return columns.gather(-1, place), top


def members(mask: Tensor, most: int) -> Selected:
    """Returns the True columns of a mask [..., L] with at most `most` of them per row."""
    slots = min(most, mask.shape[-1])
    present, indices = mask.to(torch.int8).topk(slots, dim=-1)
    return Selected(indices, present > 0)


# ---- columns that differ between rows --------------------------------------------------------------------------------
# Torch's `gather` takes several times as long on a CPU as the selection of whole rows from a table, and a weighted
# `embedding_bag` sums such rows without writing them.

ROWS_AT_ONCE = {"cpu": 2**13, "cuda": 2**21}
"""Rows that are gathered before they are multiplied: on CPUs as many as stay in a core's cache, on GPUs a bound on
memory.
"""


def weighted_sum(weights: Tensor, indices: Tensor, x: Tensor) -> Tensor:
    """Returns sum_i weights_i x_i over the columns `indices` [..., R, K] of x [..., L, D]: [..., R, D], in the dtype of
    the weights [..., R, K].
    """
    *leading, columns = indices.shape
    shape = (*leading, x.shape[-1])
    if columns == 0:
        return weights.new_zeros(shape)
    table, flat = _table(x, indices)
    flat_weights = weights.flatten(0, -2)  # [N, K]
    if x.dtype == weights.dtype:
        sums = F.embedding_bag(flat, table, per_sample_weights=flat_weights, mode="sum")
        return sums.view(shape)
    as_rows = flat_weights.unsqueeze(-2)  # [N, 1, K]
    parts = []
    for chunk, rows in _gathered(table, flat):
        parts.append(as_rows[chunk] @ rows.to(weights.dtype))
    return torch.cat(parts).view(shape)


def products_at(query: Tensor, x: Tensor, indices: Tensor) -> Tensor:
    """Returns <query, x_i> for the columns `indices` [..., R, K] of x [..., L, D], query [..., R, D]: [..., R, K], in
    the dtype of the query.
    """
    queries = query.flatten(0, -2).unsqueeze(-2)  # on CPUs three times as fast as a matrix times a column
    table, flat = _table(x, indices)
    parts = []
    for chunk, rows in _gathered(table, flat):
        own = queries[chunk]
        products = own @ rows.to(query.dtype).transpose(-1, -2)
        parts.append(products)
    return torch.cat(parts).view(indices.shape)


def _gathered(table: Tensor, flat: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yields slices of the N query rows of `flat` [N, K], with the rows of the table that they read, [n, K, D]."""
    rows, columns = flat.shape
    at_once = ROWS_AT_ONCE.get(table.device.type, 2**21)
    at_once = max(1, at_once // max(columns, 1))
    for start in range(0, max(rows, 1), at_once):
        queries = slice(start, start + at_once)
        chunk = flat[queries]
        read = table.index_select(0, chunk.flatten())
        yield queries, read.view(*chunk.shape, table.shape[1])


def _table(x: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Returns x [..., L, D] as a table of rows (a view if its strides allow one, otherwise a copy), and the row numbers
    [N, K] of the columns `indices` [..., R, K].
    """
    width = x.shape[-1]
    if x.stride(-1) != 1 or any(step % width for step in _steps(x)):
        x = x.contiguous()
    # Strides in rows of the table: of the leading dimensions, and of adjacent tokens.
    steps = [step // width for step in _steps(x)]
    of_tokens = steps[-1]
    sizes = x.shape[:-1]
    last = 0
    for size, step in zip(sizes, steps, strict=True):
        last += (size - 1) * step
    table = x.as_strided((last + 1, width), (width, 1))
    flat = indices if of_tokens == 1 else indices * of_tokens
    for dim, (size, step) in enumerate(zip(sizes[:-1], steps[:-1], strict=True)):
        if step:
            first_rows = torch.arange(0, size * step, step, device=x.device)
            later_dims = indices.ndim - 1 - dim
            flat = flat + first_rows.view(-1, *[1] * later_dims)
    return table, flat.flatten(0, -2)


def _steps(x: Tensor) -> list[int]:
    """Returns the strides of all dimensions but the last, 0 for a dimension of size 1."""
    strides = []
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        strides.append(stride if size > 1 else 0)
    return strides
