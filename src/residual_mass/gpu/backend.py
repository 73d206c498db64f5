"""The backend of Triton's steps: buffers of fixed size, and CUDA graphs that are recorded once and replayed.

The host waits for no step: the column that a step fills, and up to which it reads, is on the device, so one graph
serves all steps. Full attention is torch's, which gets its sizes from the host: it needs a graph for every step, which
is worth recording only if the same steps are taken again.

Shape letters: B = batch rows, Hq / Hkv = query / KV heads, L = prompt tokens, D = head dimension, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from residual_mass.core.feature_maps import FoldedMap
from residual_mass.decode.backend import CacheBackend, LayerCall, Prefill
from residual_mass.decode.prefix import Map, map_heads
from residual_mass.decode.terms import own_precision, retrieved_by
from residual_mass.decode.torch_backend import buffered_cache
from residual_mass.gpu.cache import DecodeCache, MethodRows, with_moments, with_scan, with_summary
from residual_mass.gpu.device import MOST_HEADS, kernels_run_on, tiles_fit
from residual_mass.gpu.terms import kind_of
from residual_mass.methods import Method, QuantisedScan
from residual_mass.methods.arms import Arm
from residual_mass.methods.served import triton_serves
from residual_mass.model.hook import exact_attention
from residual_mass.model.layers import device_of, require_plain, text_config, weights_stay_on
from residual_mass.model.phi_maps import HeadShape, PhiMaps
from residual_mass.model.rotary import frequencies_of
from residual_mass.spec.settings import AnchorSpec

Recorded = tuple[torch.cuda.CUDAGraph, Tensor]
"""A graph of one step, and the logits [B, 1, V] that it writes."""
LEAST_ROOM = 64
"""Fewest free columns of a new buffer; with every larger buffer a step is recorded anew."""
SERVED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Of models that the kernels serve; they sum in float32."""


class TritonBackend(CacheBackend):
    """Takes the steps of one arm by Triton's kernels; reads prompts, and full attention's steps, by torch.

    Args:
        room: expected tokens after the prompt; buffers grow beyond it.

    Attributes:
        graphs: recorded steps, under 0 if one serves all.
    """

    name = "triton"

    def __init__(self, model: PreTrainedModel, arm: Arm, anchors: AnchorSpec, phi: PhiMaps | None, room: int) -> None:
        self.model = model
        self.arm = arm
        self.anchors = anchors
        self.room = max(room, LEAST_ROOM)
        self._cache = buffered_cache(model, room=self.room)
        self._shown = True
        """Whether the cache holds all filled columns; steps write to its buffers directly."""
        self.graphs: dict[int, Recorded] = {}
        config = text_config(model)
        maps: list[tuple[Map | None, Map | None]] = [(None, None)] * config.num_hidden_layers
        if arm.needs_maps and phi is not None:
            maps = phi.on(model).folded()
        self._maps = maps
        self._caches: dict[int, DecodeCache] = {}
        self._query_kernels: dict[int, Callable[[Tensor], Tensor] | None] = {}
        device = device_of(model)
        self._column = torch.zeros(1, dtype=torch.long, device=device)
        """The column that the next token fills."""
        self._generated = torch.zeros(1, dtype=torch.int32, device=device)
        """Number of tokens after the prompt, with the one of the running step."""
        self._inputs = (torch.empty(0, device=device), torch.empty(0, device=device))
        """Token ids and positions [B, 1] that recorded steps read."""
        self._pool: object = None
        """Memory that graphs share, as only one of them runs at a time."""
        self._filled = 0
        """The same column as `_column`, on the host."""
        self._length = 0
        """L."""
        self._first = torch.zeros(0, dtype=torch.int32, device=device)
        """[B], the first column of a row that is no padding."""
        self._k: int | MethodRows = 0
        """Tokens to retrieve; by row if prompts have padding."""

    @property
    def records(self) -> bool:
        return bool(self.graphs)

    @classmethod
    def refusal(cls, model: PreTrainedModel, arm: Arm, phi: PhiMaps | None = None) -> str | None:
        if not triton_serves(arm.rule):
            return f"the Triton kernels serve methods that choose by the scores of all keys, not {arm.rule.name}"
        try:
            require_plain(model)
            shape = HeadShape.of(text_config(model))
        except ValueError as error:
            return str(error)
        device = device_of(model)
        if not kernels_run_on(device):
            return "the Triton kernels run on the current GPU, with Triton installed"
        if model.dtype not in SERVED_DTYPES:
            dtype = str(model.dtype).removeprefix("torch.")
            return f"the Triton kernels compute in float32, and the model in {dtype}"
        if not weights_stay_on(model, device) or frequencies_of(model).change:
            return f"{type(model).__name__} moves its weights or changes its frequencies while it decodes"
        return shape_refusal(shape, arm.rule, phi)

    @classmethod
    def open(
        cls, model: PreTrainedModel, arm: Arm, anchors: AnchorSpec, phi: PhiMaps | None, cache: Cache | None, room: int
    ) -> TritonBackend:
        return cls(model, arm, anchors, phi, room)

    @property
    def cache(self) -> DynamicCache:
        if not self._shown:
            for layer in self._cache.layers:
                layer.show(self._filled)
            self._shown = True
        return self._cache

    @property
    def kept_bytes(self) -> int:
        kept = 0
        for cache in self._caches.values():
            kept += sum(x.nbytes for x in cache if isinstance(x, Tensor))
        return kept

    def read(self, call: LayerCall) -> Tensor:
        keys, values = self.stored(call)
        self._begin(keys, call.mask)
        # Summaries are of an earlier prefix; the next step makes them anew.
        self._caches.pop(call.index, None)
        return exact_attention(call.module, call.query, keys, values, call.mask, call.scale)

    def take(self, read: Prefill) -> None:
        for index, (key, value) in sorted(read.layers.items()):
            keys, _ = self.cache.layers[index].update(key, value)
            self._begin(keys, None)
        for index in sorted(read.layers):
            self._prepare(index)

    def crop(self, tokens: int) -> None:
        """Goes back to a column of before, which the next steps overwrite."""
        self._filled -= tokens
        self._column.fill_(self._filled)
        self._shown = False

    def step(self, call: LayerCall) -> Tensor:
        if call.query.shape[2] > 1:
            raise ValueError("the Triton backend takes one token a step")
        index = call.index
        query = call.query
        if index not in self._caches:
            self._prepare(index)
        cache = self._caches[index]
        cache.keys.index_copy_(2, self._column, call.key)
        cache.values.index_copy_(2, self._column, call.value)
        if self.arm.is_full:
            filled = self._filled + 1
            keys = cache.keys[:, :, :filled]
            values = cache.values[:, :, :filled]
            output = F.scaled_dot_product_attention(query, keys, values, call.mask, scale=call.scale, enable_gqa=True)
            return output.transpose(1, 2)
        from residual_mass.gpu.path import decode_attention

        with own_precision(query):
            log_query = self._log_query(index, query)
            output = decode_attention(
                query.squeeze(2),
                cache,
                log_query,
                k=self._k,
                sink=self.anchors.sink,
                tail=self.anchors.tail,
                subtracts=self.arm.rule.subtracts,
                generated=self._generated,
                scale=call.scale,
            )
        return output.unsqueeze(1).to(query.dtype)

    def replayed(self, call: Callable[[Tensor, Tensor], Tensor], ids: Tensor, positions: Tensor) -> Tensor:
        """Runs a step, from a recorded graph where there is one."""
        if self._filled == self._cache.layers[0].buffers[0].shape[2]:
            self._grow()
        place = self._filled - self._length if self.arm.is_full else 0
        on_gpu = ids.device.type == "cuda"
        if on_gpu and place not in self.graphs and (self.repeats or not self.arm.is_full):
            self.graphs[place] = self._recorded(call, ids, positions)
        if place in self.graphs:
            graph, logits = self.graphs[place]
            for kept, given in zip(self._inputs, (ids, positions), strict=True):
                kept.copy_(given)
            graph.replay()
        else:
            logits = self._advance(call, ids, positions)
        self._filled += 1
        self._shown = False
        return logits.clone()  # the next replay overwrites them

    def _advance(self, call: Callable[[Tensor, Tensor], Tensor], ids: Tensor, positions: Tensor) -> Tensor:
        # With the token of this step, whose key is written before its attention is computed.
        self._generated.copy_(self._column - (self._length - 1))
        logits = call(ids, positions)
        self._column += 1
        return logits

    def _recorded(self, call: Callable[[Tensor, Tensor], Tensor], ids: Tensor, positions: Tensor) -> Recorded:
        """Records a step as a CUDA graph, after a step to warm up whose column is filled again."""
        if not self.graphs:
            self._inputs = (ids.clone(), positions.clone())
            self._pool = torch.cuda.graph_pool_handle()
        # Triton compiles, and libraries set themselves up, before the capture, which allows neither.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._advance(call, *self._inputs)
            self._column -= 1
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self._advance(call, *self._inputs)
        return graph, logits

    def _begin(self, keys: Tensor, mask: Tensor | None) -> None:
        """Takes the columns of keys [B, Hkv, L, D] for the prompt; `mask` [B or 1, 1, T, L] hides those of padding."""
        length = keys.shape[2]
        if length == self._filled:  # another layer of the same call
            return
        self._filled = length
        self._length = length
        self._column.fill_(length)
        self.graphs.clear()
        self._first = torch.zeros(len(keys), dtype=torch.int32, device=keys.device)
        if mask is not None:
            seen = mask[:, 0, -1].int()  # of the last query, which sees every column but padding
            self._first += seen.argmax(-1).to(torch.int32)  # one row of a mask is that of all
        counts = []
        for first in self._first.tolist():
            counts.append(retrieved_by(self.arm, length - first, self.anchors, None))
        most = max(counts)
        self._k = most
        # Rows with padding have shorter prompts, of which K is a share.
        if min(counts) < most:
            group = text_config(self.model).num_attention_heads // keys.shape[1]
            by_row = torch.tensor(counts, dtype=torch.int32, device=keys.device)
            k = by_row.unsqueeze(1).repeat(1, group)
            kinds = torch.full((group,), kind_of(self.arm.rule), dtype=torch.int32, device=keys.device)
            self._k = MethodRows(k, kinds, most)

    def _grow(self) -> None:
        """Replaces buffers without a free column by larger ones, which the next step is recorded with."""
        more = max(self.room, self._filled // 4)
        for index, layer in enumerate(self._cache.layers):
            layer.buffers = [F.pad(buffer, (0, 0, 0, more)) for buffer in layer.buffers]
            if index in self._caches:
                keys, values = layer.buffers
                self._caches[index] = self._caches[index]._replace(keys=keys, values=values)
        self._shown = False
        self.graphs.clear()  # they read and write the old buffers

    def _prepare(self, index: int) -> None:
        """Arranges a layer's buffers for the kernels, with the method's summaries of the prompt."""
        keys, values = self._cache.layers[index].buffers
        last = torch.full_like(self._first, self._length)
        cache = DecodeCache(keys, values, self._first, last, self._length)
        query_map, key_map = self._maps[index]
        self._caches[index] = prepared(cache, self.arm.rule, key_map, self.anchors)
        self._query_kernels[index] = None
        if isinstance(query_map, FoldedMap):
            from residual_mass.gpu.path import QueryMap

            self._query_kernels[index] = QueryMap(query_map, keys.dtype)

    def _log_query(self, index: int, query: Tensor) -> Tensor | None:
        """Computes log phi_q of queries [B, Hq, 1, D] as the kernels take it; None without maps."""
        query_map, _ = self._maps[index]
        kernel = self._query_kernels[index]
        if kernel is not None:
            return kernel(query.squeeze(2))
        return None if query_map is None else map_heads(query_map, query).squeeze(2).float()


def prepared(cache: DecodeCache, rule: Method, key_map: Map | None, anchors: AnchorSpec) -> DecodeCache:
    """Adds a method's summaries of the prompt to a layer's cache."""
    if key_map is not None:
        log_features = map_heads(key_map, cache.keys[:, :, : cache.length])
        cache = with_summary(cache, log_features, anchors.sink, anchors.tail)
    elif rule.own is not None:
        cache = with_moments(cache, rule.own.prepare, anchors.sink, anchors.tail)
    if isinstance(rule.selector, QuantisedScan):
        scan = rule.selector
        cache = with_scan(cache, scan.prepare, scan.block, anchors.sink, anchors.tail)
    return cache


def shape_refusal(shape: HeadShape, rule: Method, phi: PhiMaps | None) -> str | None:
    """Returns why the kernels have no tiles for a model's heads or for feature maps; None if they have."""
    widths = [shape.head_dim]
    if phi is not None:
        widths.append(phi.map.d_phi)
    if isinstance(rule.selector, QuantisedScan):
        # A byte holds two channels, so a scan multiplies the two halves of the channels separately.
        widths += [shape.head_dim // 2, rule.selector.block]
        if shape.group > MOST_HEADS:
            return f"the Triton kernels scan for at most {MOST_HEADS} query heads of a KV head"
    if not tiles_fit(*widths):
        return f"the Triton kernels have no tiles for heads of {shape.head_dim} channels or for these feature maps"
    return None
