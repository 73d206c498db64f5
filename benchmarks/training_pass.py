"""One teacher pass of training: the trainer's losses and gradients against those of a straightforward implementation.

On the CPU (shape smollm2, the backbone of the assets) both sides train on recorded traces of a few layers, scaled to
all of them; the teacher pass is timed once, and the optimiser, the same on both sides, is left out. On a GPU (shapes
llama-3.2-*, random weights, bfloat16) whole passes are timed: the teacher alone, and with each side's training of every
layer, the optimiser's update included, the trainer's also with `phi.precision: bfloat16`; --alone leaves out the
straightforward side.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from shared_prefill import SMOL
from straightforward import LayerMaps, copy_layer, gradient_deviation, layer_loss, trainers_loss
from timing import alternate, report
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from residual_mass.core.settings import MapSpec
from residual_mass.model.loading import Backbone, load_backbone
from residual_mass.model.phi_maps import HeadShape, PhiMaps
from residual_mass.study.sections import ObjectiveSpec
from residual_mass.study.specs import BackboneSpec
from residual_mass.texts.corpora import training_corpus
from residual_mass.training.learner import PRECISIONS
from residual_mass.training.teacher import LayerTrace, stream_traces

OBJECTIVE = ObjectiveSpec()
"""The paper's."""
D_PHI = 64
QUERY_WINDOW = 33000 / 65536
"""Query positions are drawn from this final share of the sequence."""
LARGEST_DEVIATION = 1e-3
"""Of gradients, relative to their norm: float32 rounding stays far below it, a mistake does not."""
LLAMA = {
    "llama-3.2-1b": LlamaConfig(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, max_position_embeddings=131072, tie_word_embeddings=True,
    ),
    "llama-3.2-3b": LlamaConfig(
        vocab_size=128256, hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=131072, tie_word_embeddings=True,
    ),
}  # fmt: skip
PAPER = {"llama-3.2-1b": 2.74, "llama-3.2-3b": 5.04}
"""GPU-seconds per sequence of 64k tokens."""
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--assets", type=Path, default=Path("results/assets"))
    parser.add_argument("--shape", choices=["smollm2", *LLAMA], default="smollm2")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--d-emb", type=int, default=512, help="inner width of the maps; the paper's is 512")
    parser.add_argument("--queries", type=int, default=100, help="query positions; the paper's are 100")
    parser.add_argument("--layers", type=int, default=3, help="layers that are compared, and on the CPU timed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--alone", action="store_true", help="on a GPU: the trainer's side, compared with nothing")
    options = parser.parse_args()
    if options.shape != "smollm2" and not torch.cuda.is_available():
        raise SystemExit(f"--shape {options.shape} needs a GPU that torch can use, and there is none here; use smollm2")

    if options.shape != "smollm2":
        backbone = random_llama(options.shape, LLAMA[options.shape], "bfloat16", torch.device("cuda"))
        compared = 0 if options.alone else options.layers
        whole_passes(backbone, options.length, options.queries, options.d_emb, compared, options.rounds)
        print(f"the paper: {PAPER[options.shape]} GPU-seconds per sequence of 64k tokens")
        return
    torch.manual_seed(0)
    backbone = load_backbone(SMOL, options.assets, torch.device("cpu"))
    ids = training_corpus(("wiki",), backbone.tokenizer, options.length, 0, options.assets).sequence(0)
    shape, chosen = backbone.shape, spread(options.layers, backbone.shape.layers)
    positions = query_positions(options.length, options.queries)
    traces, teacher = record(backbone, ids, positions, chosen)
    tell(backbone, options.length, positions, options.d_emb, chosen)
    on_traces(replace(shape, layers=len(chosen)), options.d_emb, traces, options.rounds, teacher, shape.layers)


def tell(backbone: Backbone, length: int, positions: Tensor, d_emb: int, layers: list[int]) -> None:
    """Prints what is measured, and the layers on which both sides are compared."""
    compared = f"; layers {', '.join(map(str, layers))} of {backbone.shape.layers}" if layers else ""
    print(
        f"{backbone.spec.name}, {length} tokens, {len(positions)} queries, d_emb {d_emb}, d_phi {D_PHI}, "
        f"{backbone.device}, {torch.get_num_threads()} threads{compared}"
    )


class Ours:
    """The trainer's side."""

    def __init__(self, maps: PhiMaps, precision: str = "float32") -> None:
        self.modules, self.precision = maps, precision
        self.title = "trainer" if precision == "float32" else f"trainer, {precision}"

    def backward(self, layer: int, trace: LayerTrace) -> float:
        loss = trainers_loss(self.modules, layer, trace, OBJECTIVE, self.precision)
        loss.backward()
        return loss.item()


class Straightforward:
    """The other side: the same parameters, one module per head."""

    title = "straightforward"

    def __init__(self, maps: PhiMaps) -> None:
        self.modules = torch.nn.ModuleList(copy_layer(maps, layer) for layer in range(maps.shape.layers))

    def backward(self, layer: int, trace: LayerTrace) -> float:
        loss = layer_loss(self.layer(layer), trace, OBJECTIVE)
        loss.backward()
        return loss.item()

    def layer(self, layer: int) -> LayerMaps:
        module = self.modules[layer]
        assert isinstance(module, LayerMaps)
        return module


Side = Ours | Straightforward


def on_traces(shape: HeadShape, d_emb: int, traces: list[LayerTrace], rounds: int, teacher: float, layers: int) -> None:
    """Time and peak memory of training on these traces, and of a pass of all `layers` with its `teacher` seconds."""
    maps = fresh_maps(shape, d_emb)
    ours, theirs = Ours(maps), Straightforward(maps)
    compare(ours, theirs, dict(enumerate(traces)))

    def train(side: Side) -> Callable[[], None]:
        def run() -> None:
            side.modules.zero_grad(set_to_none=True)
            for layer, trace in enumerate(traces):
                side.backward(layer, trace)

        return run

    scale = layers / len(traces)
    timed = alternate({theirs.title: train(theirs), ours.title: train(ours)}, rounds)
    alone = {title: [seconds * scale for seconds in values] for title, values in timed.items()}
    report(f"training of the maps alone, {len(traces)} layers scaled to {layers}", alone)
    print(f"teacher pass, once: {teacher:.2f} s")
    whole = {f"{title} + teacher": [seconds + teacher for seconds in values] for title, values in alone.items()}
    report("per teacher pass", whole)
    del maps, ours, theirs
    slow, fast = (peak_alone(side, shape, d_emb, traces) for side in (Straightforward, Ours))
    print("peak memory of a layer's training, beside parameters, gradients and trace")
    print(f"  {Straightforward.title} {slow / MIB:.0f} MiB, {Ours.title} {fast / MIB:.0f} MiB, ratio {slow / fast:.2f}")


@dataclass(frozen=True)
class Passes:
    """Medians of whole passes over a sequence."""

    teacher: float
    """Seconds of the teacher alone."""
    trainer: dict[str, float]
    """By precision, the seconds of teacher and training."""
    peak: dict[str, int]
    """By precision, bytes on a GPU, beside weights, maps, gradients and moments; 0 on a CPU."""


def whole_passes(backbone: Backbone, length: int, queries: int, d_emb: int, compared: int, rounds: int) -> Passes:
    """Seconds and peak GPU memory of whole passes over random tokens: the teacher alone, and with each side's training.

    Args:
        compared: layers on whose traces both sides must agree; with 0 the straightforward side is left out.
    """
    torch.manual_seed(0)
    device, on_gpu = backbone.device, backbone.device.type == "cuda"
    ids = torch.randint(backbone.model.config.vocab_size, (length,)).tolist()
    positions = query_positions(length, queries).to(device)
    chosen = spread(compared, backbone.shape.layers) if compared else []
    tell(backbone, length, positions, d_emb, chosen)
    maps = fresh_maps(backbone.shape, d_emb).to(device)
    ours = {precision: Ours(maps, precision) for precision in PRECISIONS}
    sides: list[Side] = list(ours.values())
    if compared:
        theirs = Straightforward(maps)
        compare(ours["float32"], theirs, dict(zip(chosen, record(backbone, ids, positions, chosen)[0], strict=True)))
        sides.insert(0, theirs)
    peaks: dict[str, int] = {}

    def measured(title: str, work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated() if on_gpu else 0
            work()
            if on_gpu:
                torch.cuda.synchronize()
            peaks[title] = torch.cuda.max_memory_allocated() - before if on_gpu else 0

        return run

    def train(side: Side) -> Callable[[], None]:
        optimiser = torch.optim.AdamW(side.modules.parameters(), lr=1e-3, fused=True)

        def run() -> None:
            # Gradients are kept and zeroed: like parameters and moments they are there before the pass on both sides.
            optimiser.zero_grad(set_to_none=False)
            losses = []
            stream_traces(backbone, ids, positions, lambda layer, trace: losses.append(side.backward(layer, trace)))
            assert len(losses) == backbone.shape.layers
            optimiser.step()

        return run

    works = {"teacher alone": lambda: stream_traces(backbone, ids, positions, lambda layer, trace: None)}
    works |= {side.title: train(side) for side in sides}
    seconds = alternate({title: measured(title, work) for title, work in works.items()}, rounds)
    alone = seconds.pop("teacher alone")
    teacher = statistics.median(alone)
    print(f"teacher alone: {teacher:.2f} s per sequence ({min(alone):.2f} .. {max(alone):.2f})")
    report("teacher and training, per sequence", seconds)
    print("peak memory of a pass, beside weights, maps, gradients and moments")
    print("  " + ", ".join(f"{title} {peak / MIB:.0f} MiB" for title, peak in peaks.items()))
    trainer = {precision: statistics.median(seconds[side.title]) for precision, side in ours.items()}
    return Passes(teacher, trainer, {precision: peaks[side.title] for precision, side in ours.items()})


def compare(ours: Ours, theirs: Straightforward, traces: dict[int, LayerTrace]) -> None:
    """Stops unless losses and gradients agree on these layers' traces; prints how far they are apart."""
    losses, gradients = [], []
    for layer, trace in traces.items():
        expected = theirs.backward(layer, trace)
        losses.append(abs(ours.backward(layer, trace) - expected) / abs(expected))
        gradients.append(gradient_deviation(ours.modules, layer, theirs.layer(layer)))
    print(f"largest relative deviation: losses {max(losses):.1e}, gradients {max(gradients):.1e}")
    if not all(deviation <= LARGEST_DEVIATION for deviation in (*losses, *gradients)):  # a NaN is not
        raise SystemExit(f"the two sides differ by more than {LARGEST_DEVIATION:g}: nothing is timed")


def peak_alone(side: type[Side], shape: HeadShape, d_emb: int, traces: list[LayerTrace]) -> int:
    """Bytes, from a process of its own: what other work has left in this one's allocator would count."""
    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        torch.save([vars(trace) for trace in traces], file.name)
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            return pool.submit(_peak, side, shape, d_emb, Path(file.name)).result()


def _peak(side_of: type[Side], shape: HeadShape, d_emb: int, file: Path) -> int:
    traces = [LayerTrace(**fields) for fields in torch.load(file)]
    side = side_of(fresh_maps(shape, d_emb))
    for layer, trace in enumerate(traces):  # makes gradients and what libraries allocate on their first call
        start = LayerTrace(trace.queries[:, :2], trace.keys, trace.values, torch.tensor([20, 30]), trace.scale)
        side.backward(layer, start)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    for layer, trace in enumerate(traces):
        side.backward(layer, trace)
    return resident("VmHWM") - before


def resident(field: str) -> int:
    """VmRSS or VmHWM of this process in bytes (Linux)."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def record(backbone: Backbone, ids: list[int], positions: Tensor, layers: list[int]) -> tuple[list[LayerTrace], float]:
    """Traces of these layers, without values (the objective reads none), and the seconds of the teacher pass."""
    stream_traces(backbone, ids[:16], positions.new_tensor([8]), lambda layer, trace: None)  # a first call is slower
    traces: list[LayerTrace] = []

    def keep(layer: int, trace: LayerTrace) -> None:
        if layer in layers:
            traces.append(replace(trace, keys=trace.keys.clone(), values=trace.values[:, :0].clone()))

    started = time.perf_counter()
    stream_traces(backbone, ids, positions, keep)
    return traces, time.perf_counter() - started


def query_positions(length: int, count: int) -> Tensor:
    """Distinct positions from the final share of the sequence."""
    window = round(length * QUERY_WINDOW)
    return torch.randperm(window)[:count] + length - window


def spread(count: int, layers: int) -> list[int]:
    """`count` layers, evenly over the depth."""
    if not 1 <= count <= layers:
        raise SystemExit(f"--layers {count}: the backbone has {layers} layers")
    return [(2 * i + 1) * layers // (2 * count) for i in range(count)]


def fresh_maps(shape: HeadShape, d_emb: int) -> PhiMaps:
    """PyTorch's default start with the ReZero gate open: closed, it would leave half of the parameters no gradient."""
    torch.manual_seed(0)
    maps = PhiMaps(shape, MapSpec(d_emb=d_emb, d_phi=D_PHI))
    for module in (*maps.query, *maps.key):
        module.alpha.data.fill_(0.5)
    return maps


def random_llama(name: str, config: LlamaConfig, dtype: str, device: torch.device) -> Backbone:
    """A model with random weights and no end token; time and memory do not depend on the values."""
    spec = BackboneSpec(
        name=name, study="benchmark", model_id=name, revision="random", source="random", dtype=dtype,
        tokenizer="none", context=config.max_position_embeddings, requires_gpu=device.type == "cuda",
    )  # fmt: skip
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.generation_config.eos_token_id = None
    nothing = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))  # token ids are drawn
    return Backbone(spec, model.eval().requires_grad_(False), nothing, identity=name)


if __name__ == "__main__":
    main()
