"""The `runtime` stage: latency of a decode step and from end to end, by implementation, method, context and batch.

A run reads its prompts exactly, then decodes 31 tokens after the first. A step's time is the mean over these, as in the
paper's tables. Prompts are random tokens and feature maps have their initial weights, which hardly affect time. All
rows of a batch hold the same prompt in separate buffers, and its prefill time counts once per row. On a GPU our steps
are first recorded as CUDA graphs, once per prompt length; that time has its own column and counts nowhere else.

Our repeats of a method directly follow the prototype's, but do not alternate with them: at long contexts and large
batches only one implementation's buffers fit into memory.

On a GPU our Full is measured with each of torch's attention kernels, and its row is that of the fastest.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
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
from residual_mass.decode.backend import Backend
from residual_mass.decode.backends import BACKENDS, backend_for
from residual_mass.decode.packed_backend import PackedBackend
from residual_mass.decode.text import TextBatch
from residual_mass.files import csv_text, write_text
from residual_mass.methods import method_named
from residual_mass.methods.served import backends_of
from residual_mass.metrics import budget_text
from residual_mass.model.hook import Prefill, prefill
from residual_mass.model.layers import device_of
from residual_mass.model.loading import load_backbone
from residual_mass.model.phi_maps import HeadShape, PhiMaps
from residual_mass.provenance import Record, device_name
from residual_mass.runtime.prototype import PrototypeDecoder
from residual_mass.runtime.traffic import Implementation, copy_rates, prompt_bytes, step_traffic
from residual_mass.spec.arms import ArmSpec
from residual_mass.spec.labels import METHODS
from residual_mass.spec.paths import MANIFEST
from residual_mass.spec.settings import tokens_of
from residual_mass.spec.specs import RuntimeSpec

log = logging.getLogger(__name__)

RUNTIME = (
    "study backbone implementation method context batch budget_percent k per_step_ms per_step_low_ms per_step_high_ms "
    "prefill_ms end_to_end_ms recording_ms peak_memory_mib step_bytes floor_ms bandwidth_gb_s state_bytes "
    "tokens_as_prototype attention_kernels not_measured repeats weights phi_weights dtype device model_id revision"
).split()
STEPS = 31
"""Decoded tokens after the first, which comes from the prefill."""
IMPLEMENTATIONS: tuple[Implementation, ...] = ("prototype", "fused", "kernels")
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
COPIES = 2
"""Copies of a cache that are in memory while buffers are filled."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class Setting:
    """One measurement: every row of the batch has the same prompt and retrieves `k` of its tokens."""

    model: PreTrainedModel
    phi: PhiMaps
    spec: RuntimeSpec
    implementation: Implementation
    method: str
    context: str
    batch: int
    k: int


@dataclass(frozen=True)
class Timing:
    """Times of a setting.

    Attributes:
        build: seconds for a method's buffers, features and summaries after the prefill.
        recording: seconds of the first run, which records CUDA graphs; None without graphs.
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
        ValueError: a context exceeds the backbone's, or one of `own_methods` has no fast step.
    """
    for method in spec.own_methods:
        if backends_of(method_named(method)) == ("torch",):
            raise ValueError(f"runtime.methods: {method} has no kernels, on a CPU or a GPU; leave it out")
    record = Record("runtime", spec, [assets / MANIFEST])
    for label in spec.contexts:
        if tokens_of(label) + STEPS > spec.backbone.context:
            raise ValueError(
                f"runtime.contexts: {label} and {STEPS} steps do not fit into the context of {spec.backbone.name} "
                f"({spec.backbone.context} tokens); leave it out"
            )
    backbone = load_backbone(spec.backbone, assets)
    facts = {
        "study": spec.study, "backbone": spec.backbone.name, "weights": spec.backbone.weights,
        "dtype": spec.backbone.dtype, "model_id": spec.backbone.model_id, "revision": spec.backbone.revision,
    }  # fmt: skip
    write_text(out, csv_text(RUNTIME, [facts | row for row in measure(spec, backbone.model)]))
    record.write(out, device=backbone.device, identity=backbone.identity)


def measure(
    spec: RuntimeSpec, model: PreTrainedModel, implementations: Sequence[Implementation] = IMPLEMENTATIONS
) -> Iterator[dict[str, object]]:
    """Yields rows with the columns RUNTIME, but not the backbone's; `not_measured` says why a row has no times."""
    device = device_of(model)
    torch.manual_seed(spec.seed)
    phi = PhiMaps(HeadShape.of(model.config), spec.map).to(device).requires_grad_(False)
    bandwidth = max(copy_rates(device))
    log.info("%s, copies at %.1f GB/s", device_name(device), bandwidth / 1e9)
    sides = {
        method: [side for side in implementations if _serves(side, method, model)]
        for method in (*METHODS, *spec.own_methods)
    }
    if "kernels" in implementations and "kernels" not in sides["full"]:
        log.info("no rows of the CPU kernels, which are not built or do not serve this model and device")
    bar = tqdm(total=len(spec.contexts) * len(spec.batches) * sum(map(len, sides.values())), unit="setting")
    for context in spec.contexts:
        length = tokens_of(context)
        k = retrieved_count(spec.budget, length, spec.anchors.sink + spec.anchors.tail)
        read, seconds = _timed_prefill(model, length, spec.repeats, spec.seed)
        for batch, method in itertools.product(spec.batches, sides):
            baseline: Tensor | None = None
            for implementation in sides[method]:
                bar.set_postfix_str(f"{context}, batch {batch}, {implementation} {method}")
                setting = Setting(model, phi, spec, implementation, method, context, batch, k)
                timing, kernels = (read, "") if isinstance(read, str) else _best(setting, read)
                row = _known(setting, bandwidth) | {"attention_kernels": kernels}
                if isinstance(timing, str):
                    yield row | {"not_measured": timing}
                else:
                    baseline = timing.tokens if implementation == "prototype" else baseline
                    yield row | _times(timing, batch * seconds, baseline)
                bar.update()
    bar.close()


def _serves(implementation: Implementation, method: str, model: PreTrainedModel) -> bool:
    if implementation == "prototype":
        return method in METHODS
    if implementation == "fused":
        return "triton" in backends_of(method_named(method))
    return PackedBackend.refusal(model, arm_of(method, 1.0)) is None


def _known(setting: Setting, bandwidth: float) -> dict[str, object]:
    """Returns the columns that are known without running a setting."""
    spec, length, rule = setting.spec, tokens_of(setting.context), method_named(setting.method)
    traffic = step_traffic(
        setting.model, setting.phi, setting.implementation, setting.method,
        batch=setting.batch, length=length, k=setting.k, anchors=spec.anchors, generated=STEPS // 2,
    )  # fmt: skip
    total = sum(traffic.values())
    return {
        "implementation": setting.implementation, "method": setting.method, "context": setting.context,
        "batch": setting.batch, "k": "" if rule.whole_prefix else setting.k,
        "budget_percent": budget_text(None if rule.whole_prefix else spec.budget),
        "step_bytes": total, "floor_ms": f"{1e3 * total / bandwidth:.3f}", "bandwidth_gb_s": f"{bandwidth / 1e9:.3f}",
        "state_bytes": prompt_bytes(rule, setting.phi.shape, length, spec.map.d_phi).summary,
        "repeats": spec.repeats, "phi_weights": "random" if rule.needs_maps else "",
        "device": device_name(device_of(setting.model)),
    }  # fmt: skip


def _times(timing: Timing, pass_seconds: float, baseline: Tensor | None) -> dict[str, str]:
    """Returns the measured columns."""
    before = pass_seconds + timing.build
    seconds = {
        "per_step_ms": timing.step, "per_step_low_ms": min(timing.steps), "per_step_high_ms": max(timing.steps),
        "prefill_ms": before, "end_to_end_ms": before + STEPS * timing.step, "recording_ms": timing.recording,
    }  # fmt: skip
    return {
        **{name: "" if value is None else f"{1e3 * value:.3f}" for name, value in seconds.items()},
        "peak_memory_mib": "" if timing.peak is None else f"{timing.peak / 2**20:.1f}",
        "tokens_as_prototype": "" if baseline is None else f"{float((timing.tokens == baseline).float().mean()):.3f}",
    }


def _timed_prefill(model: PreTrainedModel, length: int, repeats: int, seed: int) -> tuple[Prefill | str, float]:
    """Reads a prompt of random tokens.

    Returns:
        The prefill, or why it failed, and its median seconds.
    """
    device = device_of(model)
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(model.config.vocab_size, (length,), generator=generator).tolist()
    try:
        passes = []
        for _ in range(repeats + 1):  # the first is slower and not counted
            read, seconds = _clocked(lambda: prefill(model, [prompt]), device)
            passes.append(seconds)
    except torch.OutOfMemoryError:
        return "does not fit: out of memory while reading the prompt", 0.0
    return read, statistics.median(passes[1:])


def _best(setting: Setting, read: Prefill) -> tuple[Timing | str, str]:
    """Returns a setting's timing or why there is none; for our Full on a GPU, that of the fastest attention kernel, and
    a text with the milliseconds of a step or the failure of each kernel, fastest first. Otherwise the text is empty.
    """
    names = kernels_on(device_of(setting.model))
    if setting.implementation != "fused" or not method_named(setting.method).whole_prefix or not names:
        return _timed(setting, read), ""
    results = with_each(names, lambda: _timed(setting, read))
    timings = {name: timing for name, timing in results.items() if isinstance(timing, Timing)}
    lacking = {name: results[name] or "not available" for name in results if name not in timings}
    if not timings:
        return next(iter(lacking.values())), ""
    ordered = sorted(timings, key=lambda name: timings[name].step)
    steps = [f"{name} {1e3 * timings[name].step:.3f}" for name in ordered]
    return timings[ordered[0]], "; ".join([*steps, *(f"{name} {why}" for name, why in lacking.items())])


def kernels_on(device: torch.device) -> tuple[str, ...]:
    """Returns the names of the attention kernels to compare; empty on a CPU, where torch chooses."""
    return tuple(KERNELS) if device.type == "cuda" else ()


def with_each(names: Iterable[str], work: Callable[[], Result]) -> dict[str, Result | None]:
    """Returns the result of `work` with each of these attention kernels alone; None for a kernel that refuses."""
    results: dict[str, Result | None] = {}
    for name in names:
        try:
            with sdpa_kernel(KERNELS[name]):
                results[name] = work()
        except (torch.OutOfMemoryError, torch.AcceleratorError):  # not a refusal
            raise
        except RuntimeError as refusal:
            log.info("attention kernel %s is not available: %s", name, str(refusal).partition("\n")[0])
            results[name] = None
    return results


def _timed(setting: Setting, read: Prefill) -> Timing | str:
    """Returns a setting's timing, or why there is none."""
    if device_of(setting.model).type == "cpu":  # where the system kills a process that takes too much
        size = sum(x.nbytes for layer in read.layers.values() for x in layer)
        if method_named(setting.method).needs_maps:
            size *= 1 + setting.phi.map.d_phi / (2 * setting.phi.shape.head_dim)
        if (needed := COPIES * setting.batch * size) > (free := _free_memory()):
            return f"does not fit: needs {needed / 1e9:.1f} GB of {free / 1e9:.1f} GB that are free"
    try:
        return _timed_decoding(setting, read)
    except torch.OutOfMemoryError:
        return "does not fit: out of memory while decoding"


def _free_memory() -> float:
    """Returns the bytes of available memory; infinite on systems other than Linux, which do not report it."""
    try:
        match = re.search(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text(encoding="utf-8"))
    except OSError:
        return math.inf
    return 1024 * int(match[1]) if match else math.inf


def _timed_decoding(setting: Setting, read: Prefill) -> Timing:
    device = device_of(setting.model)
    on_gpu = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    decoder: PrototypeDecoder | TextDecoder | None
    for _ in range(2):  # the first is slower and not counted
        decoder = None  # frees its buffers first
        decoder, build = _clocked(lambda: _decoder(setting, read), device)
    if on_gpu:  # after building; graphs allocate their memory while they are recorded, not when they run
        torch.cuda.reset_peak_memory_stats(device)
    first = read.next_token.repeat(setting.batch)
    decoder.prepare()
    tokens, recording = _clocked(lambda: decoder.run(first), device)  # slower than the next ones and not counted
    steps = []
    for _ in range(setting.spec.repeats):
        decoder.prepare()
        _, seconds = _clocked(lambda: decoder.run(first), device)
        steps.append(seconds / STEPS)
    peak = torch.cuda.max_memory_allocated(device) - before if on_gpu else None
    recorded = isinstance(decoder, TextDecoder) and decoder.recorded
    return Timing(build, recording if recorded else None, steps, peak, tokens)


def _decoder(setting: Setting, read: Prefill) -> PrototypeDecoder | TextDecoder:
    """Returns the decoder of a batch of the prompt that was read, with its own buffers."""
    model, anchors, batch = setting.model, setting.spec.anchors, setting.batch
    rows = {index: (k.repeat(batch, 1, 1, 1), v.repeat(batch, 1, 1, 1)) for index, (k, v) in read.layers.items()}
    if setting.implementation == "prototype":
        return PrototypeDecoder(model, Prefill(rows), setting.method, setting.k, anchors, setting.phi, STEPS)
    arm = arm_of(setting.method, setting.spec.budget)
    kinds = [kind for kind in BACKENDS if (kind is PackedBackend) == (setting.implementation == "kernels")]
    phi = setting.phi if arm.needs_maps else None
    backend = backend_for(model, arm, anchors, phi, room=STEPS, kinds=kinds)
    backend.take(Prefill(rows))
    return TextDecoder(model, backend)


class TextDecoder:
    """Greedy decoding of a batch of prompts of equal length through a backend that holds them."""

    def __init__(self, model: PreTrainedModel, backend: Backend) -> None:
        self.text = TextBatch(model, backend)
        self.length = self.text.tokens
        backend.repeats = True

    @property
    def recorded(self) -> bool:
        """Whether steps are replayed from CUDA graphs."""
        return self.text.backend.records

    def prepare(self) -> None:
        """Removes generated tokens; call before every run."""
        self.text.crop(self.text.tokens - self.length)

    @torch.no_grad()
    def run(self, first: Tensor) -> Tensor:
        """Decodes tokens [B, T] after the tokens `first` [B]."""
        token = first.unsqueeze(1)
        tokens = []
        for _ in range(STEPS):
            self.logits = self.text.step(token)[:, -1]
            token = self.logits.argmax(-1, keepdim=True)
            tokens.append(token)
        return torch.cat(tokens, dim=1)


def arm_of(method: str, budget: float) -> ArmSpec:
    return ArmSpec(method, None if method == "full" else budget)


def _clocked(work: Callable[[], Result], device: torch.device) -> tuple[Result, float]:
    """Returns the result of `work` and its seconds by the host's clock; waits for the device before and after."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    started = now()
    result = work()
    return result, now() - started
