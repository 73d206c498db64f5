"""The backend of compiled CPU steps: a `Cache` of transformers whose layers `residual_mass.kernels` reads.

Shape letters: B = batch rows, Hq / Hkv = query / KV heads, T = new tokens, D = head dimension.
"""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from residual_mass.decode.backend import CacheBackend, LayerCall, Prefill
from residual_mass.decode.terms import retrieved_by
from residual_mass.kernels import LayerCache, load
from residual_mass.kernels.library import LAYOUT, WIDTHS
from residual_mass.methods import Method, method_named
from residual_mass.methods.arms import Arm
from residual_mass.methods.served import packing_of
from residual_mass.model.hook import exact_attention, with_sinks
from residual_mass.model.identity import Identity, difference, identity_of
from residual_mass.model.layers import attention_layers, device_of, text_config, unwrapped, window_of
from residual_mass.model.phi_maps import HeadShape, PhiMaps, read_safetensors, write_safetensors
from residual_mass.spec.settings import AnchorSpec

STATE = "residual_mass"
"""Key in the header of a file that holds the state of a `PackedCache`."""


class PackedLayer(CacheLayerMixin):
    """One layer that reads the whole text: a `LayerCache` once the prompt is read.

    `update` passes new keys and values on to the attention, which stores them, so that unpacked keys and values of the
    prompt exist for one layer at a time.
    """

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.packed: LayerCache | None = None
        self.tokens = 0
        """Number of columns, padding included."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype = key_states.dtype
        self.device = key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.lazy_initialization(key_states, value_states)
        return key_states, value_states

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        if isinstance(query_length, Tensor):  # positions, in transformers 4
            query_length = len(query_length)
        return self.tokens + query_length, 0

    def get_seq_length(self, *_: Any) -> int:
        return self.tokens

    def get_max_length(self) -> int:
        return -1  # no maximum, in transformers

    get_max_cache_shape = get_max_length  # its name in transformers 4

    def reset(self) -> None:
        self.packed = None
        self.tokens = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last tokens, a negative number as in transformers, which must still be in float32."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes a negative number of tokens to remove, not {tokens_to_remove}")
        if tokens_to_remove and self.packed is not None:
            self.packed.drop(-tokens_to_remove)
            self.tokens += tokens_to_remove

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise ValueError("a PackedCache does not follow beams: generate with num_beams=1")

    batch_repeat_interleave = batch_select_indices = reorder_cache


class PackedCache(Cache):
    """Keys and values of a prompt and of later tokens, packed for the CPU kernels of a method.

    Pass it as `past_key_values` to `model.generate` within `partial_kv` or with `partial_decoding`. It can be used for
    several turns, and `save` and `load` store its state on disk. `copy.deepcopy` makes a cache that goes on by itself.
    Layers with a window keep the last tokens as transformers' own cache does.

    Attributes:
        identity: of the model, for a caller who makes many caches of a model that stays as it is; if it is None, every
            `save` and `load` computes it from the weights.
    """

    def __init__(self, model: PreTrainedModel, method: str | Method) -> None:
        """Raises ValueError if the kernels do not support the model or the method."""
        method = method_named(method)
        refusal = packing_refusal(model, method)
        if refusal is not None:
            raise ValueError(
                f"no PackedCache of {method.name} for this model and machine: {refusal}; leave the cache out"
            )
        layers = DynamicCache(config=model.config).layers
        for layer in attention_layers(model):
            if window_of(layer) is None:
                layers[layer.layer_idx] = PackedLayer()
        super().__init__(layers=layers)
        self.packing = packing_of(method)
        self.library = load()
        self.shape = HeadShape.of(text_config(model))
        self.identity: Identity | None = None
        # Weak, so that a kept cache does not keep the weights in memory.
        self._model = weakref.ref(unwrapped(model))

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Raises ValueError: a model that is called by itself would attend to its new tokens alone."""
        raise ValueError(
            "only our own loop reads a PackedCache: generate within `with partial_kv(model, method, budget)`, or with "
            "custom_generate=partial_decoding(method, budget)"
        )

    @property
    def packed_layers(self) -> list[PackedLayer]:
        """The layers that read the whole text."""
        return [layer for layer in self.layers if isinstance(layer, PackedLayer)]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        layer = self.layers[layer_idx]
        # Layers with windows or states need not count tokens; all layers have read the same ones.
        if not isinstance(layer, PackedLayer):
            layer = self.packed_layers[0]
        return layer.tokens

    @property
    def nbytes(self) -> int:
        """Bytes of all layers in memory."""
        packed = sum(layer.packed.bytes for layer in self.packed_layers if layer.packed is not None)
        windows = [layer for layer in self.layers if isinstance(layer, DynamicLayer) and layer.is_initialized]
        return packed + sum(layer.keys.nbytes + layer.values.nbytes for layer in windows)

    def save(self, path: str | Path) -> None:
        """Writes the state to a safetensors file, which `load` reads, with the identity of the model as it is now.

        Raises:
            ValueError: the cache is empty, the model has recurrent states, which are not saved, or nothing holds the
                model any more.
        """
        tensors: dict[str, Tensor] = {}
        sizes = []
        for index, layer in enumerate(self.layers):
            if not isinstance(layer, (PackedLayer, DynamicSlidingWindowLayer)):
                raise ValueError("the cache has recurrent states, which are not saved: read the prompt again")
            if isinstance(layer, PackedLayer) and layer.packed is None:
                raise ValueError("the cache is empty: read a prompt before you save it")
            own, numbers = layer.packed.state() if isinstance(layer, PackedLayer) else window_state(layer)
            tensors |= {f"{index}.{name}": tensor for name, tensor in own.items()}
            sizes.append(numbers | {"tokens": layer.get_seq_length()})
        header = json.dumps({"layout": LAYOUT, "of": self._facts(), "sizes": sizes})
        write_safetensors(Path(path), tensors, {STATE: header})

    def load(self, path: str | Path) -> PackedCache:
        """Reads the state that `save` wrote for the same model and method, and returns the cache. Generation goes on
        from it as it would have gone on there.

        Raises:
            ValueError: the file is missing, damaged, or holds something else, such as the state of a model with another
                configuration, other weights or another dtype; the cache is as it was.
        """
        header, tensors = read_safetensors(Path(path))
        if STATE not in header:
            raise ValueError(f"{path}: no state of a PackedCache; give a file that its `save` wrote")
        try:
            restored, columns = self._restored(json.loads(header[STATE]), tensors)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}: cannot be loaded as a state of this PackedCache ({error}); load it for the model and the "
                "method that it was saved with, or read the prompt again and save it anew"
            ) from None
        # Only now, with all layers checked: an error leaves the cache as it was.
        for layer, own in zip(self.layers, restored, strict=True):
            if isinstance(layer, PackedLayer):
                layer.packed = own
                layer.tokens = columns
                layer.is_initialized = True
            else:
                restore_window(layer, own, columns)
        return self

    def _facts(self) -> Identity:
        """Returns what a state has to agree with: the format of the cache, and the identity of the model."""
        identity = self.identity
        if identity is None:
            model = self._model()
            if model is None:
                raise ValueError("its model is no longer in memory: keep the model until the state is saved or loaded")
            identity = identity_of(model)
        packing = {f"{name} of the cache": str(value) for name, value in vars(self.packing).items()}
        return packing | identity

    def _restored(self, stored: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[list[Any], int]:
        """Returns the state of each layer and the number of columns, from a file's header and tensors.

        Raises:
            ValueError and others: they are not what `save` writes.
        """
        layout, facts, sizes = (stored.get(name) for name in ("layout", "of", "sizes"))
        if layout != LAYOUT:
            raise ValueError(f"it has layout {layout}, and this version of the package reads layout {LAYOUT}")
        differing = difference(facts, self._facts())
        if differing is not None or len(sizes) != len(self.layers):
            raise ValueError(f"it is the state of another model or method: {differing or 'its layers are others'}")
        by_layer: list[dict[str, Tensor]] = [{} for _ in sizes]
        for name, tensor in tensors.items():
            index, _, own = name.partition(".")
            by_layer[int(index)][own] = tensor
        # What remains in `sizes` are the numbers that `LayerCache.state` returned.
        columns = [own.pop("tokens") for own in sizes]
        restored: list[Any] = []
        for layer, own, numbers in zip(self.layers, by_layer, sizes, strict=True):
            if isinstance(layer, PackedLayer):
                restored.append(LayerCache.restored(self.library, own, numbers))
            else:
                restored.append(own)
        packed = [each for each in restored if isinstance(each, LayerCache)]
        self._require_one_text(packed, columns)
        for layer, own in zip(self.layers, restored, strict=True):
            if not isinstance(layer, PackedLayer):
                require_window(layer, own, columns[0], packed[0].batch)
        return restored, columns[0]

    def _require_one_text(self, packed: list[LayerCache], columns: list[int]) -> None:
        """Raises ValueError unless layers are of this cache's model and method, and all of the same text."""
        first = packed[0]
        for index, layer in enumerate(packed):
            if (layer.heads, layer.width) != (self.shape.kv_heads, self.shape.head_dim):
                raise ValueError(
                    f"it has {layer.heads} KV heads of width {layer.width}, and the model {self.shape.kv_heads} of "
                    f"{self.shape.head_dim}"
                )
            if (layer.bits, layer.clusters) != (self.packing.bits, self.packing.clusters):
                raise ValueError(f"layer {index} has {layer.bits} bits and {layer.clusters} clusters")
            if (layer.tokens, layer.sink, layer.tail) != (first.tokens, first.sink, first.tail):
                raise ValueError(f"layer {index} holds another number of tokens than layer 0")
        if any(count != columns[0] for count in columns):
            raise ValueError("its layers hold different numbers of tokens")
        # `type`, because a bool is an int for `isinstance`. Columns count padding, too: no row has more tokens.
        if type(columns[0]) is not int or columns[0] < max(first.tokens):
            raise ValueError(f"its number of columns is {columns[0]!r}, below that of the tokens")


# ---- layers with a window, in a saved state --------------------------------------------------------------------------


def window_state(layer: DynamicSlidingWindowLayer) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Returns what `PackedCache.save` stores of a layer with a window."""
    return {"keys": layer.keys.contiguous(), "values": layer.values.contiguous()}, {}


def require_window(layer: CacheLayerMixin, own: dict[str, Tensor], columns: int, batch: int) -> None:
    """Raises ValueError unless the tensors are the last keys and values of `columns` tokens in a layer's window."""
    if not isinstance(layer, DynamicSlidingWindowLayer) or set(own) != {"keys", "values"}:
        raise ValueError("a layer with a window has other tensors than keys and values")
    # A window of n keeps n - 1 tokens: a query's own token is the n-th.
    held = min(columns, layer.sliding_window - 1)
    for name, tensor in own.items():
        if tensor.ndim != 4 or not tensor.is_floating_point() or (len(tensor), tensor.shape[2]) != (batch, held):
            raise ValueError(
                f"{name} of a layer with a window have shape {list(tensor.shape)} and dtype {tensor.dtype}"
            )


def restore_window(layer: DynamicSlidingWindowLayer, own: dict[str, Tensor], columns: int) -> None:
    layer.lazy_initialization(own["keys"], own["values"])
    layer.keys = own["keys"].clone()
    layer.values = own["values"].clone()
    layer.cumulative_length = columns


class PackedBackend(CacheBackend):
    """Packs prompts, then computes attention by the kernels.

    Args:
        cache: an empty one, or one that holds earlier turns.

    Raises:
        ValueError: the cache is for another method or other numbers of anchors.
    """

    name = "packed"
    reads_batches_in_parts = False

    def __init__(self, model: PreTrainedModel, arm: Arm, anchors: AnchorSpec, cache: PackedCache) -> None:
        if packing_of(arm.rule) != cache.packing:
            raise ValueError(
                f"the PackedCache was made for another method than {arm.rule.name}: make one with this method"
            )
        for layer in cache.packed_layers:
            held = layer.packed
            if held is not None and (held.sink, held.tail) != (anchors.sink, anchors.tail):
                raise ValueError(
                    f"the PackedCache was made with num_sink={held.sink} and num_tail={held.tail}, not {anchors.sink} "
                    f"and {anchors.tail}: give the same numbers, or read the prompt again into a new cache"
                )
        self.model = model
        self.arm = arm
        self.anchors = anchors
        self.cache = cache
        # One function for all steps: `LayerCache.choose` sets K anew when it gets another object.
        self.retrieved = functools.cache(lambda count: retrieved_by(arm, count, anchors, None))
        """K of a row of so many tokens."""

    @classmethod
    def refusal(cls, model: PreTrainedModel, arm: Arm, phi: PhiMaps | None = None) -> str | None:
        if arm.is_full and model.dtype != torch.bfloat16:
            dtype = str(model.dtype).removeprefix("torch.")
            return f"a packed cache would round the keys of a model in {dtype} to bfloat16, and full attention is exact"
        return packing_refusal(model, arm.rule)

    @classmethod
    def open(
        cls, model: PreTrainedModel, arm: Arm, anchors: AnchorSpec, phi: PhiMaps | None, cache: Cache | None, room: int
    ) -> PackedBackend:
        return cls(model, arm, anchors, PackedCache(model, arm.rule))

    @property
    def kept_bytes(self) -> int:
        return self.cache.nbytes

    def read(self, call: LayerCall) -> Tensor:
        layer = self._layer(call)
        if layer.packed is not None and layer.packed.batch > 1:
            raise ValueError("a further turn on a PackedCache takes one prompt, not several")
        layer.tokens += call.key.shape[2]
        if layer.packed is None:
            layer.lazy_initialization(call.key, call.value)
            # Attention comes first: it reads keys and values that are not rounded.
            output = exact_attention(*call)
            layer.packed = self._packed(call.key, call.value, call.mask)
            return output
        return attended(layer.packed.read, call)

    def require_seen(self, real: Tensor) -> None:
        held = self.cache.packed_layers[0].packed
        counts = [] if held is None else held.tokens
        if not bool(real[:, self.tokens :].all()) or real[:, : self.tokens].sum(1).tolist() != list(counts):
            raise ValueError(
                "a further turn over a PackedCache reads all of its tokens, and the attention_mask hides some: leave "
                "them out of the ids, or read the whole text into a new cache"
            )

    def step(self, call: LayerCall) -> Tensor:
        layer = self._layer(call)
        layer.packed.choose(self.retrieved, residual=self.arm.rule.own is not None)
        count = call.query.shape[2]
        layer.tokens += count
        if count == 1:
            return attended(layer.packed.step, call)
        # The kernels' step takes one token, which the next one of a continuation sees.
        outputs = []
        for token in range(count):
            new = (x[:, :, token : token + 1] for x in (call.query, call.key, call.value))
            outputs.append(attended(layer.packed.step, LayerCall(call.module, *new, None, call.scale)))
        return torch.cat(outputs, 1)

    def take(self, read: Prefill) -> None:
        for index, (key, value) in read.layers.items():
            layer = self.cache.layers[index]
            if not isinstance(layer, PackedLayer):
                layer.update(key, value)
                continue
            layer.lazy_initialization(key, value)
            layer.packed = self._packed(key, value, None)
            layer.tokens = key.shape[2]

    def _layer(self, call: LayerCall) -> PackedLayer:
        """Returns the layer of a call; raises ValueError if it holds another model's tokens or number of prompts."""
        layer = self.cache.layers[call.index]
        packed = layer.packed
        batch, heads, _, width = call.key.shape
        if packed is not None and (packed.heads, packed.width, packed.batch) != (heads, width, batch):
            raise ValueError(
                f"the cache holds {packed.batch} prompts of {packed.heads} KV heads of width {packed.width}, not "
                f"{batch} of {heads} of {width}: use it with the model and prompt it was made for"
            )
        return layer

    def _packed(self, key: Tensor, value: Tensor, mask: Tensor | None) -> LayerCache:
        """Packs the prompts [B, Hkv, L, D] of a layer; their padding may be anywhere."""
        first = [0] * len(key)
        if mask is not None:
            # The last query sees every token of its row, so its mask shows the padding: [B, L].
            visible = mask[:, 0, -1].expand(len(key), -1)
            order = visible.to(torch.uint8).argsort(dim=-1, stable=True)  # padding first
            key = key.gather(2, order[:, None, :, None].expand_as(key))
            value = value.gather(2, order[:, None, :, None].expand_as(value))
            first = (~visible).sum(-1).tolist()
        packing = self.cache.packing
        return LayerCache(
            self.cache.library,
            key,
            value,
            first,
            bits=packing.bits,
            clusters=packing.clusters,
            sink=self.anchors.sink,
            tail=self.anchors.tail,
        )


def packing_refusal(model: PreTrainedModel, method: Method) -> str | None:
    """Returns why a model's keys and values cannot be packed for a method here, in one line; None if they can."""
    if packing_of(method) is None:
        served = "full attention, an 8-bit cache, and a 4-bit scan alone or with regression"
        return f"the CPU kernels serve {served}, not {method.name}"
    try:
        layers = attention_layers(model)
        width = HeadShape.of(text_config(model)).head_dim
    except ValueError as error:
        return str(error)
    config = text_config(model)
    if getattr(config, "kv_lora_rank", None) is not None:
        return f"{type(model).__name__} has latent attention, whose caches hold no keys"
    if getattr(config, "num_kv_shared_layers", 0):
        return f"{type(model).__name__} shares keys between layers"
    if device_of(model).type != "cpu":
        return "the kernels run on CPUs"
    # The classes of transformers' own layers tell what a model keeps beside keys and values.
    held = DynamicCache(config=model.config).layers
    for layer in layers:
        plain = type(held[layer.layer_idx]) in (DynamicLayer, DynamicSlidingWindowLayer)
        if window_of(layer) is None and not plain:
            return f"{type(model).__name__} has states beside the keys in a layer"
    values = getattr(config, "v_head_dim", None) or width
    if values != width:
        return f"the kernels take keys and values of one width, not of {width} and {values} channels"
    if width not in WIDTHS:
        return f"the kernels take heads of {', '.join(map(str, WIDTHS))} channels, not {width}"
    if load() is None:
        return "the kernels are not built here, or turned off (docs/library.md)"
    return None


def attended(attend: Callable[..., Tensor], call: LayerCall) -> Tensor:
    """Returns outputs [B, T, Hq, D] of a method of `LayerCache`, with a layer's sinks in the softmax."""
    return with_sinks(attend, call.module, call.query, call.key, call.value, call.scale)
