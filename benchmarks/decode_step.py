"""One decode step of each method: our fused path against the paper's kind of prototype, and against the best Full.

Both sides decode the same prompt to the same tokens. Full is measured in every way that we know; the fastest counts.
Truncated moments, and a scan of 4-bit keys, which the paper lacks, are measured on our side alone, beside TopK and
TopK+phi at the same support.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from shared_prefill import SMOL
from torch import Tensor

from residual_mass.core.fused import DecodeCache, with_moments, with_scan, with_summary
from residual_mass.core.fused.torch_path import decode_attention, scanned_scores
from residual_mass.core.selection import largest, retrieved_count
from residual_mass.core.settings import AnchorSpec, MapSpec
from residual_mass.methods import Moments, QuantisedScan
from residual_mass.model.hook import Prefill, prefill
from residual_mass.model.loading import Backbone, load_backbone
from residual_mass.model.phi_maps import PhiMaps
from residual_mass.model.prefix import map_heads
from residual_mass.model.static_decode import StaticDecoder, fill_buffers
from residual_mass.provenance import device_name
from residual_mass.runtime.latencies import IMPLEMENTATIONS
from residual_mass.runtime.prototype import PrototypeDecoder
from residual_mass.runtime.traffic import copy_rates, step_traffic
from residual_mass.study.labels import METHODS
from residual_mass.texts.corpora import held_out_corpus

ANCHORS, SCANNED = AnchorSpec(), QuantisedScan(4)
MOMENTS, SCAN = "topk_moments", "scan4_moments"
OWN = {MOMENTS: ("topk", "topk_phi"), SCAN: (MOMENTS, "topk", "full")}
"""Methods that the paper lacks, and those whose steps theirs are compared with."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--assets", type=Path, default=Path("results/assets"))
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--budget", type=float, default=4.0, help="percent")
    parser.add_argument("--d-emb", type=int, default=512, help="inner width of the maps; the paper's is 512")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of one, its own time is measured")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    backbone = load_backbone(SMOL, options.assets, torch.device("cpu"))
    phi = PhiMaps(backbone.shape, MapSpec(d_emb=options.d_emb)).requires_grad_(False)
    prompt = held_out_corpus("books", backbone.tokenizer, options.length, 0, options.assets).sequence(0)
    read = prefill(backbone.model, [prompt])
    k = retrieved_count(options.budget, options.length, ANCHORS.sink + ANCHORS.tail)
    bandwidth = max(copy_rates(backbone.device))
    print(f"SmolLM2-135M, {options.length} tokens, K = {k}, d_emb {options.d_emb}; {device_name(backbone.device)}")
    steps(backbone, read, phi, k, bandwidth, options.steps, options.rounds)
    stages(fill_buffers([fresh(read)], 1)[0], phi, k, options.rounds)


def clock() -> float:
    """Seconds; with one thread those of the process, which other work on the machine changes little."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def fresh(read: Prefill) -> Prefill:
    one = copy.copy(read)
    one.layers = dict(read.layers)
    return one


@torch.no_grad()
def steps(backbone: Backbone, read: Prefill, phi: PhiMaps, k: int, bandwidth: float, count: int, rounds: int) -> None:
    """Whole steps, all sides in turn, and what they must move at this machine's speed of copying."""
    decoders: dict[str, PrototypeDecoder | StaticDecoder] = {}
    traffic: dict[str, dict[str, int]] = {}
    length = next(iter(read.layers.values()))[0].shape[2]
    caches = fill_buffers([fresh(read)], count)
    for side, method in (*itertools.product(IMPLEMENTATIONS, METHODS), *(("fused", one) for one in OWN)):
        if side == "prototype":
            decoder = PrototypeDecoder(backbone.model, fresh(read), method, k, ANCHORS, phi, count)
        else:
            decoder = StaticDecoder(backbone.model, caches, method, k, ANCHORS, phi, count)
        decoders[f"{side} {method}"] = decoder
        traffic[f"{side} {method}"] = step_traffic(
            backbone.model, phi, side, method, batch=1, length=length, k=k, anchors=ANCHORS, generated=count // 2
        )
    seconds: dict[str, list[float]] = {name: [] for name in decoders}
    tokens: dict[str, Tensor] = {}
    for round_ in range(rounds + 1):
        for name, decoder in decoders.items():
            decoder.prepare()
            started = clock()
            tokens[name] = decoder.run(read.next_token).clone()
            if round_:
                seconds[name].append((clock() - started) / count)
    for method in METHODS:
        if not torch.equal(tokens[f"prototype {method}"], tokens[f"fused {method}"]):
            raise SystemExit(f"the two sides of {method} decoded different tokens")
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    print(f"step, median of {rounds} rounds of {count} tokens (range), floor by bytes at {bandwidth / 1e9:.1f} GB/s")
    for name, values in seconds.items():
        spread = f"({1e3 * min(values):.1f} .. {1e3 * max(values):.1f})"
        total = sum(traffic[name].values())
        floor, rest = total / bandwidth, total - traffic[name]["weights"]
        print(f"  {name:26s} {1e3 * medians[name]:7.1f} ms  {spread:18s} floor {1e3 * floor:6.1f} ms, ", end="")
        print(f"{rest / 1e6:6.2f} MB besides weights")
    for method in METHODS:
        ours = medians[f"fused {method}"]
        best_full = min(medians["fused full"], medians["prototype full"])
        print(f"  {method}: {medians[f'prototype {method}'] / ours:.2f} x as fast as the prototype, ", end="")
        print(f"{ours / best_full:.2f} of the best Full's time")
    for own, other in ((own, other) for own, others in OWN.items() for other in others):
        ratios = [a / b for a, b in zip(seconds[f"fused {own}"], seconds[f"fused {other}"], strict=True)]
        spread = f"({min(ratios):.2f} .. {max(ratios):.2f})"
        print(f"  {own}: {statistics.median(ratios):.2f} {spread} of {other}'s time, round by round")


@torch.no_grad()
def stages(cache: DecodeCache, phi: PhiMaps, k: int, rounds: int) -> None:
    """One layer's attention by parts, and Full in every form; milliseconds, the best of many."""
    kv_heads, d = cache.keys.shape[1], cache.keys.shape[3]
    heads, scale = phi.shape.query_heads, d**-0.5
    query = torch.randn(1, heads, 1, d)
    grouped = query.view(1, kv_heads, -1, d)
    keys, values = cache.keys[:, :, : cache.length], cache.values[:, :, : cache.length]
    low = [x.bfloat16() for x in (query, keys, values)]
    query_map, key_map = phi.folded()[0]
    full = with_summary(cache, map_heads(key_map, keys), ANCHORS.sink, ANCHORS.tail)
    moments = with_moments(cache, Moments().prepare, ANCHORS.sink, ANCHORS.tail)
    scan = with_scan(moments, SCANNED.prepare, SCANNED.block, ANCHORS.sink, ANCHORS.tail)
    assert scan.scan is not None
    packed = scan.scan
    log_query = map_heads(query_map, query).squeeze(2)
    # One and the same scores again and again would teach the processor their order, which a step never knows.
    scores = itertools.cycle([torch.randn_like(grouped) @ keys.transpose(-1, -2) for _ in range(64)])

    def eager() -> Tensor:
        return (grouped * scale @ keys.transpose(-1, -2)).softmax(-1) @ values

    one = query.squeeze(2)
    common = {"k": k, "sink": ANCHORS.sink, "tail": ANCHORS.tail, "generated": 1, "scale": scale}
    parts: dict[str, Callable[[], object]] = {
        "Full: SDPA, float32": lambda: F.scaled_dot_product_attention(query, keys, values, enable_gqa=True),
        "Full: SDPA, bfloat16": lambda: F.scaled_dot_product_attention(*low, enable_gqa=True),
        "Full: grouped products, float32": eager,
        "scores": lambda: grouped @ keys.transpose(-1, -2),
        "scores of packed keys": lambda: scanned_scores(grouped, packed),
        "selection": lambda: largest(next(scores), k),
        "phi_q as written": lambda: phi.query[0].unfolded(query[0]),
        "phi_q folded": lambda: map_heads(query_map, query),
        "TopK attention, all": lambda: decode_attention(one, cache, None, subtracts=False, **common),
        "TopK+moments attention, all": lambda: decode_attention(one, moments, None, subtracts=False, **common),
        "Scan+moments attention, all": lambda: decode_attention(one, scan, None, subtracts=False, **common),
        "TopK+phi attention, all but phi_q": lambda: decode_attention(one, full, log_query, subtracts=True, **common),
    }
    print("one layer's attention, best of many, with warm caches")
    for name, part in parts.items():
        best = float("inf")
        for _ in range(20 * rounds):
            started = clock()
            part()
            best = min(best, clock() - started)
        print(f"  {name:36s} {1e3 * best:7.3f} ms")


if __name__ == "__main__":
    main()
