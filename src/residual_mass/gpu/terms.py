"""A prefix's terms of several arms by Triton's kernels, for the engine that decodes under several arms at once.

Shape letters: E = examples, Hkv = KV heads, R = query rows of a KV head, L = prefix columns, D = head dimension, M =
features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from residual_mass.core.accounting import Terms
from residual_mass.core.moments import MomentState
from residual_mass.decode.prefix import PrefixLayer, Summary
from residual_mass.decode.terms import MAPS_MISSING, ArmRows, prefix_terms
from residual_mass.gpu.cache import ADDS_MOMENTS, ADDS_RESIDUAL, SUBTRACTS_RETRIEVED, DecodeCache, MethodRows
from residual_mass.gpu.device import kernels_run_on, tiles_fit
from residual_mass.methods import Method, Moments, TopK

MOST_COLUMNS = 2**21
"""Columns, below which the selection of the kernels can count them (`gpu.selection`)."""
LAUNCH_ROWS = 2**16
"""Query rows of all examples and KV heads, below which one launch can number them."""


class PrefixTerms:
    """Same as `decode.terms.prefix_terms`, by kernels where they serve. Keeps the settings of the last rows, so that
    they are sent to the device once.
    """

    def __init__(self) -> None:
        self.arms: ArmRows | None = None
        self.rows: MethodRows | None = None

    def __call__(
        self,
        queries: Tensor,
        log_query: Tensor | None,
        layer: PrefixLayer,
        summary: Summary | None,
        arms: ArmRows,
        scale: float,
    ) -> Terms:
        if self.arms is not arms:
            self.arms = arms
            self.rows = method_rows(arms)
        if self.rows is None or not kernels_serve(queries, layer, summary, arms):
            return prefix_terms(queries, log_query, layer, summary, arms, scale)
        return kernel_terms(queries, log_query, layer, summary, arms, self.rows, scale)


def method_rows(arms: ArmRows) -> MethodRows | None:
    """Returns the settings of rows for the kernels; None if an arm has a method that they do not compute."""
    for method in arms.methods:
        if method.selector != TopK() or not (method.own is None or isinstance(method.own, Moments)):
            return None
    kinds = [kind_of(one) for one in arms.methods]
    k = arms.k.squeeze(1).to(torch.int32)
    group = k.shape[-1] // len(kinds)
    rows = torch.tensor(kinds, dtype=torch.int32, device=k.device).repeat_interleave(group)
    return MethodRows(k, rows, arms.max_k)


def kind_of(method: Method) -> int:
    """Returns the flags of query rows of a method."""
    flags = SUBTRACTS_RETRIEVED * method.subtracts
    if method.phi is not None:
        flags += ADDS_RESIDUAL
    if method.own is not None:
        flags += ADDS_MOMENTS
    return flags


def kernels_serve(queries: Tensor, layer: PrefixLayer, summary: Summary | None, arms: ArmRows) -> bool:
    """Returns whether the kernels compute `prefix_terms` for these arguments on this device."""
    keys = layer.keys
    values = layer.values
    if layer.span is None or not kernels_run_on(keys.device):
        return False
    widths = [keys.shape[-1]]
    if arms.any_residual and summary is not None:
        widths.append(summary.features.shape[-1])
    if not tiles_fit(*widths) or values.shape != keys.shape:
        return False
    if keys.shape[2] >= MOST_COLUMNS or queries.shape[:3].numel() >= LAUNCH_ROWS:
        return False
    if any(x.dtype not in (torch.bfloat16, torch.float32) for x in (queries, keys, values)):
        return False
    if not keys.is_contiguous() or not values.is_contiguous():
        return False
    return not queries.requires_grad  # kernels have no gradients


def kernel_terms(
    queries: Tensor,
    log_query: Tensor | None,
    layer: PrefixLayer,
    summary: Summary | None,
    arms: ArmRows,
    rows: MethodRows,
    scale: float,
) -> Terms:
    """Same as `decode.terms.prefix_terms`, for arguments with `kernels_serve`."""
    from residual_mass.gpu.path import terms_over_prefix

    assert layer.span is not None
    first, last, anchors = layer.span
    cache = DecodeCache(layer.keys, layer.values, first, last, layer.keys.shape[2])
    added = None
    if arms.any_residual:
        assert log_query is not None and summary is not None, MAPS_MISSING
        features = summary.features.contiguous()
        log_shift = summary.state.log_shift.contiguous()
        cache = cache._replace(features=features, summary=summary.joined, log_shift=log_shift)
        added = log_query.float()
    moments = []
    for own, members in arms.own:
        state = MomentState(*(part.contiguous() for part in layer.state(own)))
        moments.append((state, members))
    return terms_over_prefix(queries, cache, added, rows, moments, sink=anchors.sink, tail=anchors.tail, scale=scale)
