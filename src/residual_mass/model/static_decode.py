"""Greedy decoding of one method from static buffers, on a GPU from CUDA graphs.

The host waits for no step: sizes are known before the first step, and the chosen token stays on the device. So does the
column L + t of the buffers, which step t fills and up to which it reads. One graph serves all steps if attention reads
its sizes on the device, as our kernels do. Full's and torch's attention get them from the host and need one graph per
step.

Shape letters: B = batch rows, Hq / Hkv = query / KV heads, L = prompt tokens, T = decoded steps, D = head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from residual_mass.core.fused import (
    DecodeCache,
    build_cache,
    decode_attention_for,
    query_map_for,
    torch_path,
    with_moments,
    with_scan,
    with_summary,
)
from residual_mass.core.settings import AnchorSpec
from residual_mass.methods import Method, QuantisedScan, method_named
from residual_mass.model.hook import Prefill, attention_hook, device_of
from residual_mass.model.phi_maps import HeadShape, PhiMaps
from residual_mass.model.prefix import Map, map_heads, own_precision
from residual_mass.model.rotary import require_read_once


def fill_buffers(read: Sequence[Prefill], steps: int) -> list[DecodeCache]:
    """Moves prompts of equal length into one cache per layer, emptying `read` to save memory.

    Raises:
        ValueError: the prompts differ in length.
    """
    lengths = {key.shape[2] for prefill in read for key, _ in prefill.layers.values()}
    if len(lengths) != 1:
        raise ValueError(f"prompts have {len(lengths)} lengths, but static buffers take one; cut them to the shortest")
    caches = []
    for layer in sorted(read[0].layers):
        keys, values = (torch.cat(rows) for rows in zip(*(prefill.layers.pop(layer) for prefill in read), strict=True))
        first = torch.zeros(len(keys), dtype=torch.int32, device=keys.device)
        caches.append(build_cache(keys, values, first, first + keys.shape[2], steps))
    return caches


def fused_method(method: str | Method) -> Method:
    """Looks up a method with a fast decode step; raises ValueError if it has none or its name is unknown."""
    rule = method_named(method)
    if not rule.fused:
        raise ValueError(f"method {rule.name} has no fast decode step; use partial_kv")
    return rule


def prepared(cache: DecodeCache, rule: Method, key_map: Map | None, anchors: AnchorSpec) -> DecodeCache:
    """Adds a method's summaries of the prompt to a layer's cache."""
    if key_map is not None:
        cache = with_summary(cache, map_heads(key_map, cache.keys[:, :, : cache.length]), anchors.sink, anchors.tail)
    elif rule.own is not None:
        cache = with_moments(cache, rule.own.prepare, anchors.sink, anchors.tail)
    if isinstance(scan := rule.selector, QuantisedScan):
        cache = with_scan(cache, scan.prepare, scan.block, anchors.sink, anchors.tail)
    return cache


class StaticDecoder:
    """Decodes a batch of prompts under one method.

    Args:
        caches: one per layer; decoders may share them, because each run overwrites the generated columns.
        method: one with a fast step, or its name.
        k: retrieved tokens per query head; unused by `full`.
        phi: required by methods with feature maps.
        steps: tokens after the first, at most the room of the buffers.
        attention: `decode_attention` of the torch path or of Triton's; None takes the faster that works here.

    Raises:
        ValueError: the method is unknown or has no fast step; maps are missing or have another shape; the model's
            rotary frequencies change within the text.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: PreTrainedModel,
        caches: list[DecodeCache],
        method: str | Method,
        k: int,
        anchors: AnchorSpec,
        phi: PhiMaps | None,
        steps: int,
        attention: Callable[..., Tensor] | None = None,
    ) -> None:
        self.model, self.rule, self.k, self.anchors, self.steps = model, fused_method(method), k, anchors, steps
        self.device = device_of(model)
        require_read_once(model, caches[0].length, caches[0].length + steps)
        maps: list[tuple[Map | None, Map | None]] = [(None, None)] * len(caches)
        if self.rule.needs_maps:
            if phi is None:
                raise ValueError(f"method {self.rule.name} needs phi maps")
            phi.require(HeadShape.of(model.config))
            maps = phi.on(model).folded()
        self.caches = [
            prepared(cache, self.rule, key_map, anchors) for cache, (_, key_map) in zip(caches, maps, strict=True)
        ]
        self.attention = attention or decode_attention_for(self.caches[0], model.config.num_attention_heads)
        self.query_maps = [query_map for query_map, _ in maps]
        self.query_kernels = [query_map_for(self.attention, phi_q, caches[0].keys.dtype) for phi_q in self.query_maps]
        batch, self.length = caches[0].keys.shape[0], caches[0].length
        self.step = 0
        self.shared: dict[str, object] = {}
        self.token = torch.zeros(batch, 1, dtype=torch.long, device=self.device)
        self.tokens = torch.zeros(batch, steps, dtype=torch.long, device=self.device)
        self.column = torch.full((1,), self.length, device=self.device)
        # transformers passes a 4D mask through; without a mask it would read values on the host.
        self.mask = torch.ones(batch, 1, 1, 1, dtype=torch.bool, device=self.device)
        self.graphs: list[torch.cuda.CUDAGraph] = []

    @property
    def sizes_on_device(self) -> bool:
        """Whether attention reads the number of generated tokens on the device, so that one graph serves all steps."""
        return not (self.rule.whole_prefix or self.attention is torch_path.decode_attention)

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        cache = self.caches[module.layer_idx]
        cache.keys.index_copy_(2, self.column, key)
        cache.values.index_copy_(2, self.column, value)
        if self.rule.whole_prefix:
            filled = self.length + self.step + 1
            keys, values = cache.keys[:, :, :filled], cache.values[:, :, :filled]
            output = F.scaled_dot_product_attention(query, keys, values, scale=scale, enable_gqa=True)
            return output.transpose(1, 2)
        with own_precision(query):
            output = self.attention(
                query.squeeze(2),
                cache,
                self._log_query(module.layer_idx, query),
                k=self.k,
                sink=self.anchors.sink,
                tail=self.anchors.tail,
                subtracts=self.rule.subtracts,
                scale=scale,
                **self.shared,
            )
        return output.unsqueeze(1).to(query.dtype)

    def _log_query(self, layer: int, query: Tensor) -> Tensor | None:
        """Computes log phi_q of queries [B, Hq, 1, D] as `self.attention` takes it; None without maps."""
        query_map, kernel = self.query_maps[layer], self.query_kernels[layer]
        if kernel is not None:
            return kernel(query.squeeze(2))
        return None if query_map is None else map_heads(query_map, query).squeeze(2).float()

    @torch.no_grad()
    def prepare(self) -> None:
        """Captures CUDA graphs of the steps after a warm-up; does nothing on a CPU."""
        if self.device.type != "cuda" or self.graphs:
            return
        steps = range(1 if self.sizes_on_device else self.steps)
        with attention_hook(self.model, self):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._begin(self.token[:, 0])
                for step in steps:
                    self._advance(step)
            torch.cuda.current_stream().wait_stream(stream)
            pool = torch.cuda.graph_pool_handle()
            for step in steps:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    self._advance(step)
                self.graphs.append(graph)

    @torch.no_grad()
    def run(self, first: Tensor, ends: Collection[int] = ()) -> Tensor:
        """Decodes tokens [B, T] after the tokens `first` [B], into a buffer that the next run overwrites.

        Queues the work without waiting for the device. With end tokens `ends`, waits for every step and stops once each
        row has generated one: [B, <= T].
        """
        self._begin(first)
        ended, end_tokens = torch.zeros_like(first, dtype=torch.bool), first.new_tensor(list(ends))
        with nullcontext() if self.graphs else attention_hook(self.model, self):
            for step in range(self.steps):
                if self.graphs:
                    self.graphs[step % len(self.graphs)].replay()
                else:
                    self._advance(step)
                if ends:
                    ended |= torch.isin(self.tokens[:, step], end_tokens)
                    if ended.all():
                        return self.tokens[:, : step + 1]
        return self.tokens

    def _begin(self, first: Tensor) -> None:
        self.token.copy_(first.unsqueeze(1))
        self.column.fill_(self.length)

    def _advance(self, step: int) -> None:
        self.step = step
        if self.sizes_on_device:
            self.shared = {"generated": (self.column - (self.length - 1)).to(torch.int32)}
        elif not self.rule.whole_prefix:
            fixed = torch_path.fixed_columns(self.caches[0], self.anchors.sink, self.anchors.tail, step + 1)
            self.shared = {"generated": step + 1, "fixed": fixed}
        position = self.column.expand(len(self.token), 1)
        output = self.model(self.token, position_ids=position, attention_mask=self.mask, use_cache=False)
        self.logits = output.logits[:, -1]
        self.token.copy_(self.logits.argmax(-1, keepdim=True))
        self.tokens.index_copy_(1, self.column - self.length, self.token)
        self.column += 1
