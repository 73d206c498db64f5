"""Shared-prefill decoding: every arm of an evaluation from one exact prefill, as one batch.

Greedy. The prefix's keys, values and summaries are read-only and shared by all arms; each arm has its own buffer of
generated keys and values, so no arm can contaminate another. The first generated token comes from the shared exact
prefill.

Shape letters: E = examples, A = arms, Hq / Hkv = query / KV heads, G = Hq / Hkv, R = A * G, L = prefix columns, T =
generated tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from residual_mass.backbones.hook import attention_hook, exact_attention
from residual_mass.backbones.loading import Backbone
from residual_mass.backbones.phi_maps import PhiMaps
from residual_mass.backbones.prefix import (
    ArmRows,
    Map,
    PrefixLayer,
    arm_rows,
    build_prefix,
    generated_terms,
    map_queries,
    prefix_terms,
    retrieved_by,
)
from residual_mass.core.accounting import Terms, merge
from residual_mass.specs import AnchorSpec, ArmSpec


@dataclass(frozen=True)
class Generation:
    """What one arm generated for one prompt."""

    tokens: list[int]
    """Generated ids, an end-of-sequence token included."""
    k: int
    """Mid-region tokens retrieved per query head and step (all of them for `full`)."""
    finish: Literal["length", "eos"]

    def cut(self, limit: int) -> Generation:
        """What would have been generated with a lower limit."""
        if len(self.tokens) <= limit:
            return self
        return Generation(self.tokens[:limit], self.k, "length")


class SharedPrefillEngine:
    """Decodes prompts under several arms at once.

    Args:
        backbone: the frozen model.
        arms: what to run; order is kept in the results.
        anchors: sink and tail tokens that are always exact.
        phi: maps of this backbone; needed when an arm adds a residual.
        nominal_length: L in the budget formula; None takes each prompt's own length.

    Raises:
        ValueError: an arm needs phi and there is none, or the maps belong to another backbone.
    """

    def __init__(
        self,
        backbone: Backbone,
        arms: Sequence[ArmSpec],
        anchors: AnchorSpec,
        phi: PhiMaps | None,
        nominal_length: int | None,
    ) -> None:
        needs_phi = [arm.method for arm in arms if arm.uses_phi]
        if needs_phi and phi is None:
            raise ValueError(f"method {needs_phi[0]} needs phi maps")
        if needs_phi and phi is not None:
            phi.require(backbone.shape, backbone.spec.model_id, backbone.spec.revision)
            phi = phi.on(backbone.device)
        self.backbone, self.arms, self.anchors, self.nominal_length = backbone, list(arms), anchors, nominal_length
        self.maps = phi.folded() if phi is not None and needs_phi else [(None, None)] * backbone.shape.layers

    @torch.no_grad()
    def generate(self, prompts: Sequence[list[int]], max_new_tokens: int) -> list[list[Generation]]:
        """Generations indexed [example][arm]. Each prompt is prefilled once, alone; all rows then decode as one
        batch.
        """
        recorders = [self._prefill(ids) for ids in prompts]
        first = torch.stack([r.next_token for r in recorders])  # [E]
        lengths = [len(ids) for ids in prompts]
        decoder = self._decoder(recorders, lengths, max_new_tokens - 1)
        del recorders
        tokens = self._decode(decoder, first, lengths, max_new_tokens)
        return [[self._generation(tokens[e][a], lengths[e], arm) for a, arm in enumerate(self.arms)]
                for e in range(len(prompts))]  # fmt: skip

    def _prefill(self, ids: list[int]) -> _PrefillRecorder:
        recorder = _PrefillRecorder()
        with attention_hook(self.backbone.model, recorder):
            inputs = torch.tensor([ids], device=self.backbone.device)
            logits = self.backbone.model(inputs, use_cache=False, logits_to_keep=1).logits
        recorder.next_token = logits[0, -1].argmax(-1)
        return recorder

    def _decoder(self, recorders: list[_PrefillRecorder], lengths: list[int], steps: int) -> _ArmDecoder:
        real = _padded_mask(lengths, self.backbone.device)
        layers = [
            build_prefix(*_stacked([r.layers[index] for r in recorders]), real, self.anchors, self.maps[index][1])
            for index in range(self.backbone.shape.layers)
        ]
        group = self.backbone.shape.query_heads // self.backbone.shape.kv_heads
        rows = arm_rows(self.arms, group, lengths, self.anchors, self.nominal_length, self.backbone.device)
        return _ArmDecoder(layers, [q for q, _ in self.maps], rows, len(self.arms), steps)

    def _decode(
        self, decoder: _ArmDecoder, first: Tensor, lengths: list[int], max_new_tokens: int
    ) -> list[list[list[int]]]:
        """Token ids [example][arm][step]; a finished row keeps decoding until all are, and is cut afterwards."""
        num_arms, device = len(self.arms), self.backbone.device
        current = first.repeat_interleave(num_arms)  # [E * A]
        position = torch.tensor(lengths, device=device).repeat_interleave(num_arms)
        ends = torch.tensor(self._end_tokens(), device=device)
        steps, done = [current], torch.isin(current, ends)
        with attention_hook(self.backbone.model, decoder):
            while len(steps) < max_new_tokens and not bool(done.all()):
                logits = self.backbone.model(
                    current.unsqueeze(1), position_ids=position.unsqueeze(1), use_cache=False
                ).logits
                current = logits[:, -1].argmax(-1)
                steps.append(current)
                done |= torch.isin(current, ends)
                position = position + 1
        decoder.require_calls(len(steps) - 1)
        flat = torch.stack(steps, dim=1).tolist()
        return [flat[e * num_arms : (e + 1) * num_arms] for e in range(len(lengths))]

    def _generation(self, tokens: list[int], prompt_length: int, arm: ArmSpec) -> Generation:
        ends = self._end_tokens()
        end = next((i for i, token in enumerate(tokens) if token in ends), None)
        k = retrieved_by(arm, prompt_length, self.anchors, self.nominal_length)
        return Generation(tokens if end is None else tokens[: end + 1], k, "length" if end is None else "eos")

    def _end_tokens(self) -> list[int]:
        ends = self.backbone.model.generation_config.eos_token_id
        return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


class _PrefillRecorder:
    """Attention handler of the exact prefill: keeps every layer's keys and values."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.next_token = torch.tensor(0)

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        self.layers[module.layer_idx] = (key, value)
        return exact_attention(module, query, key, value, mask, scale)


class _ArmDecoder:
    """Attention handler of one decode step: E * A rows of one new token each, read against the shared prefixes."""

    def __init__(
        self, layers: list[PrefixLayer], query_maps: list[Map | None], rows: ArmRows, num_arms: int, steps: int
    ) -> None:
        self.layers, self.query_maps, self.rows, self.num_arms = layers, query_maps, rows, num_arms
        self.calls = [0] * len(layers)
        self.generated = [self._buffers(layer, max(steps, 1)) for layer in layers]

    def _buffers(self, layer: PrefixLayer, steps: int) -> tuple[Tensor, Tensor]:
        examples, kv_heads, _, d = layer.keys.shape
        size = (examples * self.num_arms, kv_heads, steps, d)
        return layer.keys.new_empty(size), layer.values.new_empty(size)

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        index = module.layer_idx
        layer, step = self.layers[index], self.calls[index]
        self.calls[index] += 1
        keys, values = self.generated[index]
        keys[:, :, step], values[:, :, step] = key[:, :, 0], value[:, :, 0]
        rows, q_heads, _, d = query.shape
        kv_heads = key.shape[1]
        grouped = query.view(rows, kv_heads, q_heads // kv_heads, d)
        query_map = self.query_maps[index]
        log_query = None if query_map is None else self._by_example(map_queries(query_map, query, kv_heads))
        prefix = prefix_terms(self._by_example(grouped), log_query, layer, self.rows, scale)
        new = generated_terms(grouped, keys[:, :, : step + 1], values[:, :, : step + 1], scale)
        output = merge(prefix, Terms(*(self._by_example(t) for t in new)))  # [E, Hkv, A * G, D]
        output = output.unflatten(2, (self.num_arms, -1)).transpose(1, 2)  # [E, A, Hkv, G, D]
        return output.reshape(rows, 1, q_heads, d).to(query.dtype)

    def _by_example(self, x: Tensor) -> Tensor:
        """[E * A, Hkv, G, ...] -> [E, Hkv, A * G, ...]."""
        return x.unflatten(0, (-1, self.num_arms)).transpose(1, 2).flatten(2, 3)

    def require_calls(self, steps: int) -> None:
        """Raises RuntimeError unless every layer went through here once per step: a bypassed hook would report Full's
        numbers.
        """
        if self.calls != [steps] * len(self.calls):
            raise RuntimeError(f"attention hook calls per layer {sorted(set(self.calls))}, expected {steps} in each")


def _padded_mask(lengths: list[int], device: torch.device) -> Tensor:
    """[E, Lmax] bool, True on real tokens (padding on the right)."""
    return torch.arange(max(lengths), device=device) < torch.tensor(lengths, device=device).unsqueeze(1)


def _stacked(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """[1, Hkv, L_e, D] keys and values of each example as [E, Hkv, Lmax, D]."""
    longest = max(key.shape[2] for key, _ in pairs)

    def pad(x: Tensor) -> Tensor:
        return nn.functional.pad(x, (0, 0, 0, longest - x.shape[2]))

    return torch.cat([pad(k) for k, _ in pairs]), torch.cat([pad(v) for _, v in pairs])
