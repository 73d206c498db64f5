"""A prefix's terms in Triton kernels, where these have all that a decode step needs.

Shape letters: E = examples, Hkv = KV heads, A = arms, G = query heads of a KV head, R = A * G query rows of a KV head,
L = prefix columns, D = head dimension, M = features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from residual_mass.core.accounting import Terms
from residual_mass.core.fused import DecodeCache, MethodRows, kernels_run_on, tiles_fit
from residual_mass.core.fused.cache import ADDS, MOMENTS, SUBTRACTS
from residual_mass.core.moments import MomentState
from residual_mass.methods import Method, TopK

if TYPE_CHECKING:
    from residual_mass.model.prefix import ArmRows, PrefixLayer, Summary

MAPS_MISSING = "an arm needs feature maps, but there are none"
LONGEST = 2**21
"""Columns that the selection can count (`core.fused.triton_selection`)."""
MOST_ROWS = 2**16
"""Query rows of all examples and KV heads that one launch can number."""


def method_rows(
    rules: Sequence[Method], k: Sequence[Sequence[int]], group: int, device: torch.device
) -> MethodRows | None:
    """Returns what the kernels are told of `group` rows per method, which retrieve k tokens by example and method; None
    if they do not compute one of the methods.
    """
    if not all(rule.selector == TopK() and (rule.own is None or rule.own.fused) for rule in rules):
        return None
    kinds = [
        ADDS * (rule.phi is not None) + SUBTRACTS * rule.subtracts + MOMENTS * (rule.own is not None) for rule in rules
    ]

    def rows(numbers: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device).repeat_interleave(group, dim=-1)

    return MethodRows(rows(k), rows(kinds), max((max(each, default=0) for each in k), default=0))


def kernels_serve(queries: Tensor, layer: PrefixLayer, summary: Summary | None, arms: ArmRows) -> bool:
    """Whether the kernels compute what `prefix_terms` is asked for, on this device."""
    keys, values, span = layer.keys, layer.values, layer.span
    if span is None or arms.for_kernels is None or not kernels_run_on(keys.device):
        return False
    features = summary.features.shape[-1:] if arms.any_residual and summary is not None else ()
    return (
        tiles_fit(keys.shape[-1], *features)
        and values.shape == keys.shape
        and keys.shape[2] < LONGEST
        and queries.shape[:3].numel() < MOST_ROWS
        and all(x.dtype in (torch.bfloat16, torch.float32) for x in (queries, keys, values))
        and all(x.is_contiguous() for x in (keys, values))
        and not queries.requires_grad  # kernels have no gradients
    )


def kernel_terms(
    queries: Tensor, log_query: Tensor | None, layer: PrefixLayer, summary: Summary | None, arms: ArmRows, scale: float
) -> Terms:
    """Same as `prefix_terms`, where `kernels_serve`."""
    from residual_mass.core.fused.triton_prefix import prefix_terms

    assert layer.span is not None and arms.for_kernels is not None
    first, last, anchors = layer.span
    cache = DecodeCache(layer.keys, layer.values, first, last, layer.keys.shape[2])
    if arms.any_residual:
        assert log_query is not None and summary is not None, MAPS_MISSING
        features, log_shift = summary.features.contiguous(), summary.state.log_shift.contiguous()
        cache = cache._replace(features=features, summary=summary.joined, log_shift=log_shift)
    moments = [(MomentState(*(x.contiguous() for x in layer.state(own))), rows) for own, rows in arms.own]
    return prefix_terms(
        queries, cache, log_query.float() if arms.any_residual else None, arms.for_kernels, moments,
        sink=anchors.sink, tail=anchors.tail, scale=scale,
    )  # fmt: skip
