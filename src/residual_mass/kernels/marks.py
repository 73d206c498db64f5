"""Marks of a packed cache: what it takes to go back to an earlier text, without a copy of all that it holds.

Tokens that were packed stay as they are while others are added, so a mark holds only what changes: the tokens in
float32, the numbers of a row, and the running sums.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from residual_mass.kernels.cache import LayerCache

GROWING = ("keys", "scales", "rows", "values", "value_scales", "bounds", "mean_values")
"""Buffers in which earlier tokens keep their places."""


class LayerMark(NamedTuple):
    """A layer at an earlier text: `LayerCache.state` without the buffers that grow."""

    buffers: dict[str, Tensor]
    sizes: dict[str, int]

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers.values())


def marked(layer: LayerCache) -> LayerMark:
    """Returns a mark of a layer as it is."""
    buffers, sizes = layer.state()
    return LayerMark({name: buffer.clone() for name, buffer in buffers.items() if name not in GROWING}, sizes)


def at_mark(layer: LayerCache, mark: LayerMark) -> LayerCache:
    """Returns a copy of a layer as it was at a mark of its own, or of one that it goes on from."""
    buffers, sizes = layer.state()
    # Buffers that grow have their sizes of now.
    sizes = mark.sizes | {"blocks": sizes["blocks"], "segments": sizes["segments"]}
    held = {name: buffer for name, buffer in buffers.items() if name in GROWING}
    # Clusters of later tokens are not those of the text then, and have bounds beyond it.
    bounds = held["bounds"].clone()
    for row, used in enumerate(mark.buffers["used"].tolist()):
        bounds[row, :, used:] = 0
    return LayerCache.restored(layer.library, mark.buffers | held | {"bounds": bounds}, sizes)
