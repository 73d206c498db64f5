"""Bytes that a decode step must move, and this machine's bandwidth."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from residual_mass.core.feature_maps import FoldedMap
from residual_mass.kernels.layout import BLOCK, bytes_read
from residual_mass.methods import Method, method_named
from residual_mass.methods.interface import FLOAT32
from residual_mass.methods.served import packing_of
from residual_mass.methods.step_bytes import StepBytes, step_bytes
from residual_mass.model.phi_maps import HeadShape, PhiMaps
from residual_mass.spec.settings import AnchorSpec
from residual_mass.timing import timed

Implementation = Literal["prototype", "fused", "kernels"]
TIMED_COPIES = 4
"""Copies that are timed at once: a single one would be dominated by its launch."""


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
) -> dict[str, int]:
    """Computes the bytes that one step of a batch must read and write, without small vectors, by purpose.

    weights: the backbone's; its embedding table only if the output layer shares it. keys: all keys, which are scored
    exhaustively at any budget, or their codes and the keys of the exact support. values: those of the exact support.
    features: cached features of retrieved tokens; in the prototype, which recomputes features, their keys. maps:
    weights of the feature maps that a step evaluates. state: S and u and, if they are formed, S_R and u_R, written and
    read; or moments. concatenation: the copy of a dynamic cache, which grows by one token. scores: float32, written
    once and read once for selection; a GPU's L2 may hold those of a small batch. cache: what the CPU kernels read.
    """
    shape = HeadShape.of(model.config)
    rule = method_named(method)
    weights = _weight_bytes(model)
    fixed = anchors.sink + anchors.tail
    if implementation == "kernels":
        packing = packing_of(rule)
        assert packing is not None
        heads = batch * shape.layers * shape.kv_heads
        cache = bytes_read(
            packing.bits,
            shape.head_dim,
            ends=fixed + generated,
            blocks=math.ceil((length - fixed) / BLOCK),
            rows=shape.group * k,
            clusters=packing.clusters if rule.own is not None else 0,
        )
        return {"weights": weights, "cache": heads * cache}
    fused = implementation == "fused"
    item = next(model.parameters()).element_size()
    columns = length + generated
    head_rows = batch * shape.layers * shape.query_heads
    whole = batch * shape.layers * shape.kv_heads * columns * shape.head_dim * item
    values = whole
    if not rule.whole_prefix:  # query heads that share a KV head may choose the same tokens
        support = k + fixed + generated
        values = min(whole, head_rows * support * shape.head_dim * item)
    of_prompt = prompt_bytes(rule, shape, batch * length, phi.map.d_phi)
    keys = whole
    if rule.selector is not None and not rule.selector.reads_keys:
        keys = of_prompt.scan + values
    features = 0
    if rule.subtracts:
        width = phi.map.d_phi if fused else shape.head_dim
        features = head_rows * k * width * item
    maps = 0
    if rule.needs_maps:
        maps = _map_bytes(phi, fused, rule.subtracts)
    scores = 0
    if not rule.whole_prefix:
        scores = 2 * head_rows * columns * FLOAT32
    # Our steps subtract while they sum; the prototype writes and reads S_R and u_R of every query head.
    formed = 1 + 2 * shape.group if rule.subtracts and not fused else 1
    return {
        "weights": weights,
        "keys": keys,
        "values": values,
        "features": features,
        "maps": maps,
        "state": formed * batch * of_prompt.summary,
        "concatenation": 0 if fused else 4 * whole,  # keys and values, each read and written
        "scores": scores,
    }


def prompt_bytes(rule: Method, shape: HeadShape, tokens: int, d_phi: int) -> StepBytes:
    """Returns the bytes that a step reads of a prompt before it retrieves tokens, over all layers and KV heads."""
    step = shape.step(tokens, features=d_phi)
    heads = shape.layers * shape.kv_heads
    return StepBytes(*(heads * round(part) for part in step_bytes(rule, step)))


def _weight_bytes(model: PreTrainedModel) -> int:
    embedding = model.get_input_embeddings()
    shared = model.get_output_embeddings().weight is embedding.weight
    whole = _bytes_of(model)
    return whole if shared else whole - _bytes_of(embedding)


def _map_bytes(phi: PhiMaps, fused: bool, subtracts: bool) -> int:
    """Counts phi_q of every query head, folded (A: D x M, B: I x M, C: D x I, and two biases), or phi_q as it is and
    phi_k if features are recomputed.
    """
    if not fused:
        return _bytes_of(phi.query) + (_bytes_of(phi.key) if subtracts else 0)
    total = 0
    for feature_map in phi.query:
        folded = feature_map.fold()
        if isinstance(folded, FoldedMap):
            tensors = (folded.a, folded.b, folded.c, folded.c_bias, folded.e_bias)
            total += sum(x.nbytes for x in tensors)
        else:
            total += _bytes_of(folded)
    return total


def _bytes_of(module: nn.Module) -> int:
    return sum(weight.nbytes for weight in module.parameters())


def copy_rates(device: torch.device, rounds: int = 10) -> list[float]:
    """Measures bytes per second of a large copy, counting reads and writes, for each round."""
    size = 2**30 if device.type == "cuda" else 2**28
    source = torch.ones(size // FLOAT32, device=device)
    target = torch.empty_like(source)

    def copies() -> None:
        for _ in range(TIMED_COPIES):
            target.copy_(source)

    copies()
    moved = 2 * size * TIMED_COPIES
    return [moved / seconds_of(copies, device) for _ in range(rounds)]


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds of `work`; on a GPU by the device's clock, without the launch delays of a busy host."""
    if device.type != "cuda":
        _, seconds = timed(work)
        return seconds
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return 1e-3 * start.elapsed_time(end)
