"""Marks of a `PackedCache`, from which it goes on as from that text."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

from residual_mass.decode.packed_backend import PackedCache, PackedLayer, restore_window, window_state
from residual_mass.kernels.marks import LayerMark, at_mark, marked


class Mark(NamedTuple):
    """A cache at an earlier text.

    Attributes:
        tokens: of that text.
        layers: for each layer its mark, or keys and values of its window.
    """

    tokens: int
    layers: list[Any]

    @property
    def nbytes(self) -> int:
        total = 0
        for layer in self.layers:
            tensors = layer.values() if isinstance(layer, dict) else ()
            total += layer.nbytes if isinstance(layer, LayerMark) else sum(tensor.nbytes for tensor in tensors)
        return total


def mark_of(cache: PackedCache) -> Mark:
    """Returns a mark of a cache that holds a text."""
    layers: list[Any] = []
    for layer in cache.layers:
        if isinstance(layer, PackedLayer):
            layers.append(marked(layer.packed))
        else:
            own, _ = window_state(layer)
            layers.append({name: tensor.clone() for name, tensor in own.items()})
    return Mark(cache.get_seq_length(), layers)


def cache_at(cache: PackedCache, mark: Mark) -> PackedCache:
    """Returns a copy of a cache as it was at one of its marks."""
    earlier = copy.copy(cache)
    earlier.layers = []
    for layer, own in zip(cache.layers, mark.layers, strict=True):
        if isinstance(layer, PackedLayer):
            new = PackedLayer()
            new.packed = at_mark(layer.packed, own)
            new.tokens = mark.tokens
            new.is_initialized = True
        else:
            new = type(layer)(sliding_window=layer.sliding_window)
            restore_window(new, own, mark.tokens)
        earlier.layers.append(new)
    return earlier
