"""Decoding on CPUs from packed caches: a `Cache` of transformers whose layers `residual_mass.kernels` reads.

Shape letters: B = batch rows, Hq / Hkv = query / KV heads, L = prompt tokens, D = head dimension.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from residual_mass.core.settings import AnchorSpec
from residual_mass.kernels import LayerCache, Library, load
from residual_mass.kernels.library import LAYOUT, WIDTHS
from residual_mass.methods import Method, method_named
from residual_mass.methods.arms import Arm
from residual_mass.methods.step_bytes import packing_of
from residual_mass.model.hook import Prefill, device_of, exact_attention, require_plain, text_config
from residual_mass.model.phi_maps import HeadShape, read_safetensors, write_safetensors
from residual_mass.model.prefix import retrieved_by

STATE = "residual_mass"
"""Key in the header of a file that holds the state of a `PackedCache`."""


def kernels_for(model: PreTrainedModel, method: Method) -> Library | None:
    """Returns the kernels that support a method on a model and its device, None if there are none."""
    try:
        require_plain(model)
    except ValueError:
        return None
    config = text_config(model)
    if getattr(config, "kv_lora_rank", None) is not None:  # latent attention, whose caches hold no keys
        return None
    if device_of(model).type != "cpu" or HeadShape.of(config).head_dim not in WIDTHS or packing_of(method) is None:
        return None
    return load()


class PackedLayer(CacheLayerMixin):
    """One layer: a `LayerCache` once the prompt is read. `update` passes new keys and values on to the attention, which
    stores them, so that unpacked keys and values of the prompt exist for one layer at a time.
    """

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.packed: LayerCache | None = None
        self.tokens = 0
        """Number of columns, padding included."""
        self.given: Tensor | None = None
        """Keys that the attention is about to store."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.lazy_initialization(key_states, value_states)
        self.tokens += key_states.shape[-2]
        self.given = key_states
        return key_states, value_states

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        if isinstance(query_length, Tensor):  # positions, in transformers 4
            query_length = len(query_length)
        return self.tokens + query_length, 0

    def get_seq_length(self, *_: Any) -> int:
        return self.tokens

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name in transformers 4

    def reset(self) -> None:
        self.packed, self.given, self.tokens = None, None, 0

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

    Pass it to `partial_kv` and, as `past_key_values`, to `model.generate` within that context. It can be used for
    several turns, and `save` and `load` store its state on disk. `copy.deepcopy` makes a cache that goes on by itself,
    for which another context is needed.
    """

    def __init__(self, model: PreTrainedModel, method: str | Method) -> None:
        """Raises ValueError if the kernels do not support the model or the method."""
        require_plain(model)
        method = method_named(method)
        packing, library = packing_of(method), kernels_for(model, method)
        if packing is None or library is None:
            raise ValueError(
                f"the CPU kernels do not support {method.name} on this model and machine: they need to be built "
                f"(docs/library.md), a model on the CPU with heads of {', '.join(map(str, WIDTHS))} channels, and full "
                "attention or a 4-bit scan, alone or with regression; leave the cache out"
            )
        super().__init__(layers=[PackedLayer() for _ in range(text_config(model).num_hidden_layers)])
        self.packing, self.library = packing, library
        self.shape = HeadShape.of(text_config(model))

    @property
    def nbytes(self) -> int:
        """Bytes of all layers in memory."""
        return sum(layer.packed.bytes for layer in self.layers if layer.packed is not None)

    def reserve(self, count: int) -> None:
        """Makes room for up to 64 tokens that `crop` may remove again."""
        for layer in self.layers:
            if layer.packed is not None:
                layer.packed.reserve(count)

    def save(self, path: str | Path) -> None:
        """Writes the state to a safetensors file, which `load` reads."""
        tensors, sizes = {}, []
        for index, layer in enumerate(self.layers):
            if layer.packed is None:
                raise ValueError("the cache is empty: read a prompt before you save it")
            packed, numbers = layer.packed.state()
            tensors |= {f"{index}.{name}": tensor for name, tensor in packed.items()}
            sizes.append(numbers | {"tokens": layer.tokens})
        header = json.dumps({"layout": LAYOUT, "packing": vars(self.packing), "sizes": sizes})
        write_safetensors(Path(path), tensors, {STATE: header})

    def load(self, path: str | Path) -> PackedCache:
        """Reads the state that `save` wrote for the same model and method, and returns the cache. From there generation
        goes on as it would have gone on without.

        Raises:
            ValueError: the file is missing, damaged, or holds something else; the cache is as it was.
        """
        header, tensors = read_safetensors(Path(path))
        if STATE not in header:
            raise ValueError(f"{path}: no state of a PackedCache; give a file that its `save` wrote")
        try:
            stored = json.loads(header[STATE])
            layout, packing, sizes = (stored.get(name) for name in ("layout", "packing", "sizes"))
            if layout != LAYOUT:
                raise ValueError(f"it has layout {layout}, and this version of the package reads layout {LAYOUT}")
            if packing != vars(self.packing) or len(sizes) != len(self.layers):
                raise ValueError("it is the state of another model or method")
            by_layer: list[dict[str, Tensor]] = [{} for _ in sizes]
            for name, tensor in tensors.items():
                index, _, own = name.partition(".")
                by_layer[int(index)][own] = tensor
            columns = [own.pop("tokens") for own in sizes]
            packed = [
                LayerCache.restored(self.library, own, numbers) for own, numbers in zip(by_layer, sizes, strict=True)
            ]
            self._require_one_text(packed, columns)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}: cannot be loaded as a state of this PackedCache ({error}); load it for the model and the "
                "method that it was saved with, or read the prompt again and save it anew"
            ) from None
        for layer, own in zip(self.layers, packed, strict=True):
            layer.packed, layer.tokens, layer.is_initialized = own, columns[0], True
        return self

    def _require_one_text(self, packed: list[LayerCache], columns: list[int]) -> None:
        """Raises ValueError unless layers are of this cache's model and method, and all of the same text."""
        for index, layer in enumerate(packed):
            if (layer.heads, layer.width) != (self.shape.kv_heads, self.shape.head_dim):
                raise ValueError(
                    f"it has {layer.heads} KV heads of width {layer.width}, and the model {self.shape.kv_heads} of "
                    f"{self.shape.head_dim}"
                )
            if (layer.bits, layer.clusters) != (self.packing.bits, self.packing.clusters):
                raise ValueError(f"layer {index} has {layer.bits} bits and {layer.clusters} clusters")
            first = packed[0]
            same = (layer.tokens, layer.sink, layer.tail) == (first.tokens, first.sink, first.tail)
            if not same or columns[index] != columns[0]:
                raise ValueError(f"layer {index} holds another number of tokens than layer 0")
            if type(columns[0]) is not int or columns[0] < max(layer.tokens):
                raise ValueError(f"its number of columns is {columns[0]!r}, below that of the tokens")


@dataclass
class Session:
    """An attention handler that reads prompts exactly, and generated tokens through a method.

    Attributes:
        partial_calls: number of decode steps by index of a layer that reads the whole text; layers without any, such as
            those that bypass the hook, are missing.
        reading: whether single tokens are part of a prompt too.
        verifying: whether tokens are drafts, which full attention reads and which may be removed again.
    """

    arm: Arm
    anchors: AnchorSpec
    partial_calls: dict[int, int] = field(default_factory=dict, init=False)
    reading: bool = field(default=False, init=False)
    verifying: bool = field(default=False, init=False)

    @contextmanager
    def doing(self, what: Literal["reading", "verifying"]) -> Iterator[None]:
        """Sets `reading` or `verifying` within a context."""
        setattr(self, what, True)
        try:
            yield
        finally:
            setattr(self, what, False)


@dataclass
class PackedSession(Session):
    """Packs prompts, then computes attention by the kernels."""

    cache: PackedCache

    def __post_init__(self) -> None:
        wanted = self.anchors.sink, self.anchors.tail
        for layer in self.cache.layers:
            if layer.packed is not None and (layer.packed.sink, layer.packed.tail) != wanted:
                raise ValueError(
                    f"the PackedCache was made with num_sink={layer.packed.sink} and num_tail={layer.packed.tail}, not "
                    f"{wanted[0]} and {wanted[1]}: give the same numbers, or read the prompt again into a new cache"
                )
        self.retrieved = functools.cache(lambda count: retrieved_by(self.arm, count, self.anchors, None))
        """K of a row of so many tokens."""

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        layer = self.cache.layers[module.layer_idx]
        if layer.given is not key:
            raise ValueError(
                "partial_kv has a PackedCache: pass it to the model too, as past_key_values; for a copy of it, open "
                "another context with cache=copy"
            )
        layer.given = None
        if layer.packed is None:
            output = exact_attention(module, query, key, value, mask, scale)
            layer.packed = self._packed(key, value, mask)
            return output
        packed = layer.packed
        if (packed.heads, packed.width, packed.batch) != (key.shape[1], key.shape[3], key.shape[0]):
            raise ValueError(
                f"the cache holds {packed.batch} prompts of {packed.heads} KV heads of width {packed.width}, not "
                f"{key.shape[0]} of {key.shape[1]} of {key.shape[3]}: use it with the model and prompt it was made for"
            )
        several = self.reading or self.verifying or query.shape[2] > 1
        if several and packed.batch > 1:
            raise ValueError("a further turn on a PackedCache takes one prompt, not several")
        if self.verifying:
            packed.extend(key, value)
            output, _ = packed.attend(query, scale)
            return output.transpose(1, 2).to(query.dtype)
        if several:
            output, _ = packed.read(query, key, value, scale)
            return output.transpose(1, 2).to(query.dtype)
        self.partial_calls[module.layer_idx] = self.partial_calls.get(module.layer_idx, 0) + 1
        packed.append(key[:, :, 0], value[:, :, 0])
        packed.choose(self.retrieved, residual=self.arm.rule.own is not None)
        output, _ = packed.step(query[:, :, 0], scale)
        return output.unsqueeze(1).to(query.dtype)

    def take(self, read: Prefill) -> None:
        """Packs prompts without padding that were prefilled elsewhere."""
        for index, (key, value) in read.layers.items():
            layer = self.cache.layers[index]
            layer.lazy_initialization(key, value)
            layer.packed, layer.tokens = self._packed(key, value, None), key.shape[2]

    def _packed(self, key: Tensor, value: Tensor, mask: Tensor | None) -> LayerCache:
        length = key.shape[2]
        visible = torch.ones(len(key), length, dtype=torch.bool, device="cpu") if mask is None else mask[:, 0, -1]
        first = visible.int().argmax(-1).expand(len(key)).tolist()
        if not all(bool(row[start:].all()) for row, start in zip(visible, first)):  # noqa: B905  # one row for several
            raise ValueError("a PackedCache takes prompts that are padded only on the left")
        packing = self.cache.packing
        return LayerCache(
            self.cache.library, key, value, first, bits=packing.bits, clusters=packing.clusters,
            sink=self.anchors.sink, tail=self.anchors.tail,
        )  # fmt: skip
