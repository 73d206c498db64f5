"""Blocks of a packed cache, and the bytes that a step reads of them."""

from __future__ import annotations

BLOCK = 64
"""Tokens of a block, which share the scales of keys."""


def bytes_read(bits: int, width: int, *, ends: int, blocks: int, rows: int, clusters: int) -> int:
    """Returns the bytes that a step reads of one KV head of one text: tokens in float32, and whole blocks or, with
    planes, the scan, the rows that query heads choose, and the summary that estimates the others.

    Args:
        bits: format of the blocks, 4 (planes), 8 or 16.
        width: D.
        ends: tokens in float32.
        blocks: blocks in use.
        rows: rows that the query heads choose from planes, the same one again for each of them.
        clusters: of the summary; 0 if it is not read.
    """
    in_float32 = ends * 2 * width * 4
    if bits == 16:
        return in_float32 + blocks * BLOCK * 2 * width * 2
    key_scales = 2 * width * 2  # middle and step of each channel, in bfloat16
    if bits == 8:
        value_scales = BLOCK * 4
        return in_float32 + blocks * (BLOCK * 2 * width + value_scales + key_scales)
    high_plane = BLOCK * width // 2
    row = width // 2 + width + 2  # the low plane, a value of 8 bits a channel and its scale
    summary = 0
    if clusters:
        bounds_and_mean_values = clusters * (2 * 4 + width * 2)
        slope_and_deviations = width * width * 2 + width * 4
        summary = bounds_and_mean_values + slope_and_deviations
    return in_float32 + blocks * (high_plane + key_scales) + rows * row + summary
