"""Triton kernel that selects the k highest scores of a query head; `gpu.kernels` explains how rows are numbered.

Scores are compared as int32 keys of the same order. The scoring kernels also write the highest key of every SUB
adjacent columns. If k of these maxima reach a bound, at least k scores reach it: only columns of such maxima are read,
and only scores that reach the bound compete. One program does all this for one query head, so it waits for no other.

The result is exact for all scores. They only decide how many compete: 1.1 to 1.2 k if they are independent and k is a
hundredth of their number, more if high scores are adjacent (at most SUB for each maximum that reaches the bound), and
the whole mid-region if they tie or if k exceeds the number of maxima. Then each round of the search, 16 at most, reads
all keys of the mid-region again: at 64k and k = 5243 about ten rounds of 16 chunks, at k = 636 one chunk.

Shape letters: B = batch rows, Hq = query heads, G = those of a KV head, L = prefix columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

SUB = tl.constexpr(16)
"""Adjacent columns of one maximum. With more, a step that retrieves many tokens would have too few maxima for a
bound; with fewer, the search among maxima would be as long as one among scores."""
LOWEST = tl.constexpr(-(2**31))
HIGHEST = tl.constexpr(2**31 - 1)
COUNT_MASK = tl.constexpr(2**21 - 1)
COUNT_BITS = tl.constexpr(21)
"""Bits of each of three counts of columns, which are summed as one int64, so that a round takes one reduction."""


@triton.jit
def store_maxima(maxima, head, block, product, ours, mid, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Writes the highest key of every SUB adjacent scores [ROWS, BLOCK]; LOWEST if none is of the mid-region."""
    key = tl.where(mid[None, :], _rising(product), LOWEST)
    best = tl.max(tl.reshape(key, [ROWS, BLOCK // SUB, SUB]), 2)
    group = block * (BLOCK // SUB) + tl.arange(0, BLOCK // SUB)
    tl.store(maxima + head[:, None] * (stride // SUB) + group[None, :], best, mask=ours[:, None])


@triton.jit(do_not_specialize=["k", "most"])
def select_kernel(
    scores,  # [B * Hq, stride]
    maxima,  # [B * Hq, stride / SUB]
    first,  # [B]
    last,  # [B]
    groups,  # scratch: [B * Hq, stride / SUB] groups of columns whose maxima reach the bound
    columns,  # scratch: [B * Hq, stride] columns whose scores reach the bound
    keys,  # scratch: [B * Hq, stride] keys of these columns
    chosen,  # out: [B * Hq, most] columns in ascending order, as many as the mid-region has
    least,  # out: [B * Hq] the k-th highest score, the highest where k is 0; unwritten where the mid-region is empty
    stride,
    k,  # a number or, BY_ROW, [B, G]
    most,  # the largest k
    sink,
    tail,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BY_ROW: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Lists the columns of a query head's k highest scores; of scores that tie with the k-th, the first ones."""
    head = tl.program_id(0).to(tl.int64)
    begin, end = mid_region(first, last, head // HEADS, sink, tail)
    if end <= begin:
        return
    k = retrieved_by(k, head, HEADS, GROUP, BY_ROW)
    wanted = tl.maximum(tl.minimum(k, end - begin), 1)
    columns += head * stride
    keys += head * stride
    groups += head * (stride // SUB)
    maxima += head * (stride // SUB) + begin // SUB
    num_maxima = (end + SUB - 1) // SUB - begin // SUB
    # The search may end with more maxima than k: a few more scores take less time than its last rounds. With fewer
    # maxima than k, the lowest is no bound.
    enough = wanted + wanted // 8
    bound, _, _ = _cut(maxima, num_maxima, tl.minimum(wanted, num_maxima), enough, CHUNK)
    bound = tl.where(wanted <= num_maxima, bound, LOWEST)

    place = tl.arange(0, CHUNK)
    num_groups = 0
    for start in range(0, num_maxima, CHUNK):
        inside = start + place < num_maxima
        reaches = inside & (tl.load(maxima + start + place, mask=inside, other=LOWEST) >= bound)
        num_groups = _append(groups, num_groups, begin // SUB + start + place, reaches)
    tl.debug_barrier()  # threads read what others wrote

    num_columns = 0
    for start in range(0, num_groups, CHUNK // SUB):
        group = start + place // SUB
        column = tl.load(groups + group, mask=group < num_groups, other=0) * SUB + place % SUB
        inside = (group < num_groups) & (column >= begin) & (column < end)
        key = _rising(tl.load(scores + head * stride + column, mask=inside, other=0.0))
        reaches = inside & (key >= bound)
        _append(keys, num_columns, key, reaches)
        num_columns = _append(columns, num_columns, column, reaches)
    tl.debug_barrier()

    cut, reaching, above = _cut(keys, num_columns, wanted, wanted, CHUNK)
    room = tl.where(reaching > wanted, wanted - above, reaching)  # for keys equal to the cut
    chosen += head * most
    num_chosen, num_equal = 0, 0
    lowest = tl.full([CHUNK], HIGHEST, tl.int32)
    for start in range(0, num_columns, CHUNK):
        inside = start + place < num_columns
        key = tl.load(keys + start + place, mask=inside, other=LOWEST)
        column = tl.load(columns + start + place, mask=inside, other=0)
        equal = (inside & (key == cut)).to(tl.int32)
        taken = inside & ((key > cut) | ((equal == 1) & (num_equal + tl.cumsum(equal, 0) <= room)))
        num_equal += tl.sum(equal, 0)
        lowest = tl.minimum(lowest, tl.where(taken, key, HIGHEST))
        num_chosen = _append(chosen, num_chosen, column, taken & (k > 0))
    tl.store(least + head, _score(tl.min(lowest, 0)))


@triton.jit
def mid_region(first, last, batch, sink, tail):
    """Returns the mid-region's first column, and one past its last; empty unless the second is larger."""
    return tl.load(first + batch) + sink, tl.load(last + batch) - tail


@triton.jit
def retrieved_by(k, head, HEADS: tl.constexpr, GROUP: tl.constexpr, BY_ROW: tl.constexpr):
    """Returns how many tokens a query head retrieves: k or, with BY_ROW, its entry of k [B, G]."""
    if BY_ROW:
        k = tl.load(k + head // HEADS * GROUP + head % GROUP)
    return k


@triton.jit
def _cut(keys, n, k, most, CHUNK: tl.constexpr):
    """Searches n keys for a bound that at least k and at most `most` of them reach, where 1 <= k <= n.

    If ties allow no such bound, it is the k-th highest key. Returns the bound, how many keys reach it, and, in case of
    ties, how many exceed it. Each round divides the range by 4.
    """
    place = tl.arange(0, CHUNK)
    held = tl.load(keys + place, mask=place < n, other=LOWEST)  # all keys if n <= CHUNK
    lowest, highest = tl.where(place < n, held, HIGHEST), held
    for start in range(CHUNK, n, CHUNK):
        inside = start + place < n
        key = tl.load(keys + start + place, mask=inside, other=LOWEST)
        lowest, highest = tl.minimum(lowest, tl.where(inside, key, HIGHEST)), tl.maximum(highest, key)
    low, high = tl.min(lowest, 0).to(tl.int64), tl.max(highest, 0).to(tl.int64)
    reaching, above = n.to(tl.int64), tl.full([], 0, tl.int64)  # keys that reach low, and high + 1
    while (low < high) & (reaching > most):
        width = high - low
        first, second, third = low + (width + 3) // 4, low + (2 * width + 3) // 4, low + (3 * width + 3) // 4
        count = _reaching(held, first, second, third)
        for start in range(CHUNK, n, CHUNK):
            key = tl.load(keys + start + place, mask=start + place < n, other=LOWEST)
            count += _reaching(key, first, second, third)
        total = tl.sum(count, 0)
        reach_first = total & COUNT_MASK
        reach_second = (total >> COUNT_BITS) & COUNT_MASK
        reach_third = total >> 2 * COUNT_BITS
        low, high, reaching, above = _narrowed(low, high, reaching, above, third, reach_third, k)
        low, high, reaching, above = _narrowed(low, high, reaching, above, second, reach_second, k)
        low, high, reaching, above = _narrowed(low, high, reaching, above, first, reach_first, k)
    return low.to(tl.int32), reaching.to(tl.int32), above.to(tl.int32)


@triton.jit
def _reaching(key, first, second, third):
    """Returns whether each key reaches each of three pivots, in COUNT_BITS per pivot; LOWEST reaches none."""
    count = (key >= first.to(tl.int32)).to(tl.int64)
    count += (key >= second.to(tl.int32)).to(tl.int64) << COUNT_BITS
    return count + ((key >= third.to(tl.int32)).to(tl.int64) << 2 * COUNT_BITS)


@triton.jit
def _narrowed(low, high, reaching, above, pivot, reach, k):
    """Narrows the range to one side of a pivot that `reach` keys reach, if the pivot is inside."""
    up = (reach >= k) & (pivot > low)
    down = (reach < k) & (pivot <= high)
    return (
        tl.where(up, pivot, low),
        tl.where(down, pivot - 1, high),
        tl.where(up, reach, reaching),
        tl.where(down, reach, above),
    )


@triton.jit
def _append(out, size, items, mask):
    """Appends the masked items to a list, and returns its new size."""
    counted = mask.to(tl.int32)
    tl.store(out + size + tl.cumsum(counted, 0) - 1, items, mask=mask)
    return size + tl.sum(counted, 0)


@triton.jit
def _rising(scores):
    """Maps float32 scores to int32 keys of the same order."""
    bits = scores.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _score(key):
    """Inverse of `_rising`."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)
