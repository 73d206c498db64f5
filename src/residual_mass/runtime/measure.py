"""The `runtime` stage: latency of a decode step and from end to end, by implementation, method, context and batch.

A run reads its prompts exactly, then decodes 31 tokens after the first; a step is the mean over these, as in the
paper's tables. Prompts are random tokens and feature maps have their initial weights, which time hardly depends on. The
rows of a batch hold one and the same prompt, each in buffers of its own; reading it counts once for every row. On a GPU
our steps are recorded as CUDA graphs first, once for a prompt's length, which is not counted.
"""

from __future__ import annotations

import logging
import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from residual_mass.backbones.loading import load_backbone
from residual_mass.backbones.phi_maps import HeadShape, PhiMaps
from residual_mass.backbones.prefill import Prefill, prefill
from residual_mass.backbones.static_decode import StaticDecoder, fill_buffers
from residual_mass.core.estimators import estimator_named
from residual_mass.core.support import retrieved_count
from residual_mass.files import csv_text, write_meta, write_text
from residual_mass.runtime.prototype import PrototypeDecoder
from residual_mass.runtime.traffic import FLOAT32, Implementation, copy_bandwidth, state_bytes, step_traffic, wait_for
from residual_mass.specs import METHODS, AnchorSpec, MapSpec, RuntimeSpec, tokens_of

log = logging.getLogger(__name__)

STEPS = 31
"""Decoded tokens after the first, which the prefill gives."""
IMPLEMENTATIONS: tuple[Implementation, ...] = ("prototype", "fused")
COLUMNS = (
    "study backbone implementation method context batch budget_percent k per_step_ms per_step_low_ms per_step_high_ms "
    "prefill_ms end_to_end_ms peak_memory_mib step_bytes floor_ms bandwidth_gb_s state_bytes tokens_as_prototype "
    "repeats weights phi_weights dtype device model_id revision"
).split()


@dataclass(frozen=True)
class Timing:
    """One implementation and method on one context and batch.

    Attributes:
        build: seconds of what a method makes of the prefill: buffers, features, summaries.
        steps: seconds of a mean step, one per repeat.
        peak: bytes of GPU memory at most while building and decoding, whatever the process holds; None on a CPU.
        tokens: [B, T] what was decoded.
    """

    build: float
    steps: list[float]
    peak: int | None
    tokens: Tensor


def run(spec: RuntimeSpec, assets: Path, out: Path) -> None:
    """Measures every setting of `spec` and writes one CSV row for each.

    Raises:
        ValueError: a context does not fit into the backbone's.
    """
    started = time.monotonic()
    for label in spec.contexts:
        if tokens_of(label) + STEPS > spec.backbone.context:
            raise ValueError(
                f"runtime.contexts: {label} and {STEPS} steps do not fit into the context of {spec.backbone.name} "
                f"({spec.backbone.context} tokens); leave it out"
            )
    backbone = load_backbone(spec.backbone, assets)
    rows = list(measure(spec, backbone.model))
    facts = {
        "study": spec.study,
        "backbone": spec.backbone.name,
        "weights": spec.backbone.weights,
        "dtype": spec.backbone.dtype,
        "model_id": spec.backbone.model_id,
        "revision": spec.backbone.revision,
    }
    write_text(out, csv_text(COLUMNS, [facts | row for row in rows]))
    write_meta(out, spec=asdict(spec), device=device_name(backbone.device), seconds=time.monotonic() - started)


def measure(
    spec: RuntimeSpec, model: PreTrainedModel, implementations: Sequence[Implementation] = IMPLEMENTATIONS
) -> Iterator[dict[str, object]]:
    """Rows as in COLUMNS, without what is known of the backbone."""
    device = next(model.parameters()).device
    torch.manual_seed(spec.seed)
    phi = PhiMaps(HeadShape.of(model.config), spec.map).to(device).requires_grad_(False)
    bandwidth = copy_bandwidth(device)
    log.info("%s, copies at %.1f GB/s", device_name(device), bandwidth / 1e9)
    places = [(context, batch) for context in spec.contexts for batch in spec.batches]
    with tqdm(total=len(places) * len(implementations) * len(METHODS), unit="setting") as bar:
        for context, batch in places:
            length = tokens_of(context)
            k = retrieved_count(spec.budget, length, spec.anchors.sink + spec.anchors.tail)
            read, seconds = _timed_prefill(model, length, spec.repeats, spec.seed)
            for method in METHODS:
                baseline: Tensor | None = None
                for implementation in implementations:
                    bar.set_postfix_str(f"{context}, batch {batch}, {implementation} {method}")
                    timing = _timed_decoding(
                        implementation, model, [read] * batch, method, k, spec.anchors, phi, spec.repeats
                    )
                    if implementation == "prototype":
                        baseline = timing.tokens
                    traffic = step_traffic(
                        model, phi, implementation, method,
                        batch=batch, length=length, k=k, anchors=spec.anchors, generated=STEPS // 2,
                    )  # fmt: skip
                    yield {
                        "implementation": implementation,
                        "method": method,
                        "context": context,
                        "batch": batch,
                        "budget_percent": "" if method == "full" else f"{spec.budget:g}",
                        "k": "" if method == "full" else k,
                        **_milliseconds(timing, batch * seconds),
                        "peak_memory_mib": "" if timing.peak is None else f"{timing.peak / 2**20:.1f}",
                        "step_bytes": traffic.total,
                        "floor_ms": f"{1e3 * traffic.total / bandwidth:.3f}",
                        "bandwidth_gb_s": f"{bandwidth / 1e9:.3f}",
                        "state_bytes": _state(model, spec.map, method),
                        "tokens_as_prototype": "" if baseline is None else f"{_equal(timing.tokens, baseline):.3f}",
                        "repeats": spec.repeats,
                        "phi_weights": "random" if estimator_named(method).adds_residual else "",
                        "device": device_name(device),
                    }
                    bar.update()


def _equal(tokens: Tensor, others: Tensor) -> float:
    """The share of tokens that are the same."""
    return float((tokens == others).float().mean())


def _milliseconds(timing: Timing, pass_seconds: float) -> dict[str, str]:
    step = statistics.median(timing.steps)
    before = pass_seconds + timing.build
    return {
        "per_step_ms": f"{1e3 * step:.3f}",
        "per_step_low_ms": f"{1e3 * min(timing.steps):.3f}",
        "per_step_high_ms": f"{1e3 * max(timing.steps):.3f}",
        "prefill_ms": f"{1e3 * before:.3f}",
        "end_to_end_ms": f"{1e3 * (before + STEPS * step):.3f}",
    }


def _state(model: PreTrainedModel, map_spec: MapSpec, method: str) -> int:
    adds_residual = estimator_named(method).adds_residual
    return state_bytes(HeadShape.of(model.config), map_spec.d_phi, FLOAT32) if adds_residual else 0


def _timed_prefill(model: PreTrainedModel, length: int, repeats: int, seed: int) -> tuple[Prefill, float]:
    """A prompt of random tokens, and the median seconds of reading it."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(model.config.vocab_size, (length,), generator=generator).tolist()
    seconds = []
    for _ in range(repeats + 1):  # the first is slower, and not counted
        started = _now(device)
        read = prefill(model, [prompt])
        seconds.append(_now(device) - started)
    return read, statistics.median(seconds[1:])


def _timed_decoding(
    implementation: Implementation,
    model: PreTrainedModel,
    reads: Sequence[Prefill],
    method: str,
    k: int,
    anchors: AnchorSpec,
    phi: PhiMaps,
    repeats: int,
) -> Timing:
    device = next(model.parameters()).device
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(2):  # the first is slower, and not counted
        decoder: PrototypeDecoder | StaticDecoder | None = None  # its buffers go before there are new ones
        copies = [Prefill(dict(one.layers), one.next_token) for one in reads]
        started = _now(device)
        if implementation == "prototype":
            decoder = PrototypeDecoder(model, _together(copies), method, k, anchors, phi, STEPS)
        else:
            decoder = StaticDecoder(model, fill_buffers(copies, STEPS), method, k, anchors, phi, STEPS)
        build = _now(device) - started
    assert decoder is not None
    first = torch.cat([one.next_token for one in reads])
    decoder.prepare()
    tokens = decoder.run(first).clone()
    steps = []
    for _ in range(repeats):
        decoder.prepare()
        started = _now(device)
        decoder.run(first)
        steps.append((_now(device) - started) / STEPS)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return Timing(build, steps, peak, tokens)


def _together(reads: Sequence[Prefill]) -> Prefill:
    """Prompts that were read one by one, as if they had been read as a batch."""
    layers = {index: tuple(torch.cat(parts) for parts in zip(*(one.layers.pop(index) for one in reads), strict=True))
              for index in list(reads[0].layers)}  # fmt: skip
    return Prefill({index: (keys, values) for index, (keys, values) in layers.items()})


def _now(device: torch.device) -> float:
    wait_for(device)
    return time.perf_counter()


def device_name(device: torch.device) -> str:
    """The GPU, or the processor and the threads that torch uses of it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()}, {torch.get_num_threads()} threads"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
