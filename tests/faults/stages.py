"""Training, generation, forced decoding and capture on the small model: how the command line starts them and what they
leave.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.small_assets import MODEL_ID, REVISION

from residual_mass.core.settings import AnchorSpec, MapSpec, MapsSpec, to_json
from residual_mass.methods.arms import ArmSpec
from residual_mass.study.sections import ObjectiveSpec, ReplaySpec
from residual_mass.study.specs import (
    AskedSpec,
    BackboneSpec,
    CaptureSpec,
    ForceSpec,
    GenerateSpec,
    TrainSpec,
    VariantSpec,
)

BACKBONE = BackboneSpec("test", MODEL_ID, REVISION, "assets", "float32", "tiny", 4096, False, name="tiny")
MAP = MapSpec(d_emb=16, d_phi=8, init="positive_random_features")
TRAIN = TrainSpec(
    name="study", backbone=BACKBONE, length="256", variants=(VariantSpec("ours", MAP, ObjectiveSpec()),),
    corpora=("pydoc",), steps=40, learning_rate=3e-3, weight_decay=1e-4, schedule="cosine", warmup_steps=2,
    sequences_per_step=1, queries_per_step=8, query_window=0.5, replay=ReplaySpec(pool=2, reuse=2), curriculum=None,
    anchors=AnchorSpec(), held_out=("books",), eval_budgets=(10.0, 30.0), eval_every=10, checkpoint_every=4, seed=0,
    recipe=1,
)  # fmt: skip
GENERATE = GenerateSpec(
    study="test", backbone=BACKBONE, benchmark="ruler", length="512", tasks=("ruler_vt",), examples=8,
    arms=(ArmSpec("full"), ArmSpec("topk", 10.0), ArmSpec("topk_phi", 10.0, "512")), anchors=AnchorSpec(),
    budget_length="nominal", chat_template=False, truncate_to="512", maps=(MapsSpec("512", 512),), answer_margin=None,
    stop_when_saturated=False, batch_tokens=1, allow_extrapolation=False, recipe=1,
)  # fmt: skip
FORCE = ForceSpec(
    study="test", backbone=BACKBONE, length="512", corpora=("books",), documents=4, tokens=8, seed=0,
    asked=(AskedSpec(benchmark="ruler", examples=4, chat_template=False, answer_margin=None, stop_when_saturated=False,
                     budget_length="nominal", batch_tokens=1),),
    arms=GENERATE.arms, arms_of_documents=(), anchors=AnchorSpec(), truncate_to="512", maps=GENERATE.maps, recipe=1,
)  # fmt: skip
CAPTURE = CaptureSpec(
    study="test", backbone=BACKBONE, corpus="books", length="256", budgets=(10.0, 30.0), anchors=AnchorSpec(),
    maps=MapsSpec("512", 512), packs=8, queries=4, seed=0, recipe=1,
)  # fmt: skip


@dataclass(frozen=True)
class Stage:
    """One of them, with its inputs.

    Attributes:
        arguments: of the command line, for a folder that takes the outputs.
        outputs: their names in that folder. Snakemake deletes them where the job fails.
    """

    name: str
    arguments: Callable[[Path], list[str]]
    outputs: tuple[str, ...]

    def command(self, out: Path) -> list[str]:
        """In an interpreter of its own."""
        return [sys.executable, "-m", "residual_mass", *self.arguments(out)]

    def made(self, out: Path) -> dict[str, bytes]:
        """The outputs that are there; of the log of a training all but the seconds, which differ every time."""
        files = {name: (out / name).read_bytes() for name in self.outputs if (out / name).exists()}
        return {name: without_seconds(data) if name.endswith(".csv") else data for name, data in files.items()}


def train(assets: Path, spec: TrainSpec = TRAIN) -> Stage:
    def arguments(out: Path) -> list[str]:
        flags = flagged(out, checkpoint="_checkpoints/maps.safetensors", out="maps.safetensors", log_csv="log.csv")
        return ["train", "--spec", to_json(spec), "--assets", str(assets), *flags]

    return Stage("train", arguments, ("maps.safetensors", "log.csv"))


def generate(assets: Path, prompts: Path, phi: Path, spec: GenerateSpec = GENERATE) -> Stage:
    def arguments(out: Path) -> list[str]:
        inputs = ["--assets", str(assets), "--prompts", str(prompts), "--phi", str(phi)]
        return ["generate", "--spec", to_json(spec), *inputs, *flagged(out, store="_store/all.jsonl", out="all.jsonl")]

    return Stage("generate", arguments, ("all.jsonl",))


def force(assets: Path, prompts: Path, phi: Path) -> Stage:
    def arguments(out: Path) -> list[str]:
        inputs = ["--assets", str(assets), "--prompts", str(prompts), "--phi", str(phi)]
        return ["force", "--spec", to_json(FORCE), *inputs, *flagged(out, store="_store/f.jsonl", out="f.parquet")]

    return Stage("force", arguments, ("f.parquet",))


def capture(assets: Path, phi: Path, spec: CaptureSpec = CAPTURE) -> Stage:
    def arguments(out: Path) -> list[str]:
        flags = flagged(out, heads="heads.parquet", mass="mass.parquet")
        return ["capture", "--spec", to_json(spec), "--assets", str(assets), "--phi", str(phi), *flags]

    return Stage("capture", arguments, ("heads.parquet", "mass.parquet"))


def flagged(folder: Path, /, **names: str) -> list[str]:
    return [word for flag, name in names.items() for word in (f"--{flag.replace('_', '-')}", str(folder / name))]


def without_seconds(log: bytes) -> bytes:
    rows = list(csv.reader(io.StringIO(log.decode())))
    at = rows[0].index("seconds")
    return "\n".join(",".join(row[:at] + row[at + 1 :]) for row in rows).encode()
