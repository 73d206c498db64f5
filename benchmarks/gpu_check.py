"""What a GPU does with this project: ceilings, parts of a decode step, whole steps and a training pass, as a snapshot.

Weights are random at the exact shapes of Llama-3.2, since times do not depend on their values; no network is needed.
`make gpu-check` runs the tests marked gpu first, then this. A part that fails is named in the snapshot, and the exit
status is 1.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from training_pass import LLAMA, random_llama

from residual_mass.backbones.phi_maps import HeadShape, PhiMaps
from residual_mass.backbones.prefix import map_heads
from residual_mass.core.fused import build_cache, decode_attention_for, torch_path, with_summary
from residual_mass.core.selection import largest
from residual_mass.core.support import retrieved_count
from residual_mass.files import csv_text, write_text
from residual_mass.runtime.measure import COLUMNS, measure
from residual_mass.runtime.traffic import Implementation, copy_bandwidth
from residual_mass.specs import AnchorSpec, BackboneSpec, MapSpec, RuntimeSpec, tokens_of

ANCHORS, MAP = AnchorSpec(), MapSpec()
NAMES = {"llama-3.2-1b": "1b", "llama-3.2-3b": "3b"}
Lines = Iterator[str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/measured"))
    parser.add_argument("--contexts", nargs="+", default=["4k", "16k", "64k"])
    parser.add_argument("--batch", type=int, default=8, help="the larger of two batch sizes, at the longest context")
    parser.add_argument("--training-length", type=int, default=16384)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("gpu-check needs an NVIDIA GPU that torch can use, and there is none here")
    device = torch.device("cuda")
    slug = torch.cuda.get_device_name(device).lower().replace(" ", "_")
    longest = max(options.contexts, key=tokens_of)
    rows: list[dict[str, object]] = []
    parts: dict[str, Callable[[], Lines]] = {
        "Ceilings": lambda: ceilings(device),
        "Parts of a step, one layer at the longest context": lambda: parts_of_a_step(device, longest),
        **{
            f"Steps, {shape}": lambda shape=shape: steps(shape, options.contexts, options.batch, rows)
            for shape in LLAMA
        },
        "A training pass": lambda: training(options.training_length),
    }
    text, failed = [*provenance(device)], False
    for title, part in parts.items():
        started = time.monotonic()
        text += ["", f"## {title}", ""]
        try:
            for line in part():  # what came before a failure stays
                text.append(line)
        except Exception:
            failed = True
            text += ["This part failed:", "", "```", traceback.format_exc().rstrip(), "```"]
        torch.cuda.empty_cache()
        print(f"{title}: {time.monotonic() - started:.0f} s", file=sys.stderr)
        # Written after every part, so that what was measured outlives whatever comes next.
        write_text(options.out / f"gpu_{slug}.md", "\n".join(text) + "\n")
        if rows:
            write_text(options.out / f"gpu_{slug}_runtime.csv", csv_text(COLUMNS, rows))
    sys.exit(int(failed))


def provenance(device: torch.device) -> Lines:
    properties = torch.cuda.get_device_properties(device)
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    yield f"# {torch.cuda.get_device_name(device)}"
    yield ""
    yield "Made by `make gpu-check`: random weights at the exact shapes of Llama-3.2, random feature maps and prompts."
    yield ""
    yield f"* {properties.total_memory / 2**30:.0f} GiB, {properties.multi_processor_count} multiprocessors"
    yield f"* torch {torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}"
    yield f"* commit {commit.stdout.strip() or 'unknown'}"


def ceilings(device: torch.device) -> Lines:
    yield f"* copies: {copy_bandwidth(device) / 1e12:.2f} TB/s, read and write counted"
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    seconds = 1e-3 * median_ms(lambda: a @ a)
    yield f"* bfloat16 products of 8192 x 8192: {2 * 8192**3 / seconds / 1e12:.0f} TFLOP/s"


@torch.no_grad()
def parts_of_a_step(device: torch.device, context: str) -> Lines:
    """Milliseconds of what one layer of the 1B shape does in a step, each part alone."""
    shape, length = HeadShape.of(LLAMA["llama-3.2-1b"]), tokens_of(context)
    k = retrieved_count(1.0, length, ANCHORS.sink + ANCHORS.tail)
    torch.manual_seed(0)
    keys, values = (torch.randn(1, 8, length, 64, device=device, dtype=torch.bfloat16) for _ in range(2))
    query = torch.randn(1, 32, 1, 64, device=device, dtype=torch.bfloat16)
    first = torch.zeros(1, dtype=torch.int32, device=device)
    phi = PhiMaps(HeadShape(1, shape.query_heads, shape.kv_heads, shape.head_dim), MAP).to(device).requires_grad_(False)
    query_map, key_map = phi.folded()[0]
    cache = with_summary(
        build_cache(keys, values, first, first + length, 32), map_heads(key_map, keys), ANCHORS.sink, ANCHORS.tail
    )
    log_query = map_heads(query_map, query).squeeze(2)
    scores = torch.randn(32, length, device=device)
    fast = decode_attention_for(cache, shape.query_heads)
    arguments = {"k": k, "sink": ANCHORS.sink, "tail": ANCHORS.tail, "subtracts": True, "generated": 16, "scale": 0.125}
    expected = torch_path.decode_attention(query.squeeze(2).float(), cache, log_query, **arguments)
    ours = fast(query.squeeze(2), cache, log_query, **arguments)
    gap = float((ours - expected).abs().sum() / expected.abs().sum())
    yield f"K = {k} of {length} tokens. The kernels' output differs from the torch path's by {gap:.1e} (relative l1)."
    yield ""
    if gap > 0.02:
        raise ValueError(f"the kernels' output is not that of the torch path: {gap:.1e}")
    one = query.squeeze(2)
    parts: dict[str, Callable[[], object]] = {
        "Full: SDPA with grouped heads": lambda: F.scaled_dot_product_attention(query, keys, values, enable_gqa=True),
        "TopK+phi: the kernels, all but phi_q": lambda: fast(one, cache, log_query, **arguments),
        "TopK: the kernels": lambda: fast(one, cache, None, **arguments | {"subtracts": False}),
        "TopK+phi: the torch path": lambda: torch_path.decode_attention(one, cache, log_query, **arguments),
        "torch.topk of all scores, float32": lambda: scores.topk(k, dim=-1, sorted=False),
        "selection in two levels": lambda: largest(scores, k),
        "phi_q, folded": lambda: map_heads(query_map, query),
        "phi_q, as written": lambda: phi.query[0].unfolded(query[0].float()),
    }
    yield "| part | ms |"
    yield "|---|---|"
    for name, part in parts.items():
        yield f"| {name} | {graphed_ms(part):.4f} |"


def steps(shape: str, contexts: list[str], batch: int, rows: list[dict[str, object]]) -> Lines:
    """Latency by context at batch 1 in both implementations, and ours alone at the larger batch."""
    model = random_llama(shape, torch.device("cuda")).model
    backbone = BackboneSpec(NAMES[shape], "gpu-check", shape, "random", "random", "bfloat16", "none", 131072)
    facts = {
        "study": "gpu-check", "backbone": backbone.name, "weights": "random", "dtype": "bfloat16", "model_id": shape,
        "revision": "random",
    }  # fmt: skip

    def spec(chosen: list[str], batches: tuple[int, ...]) -> RuntimeSpec:
        return RuntimeSpec(
            "gpu-check", backbone, tuple(chosen), batches, 1.0, ANCHORS, MAP, repeats=3, seed=0, recipe=1
        )

    yield "| context | batch | implementation | method | step ms | floor ms | end to end ms | peak GiB |"
    yield "|---|---|---|---|---|---|---|---|"
    planned: list[tuple[RuntimeSpec, tuple[Implementation, ...]]] = [
        (spec(contexts, (1,)), ("prototype", "fused")),
        (spec([max(contexts, key=tokens_of)], (batch,)), ("fused",)),
    ]
    for one, implementations in planned:
        for row in measure(one, model, implementations):
            rows.append(facts | row)
            shown = [row[name] for name in ("context", "batch", "implementation", "method", "per_step_ms", "floor_ms")]
            peak = float(str(row["peak_memory_mib"])) / 1024
            yield "| " + " | ".join(map(str, [*shown, row["end_to_end_ms"], f"{peak:.1f}"])) + " |"


def training(length: int) -> Lines:
    command = [
        sys.executable, str(Path(__file__).with_name("training_pass.py")), "--shape", "llama-3.2-1b",
        "--length", str(length), "--rounds", "1", "--layers", "2",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    yield "```"
    yield (done.stdout if done.returncode == 0 else done.stdout + done.stderr[-2000:]).rstrip()
    yield "```"
    if done.returncode:
        raise ValueError(f"training_pass.py ended with status {done.returncode}")


def median_ms(work: Callable[[], object], rounds: int = 20) -> float:
    """Milliseconds on the device's own clock."""
    times = []
    for round_ in range(rounds + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        if round_ >= 3:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def graphed_ms(work: Callable[[], object], copies: int = 20) -> float:
    """Milliseconds of one call among many in a CUDA graph, where launching costs little."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(copies):
            work()
    return median_ms(graph.replay) / copies


if __name__ == "__main__":
    main()
