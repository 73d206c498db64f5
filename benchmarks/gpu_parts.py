"""The parts of `gpu_check.py`, one to a process: each prints its section as Markdown, line by line as it comes."""

from __future__ import annotations

import argparse
import copy
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from training_pass import LLAMA, random_llama, whole_passes
from transformers import LlamaConfig, PreTrainedModel

from residual_mass.benchmarks.catalogue import BENCHMARKS
from residual_mass.core.fused import DecodeCache, build_cache, decode_attention_for, torch_path
from residual_mass.core.selection import largest, retrieved_count
from residual_mass.core.settings import AnchorSpec, MapSpec, tokens_of
from residual_mass.files import csv_text, write_text
from residual_mass.methods import method_named
from residual_mass.methods.arms import ArmSpec
from residual_mass.model.engine import SharedPrefillEngine, Work
from residual_mass.model.hook import Prefill, prefill
from residual_mass.model.loading import Backbone
from residual_mass.model.phi_maps import HeadShape, PhiMaps
from residual_mass.model.prefix import map_heads
from residual_mass.model.static_decode import StaticDecoder, fill_buffers, prepared
from residual_mass.provenance import code_version, device_name
from residual_mass.runtime.latencies import RUNTIME, kernels_on, measure, with_each
from residual_mass.runtime.prototype import PrototypeDecoder
from residual_mass.runtime.traffic import Implementation, copy_rates, seconds_of
from residual_mass.study.labels import METHODS
from residual_mass.study.specs import RuntimeSpec

ROOT = Path(__file__).parents[1]
ANCHORS, MAP, BUDGET = AnchorSpec(), MapSpec(), 1.0
OWN = ("topk_moments", "scan4_moments")
"""Methods that the paper lacks: the least that a step can add without training, and the fewest bytes of keys."""
BUDGETS = (0.5, 1.0, 2.0, 4.0)
ARMS = [ArmSpec("full"), *(ArmSpec(method, budget) for method in METHODS[1:] for budget in BUDGETS)]
FAST_SIDES = ("kernels", "graphs", "torch")
KERNEL_METHODS = ("topk", "topk_phi", *OWN)
EXAMPLES = 500
"""A task of RULER in the paper's study, like the arms."""
FEW_TOKENS, MANY_TOKENS, ROUNDS = 2, 34, 3
"""Generated tokens of an evaluation's two runs, whose difference is decoding alone, and how often it is measured."""
EVALUATION = "backbone context arms prefill_s prepare_s token_ms peak_gib ruler_hours".split()
TRAINING = "backbone context precision teacher_s sequence_s peak_gib".split()
"""Columns of the rows of these parts."""
GPU_TESTS = (
    "tests/unit/core/test_fused_triton.py", "tests/unit/model/test_gpu.py", "tests/unit/runtime/test_decoders.py",
    "tests/unit/runtime/test_latencies.py", "tests/unit/training/test_training_on_gpu.py",
)  # fmt: skip
"""Those that need no package but the few that this check needs, and pytest."""
GPU_TESTS_WITH_PANDAS = ("tests/unit/diagnostics/test_capture_on_gpu.py",)
SHAPES = {
    "1b": LLAMA["llama-3.2-1b"],
    "3b": LLAMA["llama-3.2-3b"],
    "tiny": LlamaConfig(
        vocab_size=258, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=8192, initializer_range=0.25,
    ),
}  # fmt: skip
KERNEL_GAP = 2e-3
"""Kernels against the torch path, relative l1 of a layer's output. Both sum products of the same numbers in float32,
which leaves some 1e-6. Now and then two keys tie for the last place within that rounding and the sides take different
ones: one head of many then moves by the weight of one token, a few percent of its output at most."""
FLOAT32_GAP = 5e-3
"""Logits of whole steps in float32: the same in one or two of some 500 heads. A column that is missed or read twice
moves every head of every layer by as much."""
BFLOAT16_NOISE = 2.0
"""In bfloat16 both sides round every activation, and the fused one the key features too. The prototype's own distance
from its float32 self says what such rounding does to the logits of this very model; twice that is not exceeded by
rounding alone, while a wrong mask, position or column moves logits by their own size."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parts: dict[str, Callable[[argparse.Namespace], Iterator[str]]] = {
        one.__name__: one for one in (about, ceilings, kernels, agreement, steps, tests, evaluation, training)
    }
    parser.add_argument("part", choices=parts)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--contexts", nargs="+", default=["64k"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--prototype", action="store_true", help="steps of the prototype in place of ours")
    parser.add_argument("--compare", action="store_true", help="training beside a straightforward implementation")
    parser.add_argument("--rows", type=Path, required=True)
    options = parser.parse_args()
    if options.device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("gpu-check needs an NVIDIA GPU that torch can use, and there is none here")
    for line in parts[options.part](options):
        print(line, flush=True)  # what came before a failure stays


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
    versions = [f"torch {torch.__version__}", f"CUDA {torch.version.cuda}", f"transformers {transformers.__version__}"]
    versions.append(f"Python {platform.python_version()}")
    if find_spec("triton") is not None:
        import triton

        versions.append(f"Triton {triton.__version__}")
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
    """What one layer does in a step: every context with one row, the longest with each batch."""
    yield "Milliseconds of single calls as a CUDA graph, median (fastest to slowest of 15), with a cold L2 cache:"
    yield "before each call a buffer four times its size is read, as in a step other layers' buffers and weights are."
    yield "What a kernel that does nothing takes (see above) is part of every time."
    yield ""
    config, device = SHAPES[options.shape], options.device
    places = [(context, options.batches[0]) for context in options.contexts]
    places += [(options.contexts[-1], batch) for batch in options.batches[1:]]
    yield "| part | " + " | ".join(f"{context}, batch {batch}" for context, batch in places) + " |"
    yield "|---|" + "---|" * len(places)
    timed = [_layer_times(config, tokens_of(context), batch, device) for context, batch in places]
    for name in timed[0]:
        yield f"| {name} | " + " | ".join(column[name] for column in timed) + " |"


def _layer_times(config: LlamaConfig, length: int, batch: int, device: torch.device) -> dict[str, str]:
    """Times by part.

    Raises:
        ValueError: the kernels' output is not the torch path's.
    """
    shape = replace(HeadShape.of(config), layers=1)
    heads, kv_heads, d = shape.query_heads, shape.kv_heads, shape.head_dim
    torch.manual_seed(0)
    size = (batch, kv_heads, length, d)
    keys, values = (torch.randn(size, device=device, dtype=torch.bfloat16) for _ in range(2))
    query = torch.randn(batch, heads, 1, d, device=device, dtype=torch.bfloat16)
    first = torch.zeros(batch, dtype=torch.int32, device=device)
    phi = PhiMaps(shape, MAP).to(device).requires_grad_(False)
    query_map, key_map = phi.folded()[0]
    bare = build_cache(keys, values, first, first + length, 32)
    k = retrieved_count(BUDGET, length, ANCHORS.sink + ANCHORS.tail)
    scores, one = torch.randn(batch * heads, length, device=device), query.squeeze(2)
    common = {"k": k, "sink": ANCHORS.sink, "tail": ANCHORS.tail, "generated": 16, "scale": d**-0.5}

    generated = torch.full((1,), 16, dtype=torch.int32, device=device)  # where the kernels of a decoder read it

    def full() -> Tensor:
        return F.scaled_dot_product_attention(query, keys, values, enable_gqa=True)

    times = {"K": str(k)} | _full_times(full, device)
    for method in KERNEL_METHODS:
        rule = method_named(method)
        cache = prepared(bare, rule, key_map if rule.needs_maps else None, ANCHORS)
        log_query = map_heads(query_map, query).squeeze(2) if rule.needs_maps else None
        fast, settings = decode_attention_for(cache, heads), common | {"subtracts": rule.subtracts}
        in_torch = partial(torch_path.decode_attention, one, cache, log_query, **settings)
        step = in_torch
        if fast is not torch_path.decode_attention:
            step = partial(fast, one, cache, log_query, **settings | {"generated": generated})
        gap = _gap(step(), torch_path.decode_attention(one.float(), cache, log_query, **settings))
        if not gap <= KERNEL_GAP:  # a NaN is not
            raise ValueError(f"{method}: the kernels' output is not the torch path's, {gap:.1e} at {length} tokens")
        parts = {"the kernels, all but phi_q" if rule.needs_maps else "the kernels": step}
        parts |= _kernel_parts(fast, one, cache, common | {"generated": generated}) | {"the torch path": in_torch}
        times[f"{method}: difference from the torch path, relative l1"] = f"{gap:.1e}"
        times |= {f"{method}: {name}": _spread(cold_ms(work, device), 4) for name, work in parts.items()}
    works = {
        "torch.topk of all scores, float32": lambda: scores.topk(k, dim=-1, sorted=False),
        "selection in two levels": lambda: largest(scores, k),
        "phi_q, folded": lambda: map_heads(query_map, query),
        "phi_q, as written": lambda: phi.query[0].unfolded(query[:, :, 0].transpose(0, 1).float()),
    }
    return times | {name: _spread(cold_ms(work, device), 4) for name, work in works.items()}


def _full_times(full: Callable[[], Tensor], device: torch.device) -> dict[str, str]:
    """Of every attention kernel of torch, and on a CPU of the one that it takes."""
    names = kernels_on(device)
    if not names:
        return {"full: torch's attention": _spread(cold_ms(full, device), 4)}
    times = with_each(names, lambda: cold_ms(full, device))
    return {f"full: {name}": "not available" if ms is None else _spread(ms, 4) for name, ms in times.items()}


def _kernel_parts(
    fast: Callable[..., Tensor], query: Tensor, cache: DecodeCache, common: dict[str, Any]
) -> dict[str, Callable[[], object]]:
    """The first kernels by themselves, where there are any that read all keys."""
    if fast is torch_path.decode_attention or cache.scan is not None:
        return {}
    from residual_mass.core.fused import triton_path

    region = triton_path.Region(common["k"], ANCHORS.sink, ANCHORS.tail)
    step = triton_path.Step(query, cache, region, common["scale"], common["generated"])
    return {"of these, scores": step.score, "of these, scores and selection": lambda: step.select(*step.score())}


@torch.no_grad()
def agreement(options: argparse.Namespace) -> Iterator[str]:
    """Logits of whole steps: kernels with and without graphs, the torch path, the prototype.

    Raises:
        ValueError: they are further apart than rounding explains.
    """
    length, device, low = tokens_of(options.contexts[0]), options.device, options.dtype == "bfloat16"
    model = random_llama(options.shape, SHAPES[options.shape], "bfloat16", device).model
    exact = copy.deepcopy(model).float()  # the same weights
    torch.manual_seed(1)
    phi = PhiMaps(HeadShape.of(model.config), MAP).to(device).requires_grad_(False)
    prompt = torch.randint(model.config.vocab_size, (length,), generator=torch.Generator().manual_seed(2)).tolist()
    k = retrieved_count(BUDGET, length, ANCHORS.sink + ANCHORS.tail)
    step = 1 if low else 4
    yield f"One prompt of {length} tokens, K = {k}; distances are relative l1 of the logits of step {step}, to those of"
    if low:
        yield "the prototype in float32 with the same weights; allowed is twice the bfloat16 prototype's distance."
        yield "Methods that the paper lacks have no prototype: the torch path is in its place."
    else:
        yield "the prototype, or of the torch path for methods that the paper lacks."
    yield ""
    yield "| method | kernels | kernels in graphs | torch path | allowed |"
    yield "|---|---|---|---|---|"
    wrong = []
    for method in (*METHODS, *OWN):
        slow = "prototype" if method in METHODS else "torch"
        sides = _logits(model if low else exact, prompt, method, k, phi, step, dict.fromkeys((*FAST_SIDES, slow)))
        reference, allowed = sides[slow], FLOAT32_GAP
        if low:
            theirs, reference = reference, _logits(exact, prompt, method, k, phi, step, [slow])[slow]
            allowed = BFLOAT16_NOISE * _gap(theirs, reference)
        gaps = [_gap(sides[name], reference) for name in FAST_SIDES]
        yield f"| {method} | " + " | ".join(f"{gap:.1e}" for gap in (*gaps, allowed)) + " |"
        if not max(gaps) <= allowed:
            wrong.append(method)
    if wrong:
        raise ValueError(f"logits differ by more than rounding explains: {', '.join(wrong)}")


def _logits(
    model: PreTrainedModel, prompt: list[int], method: str, k: int, phi: PhiMaps, count: int, sides: Iterable[str]
) -> dict[str, Tensor]:
    """Logits after so many greedy steps, by what computed them; all begin with the prompt's first token."""
    read = prefill(model, [prompt])
    first = torch.tensor(prompt[:1], device=read.next_token.device)
    logits = {}
    for side in sides:
        one = Prefill(dict(read.layers), read.next_token)
        if side == "prototype":
            decoder = PrototypeDecoder(model, one, method, k, ANCHORS, phi, count)
        else:
            decoder = StaticDecoder(model, fill_buffers([one], count), method, k, ANCHORS, phi, count)
        if side == "graphs":
            decoder.prepare()
        elif side == "torch":
            decoder.attention = torch_path.decode_attention
        decoder.run(first)
        logits[side] = decoder.logits.float().clone()
    return logits


def steps(options: argparse.Namespace) -> Iterator[str]:
    """Latencies; rows as of the runtime stage go to the CSV as they come."""
    name = options.shape
    dtype = "bfloat16" if options.device.type == "cuda" else "float32"
    backbone = random_llama(name, SHAPES[name], dtype, options.device)
    spec = RuntimeSpec(
        study="gpu-check", backbone=backbone.spec, contexts=tuple(options.contexts), batches=tuple(options.batches),
        budget=BUDGET, anchors=ANCHORS, map=MAP, repeats=1 if options.prototype else 3, seed=0, recipe=1,
        own_methods=() if options.prototype else OWN,
    )  # fmt: skip
    facts = {
        "study": "gpu-check", "backbone": name, "weights": "random", "dtype": dtype, "model_id": name,
        "revision": "random",
    }  # fmt: skip
    rows: list[dict[str, object]] = []
    yield "| context | batch | method | step ms | end to end ms | recording ms | peak GiB | attention kernels, ms |"
    yield "|---|---|---|---|---|---|---|---|"
    side: Implementation = "prototype" if options.prototype else "fused"
    for row in measure(spec, backbone.model, (side,)):
        rows.append(facts | row)
        write_text(options.rows, csv_text(RUNTIME, rows))
        peak = f"{float(str(row['peak_memory_mib'])) / 1024:.1f}" if row.get("peak_memory_mib") else ""
        shown = [row["context"], row["batch"], row["method"], row.get("per_step_ms", row.get("not_measured"))]
        shown += [row.get("end_to_end_ms", ""), row.get("recording_ms", ""), peak, row["attention_kernels"]]
        yield "| " + " | ".join(map(str, shown)) + " |"


def tests(options: argparse.Namespace) -> Iterator[str]:
    """The tests that need a GPU, where pytest is installed.

    Raises:
        ValueError: one failed.
    """
    if find_spec("pytest") is None:
        yield "* pytest is not installed, so no test was run"
        return
    files = [*GPU_TESTS, *(GPU_TESTS_WITH_PANDAS if find_spec("pandas") else ())]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *files]
    yield "```"
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as run:
        assert run.stdout is not None
        for line in run.stdout:
            yield line.rstrip()
    yield "```"
    if run.returncode:
        raise ValueError(f"pytest ended with status {run.returncode}")


def evaluation(options: argparse.Namespace) -> Iterator[str]:
    """The paper's arms from one shared prefix, what RULER takes at these rates, and the same with moments."""
    context, device = options.contexts[-1], options.device
    length, on_gpu = tokens_of(context), device.type == "cuda"
    backbone = random_llama(options.shape, SHAPES[options.shape], "bfloat16" if on_gpu else "float32", device)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    prefill_seconds, before, per_token = _evaluation_seconds(backbone, ARMS, length)
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    hours = ruler_seconds(prefill_seconds + before, per_token) / 3600
    yield f"* {len(ARMS)} arms, one prompt of {length} tokens, {ROUNDS} rounds: prefill {prefill_seconds:.3f} s, then"
    yield f"  {before:.3f} s until the first step and {1e3 * per_token:.2f} ms a token of all arms"
    if on_gpu:
        yield f"* peak memory {peak:.1f} GiB, the model included"
    limits = [task.max_new_tokens for task in BENCHMARKS["ruler"]]
    yield f"* RULER: {len(limits)} tasks of {EXAMPLES} examples of {context}, as in the paper's study:"
    yield f"  {hours:.2f} GPU-hours if every answer runs to its task's limit of {min(limits)} to {max(limits)} tokens"
    values = [options.shape, context, len(ARMS), prefill_seconds, before, 1e3 * per_token, peak, hours]
    write_text(options.rows, csv_text(EVALUATION, [dict(zip(EVALUATION, values, strict=True))]))
    more = [*ARMS, *(ArmSpec("topk_moments", budget) for budget in BUDGETS)]
    _, before, per_token = _evaluation_seconds(backbone, more, length)
    yield f"* {len(more)} arms, with TopK+moments at the same budgets: {before:.3f} s until the first step and"
    yield f"  {1e3 * per_token:.2f} ms a token of all arms"


def _evaluation_seconds(backbone: Backbone, arms: list[ArmSpec], length: int) -> tuple[float, float, float]:
    """Median seconds of the prefill, from it to the first step, and of a token of all arms."""
    phi = PhiMaps(backbone.shape, MAP, {"model_id": backbone.spec.model_id, "revision": "random"}).requires_grad_(False)
    engine = SharedPrefillEngine(backbone, arms, ANCHORS, phi, length)
    prompt = torch.randint(backbone.model.config.vocab_size, (length,), generator=torch.Generator().manual_seed(2))

    def run(tokens: int) -> tuple[float, float]:
        """Seconds of the prefill and of what follows it."""
        engine.work = Work()
        engine.generate([prompt.tolist()], tokens)
        return engine.work.prefill_seconds, engine.work.decode_seconds

    run(FEW_TOKENS)  # is slower and not counted
    short, long = ([run(tokens) for _ in range(ROUNDS)] for tokens in (FEW_TOKENS, MANY_TOKENS))
    few, many = (statistics.median(seconds for _, seconds in runs) for runs in (short, long))
    per_token = (many - few) / (MANY_TOKENS - FEW_TOKENS)
    before = few - (FEW_TOKENS - 1) * per_token  # summaries and buffers
    return statistics.median(seconds for seconds, _ in (*short, *long)), before, per_token


def ruler_seconds(before: float, per_token: float) -> float:
    """Seconds for all tasks with answers of full length, of an example's seconds before and for each decoded token."""
    return sum(EXAMPLES * (before + (task.max_new_tokens - 1) * per_token) for task in BENCHMARKS["ruler"])


def training(options: argparse.Namespace) -> Iterator[str]:
    context, device = options.contexts[-1], options.device
    backbone = random_llama(
        options.shape, SHAPES[options.shape], "bfloat16" if device.type == "cuda" else "float32", device
    )
    yield "```"
    length, compared = tokens_of(context), 2 if options.compare else 0
    passes = whole_passes(backbone, length, queries=100, d_emb=MAP.d_emb, compared=compared, rounds=2)
    yield "```"
    rows = [
        [options.shape, context, precision, passes.teacher, seconds, passes.peak[precision] / 2**30]
        for precision, seconds in passes.trainer.items()
    ]
    write_text(options.rows, csv_text(TRAINING, [dict(zip(TRAINING, row, strict=True)) for row in rows]))


def cold_ms(work: Callable[[], object], device: torch.device, rounds: int = 15) -> list[float]:
    """Milliseconds of single calls, each after a read of more than the L2 cache holds."""
    on_gpu = device.type == "cuda"
    run = _recorded(work) if on_gpu else work
    held = torch.cuda.get_device_properties(device).L2_cache_size if on_gpu else 2**20
    flushed = torch.zeros(held, device=device)  # of four bytes each: four times the cache
    times = []
    for round_ in range(rounds + 3):
        flushed.sum()  # reads leave nothing to be written back during the call
        milliseconds = 1e3 * seconds_of(run, device)
        if round_ >= 3:
            times.append(milliseconds)
    return times


def _recorded(work: Callable[[], object]) -> Callable[[], None]:
    """The work as a CUDA graph: while the cache is flushed the host has long launched it."""
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


def _spread(values: list[float], decimals: int) -> str:
    middle, low, high = (f"{x:.{decimals}f}" for x in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({low} to {high})"


def _gap(ours: Tensor, theirs: Tensor) -> float:
    """Relative l1."""
    return float((ours.float() - theirs.float()).abs().sum() / theirs.float().abs().sum())


if __name__ == "__main__":
    main()
