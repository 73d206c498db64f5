"""The `runtime` stage: latency of a decode step and from end to end, by implementation, method, context and batch.

A run reads its prompts exactly, then decodes 31 tokens after the first; a step is the mean over these, as in the
paper's tables. Prompts are random tokens and feature maps have their initial weights, which hardly affect time. All
rows of a batch hold the same prompt in separate buffers, and its prefill time counts once per row. On a GPU our steps
are first recorded as CUDA graphs, once per prompt length; that time has its own column and counts nowhere else.

Our repeats of a method directly follow the prototype's, but do not alternate with them: at long contexts and large
batches only one implementation's buffers fit into memory.

Our Full is measured with each of torch's attention kernels on a GPU, and its row is that of the fastest.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm
from transformers import PreTrainedModel

from residual_mass.core.selection import retrieved_count
from residual_mass.core.settings import tokens_of
from residual_mass.files import csv_text, write_text
from residual_mass.methods import method_named
from residual_mass.model.hook import Prefill, device_of, prefill
from residual_mass.model.loading import load_backbone
from residual_mass.model.phi_maps import HeadShape, PhiMaps
from residual_mass.model.static_decode import StaticDecoder, fill_buffers, fused_method
from residual_mass.provenance import MANIFEST, Record, device_name
from residual_mass.runtime.prototype import PrototypeDecoder
from residual_mass.runtime.traffic import (
    Implementation,
    copy_bandwidth,
    decoding_bytes,
    free_bytes,
    gigabytes,
    prompt_bytes,
    shortfall,
    step_traffic,
    wait_for,
)
from residual_mass.study.labels import METHODS
from residual_mass.study.specs import RuntimeSpec

log = logging.getLogger(__name__)

RUNTIME = (
    "study backbone implementation method context batch budget_percent k per_step_ms per_step_low_ms per_step_high_ms "
    "prefill_ms end_to_end_ms recording_ms peak_memory_mib step_bytes floor_ms bandwidth_gb_s state_bytes "
    "tokens_as_prototype attention_kernels not_measured repeats weights phi_weights dtype device model_id revision"
).split()
STEPS = 31
"""Decoded tokens after the first, which comes from the prefill."""
IMPLEMENTATIONS: tuple[Implementation, ...] = ("prototype", "fused")
Result = TypeVar("Result")
LAST = "math"
"""The attention kernel of separate operations: takes every shape and dtype, and more time and memory than others."""
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    LAST: SDPBackend.MATH,
}


@dataclass(frozen=True)
class RuntimeSetting:
    """A measured setting; every row of the batch retrieves `k` tokens from a context of `length`."""

    implementation: Implementation
    method: str
    length: int
    batch: int
    k: int


@dataclass(frozen=True)
class Timing:
    """Times of a setting.

    Attributes:
        build: seconds for a method's buffers, features and summaries after the prefill.
        recording: seconds for recording CUDA graphs, including a first run; None without graphs.
        steps: mean seconds of a step, one per repeat.
        peak: peak bytes of GPU memory while recording and decoding, without model, maps and prefill; None on a CPU.
        tokens: [B, T] decoded tokens.
    """

    build: float
    recording: float | None
    steps: list[float]
    peak: int | None
    tokens: Tensor

    @property
    def step(self) -> float:
        return statistics.median(self.steps)


def run(spec: RuntimeSpec, assets: Path, out: Path) -> None:
    """Measures every setting of `spec` and writes one CSV row for each.

    Raises:
        ValueError: a context exceeds the backbone's; a method of our own has no fast step.
    """
    for method in spec.own_methods:
        fused_method(method)
    record = Record("runtime", spec, [assets / MANIFEST])
    for label in spec.contexts:
        if tokens_of(label) + STEPS > spec.backbone.context:
            raise ValueError(
                f"runtime.contexts: {label} and {STEPS} steps do not fit into the context of {spec.backbone.name} "
                f"({spec.backbone.context} tokens); leave it out"
            )
    backbone = load_backbone(spec.backbone, assets)
    rows = list(measure(spec, backbone.model))
    facts = {
        "study": spec.study, "backbone": spec.backbone.name, "weights": spec.backbone.weights,
        "dtype": spec.backbone.dtype, "model_id": spec.backbone.model_id, "revision": spec.backbone.revision,
    }  # fmt: skip
    write_text(out, csv_text(RUNTIME, [facts | row for row in rows]))
    record.write(out, device=backbone.device, identity=backbone.identity)


def measure(
    spec: RuntimeSpec, model: PreTrainedModel, implementations: Sequence[Implementation] = IMPLEMENTATIONS
) -> Iterator[dict[str, object]]:
    """Yields rows with the columns RUNTIME, without facts of the backbone; `not_measured` says why one has no times."""
    device = device_of(model)
    torch.manual_seed(spec.seed)
    phi = PhiMaps(HeadShape.of(model.config), spec.map).to(device).requires_grad_(False)
    bandwidth = copy_bandwidth(device)
    log.info("%s, copies at %.1f GB/s", device_name(device), bandwidth / 1e9)
    ours = [side for side in implementations if side != "prototype"]
    sides: dict[str, Sequence[Implementation]] = dict.fromkeys(METHODS, implementations)
    sides |= dict.fromkeys(spec.own_methods, ours)
    settings = len(spec.contexts) * len(spec.batches) * sum(map(len, sides.values()))
    with tqdm(total=settings, unit="setting") as bar:
        for context in spec.contexts:
            length = tokens_of(context)
            k = retrieved_count(spec.budget, length, spec.anchors.sink + spec.anchors.tail)
            read, seconds = _timed_prefill(model, length, spec.repeats, spec.seed)
            for batch, method in itertools.product(spec.batches, sides):
                baseline: Tensor | None = None
                for implementation in sides[method]:
                    bar.set_postfix_str(f"{context}, batch {batch}, {implementation} {method}")
                    setting = RuntimeSetting(implementation, method, length, batch, k)
                    timing, kernels = (read, "") if isinstance(read, str) else _best(setting, model, read, phi, spec)
                    if implementation == "prototype" and isinstance(timing, Timing):
                        baseline = timing.tokens
                    yield {
                        "context": context,
                        **_row(setting, model, phi, spec, bandwidth),
                        **_measured(timing, batch * seconds, baseline),
                        "attention_kernels": kernels,
                    }
                    bar.update()


def _row(
    setting: RuntimeSetting, model: PreTrainedModel, phi: PhiMaps, spec: RuntimeSpec, bandwidth: float
) -> dict[str, object]:
    """Returns the columns that are known without running a setting."""
    traffic = step_traffic(
        model, phi, setting.implementation, setting.method,
        batch=setting.batch, length=setting.length, k=setting.k, anchors=spec.anchors, generated=STEPS // 2,
    )  # fmt: skip
    device, rule = device_of(model), method_named(setting.method)
    return {
        "implementation": setting.implementation,
        "method": setting.method,
        "batch": setting.batch,
        "budget_percent": "" if rule.whole_prefix else f"{spec.budget:g}",
        "k": "" if rule.whole_prefix else setting.k,
        "step_bytes": traffic.total,
        "floor_ms": f"{1e3 * traffic.total / bandwidth:.3f}",
        "bandwidth_gb_s": f"{bandwidth / 1e9:.3f}",
        "state_bytes": prompt_bytes(rule, HeadShape.of(model.config), setting.length, spec.map.d_phi).summary,
        "repeats": spec.repeats,
        "phi_weights": "random" if rule.needs_maps else "",
        "device": device_name(device),
    }


def _measured(timing: Timing | str, pass_seconds: float, baseline: Tensor | None) -> dict[str, str]:
    """Returns the measured columns, or why a setting does not fit."""
    if isinstance(timing, str):
        return {"not_measured": timing}
    step, before = timing.step, pass_seconds + timing.build
    equal = "" if baseline is None else f"{float((timing.tokens == baseline).float().mean()):.3f}"
    return {
        "per_step_ms": f"{1e3 * step:.3f}",
        "per_step_low_ms": f"{1e3 * min(timing.steps):.3f}",
        "per_step_high_ms": f"{1e3 * max(timing.steps):.3f}",
        "prefill_ms": f"{1e3 * before:.3f}",
        "end_to_end_ms": f"{1e3 * (before + STEPS * step):.3f}",
        "recording_ms": "" if timing.recording is None else f"{1e3 * timing.recording:.3f}",
        "peak_memory_mib": "" if timing.peak is None else f"{timing.peak / 2**20:.1f}",
        "tokens_as_prototype": equal,
    }


def _timed_prefill(model: PreTrainedModel, length: int, repeats: int, seed: int) -> tuple[Prefill | str, float]:
    """Reads a prompt of random tokens.

    Returns:
        The prefill, or why it failed, and its median seconds.
    """
    device = device_of(model)
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(model.config.vocab_size, (length,), generator=generator).tolist()
    free, seconds = free_bytes(device), []
    try:
        for _ in range(repeats + 1):  # the first is slower and not counted
            started = _now(device)
            read = prefill(model, [prompt])
            seconds.append(_now(device) - started)
    except torch.OutOfMemoryError:
        return _ran_out("reading the prompt", free), 0.0
    return read, statistics.median(seconds[1:])


def _best(
    setting: RuntimeSetting, model: PreTrainedModel, read: Prefill, phi: PhiMaps, spec: RuntimeSpec
) -> tuple[Timing | str, str]:
    """Returns a setting's timing or why there is none, of our Full that of the fastest attention kernel, and the
    milliseconds of a step with each kernel, the fastest first, or what it lacks; empty where there is no choice.
    """

    def attempt() -> Timing | str:
        return _attempt(setting, model, read, phi, spec)

    full = setting.implementation != "prototype" and method_named(setting.method).whole_prefix
    if not full or not (names := kernels_on(device_of(model))):
        return attempt(), ""
    found = with_each((name for name in names if name != LAST), attempt)
    if all(timing is None for timing in found.values()):
        found |= with_each((LAST,), attempt)
        if found[LAST] is None:  # takes everything: the fault is elsewhere, and is met again
            return attempt(), ""
    timings = {name: timing for name, timing in found.items() if isinstance(timing, Timing)}
    lacking = {name: why or "not available" for name, why in found.items() if not isinstance(why, Timing)}
    if not timings:
        return next(iter(lacking.values())), ""
    ordered = sorted(timings, key=lambda name: timings[name].step)
    told = [f"{name} {1e3 * timings[name].step:.3f}" for name in ordered]
    return timings[ordered[0]], "; ".join([*told, *(f"{name} {why}" for name, why in lacking.items())])


def kernels_on(device: torch.device) -> tuple[str, ...]:
    """Names of the kernels to choose among; none on a CPU, where torch's own choice is taken."""
    return tuple(KERNELS) if device.type == "cuda" else ()


def with_each(names: Iterable[str], work: Callable[[], Result]) -> dict[str, Result | None]:
    """Returns what some work with attention gives under each of these kernels alone; None where one refuses."""
    results: dict[str, Result | None] = {}
    for name in names:
        try:
            with sdpa_kernel(KERNELS[name]):
                results[name] = work()
        except (torch.OutOfMemoryError, torch.AcceleratorError):  # is no refusal
            raise
        except RuntimeError as refusal:
            log.info("attention kernel %s is not available: %s", name, str(refusal).partition("\n")[0])
            results[name] = None
    return results


def _attempt(
    setting: RuntimeSetting, model: PreTrainedModel, read: Prefill, phi: PhiMaps, spec: RuntimeSpec
) -> Timing | str:
    """Returns a setting's timing, or why there is none."""
    free = free_bytes(device_of(model))
    needed = decoding_bytes(
        model, phi.map, setting.implementation, setting.method,
        batch=setting.batch, length=setting.length, room=STEPS,
    )  # fmt: skip
    if lacking := shortfall(needed, free):
        return lacking
    try:
        return _timed_decoding(setting, model, read, phi, spec)
    except torch.OutOfMemoryError:  # the estimate covers neither fragmentation nor libraries
        return _ran_out("decoding", free)


def _ran_out(what: str, free: int | None) -> str:
    return f"does not fit: {what} needs more than the {gigabytes(free or 0)} that are free"


def _timed_decoding(
    setting: RuntimeSetting, model: PreTrainedModel, read: Prefill, phi: PhiMaps, spec: RuntimeSpec
) -> Timing:
    device = device_of(model)
    on_gpu = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    for _ in range(2):  # the first is slower and not counted
        decoder: PrototypeDecoder | StaticDecoder | None = None  # frees its buffers before allocating new ones
        copies = [Prefill(dict(read.layers), read.next_token) for _ in range(setting.batch)]
        started = _now(device)
        if setting.implementation == "prototype":
            decoder = PrototypeDecoder(model, _together(copies), setting.method, setting.k, spec.anchors, phi, STEPS)
        else:
            caches = fill_buffers(copies, STEPS)
            decoder = StaticDecoder(model, caches, setting.method, setting.k, spec.anchors, phi, STEPS)
        build = _now(device) - started
    assert decoder is not None
    if on_gpu:  # after building; graphs allocate their memory while they are recorded, not when they run
        torch.cuda.reset_peak_memory_stats(device)
    first = read.next_token.repeat(setting.batch)
    started = _now(device)
    decoder.prepare()
    recording = _now(device) - started
    tokens = decoder.run(first).clone()  # slower than the next ones and not counted
    steps = []
    for _ in range(spec.repeats):
        decoder.prepare()
        started = _now(device)
        decoder.run(first)
        steps.append((_now(device) - started) / STEPS)
    peak = torch.cuda.max_memory_allocated(device) - before if on_gpu else None
    recorded = isinstance(decoder, StaticDecoder) and decoder.graphs
    return Timing(build, recording if recorded else None, steps, peak, tokens)


def _together(reads: Sequence[Prefill]) -> Prefill:
    """Joins prefills of single prompts to one of a batch, emptying `reads`."""
    layers = {index: tuple(torch.cat(parts) for parts in zip(*(one.layers.pop(index) for one in reads), strict=True))
              for index in list(reads[0].layers)}  # fmt: skip
    return Prefill({index: (keys, values) for index, (keys, values) in layers.items()})


def _now(device: torch.device) -> float:
    wait_for(device)
    return time.perf_counter()
