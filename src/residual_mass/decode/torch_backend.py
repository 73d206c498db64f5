"""The backend that runs anywhere and serves every method: selectors and residuals in torch over whole keys and values.

Shape letters: N = batch rows, Hq / Hkv = query / KV heads, G = Hq / Hkv, L = prefix columns, C = all columns, D = head
dimension.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from residual_mass.decode.backend import Backend
from residual_mass.decode.prefix import PrefixLayer, Summary, build_prefix, map_heads, summarise_prefix
from residual_mass.decode.terms import ArmRows, arm_rows, merge_with_prefix, own_precision, prefix_terms, rows_of_heads
from residual_mass.methods.arms import Arm
from residual_mass.model.hook import Prefill, exact_attention
from residual_mass.model.layers import attention_layers, sinks_of, text_config, window_of
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
        begins_with_held = buffer is not None and held.data_ptr() == buffer.data_ptr()
        if not begins_with_held or len(held) != len(buffer) or after > buffer.shape[2]:
            batch, heads, _, width = new.shape
            room = max(self.room, after // 4)
            buffer = new.new_empty(batch, heads, after + room, width)
            buffer[:, :, :before] = held
            self.buffers[place] = buffer
        buffer[:, :, before:after] = new
        return buffer[:, :, :after]


def buffered_cache(
    model: PreTrainedModel, whole: bool, given: DynamicCache | None = None, room: int = 64
) -> DynamicCache:
    """Returns a cache whose layers have room for new tokens.

    Args:
        whole: whether layers with a window keep all tokens, so that tokens can be removed again.
        given: an empty cache, whose layers are replaced; None makes one.
        room: as in `BufferedLayer`.
    """
    cache = DynamicCache(config=model.config) if given is None else given
    count = text_config(model).num_hidden_layers
    own = list(cache.layers)
    if len(own) != count:
        own = [DynamicLayer() for _ in range(count)]
    # Without a cache, layers that share keys are given them again and again, so that each keeps its own.
    whole = whole or bool(getattr(text_config(model), "num_kv_shared_layers", 0))
    for layer in attention_layers(model):
        if whole or window_of(layer) is None:
            own[layer.layer_idx] = BufferedLayer(room)
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


class TorchBackend(Backend):
    """Serves every method on every device.

    Args:
        cache: stores keys and values. None: another cache stores them, as under transformers' own loop; then each call
            passes the keys and values of all columns [N, Hkv, C, D].
        fold: number of generated tokens that join the prefix whenever more than twice as many have gathered; None keeps
            them out of it.
    """

    name = "torch"

    def __init__(
        self,
        model: PreTrainedModel,
        arm: Arm,
        anchors: AnchorSpec,
        phi: PhiMaps | None = None,
        cache: Cache | None = None,
        fold: int | None = None,
    ) -> None:
        self.model = model
        self.arm = arm
        self.anchors = anchors
        self.fold = fold
        self.cache = cache
        self.maps = None
        self.shape: HeadShape | None = None
        if arm.needs_maps and phi is not None:
            self.maps = phi.on(model).folded()
            self.shape = phi.shape
        self.partial_calls: dict[int, int] = {}
        self._real: dict[int, Tensor] = {}
        """[N, L] bool by layer: the prefix's columns that hold a token, not padding."""
        self.prefixes: dict[int, tuple[PrefixLayer, Summary | None, ArmRows]] = {}
        """By layer, without keys and values: what a step knows of the prefix."""

    @classmethod
    def refusal(cls, model: PreTrainedModel, arm: Arm, phi: PhiMaps | None = None) -> str | None:
        return None

    @classmethod
    def crops(cls, model: PreTrainedModel, arm: Arm) -> bool:
        return True

    @classmethod
    def open(
        cls,
        model: PreTrainedModel,
        arm: Arm,
        anchors: AnchorSpec,
        phi: PhiMaps | None,
        cache: Cache | None,
        crop: bool,
        room: int,
    ) -> TorchBackend:
        given = cache if isinstance(cache, DynamicCache) else None
        return cls(model, arm, anchors, phi, buffered_cache(model, crop, given))

    @property
    def can_crop(self) -> bool:
        return self.cache is not None and all(
            type(layer) in (DynamicLayer, BufferedLayer) for layer in self.cache.layers
        )

    @property
    def kept_bytes(self) -> int:
        layers = [] if self.cache is None else self.cache.layers
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers if layer.is_initialized)

    def read(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        keys, values = self._columns(module, key, value)
        if mask is None:
            real = torch.ones(len(keys), keys.shape[2], dtype=torch.bool, device=keys.device)
        else:
            real = mask[:, 0, -1].expand(len(keys), -1).clone()  # so that the mask [N, 1, T, C] is not kept
        self._real[module.layer_idx] = real
        self.prefixes.pop(module.layer_idx, None)
        return exact_attention(module, query, keys, values, mask, scale)

    def verify(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        keys, values = self._columns(module, key, value)
        groups = query.shape[1] // keys.shape[1]
        if mask is None or groups == 1 or sinks_of(module) is not None:
            return exact_attention(module, query, keys, values, mask, scale)
        # The query heads of a KV head become rows of one matrix product: no copy of keys and values for each.
        rows = query.unflatten(1, (keys.shape[1], groups)).flatten(2, 3)
        visible = mask.repeat(1, 1, groups, 1)
        output = nn.functional.scaled_dot_product_attention(rows, keys, values, visible, scale=scale)
        return output.unflatten(2, (groups, -1)).flatten(1, 2).transpose(1, 2).contiguous()

    def step(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        keys, values = self._columns(module, key, value)
        index = module.layer_idx
        self.partial_calls[index] = self.partial_calls.get(index, 0) + 1
        if self.arm.is_full:
            return exact_attention(module, query, keys, values, mask, scale)
        with own_precision(query):
            return self._partial(module, query, keys, values, mask, scale)

    def _partial(
        self, module: nn.Module, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        """Computes the attention [N, 1, Hq, D] of one new token of each row through the method."""
        index = module.layer_idx
        kv_heads = keys.shape[1]
        layer, summary, arm = self._prefix_of(index, keys, values, query.shape[1], mask)
        length = self._real[index].shape[1]
        log_query = None
        if self.maps is not None:
            query_map, _ = self.maps[index]
            log_query = rows_of_heads(map_heads(query_map, query), kv_heads)
        rows = rows_of_heads(query, kv_heads)
        prefix = prefix_terms(rows, log_query, layer, summary, arm, scale)
        near_keys = keys[:, :, length:]
        near_values = values[:, :, length:]
        if mask is None:
            visible = rows.new_ones(1, 1, near_keys.shape[2], dtype=torch.bool)
        else:
            visible = mask[:, 0, :, length:]
        return merge_with_prefix(module, query, prefix, [(near_keys, near_values, visible)], scale)

    def take(self, read: Prefill) -> None:
        """Takes prompts without padding that were prefilled elsewhere, and summarises them."""
        query_heads = text_config(self.model).num_attention_heads
        for layer in attention_layers(self.model):
            index = layer.layer_idx
            if index not in read.layers:
                continue
            key, value = read.layers[index]
            keys, values = self.cache.layers[index].update(key, value)
            self._real[index] = torch.ones(len(key), key.shape[2], dtype=torch.bool, device=key.device)
            if not self.arm.is_full and window_of(layer) is None:
                self._prefix_of(index, keys, values, query_heads, None)

    def forget(self, index: int, columns: int) -> None:
        """Keeps the first `columns` columns of a layer, after the caller's cache was cropped."""
        if columns < self._real[index].shape[1]:
            self._real[index] = self._real[index][:, :columns]
            self.prefixes.pop(index, None)

    def _columns(self, module: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values of all columns [N, Hkv, C, D]."""
        if self.cache is None:
            return key, value
        return self.cache.layers[module.layer_idx].update(key, value)

    def _prefix_of(
        self, index: int, keys: Tensor, values: Tensor, query_heads: int, mask: Tensor | None
    ) -> tuple[PrefixLayer, Summary | None, ArmRows]:
        """Returns a layer's prefix; builds it at the first step, and anew when generated tokens are folded into it."""
        generated = keys.shape[2] - self._real[index].shape[1]
        folds = self.fold is not None and generated > 2 * self.fold
        if folds:
            self._join(index, mask)
        length = self._real[index].shape[1]
        keys = keys[:, :, :length]
        values = values[:, :, :length]
        if folds or index not in self.prefixes:
            self.prefixes[index] = self._built(index, keys, values, query_heads)
        layer, summary, rows = self.prefixes[index]
        return replace(layer, keys=keys, values=values), summary, rows

    def _join(self, index: int, mask: Tensor | None) -> None:
        """Adds the oldest generated tokens to a layer's prefix; those of a row that had ended are padding."""
        real = self._real[index]
        length = real.shape[1]
        joined = real.new_ones(len(real), self.fold)
        if mask is not None:
            joined = joined & mask[:, 0, 0, length : length + self.fold]
        self._real[index] = torch.cat((real, joined), 1)

    def _built(
        self, index: int, keys: Tensor, values: Tensor, query_heads: int
    ) -> tuple[PrefixLayer, Summary | None, ArmRows]:
        real = self._real[index]
        if index in self.prefixes:
            layer = self.prefixes[index][0].grown(keys, values, real, self.anchors)
        else:
            layer = build_prefix(keys, values, real, self.anchors)
        if self.shape is not None and (self.shape.kv_heads, self.shape.head_dim) != (keys.shape[1], keys.shape[3]):
            raise ValueError(
                f"layer {index} has {keys.shape[1]} key heads of width {keys.shape[3]}, and the phi maps are for "
                f"{self.shape.kv_heads} of width {self.shape.head_dim}; take a method without maps: topk_moments"
            )
        summary = None if self.maps is None else summarise_prefix(layer, self.maps[index][1])
        group = query_heads // keys.shape[1]
        rows = arm_rows([self.arm], group, real.sum(-1).tolist(), self.anchors, None, keys.device)
        # The cache may replace its tensors at every step, and a view would keep the old ones.
        return replace(layer, keys=keys.new_empty(0), values=values.new_empty(0)), summary, rows
