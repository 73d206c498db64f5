"""`partial_kv`: runs a method under transformers' own `model.generate`.

Shape letters: N = batch rows, Hq / Hkv = query / KV heads, G = Hq / Hkv, L = prefix columns, T = all key columns, D =
head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from residual_mass.backbones.hook import attention_hook, attention_layers, device_of, exact_attention
from residual_mass.backbones.phi_maps import HeadShape, PhiMaps
from residual_mass.backbones.prefix import (
    ArmRows,
    Map,
    PrefixLayer,
    Summary,
    arm_rows,
    build_prefix,
    generated_terms,
    map_queries,
    prefix_terms,
    summarise_prefix,
)
from residual_mass.core.accounting import merge
from residual_mass.core.settings import AnchorSpec
from residual_mass.methods import Method, method_named
from residual_mass.methods.arms import Arm


@contextmanager
def partial_kv(
    model: PreTrainedModel,
    method: str | Method = "topk_phi",
    budget: float | None = 0.01,
    phi: PhiMaps | None = None,
    num_sink: int = 4,
    num_tail: int = 16,
    fold: int | None = None,
) -> Iterator[PartialKV]:
    """Context in which prompts are read exactly and generated tokens attend to the prompt through `method`.

    Works with `model.generate` (greedy, sampling or beams, left-padded batches, the default dynamic cache) on
    decoder-only models with rotary positions that use transformers' attention interface. Prompts must be read in one
    piece (no `prefill_chunk_size`), because a call with a single token counts as a generated one.

    Args:
        method: full, topk, topk_phi, topk_moments or another name in `residual_mass.methods`, or your own `Method`.
        budget: exact-support budget as a share of each row's own prompt, in (0, 1], including anchors; ignored for
            full.
        phi: maps trained for this backbone; required by the methods with phi in their name, refused by those with
            another residual.
        num_sink, num_tail: first and last positions of the prompt that are always exact.
        fold: None reads every generated token exactly. A number folds that many older ones into the prompt whenever
            twice as many were generated: they are retrieved and estimated as the prompt's tokens are, and the budget is
            a share of both. Not with beams, which exchange generated tokens between rows.

    Raises:
        ValueError: unknown method, budget out of range, maps missing, not needed or of another head shape, model not
            supported or already hooked.
    """
    arm = make_arm(method, budget)
    if fold is not None and fold < 1:
        raise ValueError(f"fold is {fold}, not 1 or more tokens")
    if getattr(model.generation_config, "prefill_chunk_size", None):
        raise ValueError("partial_kv reads a prompt in one piece; unset generation_config.prefill_chunk_size")
    attention_layers(model)
    session = PartialKV(arm, AnchorSpec(num_sink, num_tail), HeadShape.of(model.config), fold)
    require_maps(arm, phi)
    if arm.needs_maps:
        assert phi is not None
        phi.require(session.shape)
        session.maps = phi.on(device_of(model)).folded()
    with attention_hook(model, session):
        yield session


def make_arm(method: str | Method, budget: float | None) -> Arm:
    """Converts the budget to percent; raises ValueError for an unknown method or a budget out of range."""
    rule = method_named(method) if isinstance(method, str) else method
    # Exact arithmetic: 100 * 0.07 is a little above 7 in floats, and the budget formula would round it up to 8.
    return Arm(rule, None if rule.whole_prefix or budget is None else float(Fraction(str(budget)) * 100))


def require_maps(arm: Arm, phi: PhiMaps | None) -> None:
    """Raises ValueError where a method lacks its maps, or another residual than theirs is given some."""
    if phi is not None and arm.rule.own is not None and not arm.needs_maps:
        raise ValueError(f"method {arm.rule.name} uses no phi maps: leave phi out, or take topk_phi_moments for both")
    if phi is None and arm.needs_maps:
        raise ValueError(f"method {arm.rule.name} needs phi maps: pass phi=PhiMaps.load(...)")


@dataclass
class PartialKV:
    """State of one `partial_kv` context, by layer.

    Attributes:
        partial_calls: number of decode-step attention calls per layer; 0 if the model bypasses the hook.
    """

    arm: Arm
    anchors: AnchorSpec
    shape: HeadShape
    fold: int | None = None
    maps: list[tuple[Map, Map]] | None = None
    partial_calls: dict[int, int] = field(default_factory=dict)
    _real: dict[int, Tensor] = field(default_factory=dict)
    _prefix: dict[int, tuple[PrefixLayer, Summary | None, ArmRows]] = field(default_factory=dict)

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        index = module.layer_idx
        if query.shape[2] > 1 or key.shape[2] == 1:  # a prompt, or more of it
            self._real[index] = _real_columns(key, mask)
            self._prefix.pop(index, None)
            return exact_attention(module, query, key, value, mask, scale)
        if index not in self._real:
            raise ValueError("partial_kv: the prompt has to be read within the context, not before it")
        length = self._real[index].shape[1]
        if key.shape[2] <= length:
            raise ValueError(
                "partial_kv needs a growing cache: static caches (cache_implementation=...) are not supported"
            )
        self.partial_calls[index] = self.partial_calls.get(index, 0) + 1
        if self.arm.is_full:
            return exact_attention(module, query, key, value, mask, scale)
        folded = self.fold is not None and key.shape[2] - length > 2 * self.fold
        if folded:
            length += self.fold
            self._real[index] = nn.functional.pad(self._real[index], (0, self.fold), value=True)
        if folded or index not in self._prefix:
            self._prefix[index] = self._build(index, key[:, :, :length], value[:, :, :length])
        layer, summary, rows = self._prefix[index]
        grouped = query.view(query.shape[0], key.shape[1], -1, query.shape[-1])
        log_query = None if self.maps is None else map_queries(self.maps[index][0], query, key.shape[1])
        prefix = prefix_terms(grouped, log_query, layer, summary, rows, scale)
        new = generated_terms(grouped, key[:, :, length:], value[:, :, length:], scale)
        return merge(prefix, new).flatten(1, 2).unsqueeze(1).to(query.dtype)

    def _build(self, index: int, keys: Tensor, values: Tensor) -> tuple[PrefixLayer, Summary | None, ArmRows]:
        real = self._real[index]
        if index in self._prefix:
            layer = self._prefix[index][0].grown(keys, values, real, self.anchors)
        else:
            layer = build_prefix(keys, values, real, self.anchors)
        summary = None if self.maps is None else summarise_prefix(layer, self.maps[index][1])
        group = self.shape.query_heads // self.shape.kv_heads
        rows = arm_rows([self.arm], group, real.sum(-1).tolist(), self.anchors, None, keys.device)
        return layer, summary, rows


def _real_columns(key: Tensor, mask: Tensor | None) -> Tensor:
    """Returns the mask [N, L] of real prompt tokens: exactly those that a left-padded prompt's last query sees."""
    if mask is None:
        return torch.ones(key.shape[0], key.shape[2], dtype=torch.bool, device=key.device)
    return mask[:, 0, -1].expand(key.shape[0], -1)
