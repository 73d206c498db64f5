"""The backend that runs anywhere and serves every method: selectors and residuals in torch over whole keys and values.

Shape letters: B = batch rows, Hq / Hkv = query / KV heads, G = Hq / Hkv, T = new tokens, L = prefix columns, C = all
columns, D = head dimension.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from residual_mass.decode.backend import CacheBackend, LayerCall, Prefill
from residual_mass.decode.prefix import PrefixLayer, Summary, build_prefix, map_heads, summarise_prefix
from residual_mass.decode.terms import ArmRows, arm_rows, merge_with_prefix, own_precision, prefix_terms, rows_of_heads
from residual_mass.kernels.layout import BLOCK
from residual_mass.methods.arms import Arm
from residual_mass.model.hook import exact_attention
from residual_mass.model.layers import attention_layers, text_config, window_of
from residual_mass.model.phi_maps import HeadShape, PhiMaps
from residual_mass.spec.settings import AnchorSpec


class BufferedLayer(DynamicLayer):
    """A layer of a `DynamicCache` whose keys and values are views of buffers with room: a step copies one token alone.

    A buffer that is full is replaced by one with a quarter more room. Keys and values that others replaced (beams,
    repeated rows) are copied to new buffers at the next update.

    Args:
        room: fewest free columns of a new buffer.
    """

    def __init__(self, room: int = 64) -> None:
        super().__init__()
        self.room = room
        self.buffers: list[Tensor | None] = [None, None]
        """Of keys and of values, [N, Hkv, columns, D]."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys = key_states[:, :, :0]
            self.values = value_states[:, :, :0]
        self.keys = self._appended(0, self.keys, key_states)
        self.values = self._appended(1, self.values, value_states)
        return self.keys, self.values

    def show(self, columns: int) -> None:
        """Makes keys and values views of the first columns, which were written to the buffers directly."""
        self.keys = self.buffers[0][:, :, :columns]
        self.values = self.buffers[1][:, :, :columns]

    def reset(self) -> None:
        super().reset()
        self.buffers = [None, None]

    def _appended(self, place: int, held: Tensor, new: Tensor) -> Tensor:
        """Returns the view [N, Hkv, C, D] of a buffer that begins with the tokens `held` and ends with `new`."""
        before = held.shape[2]
        after = before + new.shape[2]
        buffer = self.buffers[place]
        # Another address: someone replaced the tensor, and the buffer holds other tokens.
        begins_with_held = buffer is not None and held.data_ptr() == buffer.data_ptr()
        # What was made in inference mode cannot be written to outside of it.
        if buffer is not None and buffer.is_inference() and not torch.is_inference_mode_enabled():
            begins_with_held = False
        if not begins_with_held or len(held) != len(buffer) or after > buffer.shape[2]:
            batch, heads, _, width = new.shape
            # In proportion to the length, so that the copies of all growths together stay linear in it.
            room = max(self.room, after // 4)
            buffer = new.new_empty(batch, heads, after + room, width)
            buffer[:, :, :before] = held
            self.buffers[place] = buffer
        buffer[:, :, before:after] = new
        return buffer[:, :, :after]


def buffered_cache(model: PreTrainedModel, given: DynamicCache | None = None, room: int = 64) -> DynamicCache:
    """Returns a cache whose layers that read the whole text have room for new tokens.

    Args:
        given: an empty cache, whose layers are replaced; None makes one.
        room: as in `BufferedLayer`.
    """
    cache = DynamicCache(config=model.config) if given is None else given
    count = text_config(model).num_hidden_layers
    own = list(cache.layers)
    if len(own) != count:
        own = [DynamicLayer() for _ in range(count)]
    # Without a cache, layers that share keys are given them again and again, so that each keeps its own.
    shares = bool(getattr(text_config(model), "num_kv_shared_layers", 0))
    for layer in attention_layers(model):
        index = layer.layer_idx
        has_states = hasattr(own[index], "recurrent_states")
        if (shares or window_of(layer) is None) and not has_states:
            own[index] = BufferedLayer(room)
    cache.layers = own
    return cache


def with_room(cache: Cache) -> Cache:
    """Gives layers of a cache that holds tokens room for more, which are copied once; returns the cache."""
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and layer.is_initialized:
            roomy = BufferedLayer()
            roomy.lazy_initialization(layer.keys, layer.values)
            roomy.keys = layer.keys
            roomy.values = layer.values
            cache.layers[index] = roomy
    return cache


class TorchBackend(CacheBackend):
    """Serves every method on every device.

    Generated tokens are read exactly. At every `BLOCK` of them they join the prefix, as in a packed cache: from then on
    they are retrieved and estimated like the prompt's, and K is a share of both.

    Args:
        cache: stores keys and values.
        joins: whether generated tokens join the prefix; as in the paper they never do.
    """

    name = "torch"

    def __init__(
        self,
        model: PreTrainedModel,
        arm: Arm,
        anchors: AnchorSpec,
        phi: PhiMaps | None,
        cache: Cache,
        joins: bool = True,
    ) -> None:
        self.model = model
        self.arm = arm
        self.anchors = anchors
        self.cache = cache
        self.joins = joins
        self.maps = None
        self.shape: HeadShape | None = None
        if arm.needs_maps and phi is not None:
            self.maps = phi.on(model).folded()
            self.shape = phi.shape
        self._real: dict[int, Tensor] = {}
        """[B, L] bool by layer: the prefix's columns that hold a token, not padding."""
        self._prefixes: dict[int, Prefix] = {}

    @classmethod
    def refusal(cls, model: PreTrainedModel, arm: Arm, phi: PhiMaps | None = None) -> str | None:
        return None

    @classmethod
    def open(
        cls, model: PreTrainedModel, arm: Arm, anchors: AnchorSpec, phi: PhiMaps | None, cache: Cache | None, room: int
    ) -> TorchBackend:
        given = cache if isinstance(cache, DynamicCache) else None
        return cls(model, arm, anchors, phi, buffered_cache(model, given))

    @property
    def kept_bytes(self) -> int:
        held = [layer for layer in self.cache.layers if isinstance(layer, DynamicLayer) and layer.is_initialized]
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in held)

    def read(self, call: LayerCall) -> Tensor:
        keys, values = self.stored(call)
        if call.mask is None:
            real = torch.ones(len(keys), keys.shape[2], dtype=torch.bool, device=keys.device)
        else:
            real = call.mask[:, 0, -1].expand(len(keys), -1).clone()  # so that the mask [B, 1, T, C] is not kept
        self._real[call.index] = real
        self._prefixes.pop(call.index, None)
        return exact_attention(call.module, call.query, keys, values, call.mask, call.scale)

    def step(self, call: LayerCall) -> Tensor:
        keys, values = self.stored(call)
        if self.arm.is_full:
            return exact_attention(call.module, call.query, keys, values, call.mask, call.scale)
        outputs = []
        start = keys.shape[2] - call.query.shape[2]
        first = start
        with own_precision(call.query):
            while start < keys.shape[2]:
                length = self._prefix_length(call, start)
                # A piece ends where generated tokens join the prefix.
                end = keys.shape[2]
                if self.joins and end > length + BLOCK:
                    end = min(end, length + self._joining(call.index))
                query = call.query[:, :, start - first : end - first]
                mask = None if call.mask is None else call.mask[:, :, start - first : end - first, :end]
                piece = call._replace(query=query, key=keys[:, :, :end], value=values[:, :, :end], mask=mask)
                outputs.append(self._partial(piece, length))
                start = end
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)

    def _prefix_length(self, call: LayerCall, start: int) -> int:
        """Returns the columns of a layer's prefix for the token in column `start`, after tokens have joined it."""
        if call.index not in self._real:  # no turn has read more than the cache held
            self._real[call.index] = self._held_columns(call, start)
        real = self._real[call.index]
        length = real.shape[1]
        if not self.joins or start - length < BLOCK:
            return length
        count = self._joining(call.index)
        if start - length < count:
            return length
        joined = real.new_ones(len(real), count)
        if call.mask is not None:  # the tokens of a row that had ended are padding
            joined = joined & call.mask[:, 0, -1, length : length + count]
        self._real[call.index] = torch.cat((real, joined), 1)
        return length + count

    def _joining(self, index: int) -> int:
        """Returns how many generated tokens join a layer's prefix next: a block, and as many more as the shortest row
        lacks of its anchors, as in a packed cache.
        """
        fewest = int(self._real[index].sum(-1).min())
        return BLOCK + max(0, self.anchors.sink + self.anchors.tail - fewest)

    def _held_columns(self, call: LayerCall, count: int) -> Tensor:
        """Returns which of the first columns [B, `count`] hold tokens, as the new tokens see them."""
        if call.mask is None:
            return torch.ones(len(call.query), count, dtype=torch.bool, device=call.query.device)
        return call.mask[:, 0, 0, :count].expand(len(call.query), -1).clone()

    def _partial(self, call: LayerCall, length: int) -> Tensor:
        """Computes the attention [B, T, Hq, D] of new tokens through the method.

        Args:
            call: with keys and values of all columns [B, Hkv, C, D].
            length: columns of the prefix.
        """
        kv_heads = call.key.shape[1]
        group = call.query.shape[1] // kv_heads
        tokens = call.query.shape[2]
        prefix_keys = call.key[:, :, :length]
        prefix_values = call.value[:, :, :length]
        prefix = self._prefix(call.index, prefix_keys, prefix_values, group)
        log_query = None
        if self.maps is not None:
            query_map, _ = self.maps[call.index]
            log_query = rows_of_heads(map_heads(query_map, call.query), kv_heads)
        rows = rows_of_heads(call.query, kv_heads)
        layer = replace(prefix.layer, keys=prefix_keys, values=prefix_values)
        arm = prefix.rows if tokens == 1 else self._rows(call.index, group, tokens)
        terms = prefix_terms(rows, log_query, layer, prefix.summary, arm, call.scale)
        near_keys = call.key[:, :, length:]
        near_values = call.value[:, :, length:]
        if call.mask is None:
            visible = rows.new_ones(1, 1, near_keys.shape[2], dtype=torch.bool)
        else:
            visible = call.mask[:, 0, :, length:]
        return merge_with_prefix(call.module, call.query, terms, [(near_keys, near_values, visible)], call.scale)

    def take(self, read: Prefill) -> None:
        for layer in attention_layers(self.model):
            index = layer.layer_idx
            if index in read.layers:
                key, value = read.layers[index]
                self.cache.layers[index].update(key, value)
                self._real[index] = torch.ones(len(key), key.shape[2], dtype=torch.bool, device=key.device)
        self._summarise()

    def copy(self) -> TorchBackend:
        self._summarise()  # once for all copies
        other = super().copy()
        other._real = dict(self._real)
        other._prefixes = dict(self._prefixes)
        return other

    def _summarise(self) -> None:
        """Computes what a step needs to know of the prefixes, before the first step asks for it."""
        if self.arm.is_full or not self._real:
            return
        query_heads = text_config(self.model).num_attention_heads
        for layer in attention_layers(self.model):
            index = layer.layer_idx
            if window_of(layer) is None:
                length = self._real[index].shape[1]
                keys = self.cache.layers[index].keys[:, :, :length]
                values = self.cache.layers[index].values[:, :, :length]
                self._prefix(index, keys, values, query_heads // keys.shape[1])

    def crop(self, tokens: int) -> None:
        prefix = max((real.shape[1] for real in self._real.values()), default=0)
        most = self.cache.get_seq_length() - prefix
        if self._prefixes and tokens > most:
            raise ValueError(f"only the last {most} tokens can be removed, not {tokens}: those before are the prompt's")
        super().crop(tokens)

    def _prefix(self, index: int, keys: Tensor, values: Tensor, group: int) -> Prefix:
        """Returns a layer's prefix; builds it at the first step, and anew when tokens have joined it.

        Args:
            keys, values: [B, Hkv, L, D], the prefix's.
            group: G.
        """
        held = self._prefixes.get(index)
        if held is not None and held.length == keys.shape[2]:
            return held
        real = self._real[index]
        if held is None:
            layer = build_prefix(keys, values, real, self.anchors)
        else:
            layer = held.layer.grown(keys, values, real, self.anchors)
        if self.shape is not None and (self.shape.kv_heads, self.shape.head_dim) != (keys.shape[1], keys.shape[3]):
            raise ValueError(
                f"layer {index} has {keys.shape[1]} key heads of width {keys.shape[3]}, and the phi maps are for "
                f"{self.shape.kv_heads} of width {self.shape.head_dim}; take a method without maps: topk_moments"
            )
        summary = None if self.maps is None else summarise_prefix(layer, self.maps[index][1])
        # The cache may replace its tensors at every step, and a view would keep the old ones.
        layer = replace(layer, keys=keys.new_empty(0), values=values.new_empty(0))
        self._prefixes[index] = Prefix(keys.shape[2], layer, summary, self._rows(index, group, 1))
        return self._prefixes[index]

    def _rows(self, index: int, group: int, tokens: int) -> ArmRows:
        """Returns the settings of the query rows of so many tokens."""
        real = self._real[index]
        counts = real.sum(-1).tolist()
        return arm_rows([self.arm], group * tokens, counts, self.anchors, None, real.device, tokens)


class Prefix(NamedTuple):
    """What steps know of a layer's prefix.

    Attributes:
        length: columns L.
        layer: without keys and values.
        rows: of a single token.
    """

    length: int
    layer: PrefixLayer
    summary: Summary | None
    rows: ArmRows
