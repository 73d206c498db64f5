"""Estimates whether decoding fits into the free memory of a device."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from residual_mass.backbones.phi_maps import HeadShape
from residual_mass.backbones.prefix import KEY_CHUNK
from residual_mass.core.settings import MapSpec
from residual_mass.methods import method_named
from residual_mass.runtime.traffic import FLOAT32, Implementation, prompt_bytes

INNER: dict[Implementation, int] = {"prototype": 5, "fused": 2}
"""Activations of a map's inner width in memory at once: layer by layer (prototype) and folded (fused)."""


def shortfall(needed: int, free: int | None) -> str:
    """Says why work that needs so many bytes is skipped; empty if it fits or free memory is unknown."""
    if free is None or needed <= free:
        return ""
    return f"does not fit: needs {gigabytes(needed)} of {gigabytes(free)} that are free"


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


def decoding_bytes(
    model: PreTrainedModel, maps: MapSpec, implementation: Implementation, method: str,
    *, batch: int, length: int, room: int,
) -> int:  # fmt: skip
    """Returns an upper bound of the bytes for building a decoder and decoding `room` tokens.

    Excludes the model, its maps and the prefill, which are already in memory. Keys, values and, in the fused decoder,
    features stay in memory for all layers; copies, map activations (KEY_CHUNK columns at once) and float32 sums count
    for one layer at a time. So do centred keys and values, the keys once more with weights, behind moments, and three
    further copies of the keys while their codes are made, which stay for all layers.
    """
    shape, item = HeadShape.of(model.config), next(model.parameters()).element_size()
    tokens = batch * shape.kv_heads * (length + room)
    fused, rule = implementation != "prototype", method_named(method)
    maps_keys, centred = rule.needs_maps, 0 if rule.own is None else 3 * shape.head_dim
    features = maps.d_phi if maps_keys else 0
    codes = 0
    if rule.selector is not None and not rule.selector.reads_keys:
        codes = prompt_bytes(rule, shape, batch * (length + room), maps.d_phi).scan
    coded = 3 * shape.head_dim if codes else 0
    kept = shape.layers * tokens * (2 * shape.head_dim + (features if fused else 0)) * item + codes
    in_work = tokens * (2 * shape.head_dim + 4 * features + centred + coded) * FLOAT32
    scores = 2 * batch * shape.query_heads * (length + room) * FLOAT32  # scores, and the columns selected by them
    at_once = min(batch * length, KEY_CHUNK) if fused else batch * min(length, KEY_CHUNK)
    inner = INNER[implementation] * shape.kv_heads * at_once * maps.d_emb * FLOAT32 if maps_keys else 0
    return kept + in_work + scores + inner


def free_bytes(device: torch.device) -> int | None:
    """Returns the free bytes of the GPU or, on Linux, of the machine; None elsewhere."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        return free
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    available = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(available[0]) * 1024 if available else None
