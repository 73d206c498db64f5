"""Seconds and peak memory of training on one sequence: the teacher alone, and with the trainer's losses, gradients and
updates of all layers.

On a CPU the backbone is that of the mini study, on a GPU a bfloat16 model with random weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from common import SHAPES, SMOL, random_llama, report

from residual_mass.model.loading import Backbone, load_backbone
from residual_mass.model.phi_maps import PhiMaps
from residual_mass.spec.sections import ObjectiveSpec
from residual_mass.spec.settings import AnchorSpec, MapSpec
from residual_mass.timing import time_in_turns
from residual_mass.training.learner import row_losses
from residual_mass.training.teacher import LayerTrace, stream_traces

OBJECTIVE, QUERIES, QUERY_WINDOW = ObjectiveSpec(), 100, 33000 / 65536
"""The paper's objective, queries per sequence, and final share of the sequence that queries are drawn from."""
PAPER = {"1b": 2.74, "3b": 5.04}
"""The paper's GPU-seconds per sequence of 64k tokens."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--assets", type=Path, default=Path("results/assets"))
    parser.add_argument("--shape", choices=["smollm2", *SHAPES], default="smollm2")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.shape == "smollm2":
        backbone = load_backbone(SMOL, options.assets, torch.device("cpu"))
    elif torch.cuda.is_available():
        backbone = random_llama(options.shape, "bfloat16", torch.device("cuda"))
    else:
        raise SystemExit(f"--shape {options.shape} needs a GPU that torch can use, and there is none here; use smollm2")
    whole_passes(backbone, options.length, options.rounds)


def whole_passes(backbone: Backbone, length: int, rounds: int) -> None:
    """Prints times and peaks of passes over random tokens; peaks exclude weights, maps, gradients and moments."""
    torch.manual_seed(0)
    device = backbone.device
    ids = torch.randint(backbone.model.config.vocab_size, (length,)).tolist()
    window = round(length * QUERY_WINDOW)
    positions = (torch.randperm(window)[:QUERIES] + length - window).to(device)
    maps = PhiMaps(backbone.shape, MapSpec()).to(device)
    peaks: dict[str, int] = {}

    def passing(title: str, trains: bool) -> Callable[[], None]:
        optimiser = torch.optim.AdamW(maps.parameters(), lr=1e-3, fused=True)

        def learn(layer: int, trace: LayerTrace) -> None:
            if trains:
                row_losses(maps.query[layer], maps.key[layer], trace, OBJECTIVE, AnchorSpec()).mean().backward()

        def run() -> None:
            before = 0
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            optimiser.zero_grad(set_to_none=False)  # keeps gradients, so that like moments they are not in the peak
            stream_traces(backbone, ids, positions, learn)
            if trains:
                optimiser.step()
            if device.type == "cuda":
                torch.cuda.synchronize()
                peaks[title] = torch.cuda.max_memory_allocated() - before

        return run

    titles = {"teacher alone": False, "with training": True}
    sides = {title: passing(title, trains) for title, trains in titles.items()}
    seconds = time_in_turns(sides, rounds)
    width, threads = MapSpec(), torch.get_num_threads()
    report(
        f"{backbone.spec.name}, {length} tokens, {len(positions)} queries, d_emb {width.d_emb}, d_phi {width.d_phi}, "
        f"{device}, {threads} threads, a sequence:",
        seconds,
    )
    for title, peak in peaks.items():
        print(f"  {title}: {peak / 2**20:.0f} MiB at most")
    if backbone.spec.name in PAPER:
        print(f"the paper: {PAPER[backbone.spec.name]} GPU-seconds per sequence of 64k tokens")


if __name__ == "__main__":
    main()
