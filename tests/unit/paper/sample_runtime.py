"""Files of the runtime stage with made-up numbers, and the recipe of a training."""

from __future__ import annotations

import csv
import random
from collections.abc import Iterable
from pathlib import Path

from tests.records import recorded

from residual_mass.core.settings import AnchorSpec, MapSpec
from residual_mass.runtime.columns import RUNTIME
from residual_mass.study.sections.training import ObjectiveSpec, ReplaySpec
from residual_mass.study.specs import BackboneSpec, TrainSpec, VariantSpec

SMALL = BackboneSpec("mini", "org/Small-LM", "r1", "assets", "float32", "bytes", 8192, False, name="smol")
OWN = VariantSpec("ours", MapSpec(d_emb=5, d_phi=4), ObjectiveSpec())
TRAINED = TrainSpec(
    name="study", backbone=SMALL, length="2k", variants=(OWN,), corpora=("wiki",), steps=300, learning_rate=1e-3,
    weight_decay=0.0, schedule="constant", warmup_steps=0, sequences_per_step=1, queries_per_step=5, query_window=0.5,
    replay=ReplaySpec(), curriculum=None, anchors=AnchorSpec(), held_out=("wiki",), eval_budgets=(4.0,), eval_every=100,
    checkpoint_every=50, seed=3, recipe=1,
)  # fmt: skip
METHODS = ("full", "topk", "topk_phi", "topk_phi_nosub")
BLOCKS = (("prototype", 1), ("fused", 1), ("fused", 8))
K = {"1k": "21", "2k": "62", "4k": "21", "16k": "144", "64k": "636"}

Row = dict[str, str]


def runtime_rows(
    seed: int = 0,
    contexts: Iterable[str] = ("1k", "2k"),
    blocks: Iterable[tuple[str, int]] = BLOCKS,
    scale: float = 1.0,
    **facts: str,
) -> list[Row]:
    """One row per implementation, batch size, context and method, as the stage writes them; `facts` replace what is
    constant in a file.
    """
    generator = random.Random(seed)
    constant = {
        "study": "mini", "backbone": "smol", "model_id": "org/Small-LM", "revision": "r1", "weights": "pretrained",
        "dtype": "float32", "device": "Some CPU, 2 threads", "repeats": "3", "bandwidth_gb_s": "21.700",
        "budget_percent": "4", "recording_ms": "", "peak_memory_mib": "", "not_measured": "", "state_bytes": "0",
    }  # fmt: skip
    rows = []
    for implementation, batch in blocks:
        for context in contexts:
            for method in METHODS:
                row = constant | {"implementation": implementation, "batch": str(batch), "context": context}
                row |= {"method": method, "k": K[context], "phi_weights": "random" if "phi" in method else ""} | facts
                if method == "full":
                    row |= {"k": "", "budget_percent": ""}
                count = round(scale * generator.uniform(1e8, 2e9))
                step, prefill = scale * generator.uniform(20, 300), scale * generator.uniform(500, 3000)
                row |= {"step_bytes": str(count), "floor_ms": f"{count / float(row['bandwidth_gb_s']) / 1e6:.3f}"}
                row |= {"per_step_ms": f"{step:.3f}", "prefill_ms": f"{prefill:.3f}"}
                row |= {"per_step_low_ms": f"{0.98 * step:.3f}", "per_step_high_ms": f"{1.04 * step:.3f}"}
                row |= {"end_to_end_ms": f"{prefill + 31 * step:.3f}"}
                row |= {"tokens_as_prototype": "1.000" if implementation == "prototype" else "0.969"}
                rows.append(row)
    return rows


def runtime_1b(**facts: str) -> list[Row]:
    """Of the paper's smaller model, where and how the paper measured it."""
    of_the_paper = {
        "study": "paper", "backbone": "1b", "model_id": "meta-llama/Llama-3.2-1B-Instruct", "dtype": "bfloat16",
        "device": "NVIDIA H200", "bandwidth_gb_s": "4300.000", "budget_percent": "1", "peak_memory_mib": "4000.0",
    }  # fmt: skip
    return runtime_rows(contexts=("4k", "16k", "64k"), **of_the_paper | facts)


REASON = "does not fit: needs 143.2 GB of 84.9 GB that are free"


def not_measured(row: Row) -> Row:
    """The row of a setting that does not fit: without times, but with what a step would have to move."""
    lacking = ("prefill_ms", "end_to_end_ms", "recording_ms", "peak_memory_mib", "tokens_as_prototype")
    steps = (name for name in row if name.startswith("per_step"))
    return row | dict.fromkeys((*lacking, *steps), "") | {"not_measured": REASON}


def write_runtime(path: Path, rows: Iterable[Row], columns: Iterable[str] = RUNTIME) -> Path:
    with open(path, "w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, list(columns), lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return recorded(path)
