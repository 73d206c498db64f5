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
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm
from transformers import PreTrainedModel

from residual_mass.core.selection import retrieved_count
from residual_mass.decode.backend import Prefill
from residual_mass.decode.backends import BACKENDS, backend_for
from residual_mass.decode.packed_backend import PackedBackend
from residual_mass.decode.recording import prefill
from residual_mass.files import csv_text, write_text
from residual_mass.methods import Method, method_named
from residual_mass.methods.served import backends_of
from residual_mass.metrics import budget_text
from residual_mass.model.layers import device_of
from residual_mass.model.loading import load_backbone
from residual_mass.model.phi_maps import HeadShape, PhiMaps
from residual_mass.model.rotary import frequencies_of
from residual_mass.provenance import Record, device_name
from residual_mass.runtime.decoders import DecodingTimes, TextDecoder, time_decoder
from residual_mass.runtime.prototype import PrototypeBackend
from residual_mass.runtime.traffic import Implementation, copy_rates, prompt_bytes, step_traffic
from residual_mass.spec.arms import ArmSpec
from residual_mass.spec.labels import PAPER_METHODS
from residual_mass.spec.paths import MANIFEST
from residual_mass.spec.settings import tokens_of
from residual_mass.spec.specs import RuntimeSpec
from residual_mass.timing import Clock, Result, device_clock, timed

log = logging.getLogger(__name__)

LATENCY_COLUMNS = (
    "study backbone implementation method context batch budget_percent k per_step_ms per_step_low_ms per_step_high_ms "
    "prefill_ms end_to_end_ms recording_ms peak_memory_mib step_bytes floor_ms bandwidth_gb_s state_bytes "
    "tokens_as_prototype attention_kernels not_measured repeats weights phi_weights dtype device model_id revision"
).split()
RUN_STEPS = 31
"""Decoded tokens after the first, which comes from the prefill."""
IMPLEMENTATIONS: tuple[Implementation, ...] = ("prototype", "fused", "kernels")
ATTENTION_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
CACHE_COPIES = 2
"""Copies of a cache that are in memory while buffers are filled."""


@dataclass(frozen=True)
class Setting:
    """One measurement: every row of the batch has the same prompt and retrieves `k` of its tokens.

    Attributes:
        clock: of the host.
    """

    model: PreTrainedModel
    phi: PhiMaps
    spec: RuntimeSpec
    implementation: Implementation
    method: str
    context: str
    batch: int
    k: int
    clock: Clock

    @property
    def rule(self) -> Method:
        return method_named(self.method)


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
        if tokens_of(label) + RUN_STEPS > spec.backbone.context:
            raise ValueError(
                f"runtime.contexts: {label} and {RUN_STEPS} steps do not fit into the context of {spec.backbone.name} "
                f"({spec.backbone.context} tokens); leave it out"
            )
    backbone = load_backbone(spec.backbone, assets)
    of_backbone = {
        "study": spec.study,
        "backbone": spec.backbone.name,
        "weights": spec.backbone.weights,
        "dtype": spec.backbone.dtype,
        "model_id": spec.backbone.model_id,
        "revision": spec.backbone.revision,
    }
    rows = [of_backbone | row for row in measure(spec, backbone.model)]
    write_text(out, csv_text(LATENCY_COLUMNS, rows))
    record.write(out, device=backbone.device, identity=backbone.identity)


def measure(
    spec: RuntimeSpec,
    model: PreTrainedModel,
    implementations: Sequence[Implementation] = IMPLEMENTATIONS,
    clock: Clock = time.perf_counter,
) -> Iterator[dict[str, object]]:
    """Yields rows of LATENCY_COLUMNS, without the backbone's columns; `not_measured` says why a row has no times."""
    device = device_of(model)
    for context in spec.contexts:
        frequencies_of(model).require_growing([tokens_of(context)], [RUN_STEPS])
    torch.manual_seed(spec.seed)
    phi = PhiMaps(HeadShape.of(model.config), spec.map).to(device).requires_grad_(False)
    bandwidth = max(copy_rates(device))
    log.info("%s, copies at %.1f GB/s", device_name(device), bandwidth / 1e9)
    served = {}
    for method in (*PAPER_METHODS, *spec.own_methods):
        served[method] = [name for name in implementations if _serves(name, method, model)]
    if "kernels" in implementations and "kernels" not in served["full"]:
        log.info("no rows of the CPU kernels, which are not built or do not serve this model and device")
    of_prompt = sum(map(len, served.values()))
    count = len(spec.contexts) * len(spec.batches) * of_prompt
    with tqdm(total=count, unit="setting") as progress:
        for context in spec.contexts:
            length = tokens_of(context)
            k = retrieved_count(spec.budget, length, spec.anchors.sink + spec.anchors.tail)
            read, seconds = _timed_prefill(model, length, spec.repeats, spec.seed, clock)
            for batch, method in itertools.product(spec.batches, served):
                baseline: Tensor | None = None
                # The prototype comes first, so that the others can be compared with its tokens.
                for implementation in served[method]:
                    progress.set_postfix_str(f"{context}, batch {batch}, {implementation} {method}")
                    setting = Setting(model, phi, spec, implementation, method, context, batch, k, clock)
                    times, kernels = (read, "") if isinstance(read, str) else _fastest(setting, read)
                    row = _setting_columns(setting, bandwidth) | {"attention_kernels": kernels}
                    if isinstance(times, str):
                        yield row | {"not_measured": times}
                    else:
                        if implementation == "prototype":
                            baseline = times.tokens
                        yield row | _time_columns(times, batch * seconds, baseline)
                    progress.update()


def _serves(implementation: Implementation, method: str, model: PreTrainedModel) -> bool:
    if implementation == "prototype":
        return method in PAPER_METHODS
    if implementation == "fused":
        return "triton" in backends_of(method_named(method))
    return PackedBackend.refusal(model, arm_of(method, 1.0)) is None


def _setting_columns(setting: Setting, bandwidth: float) -> dict[str, object]:
    """Returns the columns that a setting has without being run; `bandwidth` is in bytes per second."""
    spec = setting.spec
    length = tokens_of(setting.context)
    rule = setting.rule
    traffic = step_traffic(
        setting.model,
        setting.phi,
        setting.implementation,
        setting.method,
        batch=setting.batch,
        length=length,
        k=setting.k,
        anchors=spec.anchors,
        generated=RUN_STEPS // 2,  # as many as in the mean step of a run
    )
    total = sum(traffic.values())
    floor = total / bandwidth
    state = prompt_bytes(rule, setting.phi.shape, length, spec.map.d_phi).summary
    budget = None if rule.whole_prefix else spec.budget
    return {
        "implementation": setting.implementation,
        "method": setting.method,
        "context": setting.context,
        "batch": setting.batch,
        "k": "" if rule.whole_prefix else setting.k,
        "budget_percent": budget_text(budget),
        "step_bytes": total,
        "floor_ms": f"{1e3 * floor:.3f}",
        "bandwidth_gb_s": f"{bandwidth / 1e9:.3f}",
        "state_bytes": state,
        "repeats": spec.repeats,
        "phi_weights": "random" if rule.needs_maps else "",
        "device": device_name(device_of(setting.model)),
    }


def _time_columns(times: DecodingTimes, prefill_seconds: float, baseline: Tensor | None) -> dict[str, str]:
    """Returns the measured columns.

    Args:
        prefill_seconds: of the batch.
        baseline: [B, T], the prototype's tokens; None if they were not decoded.
    """
    before = prefill_seconds + times.build
    seconds = {
        "per_step_ms": times.step,
        "per_step_low_ms": min(times.steps),
        "per_step_high_ms": max(times.steps),
        "prefill_ms": before,
        "end_to_end_ms": before + RUN_STEPS * times.step,
        "recording_ms": times.recording,
    }
    columns = {}
    for name, value in seconds.items():
        columns[name] = "" if value is None else f"{1e3 * value:.3f}"
    columns["peak_memory_mib"] = "" if times.peak is None else f"{times.peak / 2**20:.1f}"
    columns["tokens_as_prototype"] = ""
    if baseline is not None:
        same = (times.tokens == baseline).float().mean()
        columns["tokens_as_prototype"] = f"{float(same):.3f}"
    return columns


def _timed_prefill(
    model: PreTrainedModel, length: int, repeats: int, seed: int, clock: Clock
) -> tuple[Prefill | str, float]:
    """Reads a prompt of random tokens.

    Returns:
        The prefill, or why it failed, and its median seconds.
    """
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(model.config.vocab_size, (length,), generator=generator).tolist()
    now = device_clock(device_of(model), clock)
    passes = []
    try:
        for _ in range(repeats + 1):  # the first is slower and not counted
            read, seconds = timed(lambda: prefill(model, [prompt]), now)
            passes.append(seconds)
    except torch.OutOfMemoryError:
        return "does not fit: out of memory while reading the prompt", 0.0
    return read, statistics.median(passes[1:])


def _fastest(setting: Setting, read: Prefill) -> tuple[DecodingTimes | str, str]:
    """Returns a setting's times or why there are none; for our Full on a GPU, those of the fastest attention kernel,
    and a text with the milliseconds of a step or the failure of each kernel, fastest first. Otherwise the text is
    empty.
    """
    names = kernels_on(device_of(setting.model))
    if setting.implementation != "fused" or not setting.rule.whole_prefix or not names:
        return _times_of(setting, read), ""
    results = with_each(names, lambda: _times_of(setting, read))
    times = {name: result for name, result in results.items() if isinstance(result, DecodingTimes)}
    reasons = {name: results[name] or "not available" for name in results if name not in times}
    if not times:
        return next(iter(reasons.values())), ""
    ordered = sorted(times, key=lambda name: times[name].step)
    parts = [f"{name} {1e3 * times[name].step:.3f}" for name in ordered]
    parts += [f"{name} {reason}" for name, reason in reasons.items()]
    return times[ordered[0]], "; ".join(parts)


def kernels_on(device: torch.device) -> tuple[str, ...]:
    """Returns the names of the attention kernels to compare; empty on a CPU, where torch chooses."""
    return tuple(ATTENTION_KERNELS) if device.type == "cuda" else ()


def with_each(names: Iterable[str], work: Callable[[], Result]) -> dict[str, Result | None]:
    """Returns the result of `work` with each of these attention kernels alone; None for a kernel that refuses."""
    results: dict[str, Result | None] = {}
    for name in names:
        try:
            with sdpa_kernel(ATTENTION_KERNELS[name]):
                results[name] = work()
        except (torch.OutOfMemoryError, torch.AcceleratorError):  # not a refusal
            raise
        except RuntimeError as refusal:
            log.info("attention kernel %s is not available: %s", name, str(refusal).partition("\n")[0])
            results[name] = None
    return results


def _times_of(setting: Setting, read: Prefill) -> DecodingTimes | str:
    """Returns a setting's times, or why there are none."""
    if device_of(setting.model).type == "cpu":  # where the system kills a process that takes too much
        size = sum(keys.nbytes + values.nbytes for keys, values in read.layers.values())
        if setting.rule.needs_maps:
            # M features of a token beside the 2 D numbers of its key and value.
            size *= 1 + setting.phi.map.d_phi / (2 * setting.phi.shape.head_dim)
        needed = CACHE_COPIES * setting.batch * size
        free = _free_memory()
        if needed > free:
            return f"does not fit: needs {needed / 1e9:.1f} GB of {free / 1e9:.1f} GB that are free"
    try:
        first = read.next_token.repeat(setting.batch)
        return time_decoder(partial(_decoder, setting, read), first, setting.spec.repeats, setting.clock)
    except torch.OutOfMemoryError:
        return "does not fit: out of memory while decoding"


def _free_memory() -> float:
    """Returns the bytes of available memory; infinite on systems other than Linux, which do not report it."""
    try:
        match = re.search(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text(encoding="utf-8"))
    except OSError:
        return math.inf
    return 1024 * int(match[1]) if match else math.inf


def _decoder(setting: Setting, read: Prefill) -> TextDecoder:
    """Returns the decoder of a batch of the prompt that was read, with its own buffers."""
    model = setting.model
    anchors = setting.spec.anchors
    rows = {}
    for index, (key, value) in read.layers.items():
        rows[index] = key.repeat(setting.batch, 1, 1, 1), value.repeat(setting.batch, 1, 1, 1)
    if setting.implementation == "prototype":
        prototype = PrototypeBackend(model, Prefill(rows), setting.method, setting.k, anchors, setting.phi)
        return TextDecoder(model, prototype, RUN_STEPS)
    arm = arm_of(setting.method, setting.spec.budget)
    kinds = [kind for kind in BACKENDS if (kind is PackedBackend) == (setting.implementation == "kernels")]
    phi = setting.phi if arm.needs_maps else None
    backend = backend_for(model, arm, anchors, phi, room=RUN_STEPS, kinds=kinds)
    backend.take(Prefill(rows))
    return TextDecoder(model, backend, RUN_STEPS)


def arm_of(method: str, budget: float) -> ArmSpec:
    return ArmSpec(method, None if method == "full" else budget)
