"""Bytes: those that a decode step must move, this machine's bandwidth, and whether decoding fits into free memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from residual_mass.core.feature_maps import ReZeroMap
from residual_mass.core.settings import AnchorSpec, MapSpec
from residual_mass.methods import Method, Step, method_named
from residual_mass.methods.step_bytes import StepBytes, step_bytes
from residual_mass.model.phi_maps import HeadShape, PhiMaps
from residual_mass.model.prefix import KEY_CHUNK

Implementation = Literal["prototype", "fused"]
FLOAT32 = 4
COPIES = 4
INNER: dict[Implementation, int] = {"prototype": 5, "fused": 2}
"""Activations of a map's inner width in memory at once: layer by layer (prototype) and folded (fused)."""


@dataclass(frozen=True)
class Traffic:
    """Bytes of one decode step by purpose."""

    weights: int
    """Weights of the backbone; its embedding table only if the output layer shares it."""
    keys: int
    """All keys, which are scored exhaustively at any budget, or their codes and the keys of the exact support."""
    values: int
    features: int
    """Cached key features of retrieved tokens; keys of retrieved tokens in the prototype, which recomputes features."""
    maps: int
    """Weights of the feature maps that a step evaluates."""
    state: int
    """S and u and, if they are formed, S_R and u_R, written and read; or moments."""
    concatenation: int
    """Copy of a dynamic cache, which grows by one token."""
    scores: int
    """float32 scores, written once and read once for selection; a GPU's L2 may hold those of a small batch."""

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


def step_traffic(
    model: PreTrainedModel,
    phi: PhiMaps,
    implementation: Implementation,
    method: str,
    *,
    batch: int,
    length: int,
    k: int,
    anchors: AnchorSpec,
    generated: int,
) -> Traffic:
    """Computes what one step of a batch must read and write, without small vectors."""
    shape, item = HeadShape.of(model.config), next(model.parameters()).element_size()
    fused, rule = implementation != "prototype", method_named(method)
    adds_residual, subtracts = rule.needs_maps, rule.subtracts
    columns = length + generated
    whole = batch * shape.layers * shape.kv_heads * columns * shape.head_dim * item
    per_token = batch * shape.layers * shape.query_heads * item
    support = k + anchors.sink + anchors.tail + generated
    values = whole if rule.whole_prefix else min(whole, per_token * support * shape.head_dim)
    retrieved = per_token * k * (phi.map.d_phi if fused else shape.head_dim) if subtracts else 0
    read = prompt_bytes(rule, shape, batch * length, phi.map.d_phi)
    state = read.summary * batch
    if subtracts and not fused:
        state += 2 * state * shape.query_heads // shape.kv_heads
    return Traffic(
        weights=_weight_bytes(model),
        keys=whole if rule.selector is None or rule.selector.reads_keys else read.scan + values,
        values=values,
        features=retrieved,
        maps=_map_bytes(phi, fused, subtracts) if adds_residual else 0,
        state=state,
        concatenation=0 if fused else 4 * whole,
        scores=0 if rule.whole_prefix else 2 * batch * shape.layers * shape.query_heads * columns * FLOAT32,
    )


def prompt_bytes(rule: Method, shape: HeadShape, tokens: int, d_phi: int) -> StepBytes:
    """Returns what a step reads of a prompt of so many tokens before it retrieves any, over all layers and KV heads."""
    step = Step(tokens, shape.head_dim, shape.query_heads // shape.kv_heads, anchors=0, retrieved=0, features=d_phi)
    return StepBytes(*(shape.layers * shape.kv_heads * round(part) for part in step_bytes(rule, step)))


def _weight_bytes(model: PreTrainedModel) -> int:
    embedding = model.get_input_embeddings()
    unread = 0 if model.get_output_embeddings().weight is embedding.weight else _bytes_of(embedding)
    return _bytes_of(model) - unread


def _map_bytes(phi: PhiMaps, fused: bool, subtracts: bool) -> int:
    """Counts phi_q of every query head, folded (A: D x M, B: I x M, C: D x I, and two biases), or phi_q as it is and
    phi_k if features are recomputed.
    """
    if not fused:
        return _bytes_of(phi.query) + (_bytes_of(phi.key) if subtracts else 0)
    size = 0
    for feature_map in phi.query:
        if isinstance(feature_map, ReZeroMap):
            (heads, d, inner), m = feature_map.stem.shape, feature_map.out.shape[-1]
            size += heads * (d * m + inner * m + d * inner + inner + m) * FLOAT32
        else:
            size += _bytes_of(feature_map)
    return size


def _bytes_of(module: nn.Module) -> int:
    return sum(weight.numel() * weight.element_size() for weight in module.parameters())


def copy_bandwidth(device: torch.device, rounds: int = 10) -> float:
    """Measures bytes per second of a large copy, counting reads and writes; best of `rounds`."""
    return max(copy_rates(device, rounds))


def copy_rates(device: torch.device, rounds: int) -> list[float]:
    """Measures bytes per second of a large copy, counting reads and writes, for each round."""
    size = 2**30 if device.type == "cuda" else 2**28
    source = torch.ones(size // FLOAT32, device=device)
    target = torch.empty_like(source)

    def copies() -> None:
        for _ in range(COPIES):  # a single copy would be dominated by its launch
            target.copy_(source)

    copies()
    return [2 * size * COPIES / seconds_of(copies, device) for _ in range(rounds)]


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Times some work, on a GPU by the device's own clock, which excludes launch delays of a busy host."""
    if device.type != "cuda":
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return 1e-3 * start.elapsed_time(end)


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
