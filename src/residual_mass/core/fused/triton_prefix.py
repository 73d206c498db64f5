"""Attention terms of several methods and budgets over one prefix, in the kernels of `triton_path`.

Query rows of a KV head take the place of its query heads: one launch scores all rows with every key, one selects, one
gathers and one merges, whatever the rows' methods are; moments have one launch for each residual. The terms stay
unnormalised, for the tokens that the rows generate are kept apart.

Shape letters: B = batch rows, Hkv = KV heads, R = query rows of a KV head, L = prefix columns, D = head dimension, M =
features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from residual_mass.core.accounting import Terms
from residual_mass.core.fused.cache import DecodeCache, MethodRows
from residual_mass.core.fused.triton_path import Region, add_moments, gather, merge, programs_of, score, select
from residual_mass.core.moments import MomentState


def prefix_terms(
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
    """Computes unnormalised terms [B, Hkv, R, ...] float32 of queries [B, Hkv, R, D] over a prefix.

    Args:
        cache: without room; with a summary if any row adds the residual of feature maps. Its sizes are those of
            `triton_path.decode_attention`, and nothing of it is copied.
        log_query: [B, Hkv, R, M] float32 log phi_q; None if no row adds that residual.
        moments: of residuals, each with the indices [N] of its rows.
        sink, tail: numbers of anchors.
    """
    given = (*cache, *rows, *(part for state, members in moments for part in (*state, members)))
    assert all(x.is_contiguous() for x in given if isinstance(x, Tensor)), "no copies of large buffers"
    assert cache.keys.shape[2] == cache.length
    heads = queries.shape[1:3]
    query = queries.flatten(1, 2).contiguous()
    if log_query is not None:
        log_query = log_query.flatten(1, 2).contiguous().unsqueeze(0)
    region = Region(min(rows.most, cache.length), sink, tail)
    scores, maxima = score(query, cache, region, None, scale)
    selection = select(scores, maxima, cache, region, rows)
    programs = max((programs_of(state) for state, _ in moments), default=0)
    subtracts = log_query is not None
    shares = gather(query, cache, log_query, region, scores, selection, None, subtracts, scale, rows, programs)
    for state, members in moments:
        add_moments(query, cache, state, region, selection.least, shares, scale, rows, members)
    terms = Terms(query.new_empty(query.shape, dtype=torch.float32), *shares.shifts.new_empty(2, *query.shape[:2]))
    merge(query, cache, log_query, shares, subtracts, terms, rows)
    return Terms(*(part.unflatten(1, heads) for part in terms))
