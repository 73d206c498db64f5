"""The parts of `gpu_check.py`: each runs in its own process and prints its section as Markdown, line by line."""

from __future__ import annotations

import argparse
import copy
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from common import SHAPES, random_llama
from torch import Tensor
from training_pass import whole_passes
from transformers import LlamaConfig, PreTrainedModel

from residual_mass.core.selection import retrieved_count
from residual_mass.decode.backend import Backend
from residual_mass.decode.backends import backend_for
from residual_mass.decode.engine import SharedPrefillEngine, Work
from residual_mass.decode.prefix import map_heads
from residual_mass.decode.recording import prefill
from residual_mass.decode.text import Text
from residual_mass.decode.torch_backend import TorchBackend
from residual_mass.gpu.backend import TritonBackend, prepared
from residual_mass.gpu.cache import build_cache
from residual_mass.gpu.device import kernels_run_on
from residual_mass.methods import method_named
from residual_mass.model.loading import Backbone
from residual_mass.model.phi_maps import HeadShape, PhiMaps
from residual_mass.provenance import code_version, device_name
from residual_mass.runtime.latencies import arm_of, kernels_on, measure, with_each
from residual_mass.runtime.traffic import Implementation, copy_rates, seconds_of
from residual_mass.spec.arms import ArmSpec
from residual_mass.spec.labels import PAPER_METHODS
from residual_mass.spec.settings import AnchorSpec, MapSpec, tokens_of
from residual_mass.spec.specs import RuntimeSpec

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests" / "unit" / "gpu"))  # the reference of the kernels is that of their tests

import torch_path  # noqa: E402

ANCHORS, MAP, BUDGET = AnchorSpec(), MapSpec(), 1.0
OWN = ("topk_moments", "scan4_moments")
"""Methods that the paper lacks: the cheapest residual without training, and the fewest bytes of keys."""
ARMS = [ArmSpec("full"), *(ArmSpec(method, budget) for method in PAPER_METHODS[1:] for budget in (0.5, 1.0, 2.0, 4.0))]
"""Arms of the paper's study."""
SIDES: dict[str, tuple[type[Backend], ...]] = {"kernels": (TritonBackend, TorchBackend), "torch": (TorchBackend,)}
"""Backends of whole steps; a CPU has no kernels."""
FEW_TOKENS, MANY_TOKENS, ROUNDS = 2, 34, 3
"""Generated tokens of an evaluation's two runs, whose difference is only decoding, and the number of rounds."""
GPU_TESTS = (
    "tests/unit/gpu/test_triton.py", "tests/unit/model/test_gpu.py", "tests/unit/runtime/test_decoders.py",
    "tests/unit/runtime/test_latencies.py", "tests/unit/training/test_training_on_gpu.py",
)  # fmt: skip
"""Tests that need only pytest and the packages of this check."""
GPU_TESTS_WITH_PANDAS = ("tests/unit/diagnostics/test_capture_on_gpu.py",)
KERNEL_GAP = 2e-3
"""Allowed difference of kernels from the same step in torch, relative l1 of a layer's output. Both sum products of the
same numbers in float32, which differ by some 1e-6. Sometimes two keys tie for the last place within that rounding, and
the sides choose different keys: one head of many then changes by the weight of one token, at most a few percent."""
FLOAT32_GAP = 5e-3
"""Allowed difference of logits of whole steps in float32, where such ties change one or two of some 500 heads. A column
that is missed or read twice changes every head of every layer by as much."""
ROUNDING = 2.0
"""Allowed difference in bfloat16, as a multiple of torch's own distance from float32, which measures the
effect of rounding every activation in this model. Rounding alone does not exceed twice that distance, while a wrong
mask, position or column changes logits by their own size."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parts: dict[str, Callable[[argparse.Namespace], Iterator[str]]] = {
        part.__name__: part for part in (about, ceilings, kernels, agreement, steps, prototype, tests, evaluation)
    }
    parser.add_argument("part", choices=[*parts, "training"])
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--contexts", nargs="+", default=["64k"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"])
    options = parser.parse_args()
    on_gpu = options.device.type == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise SystemExit("gpu-check needs an NVIDIA GPU that torch can use, and there is none here")
    options.dtype = options.dtype or ("bfloat16" if on_gpu else "float32")
    if options.part == "training":
        whole_passes(backbone_of(options), tokens_of(options.contexts[0]), rounds=2)
    else:
        for line in parts[options.part](options):
            print(line, flush=True)  # lines before a failure are kept


def backbone_of(options: argparse.Namespace) -> Backbone:
    return random_llama(options.shape, options.dtype, options.device)


def about(options: argparse.Namespace) -> Iterator[str]:
    yield f"# {device_name(options.device)}"
    yield ""
    if options.device.type == "cuda":
        yield "Made by `make gpu-check`: random weights at the shapes of Llama-3.2, random feature maps and prompts."
        yield ""
        facts = torch.cuda.get_device_properties(options.device)
        yield (
            f"* {facts.total_memory / 2**30:.0f} GiB, {facts.multi_processor_count} multiprocessors, "
            f"{facts.L2_cache_size / 2**20:.0f} MiB of L2"
        )
    versions = [f"Python {platform.python_version()}", f"CUDA {torch.version.cuda}"]
    for package in ("torch", "transformers", "triton"):
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            versions.append(f"no {package}")
    yield f"* {', '.join(versions)}"
    code = code_version()
    yield f"* version {code['version']}, commit {code['commit'] or 'unknown'}{', changed' if code['changed'] else ''}"


def ceilings(options: argparse.Namespace) -> Iterator[str]:
    device = options.device
    rates = copy_rates(device, rounds=20)
    yield f"* copies: {_spread([rate / 1e12 for rate in rates], 3)} TB/s, read and write counted"
    size = 8192 if device.type == "cuda" else 256
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    speeds = [2 * size**3 / (1e-3 * ms) / 1e12 for ms in cold_ms(lambda: a @ a, device)]
    yield f"* bfloat16 products of {size} x {size}: {_spread(speeds, 0)} TFLOP/s"
    nothing = torch.zeros(1, device=device)
    yield f"* one kernel that does nothing, timed as kernels are below: {_spread(cold_ms(nothing.zero_, device), 4)} ms"


@torch.no_grad()
def kernels(options: argparse.Namespace) -> Iterator[str]:
    """Times of one layer in a step: every context with one row, the longest with each batch."""
    yield "Milliseconds of single calls as a CUDA graph, median (fastest to slowest of 15), with a cold L2 cache:"
    yield "before each call a buffer four times its size is read, as in a step other layers' buffers and weights are."
    yield "What a kernel that does nothing takes (see above) is part of every time."
    yield ""
    places = [(context, options.batches[0]) for context in options.contexts]
    places += [(options.contexts[-1], batch) for batch in options.batches[1:]]
    timed = [
        _layer_times(SHAPES[options.shape], tokens_of(context), batch, options.device) for context, batch in places
    ]
    yield from _table(["part", *(f"{context}, batch {batch}" for context, batch in places)])
    for name in timed[0]:
        yield _line([name, *(column[name] for column in timed)])


def _layer_times(config: LlamaConfig, length: int, batch: int, device: torch.device) -> dict[str, str]:
    """Returns times by part.

    Raises:
        ValueError: the kernels' output differs from that of torch.
    """
    shape = replace(HeadShape.of(config), layers=1)
    heads, kv_heads, d = shape.query_heads, shape.kv_heads, shape.head_dim
    torch.manual_seed(0)
    size = (batch, kv_heads, length, d)
    keys, values = (torch.randn(size, device=device, dtype=torch.bfloat16) for _ in range(2))
    query = torch.randn(batch, heads, 1, d, device=device, dtype=torch.bfloat16)
    first = torch.zeros(batch, dtype=torch.int32, device=device)
    query_map, key_map = PhiMaps(shape, MAP).to(device).requires_grad_(False).folded()[0]
    bare = build_cache(keys, values, first, first + length, 32)
    k = retrieved_count(BUDGET, length, ANCHORS.sink + ANCHORS.tail)
    common = {"k": k, "sink": ANCHORS.sink, "tail": ANCHORS.tail, "generated": 16, "scale": d**-0.5}
    generated = torch.full((1,), 16, dtype=torch.int32, device=device)  # where the kernels of a decoder read it
    newest = query.squeeze(2)

    def full() -> list[float]:
        return cold_ms(lambda: F.scaled_dot_product_attention(query, keys, values, enable_gqa=True), device)

    by_kernel = with_each(kernels_on(device), full) or {"torch's attention": full()}
    times = {"K": str(k)}
    times |= {f"full: {name}": "not available" if ms is None else _spread(ms, 4) for name, ms in by_kernel.items()}
    for method in ("topk", "topk_phi", *OWN):
        rule = method_named(method)
        cache = prepared(bare, rule, key_map if rule.needs_maps else None, ANCHORS)
        log_query = map_heads(query_map, query).squeeze(2) if rule.needs_maps else None
        settings = common | {"subtracts": rule.subtracts}
        step = partial(torch_path.decode_attention, newest, cache, log_query, **settings)
        if kernels_run_on(device):
            from residual_mass.gpu.path import decode_attention

            step = partial(decode_attention, newest, cache, log_query, **settings | {"generated": generated})
        gap = _gap(step(), torch_path.decode_attention(newest.float(), cache, log_query, **settings))
        if not gap <= KERNEL_GAP:  # refuses NaN, too
            raise ValueError(f"{method}: the kernels' output is not that of torch, {gap:.1e} at {length} tokens")
        times[f"{method}: difference from torch, relative l1"] = f"{gap:.1e}"
        times[f"{method}: the kernels, without phi_q"] = _spread(cold_ms(step, device), 4)
    return times | {"phi_q, folded": _spread(cold_ms(lambda: map_heads(query_map, query), device), 4)}


@torch.no_grad()
def agreement(options: argparse.Namespace) -> Iterator[str]:
    """Logits of whole steps by the kernels, in graphs, and by torch.

    Raises:
        ValueError: they are further apart than rounding explains.
    """
    length, device = tokens_of(options.contexts[0]), options.device
    model = random_llama(options.shape, "bfloat16", device).model
    exact = copy.deepcopy(model).float()  # the same weights
    torch.manual_seed(1)
    phi = PhiMaps(HeadShape.of(model.config), MAP).to(device).requires_grad_(False)
    prompt = torch.randint(model.config.vocab_size, (length,), generator=torch.Generator().manual_seed(2)).tolist()
    k = retrieved_count(BUDGET, length, ANCHORS.sink + ANCHORS.tail)
    model, count = (model, 1) if options.dtype == "bfloat16" else (exact, 4)
    yield f"One prompt of {length} tokens, K = {k}; distances are relative l1 of the logits of step {count}, to those"
    yield f"of torch in float32 with the same weights; allowed is {FLOAT32_GAP:g}, or {ROUNDING:g} times the"
    yield "distance of torch in the same precision."
    yield ""
    yield from _table(["method", "kernels in graphs", "torch", "allowed"])
    wrong = []
    for method in (*PAPER_METHODS, *OWN):
        reference = _logits(exact, prompt, method, phi, count, SIDES["torch"])
        gaps = [_gap(_logits(model, prompt, method, phi, count, kinds), reference) for kinds in SIDES.values()]
        allowed = max(FLOAT32_GAP, ROUNDING * gaps[-1])
        yield _line([method, *(f"{gap:.1e}" for gap in (*gaps, allowed))])
        if not max(gaps) <= allowed:
            wrong.append(method)
    if wrong:
        raise ValueError(f"logits differ by more than rounding explains: {', '.join(wrong)}")


def _logits(
    model: PreTrainedModel, prompt: list[int], method: str, phi: PhiMaps, count: int, kinds: tuple[type[Backend], ...]
) -> Tensor:
    """Returns logits after `count` greedy steps, which begin with the prompt's first token."""
    arm = arm_of(method, BUDGET)
    backend = backend_for(model, arm, ANCHORS, phi if arm.needs_maps else None, room=count, kinds=kinds)
    if isinstance(backend, TritonBackend):
        backend.repeats = True  # so that steps of full attention are recorded, too
    read = prefill(model, [prompt])
    backend.take(read)
    text = Text(model, backend)
    token = torch.tensor([prompt[:1]], device=read.next_token.device)
    for _ in range(count):
        logits = text.step(token)[:, -1]
        token = logits.argmax(-1, keepdim=True)
    return logits.float()


def steps(options: argparse.Namespace) -> Iterator[str]:
    """Latencies as in the runtime stage, and the floor: the time that a step's bytes take at the speed of a copy."""
    return _steps(options, "fused", OWN, repeats=3)


def prototype(options: argparse.Namespace) -> Iterator[str]:
    return _steps(options, "prototype", (), repeats=1)


def _steps(options: argparse.Namespace, side: Implementation, own: tuple[str, ...], repeats: int) -> Iterator[str]:
    backbone = backbone_of(options)
    spec = RuntimeSpec(
        study="gpu-check", backbone=backbone.spec, contexts=tuple(options.contexts), batches=tuple(options.batches),
        budget=BUDGET, anchors=ANCHORS, map=MAP, repeats=repeats, seed=0, recipe=1, own_methods=own,
    )  # fmt: skip
    columns = (
        "context batch method per_step_ms per_step_low_ms per_step_high_ms floor_ms end_to_end_ms recording_ms "
        "peak_memory_mib attention_kernels not_measured"
    ).split()
    yield from _table(columns)
    for row in measure(spec, backbone.model, (side,)):
        yield _line([row.get(column, "") for column in columns])


def tests(options: argparse.Namespace) -> Iterator[str]:
    """The tests that need a GPU, if pytest is installed.

    Raises:
        ValueError: one failed.
    """
    if find_spec("pytest") is None:
        yield "* pytest is not installed, so no test was run"
        return
    files = [*GPU_TESTS, *(GPU_TESTS_WITH_PANDAS if find_spec("pandas") else ())]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *files]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as run:
        yield from (f"    {line.rstrip()}" for line in run.stdout)
    if run.returncode:
        raise ValueError(f"pytest ended with status {run.returncode}")


def evaluation(options: argparse.Namespace) -> Iterator[str]:
    """Decoding of the paper's arms from one shared prefix."""
    context, on_gpu = options.contexts[-1], options.device.type == "cuda"
    backbone = backbone_of(options)
    phi = PhiMaps(backbone.shape, MAP, {"model_id": backbone.spec.model_id, "revision": "random"}).requires_grad_(False)
    engine = SharedPrefillEngine(backbone, ARMS, ANCHORS, phi, tokens_of(context))
    draw = torch.Generator().manual_seed(2)
    prompt = torch.randint(backbone.model.config.vocab_size, (tokens_of(context),), generator=draw).tolist()
    decoding: dict[int, list[float]] = {FEW_TOKENS: [], MANY_TOKENS: []}
    reading = []
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    for tokens in (FEW_TOKENS, *ROUNDS * (FEW_TOKENS, MANY_TOKENS)):
        engine.work = Work()
        engine.generate([prompt], tokens)
        reading.append(engine.work.prefill_seconds)
        decoding[tokens].append(engine.work.decode_seconds)
    del reading[0], decoding[FEW_TOKENS][0]  # warm-up
    few, many = (statistics.median(seconds) for seconds in decoding.values())
    per_token = (many - few) / (MANY_TOKENS - FEW_TOKENS)
    before = few - (FEW_TOKENS - 1) * per_token
    yield f"* {len(ARMS)} arms, one prompt of {context}, {ROUNDS} rounds: prefill {statistics.median(reading):.3f} s,"
    yield f"  {before:.3f} s for summaries and buffers, then {1e3 * per_token:.2f} ms a token of all arms"
    if on_gpu:
        yield f"* peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB, the model included"


def cold_ms(work: Callable[[], object], device: torch.device, rounds: int = 15) -> list[float]:
    """Returns milliseconds of single calls, each after a read of more than the L2 cache holds."""
    on_gpu = device.type == "cuda"
    run = _recorded(work) if on_gpu else work
    cached = torch.cuda.get_device_properties(device).L2_cache_size if on_gpu else 2**20
    flushed = torch.zeros(cached, device=device)  # of four bytes each: four times the cache
    times = []
    for _ in range(rounds + 3):
        flushed.sum()  # reads leave nothing to be written back during the call
        times.append(1e3 * seconds_of(run, device))
    return times[3:]


def _recorded(work: Callable[[], object]) -> Callable[[], None]:
    """Returns the work as a CUDA graph, which the host launches while the cache is still flushed."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def _table(columns: list[str]) -> Iterator[str]:
    yield _line(columns)
    yield _line(["---"] * len(columns))


def _line(cells: list[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _spread(values: list[float], decimals: int) -> str:
    middle, low, high = (f"{x:.{decimals}f}" for x in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({low} to {high})"


def _gap(ours: Tensor, theirs: Tensor) -> float:
    """Returns the relative l1 difference."""
    return float((ours.float() - theirs.float()).abs().sum() / theirs.float().abs().sum())


if __name__ == "__main__":
    main()
