"""Buffers of a packed cache: their shapes and dtypes, and what those of a saved cache have to fulfil.

Shape letters: B = batch rows, H = KV heads, D = head dimension.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from residual_mass.kernels.layout import BLOCK
from residual_mass.kernels.library import WIDTHS

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of every buffer by its name."""
SIZES = (
    "batch",
    "heads",
    "width",
    "bits",
    "clusters",
    "sink",
    "tail",
    "room",
    "blocks",
    "segments",
    "residual",
    "summed",
)
"""Numbers of a packed cache beside its buffers, attributes of a `LayerCache`; the last two are 0 or 1."""


def shapes_of(sizes: Mapping[str, int]) -> Shapes:
    """Returns the shape and the dtype of every buffer; comments on `Buffers` in common.hpp say what they hold."""
    bits = sizes["bits"]
    width = sizes["width"]
    blocks = sizes["blocks"]
    segments = sizes["segments"]
    rows = (sizes["batch"],)
    heads = (sizes["batch"], sizes["heads"])
    block_bytes = BLOCK * width * bits // 8
    shapes: Shapes = {}
    for name in ("slots", "k", "recents", "used", "counted"):
        shapes[name] = (rows, torch.int32)
    shapes["gap"] = ((*rows, 2), torch.int32)
    shapes["recent"] = ((*heads, sizes["room"], 2, width), torch.float32)
    shapes["keys"] = ((*heads, blocks, block_bytes), torch.uint8)
    shapes["bounds"] = ((*heads, segments, 2), torch.int32)
    shapes["mean_values"] = ((*heads, segments, width), torch.bfloat16)
    if bits < 16:
        shapes["scales"] = ((*heads, blocks, 2, width), torch.bfloat16)
    if bits == 4:
        row_bytes = 3 * width // 2 + 2  # the low plane, a value of 8 bits a channel, and its scale
        shapes["rows"] = ((*heads, blocks, BLOCK, row_bytes), torch.uint8)
        shapes["slope"] = ((*heads, width, width), torch.bfloat16)
        shapes["deviations"] = ((*heads, width), torch.float32)
    else:
        shapes["values"] = ((*heads, blocks, block_bytes), torch.uint8)
    if bits == 8:
        shapes["value_scales"] = ((*heads, blocks * BLOCK), torch.float32)
    if sizes["summed"]:
        shapes["covariance"] = ((*heads, width, width), torch.float32)
    return shapes


def require_sizes(sizes: Mapping[str, int]) -> None:
    """Raises ValueError unless these can be the sizes of a packed cache."""
    if set(sizes) != set(SIZES):
        raise ValueError(f"its numbers are {', '.join(sizes)}, not {', '.join(SIZES)}")
    for name, number in sizes.items():
        least = 1 if name in ("batch", "heads", "clusters", "blocks") else 0
        if type(number) is not int or number < least:
            raise ValueError(f"{name} is {number!r}, not a number from {least} on")
    allowed = {"bits": (4, 8, 16), "width": WIDTHS, "residual": (0, 1), "summed": (0, 1)}
    for name, choices in allowed.items():
        if sizes[name] not in choices:
            raise ValueError(f"{name} is {sizes[name]}, not one of {', '.join(map(str, choices))}")
    if sizes["room"] < sizes["sink"] + sizes["tail"] + BLOCK:
        raise ValueError(f"room is {sizes['room']}, below {BLOCK} tokens and those at the ends")


def require_buffers(buffers: Mapping[str, Tensor], shapes: Shapes) -> None:
    """Raises ValueError unless the buffers have these names, shapes and dtypes, and finite numbers."""
    for name in sorted({*buffers, *shapes}):
        if name not in shapes:
            raise ValueError(f"{name} is unknown")
        if name not in buffers:
            raise ValueError(f"{name} is missing")
        buffer = buffers[name]
        shape, dtype = shapes[name]
        if (buffer.shape, buffer.dtype) != (shape, dtype):
            raise ValueError(f"{name} is {buffer.dtype} {list(buffer.shape)}, not {dtype} {list(shape)}")
        if dtype.is_floating_point and not bool(buffer.isfinite().all()):
            raise ValueError(f"{name} has numbers that are not finite")


def require_places(buffers: Mapping[str, Tensor], sizes: Mapping[str, int]) -> None:
    """Raises ValueError naming a buffer with places outside of other buffers, which the kernels would read or write."""
    slots = buffers["slots"].long()
    recents = buffers["recents"].long()
    used = buffers["used"]
    start, end = buffers["gap"].long().unbind(1)
    first, last = buffers["bounds"].long().unbind(-1)  # [B, H, segments]
    in_blocks = slots - (end - start)
    sinks = sizes["sink"] * (in_blocks > 0)
    places = BLOCK * sizes["blocks"]
    end_of_row = slots[:, None, None]
    right = {}
    right["slots"] = (slots >= 0) & (slots <= places)
    right["gap"] = (start >= 0) & (start <= end) & (end <= slots)
    right["recents"] = (recents >= sinks) & (recents <= sizes["room"])
    right["k"] = buffers["k"] >= 0
    right["counted"] = buffers["counted"] >= 0
    right["used"] = (used >= 0) & (used <= sizes["segments"])
    right["bounds"] = (first >= 0) & (first <= last) & (last <= end_of_row)
    if sizes["bits"] == 4:
        # Every token in the blocks is in exactly one cluster.
        of_clusters = (last - first).sum(-1)
        right["sum of bounds"] = of_clusters == in_blocks[:, None]
    for name, each in right.items():
        if not bool(each.all()):
            raise ValueError(f"{name} has numbers out of range")
