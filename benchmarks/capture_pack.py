"""One pack of the diagnostics: the model's pass with every head measured against the bare pass, and what both cost at
other shapes.

Both sides end in the same hidden states. Time does not depend on the values of the feature maps, which are untrained
here. Memory is that of the process (CPU) or of torch (GPU), beside weights and maps.
"""

from __future__ import annotations

import argparse
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from shared_prefill import SMOL
from timing import alternate, report
from torch import Tensor
from training_pass import LLAMA, MIB, fresh_maps, random_llama, resident
from transformers import LlamaConfig

from residual_mass.core.selection import retrieved_count
from residual_mass.core.settings import AnchorSpec, MapsSpec
from residual_mass.diagnostics.capture import captured
from residual_mass.diagnostics.packs import Pack, visit_layers
from residual_mass.model.loading import Backbone, load_backbone
from residual_mass.study.specs import CaptureSpec
from residual_mass.texts.corpora import held_out_corpus

BUDGETS = (0.5, 1.0, 2.0, 4.0)
ANCHORS = AnchorSpec()
D_PHI = 64


class Setting(NamedTuple):
    shape: str
    length: int
    queries: int
    d_emb: int
    assets: Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--assets", type=Path, default=Path("results/assets"))
    parser.add_argument("--shape", choices=["smollm2", *LLAMA], default="smollm2")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--queries", type=int, default=8)
    parser.add_argument("--d-emb", type=int, default=64, help="inner width of the maps; the paper's is 512")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    if options.shape != "smollm2" and not torch.cuda.is_available():
        raise SystemExit(f"--shape {options.shape} needs a GPU that torch can use, and there is none here; use smollm2")
    setting = Setting(options.shape, options.length, options.queries, options.d_emb, options.assets)
    print(
        f"{setting.shape}, {setting.length} + {setting.queries} tokens, budgets {', '.join(map(str, BUDGETS))} %, "
        f"{torch.get_num_threads()} threads"
    )
    backbone, pack = prepared(setting)
    compare(setting, backbone, pack)
    works = {
        "every head measured": lambda: measured_pass(setting, backbone, pack),
        "bare pass": lambda: bare_pass(setting, backbone, pack),
    }
    report("seconds of a pack", alternate(works, options.rounds))
    peaks = [peak(side, setting) / MIB for side in (measured_pass, bare_pass)]
    print(f"peak memory beside weights and maps: measured {peaks[0]:.0f} MiB, bare pass {peaks[1]:.0f} MiB")
    for name, config in {setting.shape: backbone_config(setting), **LLAMA}.items():
        for length in dict.fromkeys((setting.length, 65536)):
            arithmetic(name, config, length, setting.queries, setting.d_emb if name == setting.shape else 512)


def prepared(setting: Setting) -> tuple[Backbone, Pack]:
    tokens = setting.length + setting.queries
    if setting.shape == "smollm2":
        backbone = load_backbone(SMOL, setting.assets, torch.device("cpu"))
        return backbone, held_out_corpus("wiki", backbone.tokenizer, tokens, 0, setting.assets).sequence(0)
    backbone = random_llama(setting.shape, LLAMA[setting.shape], "bfloat16", torch.device("cuda"))
    return backbone, torch.randint(backbone.model.config.vocab_size, (tokens,)).tolist()


def backbone_config(setting: Setting) -> LlamaConfig:
    if setting.shape in LLAMA:
        return LLAMA[setting.shape]
    return load_backbone(SMOL, setting.assets, torch.device("cpu")).model.config


def bare_pass(setting: Setting, backbone: Backbone, pack: Pack) -> None:
    visit_layers(backbone, pack, setting.length, lambda *inputs: None)
    synchronise(backbone)


def measured_pass(setting: Setting, backbone: Backbone, pack: Pack) -> None:
    maps = fresh_maps(backbone.shape, setting.d_emb).to(backbone.device)
    spec = CaptureSpec(
        study="benchmark", backbone=backbone.spec, corpus="wiki", length=str(setting.length), budgets=BUDGETS,
        anchors=ANCHORS, maps=MapsSpec("untrained", setting.length), packs=1, queries=setting.queries,
        seed=0, recipe=0,
    )  # fmt: skip
    heads, _ = captured(spec, backbone, maps, [pack])
    assert heads["layer"].nunique() == backbone.shape.layers
    synchronise(backbone)


def compare(setting: Setting, backbone: Backbone, pack: Pack) -> None:
    """Stops unless the model ends in the same hidden states measured and bare."""
    ends: list[Tensor] = []
    handle = backbone.model.get_decoder().norm.register_forward_hook(lambda *call: ends.append(call[-1].cpu()))
    try:
        measured_pass(setting, backbone, pack)
        bare_pass(setting, backbone, pack)
    finally:
        handle.remove()
    if not torch.equal(*ends):
        raise SystemExit("measuring changes what the model computes: nothing is timed")


def synchronise(backbone: Backbone) -> None:
    if backbone.device.type == "cuda":
        torch.cuda.synchronize()


def peak(side: object, setting: Setting) -> int:
    """Bytes, from a process of its own: what other work has left in this one's allocator would count."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_peak, side is measured_pass, setting).result()


def _peak(measured: bool, setting: Setting) -> int:
    backbone, pack = prepared(setting)
    side = measured_pass if measured else bare_pass
    if backbone.device.type == "cuda":
        before = torch.cuda.memory_allocated()
        side(setting, backbone, pack)
        return torch.cuda.max_memory_allocated() - before
    short = setting._replace(length=64)
    side(short, backbone, pack[: 64 + setting.queries])  # what libraries allocate on their first call
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    side(setting, backbone, pack)
    return resident("VmHWM") - before


def arithmetic(name: str, config: LlamaConfig, length: int, queries: int, d_emb: int) -> None:
    """Prints multiplications and bytes of one pack, counted from the shapes."""
    heads, groups, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    layers, hidden = config.num_hidden_layers, config.hidden_size
    rows = heads * queries
    ks = [retrieved_count(budget, length, ANCHORS.sink + ANCHORS.tail) for budget in BUDGETS]
    weights = hidden * dim * (2 * heads + 2 * groups) + 3 * hidden * config.intermediate_size
    linear, attention = 2 * weights * length, 2 * length**2 * heads * dim  # causal: half of 4 L^2
    products = 2 + 3 + 2 * len(ks)  # scores twice, three sets at any K, two at each
    maps = 2 * groups * length * (dim * D_PHI + dim * d_emb + d_emb * D_PHI + D_PHI * dim)
    measures = products * 2 * rows * length * dim + maps
    scores = rows * length
    gathered = rows * max(ks) * (D_PHI + dim)
    layer_bytes = 4 * (2 * groups * length * dim + 3 * groups * length * D_PHI + 6 * scores + 2 * gathered)
    print(
        f"{name} at {length}: a pass {layers * (linear + attention) / 1e12:.2f} TFLOP, measuring "
        f"{layers * measures / 1e12:.3f} TFLOP ({measures / (linear + attention):.1%}); one layer's measuring holds "
        f"some {layer_bytes / MIB:.0f} MiB, of them {8 * groups * length * dim / MIB:.0f} keys and values in float32"
    )


if __name__ == "__main__":
    main()
