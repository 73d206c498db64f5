"""One decode step's attention in Triton kernels, without leaving the GPU.

1. `score` reads every key once, for all query heads that share it, and writes scores and the maxima of adjacent scores.
   `scan` does the same with packed keys.
2. `select` lists the columns of the k highest scores, in one program per query head (`gpu.selection`).
3. `gather` sums values and key features of the exact support in shares; after a scan it computes the exact scores too.
   `add_moments` computes more shares from moments. `merge` adds up all shares and the residual of feature maps, and
   divides once.

`QueryMap` computes log phi_q beforehand, in one launch.

Nothing is read back to the host, and all shapes and grids depend only on the buffers and k, so a CUDA graph can capture
a step. One graph serves all steps if the number of generated tokens is on the device.

Shape letters: B = batch rows, Hq / Hkv = query / KV heads, R = query rows of a KV head, L = prefix columns, T = room
for generated tokens, D = head dimension, M = features, I = inner width of a feature map, C = its terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from residual_mass.core.accounting import CLAMP_RELATIVE, Terms
from residual_mass.core.feature_maps import FoldedMap
from residual_mass.core.moments import LARGEST_CUT, LEAST_VARIANCE, MomentState
from residual_mass.gpu import kernels
from residual_mass.gpu import selection as triton_selection
from residual_mass.gpu.cache import DecodeCache, MethodRows

SCORE_BLOCK = 128
"""Keys per program, 16 KiB in bfloat16 at D = 64: small enough for several programs per SM."""
TILE_ROWS = 64
"""Most query rows that a program scores; further rows of a KV head have programs of their own."""
SELECT_CHUNK = 4096
"""Keys that a program of `select` holds in registers: all maxima of 64k columns."""
SHARED_PARTS = 8
"""Parts that a program computes if they share a covariance, which it then reads once."""
SLOTS = 32
"""Tokens that a program gathers at once: at D = M = 128 their values and features still fit in its registers."""
MOST_SPLITS = 32
"""Most shares of a query head: enough to fill any GPU from 24 heads on, few enough for `merge` to read at once."""
INNER_BLOCK = {tl.bfloat16: 64, tl.float32: 32}
"""Inner channels of a program: 8 programs per head at the paper's inner width of 512 in bfloat16."""
WARPS = {tl.bfloat16: 4, tl.float32: 16}
"""Products of float32 take so many registers that fewer threads spill them."""


def decode_attention(
    query: Tensor,
    cache: DecodeCache,
    log_query: Tensor | None,
    *,
    k: int | MethodRows,
    sink: int,
    tail: int,
    subtracts: bool,
    generated: int | Tensor,
    scale: float,
) -> Tensor:
    """Computes attention [B, Hq, D] float32 of one new token of each row, under one method.

    D is a power of two, at least 16 or, with a scan, 32; so are M and S. With a scan, at most MOST_HEADS query heads
    share a KV head.

    Args:
        query: [B, Hq, D].
        cache: bfloat16, float16 or float32.
        log_query: log phi_q [B, Hq, M], or terms [C, B, Hq, M] of it as `QueryMap` computes them; None without maps.
        k: number of tokens to retrieve; settings of the query heads of a KV head if batch rows have their own.
        sink, tail: numbers of anchors.
        subtracts: whether retrieved tokens are subtracted from the residual of feature maps.
        generated: number of filled columns after the prefix, on the host or [1] int32 on the device.
    """
    if isinstance(generated, int):
        generated = torch.full((1,), generated, dtype=torch.int32, device=query.device)
    if log_query is not None:
        batch, heads, _ = query.shape
        m = log_query.shape[-1]
        log_query = log_query.contiguous().view(-1, batch, heads, m)  # [C, B, Hq, M], with one term where it is whole
    rows = k if isinstance(k, MethodRows) else None
    most = k if rows is None else rows.most
    region = Region(min(most, cache.length), sink, tail)
    launches = Launches(query, cache, region, scale, generated, log_query, subtracts, rows)
    # Settings by row come with indices of the rows, and their terms are not divided by the kernels.
    members = None if rows is None else torch.arange(launches.group, device=query.device)
    moments = [] if cache.moments is None else [(cache.moments, members)]
    if rows is None:
        out = torch.empty(query.shape, dtype=torch.float32, device=query.device)
        return launches.attend(moments, out)
    terms = launches.attend(moments, empty_terms(query))
    return terms.numerator / terms.denominator.unsqueeze(-1)


def terms_over_prefix(
    queries: Tensor,
    cache: DecodeCache,
    log_query: Tensor | None,
    rows: MethodRows,
    moments: Sequence[tuple[MomentState, Tensor]],
    *,
    sink: int,
    tail: int,
    scale: float,
) -> Terms:
    """Computes unnormalised terms [B, Hkv, R, ...] float32 of queries [B, Hkv, R, D] over a prefix, under several
    methods and budgets at once: query rows of a KV head take the place of its query heads.

    Args:
        cache: without room; with a summary if any row adds the residual of feature maps. Its sizes are those of
            `decode_attention`, and nothing of it is copied.
        log_query: [B, Hkv, R, M] float32 log phi_q; None if no row adds that residual.
        moments: of residuals, each with the indices [N] of its rows.
        sink, tail: numbers of anchors.
    """
    require_contiguous(*rows)
    for state, members in moments:
        require_contiguous(*state, members)
    assert cache.keys.shape[2] == cache.length
    if log_query is not None:
        log_query = log_query.flatten(1, 2).contiguous().unsqueeze(0)
    query = queries.flatten(1, 2)  # [B, Hkv R, D]
    region = Region(min(rows.most, cache.length), sink, tail)
    launches = Launches(query, cache, region, scale, None, log_query, log_query is not None, rows)
    terms = launches.attend(moments, empty_terms(query))
    heads_and_rows = queries.shape[1:3]
    return Terms(*(part.unflatten(1, heads_and_rows) for part in terms))


def empty_terms(query: Tensor) -> Terms:
    """Returns terms of queries [B, Hq, D] to be written, in float32."""
    numerator = query.new_empty(query.shape, dtype=torch.float32)
    denominator, shift = numerator.new_empty(2, *query.shape[:2])
    return Terms(numerator, denominator, shift)


def require_contiguous(*buffers: object) -> None:
    """Asserts that tensors among large buffers need no copy, which a step could not afford."""
    for buffer in buffers:
        assert not isinstance(buffer, Tensor) or buffer.is_contiguous(), "large buffers must be contiguous"


class Region(NamedTuple):
    """Most tokens that a query head retrieves, and numbers of anchors around the mid-region."""

    k: int
    sink: int
    tail: int


class Selection(NamedTuple):
    """Retrieved tokens."""

    chosen: Tensor
    """[B * Hq, K] int32, columns in ascending order, as many as a head retrieves and the mid-region has."""
    least: Tensor
    """[B * Hq] float32, the lowest score among them, or the highest of all where k is 0."""


class Shares(NamedTuple):
    """Partial sums of every query head, to be merged."""

    sums: Tensor
    """[2, B * Hq, S, D + 1] float32."""
    shifts: Tensor
    """[B * Hq, S]."""
    of_tokens: int
    """Number of shares of tokens, which come first; the others are of moments."""


class Launches:
    """The launches of one step.

    Args:
        query: [B, Hq, D].
        generated: [1] int32, filled columns after the prefix; None for none.
        log_query: [C, B, Hq, M] terms of log phi_q; None adds no residual of feature maps.
        rows: settings of the query heads of a KV head, if they belong to several methods.
    """

    def __init__(
        self,
        query: Tensor,
        cache: DecodeCache,
        region: Region,
        scale: float,
        generated: Tensor | None = None,
        log_query: Tensor | None = None,
        subtracts: bool = False,
        rows: MethodRows | None = None,
    ) -> None:
        # These two are small enough to be copied in every step.
        cache = cache._replace(first=cache.first.contiguous(), last=cache.last.contiguous())
        moments = cache.moments or ()
        scan = cache.scan or ()
        require_contiguous(*cache, *moments, *scan)
        self.query = query.contiguous()
        self.cache = cache
        self.region = region
        self.scale = scale
        self.generated = generated
        self.rows = rows
        self.batch, self.heads, self.d = query.shape
        self.kv_heads = cache.keys.shape[1]
        self.group = self.heads // self.kv_heads
        self.span: dict[str, Any] = {
            "first": cache.first,
            "last": cache.last,
            "sink": region.sink,
            "tail": region.tail,
        }
        """Arguments of kernels that use the mid-region."""
        self.retrieved: dict[str, Any] = self.span | {
            "k": region.k if rows is None else rows.k,
            "HEADS": self.heads,
            "GROUP": self.group,
            "BY_ROW": rows is not None,
        }
        """Arguments of kernels that use the retrieved tokens."""
        terms, m = 1, 1
        if log_query is not None:
            terms, _, _, m = log_query.shape
        self.features: dict[str, Any] = {
            "log_query": log_query,
            "log_shift": cache.log_shift,
            "kinds": None if rows is None else rows.kinds,
            "D": self.d,
            "M": m,
            "TERMS": terms,
            "MAX_TERMS": triton.next_power_of_2(terms),  # tl.arange has powers of two alone
            "SUBTRACTS": subtracts and log_query is not None,
        }
        """Arguments of kernels that use feature maps."""

    def attend(self, moments: Sequence[tuple[MomentState, Tensor | None]], out: Tensor | Terms) -> Tensor | Terms:
        """Writes attention [B, Hq, D] or, for several methods, terms [B, Hq, ...] to `out`. `moments` has states with
        the indices [N] of their rows of a KV head, None for all.
        """
        scores, maxima = self.score() if self.cache.scan is None else self.scan()
        selection = self.select(scores, maxima)
        # Several states belong to different query rows, so their shares take the same places.
        programs = max((programs_of(state) for state, _ in moments), default=0)
        shares = self.gather(scores, selection, programs)
        for state, members in moments:
            self.add_moments(state, members, selection.least, shares)
        self.merge(shares, out)
        return out

    def score(self) -> tuple[Tensor, Tensor]:
        """Returns scores [B * Hq, >= L + T] float32 of real tokens, and the mid-region's maxima [B * Hq, groups]."""
        keys = self.cache.keys
        columns = keys.shape[2]
        blocks = triton.cdiv(columns, SCORE_BLOCK)
        least_rows = kernels.DOT_ROWS.value  # of a tensor core's product
        tile = min(max(triton.next_power_of_2(self.group), least_rows), TILE_ROWS)
        # Rows start at multiples of the block, which aligns the scores for wide stores.
        scores, maxima = self._scratch(blocks * SCORE_BLOCK)
        grid = blocks, self.batch * self.kv_heads, triton.cdiv(self.group, tile)
        kernels.score_kernel[grid](
            query=self.query,
            keys=keys,
            scores=scores,
            maxima=maxima,
            scale=self.scale,
            length=self.cache.length,
            columns=columns,
            stride=scores.stride(0),
            generated=self.generated,
            **self.span,
            KV_HEADS=self.kv_heads,
            GROUP=self.group,
            D=self.d,
            DOT_TYPE=product_type(self.query, keys),
            ROWS=tile,
            BLOCK=SCORE_BLOCK,
            num_warps=4 if tile == least_rows else 8,
        )
        return scores, maxima

    def scan(self) -> tuple[Tensor, Tensor]:
        """Returns scores [B * Hq, N S] float32 of the mid-region's packed keys, and maxima as `score` does."""
        codes, low, step = self.cache.scan
        blocks = codes.shape[2]
        block = codes.shape[4]
        scores, maxima = self._scratch(blocks * block)
        kind = product_type(self.query, self.query)
        in_bfloat16 = kind == tl.bfloat16
        grid = blocks, self.batch * self.kv_heads
        kernels.scan_kernel[grid](
            query=self.query,
            codes=codes,
            low=low,
            step=step,
            scores=scores,
            maxima=maxima,
            scale=self.scale,
            stride=scores.stride(0),
            **self.span,
            KV_HEADS=self.kv_heads,
            GROUP=self.group,
            D=self.d,
            DOT_TYPE=kind,
            IN_TWO=in_bfloat16,
            BLOCK=block,
            num_warps=4 if in_bfloat16 else 8,  # products of float32 take registers of more threads
        )
        return scores, maxima

    def select(self, scores: Tensor, maxima: Tensor) -> Selection:
        """Selects the k highest scores of every query head's mid-region."""
        assert self.cache.length < 2**triton_selection.COUNT_BITS.value, "three counts fill 64 bits"
        heads = len(scores)
        columns = torch.empty_like(scores, dtype=torch.int32)
        keys = torch.empty_like(columns)
        chosen = scores.new_empty(heads, self.region.k, dtype=torch.int32)
        least = scores.new_empty(heads)
        triton_selection.select_kernel[(heads,)](
            scores=scores,
            maxima=maxima,
            groups=torch.empty_like(maxima),
            columns=columns,
            keys=keys,
            chosen=chosen,
            least=least,
            stride=scores.stride(0),
            most=self.region.k,
            **self.retrieved,
            CHUNK=SELECT_CHUNK,
            num_warps=32,
        )
        return Selection(chosen, least)

    def gather(self, scores: Tensor, selection: Selection, programs: int) -> Shares:
        """Sums the exact support of every query head, with room for the shares of `programs` programs of moments."""
        cache = self.cache
        columns = cache.keys.shape[2]
        # All room counts, filled or not: a recorded grid cannot follow the number on the device.
        generated_columns = columns - cache.length
        support = self.region.k + self.region.sink + self.region.tail + generated_columns
        pieces = max(triton.cdiv(support, SLOTS), 1)
        # The fewest rounds, then the fewest shares with so many rounds: no share is left without pieces.
        rounds = triton.cdiv(pieces, MOST_SPLITS)
        splits = triton.cdiv(pieces, rounds)
        heads = self.batch * self.heads
        count = splits + programs
        sums = scores.new_empty(2, heads, count, self.d + 1)
        shifts = scores.new_empty(heads, count)
        kernels.gather_kernel[splits, heads](
            scores=scores,
            query=self.query,
            keys=cache.keys,
            values=cache.values,
            features=cache.features,
            chosen=selection.chosen,
            sums=sums,
            shifts=shifts,
            shares=count,
            scale=self.scale,
            length=cache.length,
            columns=columns,
            stride=scores.stride(0),
            most=self.region.k,
            generated=self.generated,
            rounds=rounds,
            SCANNED=cache.scan is not None,
            SLOTS=SLOTS,
            **self.retrieved,
            **self.features,
        )
        return Shares(sums, shifts, splits)

    def add_moments(self, moments: MomentState, members: Tensor | None, least: Tensor, shares: Shares) -> None:
        """Writes the shares of moments of every query head, or of the query heads `members` [N] of every KV head."""
        count = shares.shifts.shape[1]
        before = shares.of_tokens
        num_members = self.group if members is None else len(members)
        grid = count - before, self.batch * self.kv_heads * num_members
        kernels.moments_kernel[grid](
            query=self.query,
            least=least,
            **moments._asdict(),
            sums=shares.sums,
            shifts=shares.shifts,
            shares=count,
            before=before,
            parts=moments.count.shape[2],
            rounds=_at_once(moments),
            scale=self.scale,
            members=members,
            num_members=num_members,
            least_variance=LEAST_VARIANCE,
            whole=LARGEST_CUT,
            D=self.d,
            SHARED=moments.shared,
            **self.retrieved,
            num_warps=8,
        )

    def merge(self, shares: Shares, out: Tensor | Terms) -> None:
        """Adds up the shares of every query head."""
        numerator, masses, units = out if isinstance(out, Terms) else (out, None, None)
        count = shares.shifts.shape[1]
        heads = self.batch * self.heads
        kernels.merge_kernel[(heads,)](
            sums=shares.sums,
            shifts=shares.shifts,
            summary=self.cache.summary,
            out=numerator,
            masses=masses,
            units=units,
            shares=count,
            before=shares.of_tokens,
            clamp=CLAMP_RELATIVE,
            GROUP=self.group,
            RESIDUAL=self.features["log_query"] is not None,
            BY_ROW=self.rows is not None,
            MAX_SHARES=triton.next_power_of_2(count),
            **self.features,
            num_warps=8,
        )

    def _scratch(self, columns: int) -> tuple[Tensor, Tensor]:
        """Returns room for scores, and for the maxima of adjacent ones."""
        heads = self.batch * self.heads
        scores = self.query.new_empty(heads, columns, dtype=torch.float32)
        maxima = scores.new_empty(heads, columns // triton_selection.SUB.value, dtype=torch.int32)
        return scores, maxima


def programs_of(moments: MomentState) -> int:
    """Returns the number of programs per query head that compute the parts."""
    return triton.cdiv(moments.count.shape[2], _at_once(moments))


def _at_once(moments: MomentState) -> int:
    """Returns the number of parts that one program computes."""
    return SHARED_PARTS if moments.shared else 1


class QueryMap:
    """The maps of a layer's query heads, with weights rounded to the type of the cache.

    A single query reads 70,000 weights per head, so several programs share a head: each takes some of the inner
    channels and writes its term of the sum. The kernels that read log phi_q add the terms up, which saves a launch.
    """

    def __init__(self, folded: FoldedMap, dtype: torch.dtype) -> None:
        """D at least 16; D and M powers of two."""
        self.weights = {}
        for name in ("a", "b", "c"):
            self.weights[name] = getattr(folded, name).to(dtype).contiguous()
        self.biases = {}
        for name in ("c_bias", "e_bias"):
            self.biases[name] = getattr(folded, name).float().contiguous()

    def __call__(self, query: Tensor) -> Tensor:
        """Computes terms of log phi, which is their sum: [B, Hq, D] -> [C, B, Hq, M] float32."""
        batch, heads, d = query.shape
        _, inner, m = self.weights["b"].shape
        kind = product_type(query, self.weights["a"])
        blocks = triton.cdiv(inner, INNER_BLOCK[kind])
        terms = query.new_empty(blocks, batch, heads, m, dtype=torch.float32)
        kernels.map_kernel[blocks, heads](
            query=query.contiguous(),
            **self.weights,
            **self.biases,
            terms=terms,
            batch=batch,
            inner=inner,
            D=d,
            M=m,
            DOT_TYPE=kind,
            BLOCK=INNER_BLOCK[kind],
            num_warps=WARPS[kind],
        )
        return terms


def product_type(query: Tensor, others: Tensor) -> tl.dtype:
    """Returns bfloat16 for two bfloat16 operands, whose products are exact in float32, otherwise float32. Triton's
    interpreter always gets float32, because it multiplies bfloat16 bits as integers.
    """
    compiled = isinstance(kernels.score_kernel, triton.JITFunction)
    in_bfloat16 = query.dtype == others.dtype == torch.bfloat16
    return tl.bfloat16 if compiled and in_bfloat16 else tl.float32
