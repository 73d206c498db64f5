"""TopK over a whole text in one pass of the plain model, without any code of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from residual_mass.spec.settings import AnchorSpec

NAME = "masked_topk"


@contextmanager
def masked_topk(model: PreTrainedModel, prefix: int, k: int, anchors: AnchorSpec) -> Iterator[None]:
    """Within it each token after the prefix sees its own top K of the mid-region, by an additive mask under SDPA."""

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        n, first, last = query.shape[2], anchors.sink, prefix - anchors.tail
        groups = query.shape[1] // key.shape[1]
        keys, values = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        visible = torch.ones(n, n, dtype=torch.bool).tril().repeat(1, query.shape[1], 1, 1)
        scores = query[:, :, prefix:] @ keys[:, :, first:last].transpose(-1, -2)
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(k, dim=-1).indices, True)
        visible[:, :, prefix:, first:last] = chosen
        bias = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)
        output = F.scaled_dot_product_attention(query, keys, values, bias, scale=scaling)
        return output.transpose(1, 2).contiguous(), None

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    before = model.config._attn_implementation
    model.config._attn_implementation = NAME
    try:
        yield
    finally:
        model.config._attn_implementation = before
