"""Bytes that a decode step must move, and this machine's bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from residual_mass.core.feature_maps import FoldedMap
from residual_mass.methods import Method, Step, method_named
from residual_mass.methods.served import packing_of
from residual_mass.methods.step_bytes import StepBytes, packed_bytes, step_bytes
from residual_mass.model.phi_maps import HeadShape, PhiMaps
from residual_mass.spec.settings import AnchorSpec

Implementation = Literal["prototype", "fused", "kernels"]
FLOAT32 = 4
COPIES = 4


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
    shape, item, rule = HeadShape.of(model.config), next(model.parameters()).element_size(), method_named(method)
    weights, group = _weight_bytes(model), shape.query_heads // shape.kv_heads
    if implementation == "kernels":
        packing = packing_of(rule)
        assert packing is not None
        step = Step(length, shape.head_dim, group, anchors=anchors.sink + anchors.tail, retrieved=k, features=0)
        heads = batch * shape.layers * shape.kv_heads
        return {"weights": weights, "cache": heads * packed_bytes(packing, step, generated)}
    fused, columns = implementation == "fused", length + generated
    whole = batch * shape.layers * shape.kv_heads * columns * shape.head_dim * item
    per_token = batch * shape.layers * shape.query_heads * item
    support = k + anchors.sink + anchors.tail + generated
    values = whole if rule.whole_prefix else min(whole, per_token * support * shape.head_dim)
    read = prompt_bytes(rule, shape, batch * length, phi.map.d_phi)
    formed = 1 + 2 * group if rule.subtracts and not fused else 1
    return {
        "weights": weights,
        "keys": whole if rule.selector is None or rule.selector.reads_keys else read.scan + values,
        "values": values,
        "features": per_token * k * (phi.map.d_phi if fused else shape.head_dim) if rule.subtracts else 0,
        "maps": _map_bytes(phi, fused, rule.subtracts) if rule.needs_maps else 0,
        "state": formed * batch * read.summary,
        "concatenation": 0 if fused else 4 * whole,
        "scores": 0 if rule.whole_prefix else 2 * batch * shape.layers * shape.query_heads * columns * FLOAT32,
    }


def prompt_bytes(rule: Method, shape: HeadShape, tokens: int, d_phi: int) -> StepBytes:
    """Returns the bytes that a step reads of a prompt before it retrieves tokens, over all layers and KV heads."""
    step = Step(tokens, shape.head_dim, shape.query_heads // shape.kv_heads, anchors=0, retrieved=0, features=d_phi)
    return StepBytes(*(shape.layers * shape.kv_heads * round(part) for part in step_bytes(rule, step)))


def _weight_bytes(model: PreTrainedModel) -> int:
    embedding = model.get_input_embeddings()
    shared = model.get_output_embeddings().weight is embedding.weight
    return _bytes_of(model) - (0 if shared else _bytes_of(embedding))


def _map_bytes(phi: PhiMaps, fused: bool, subtracts: bool) -> int:
    """Counts phi_q of every query head, folded (A: D x M, B: I x M, C: D x I, and two biases), or phi_q as it is and
    phi_k if features are recomputed.
    """
    if not fused:
        return _bytes_of(phi.query) + (_bytes_of(phi.key) if subtracts else 0)
    folded = [feature_map.fold() for feature_map in phi.query]
    return sum(
        sum(x.nbytes for x in (phi_q.a, phi_q.b, phi_q.c, phi_q.c_bias, phi_q.e_bias))
        if isinstance(phi_q, FoldedMap)
        else _bytes_of(phi_q)
        for phi_q in folded
    )


def _bytes_of(module: nn.Module) -> int:
    return sum(weight.nbytes for weight in module.parameters())


def copy_rates(device: torch.device, rounds: int = 10) -> list[float]:
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
    """Returns the seconds of `work`; on a GPU by the device's clock, without the launch delays of a busy host."""
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
