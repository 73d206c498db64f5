"""Training, generation, forced decoding and capture on the small model, as processes that faults interrupt."""

from __future__ import annotations

import csv
import io
import os
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests import forks
from tests.small_assets import MODEL_ID, REVISION

from residual_mass.spec.arms import ArmSpec
from residual_mass.spec.sections import ObjectiveSpec, ReplaySpec
from residual_mass.spec.settings import AnchorSpec, MapSpec, MapsSpec, Settings, to_json
from residual_mass.spec.specs import (
    BackboneSpec,
    CaptureSpec,
    ForcedPromptsSpec,
    ForceSpec,
    GenerateSpec,
    TrainSpec,
    VariantSpec,
)

NAMES = ("train", "generate", "force", "capture")
BACKBONE = BackboneSpec("test", MODEL_ID, REVISION, "assets", "float32", "tiny", 4096, False, name="tiny")
MAP = MapSpec(d_emb=16, d_phi=8, init="positive_random_features")
TRAIN = TrainSpec(
    name="study", backbone=BACKBONE, length="256", variants=(VariantSpec("ours", MAP, ObjectiveSpec()),),
    corpora=("pydoc",), steps=24, learning_rate=3e-3, weight_decay=1e-4, schedule="cosine", warmup_steps=2,
    sequences_per_step=1, queries_per_step=8, query_window=0.5, replay=ReplaySpec(pool=2, reuse=2),
    anchors=AnchorSpec(), held_out=("books",), eval_budgets=(10.0, 30.0), eval_every=8, checkpoint_every=4, seed=0,
    recipe=1,
)  # fmt: skip
GENERATE = GenerateSpec(
    study="test", backbone=BACKBONE, benchmark="ruler", length="512", tasks=("ruler_vt",), examples=6,
    arms=(ArmSpec("full"), ArmSpec("topk", 10.0), ArmSpec("topk_phi", 10.0, "512")), anchors=AnchorSpec(),
    budget_length="nominal", chat_template=False, truncate_to="512", maps=(MapsSpec("512", 512),), answer_margin=None,
    stop_when_saturated=False, batch_tokens=1, allow_extrapolation=False, recipe=1,
)  # fmt: skip
FORCE = ForceSpec(
    study="test", backbone=BACKBONE, length="512", corpora=("books",), documents=3, tokens=8, seed=0,
    asked=(ForcedPromptsSpec(
        benchmark="ruler", examples=3, chat_template=False, answer_margin=None, stop_when_saturated=False,
        budget_length="nominal", batch_tokens=1,
    ),),
    arms=GENERATE.arms, arms_of_documents=(), anchors=AnchorSpec(), truncate_to="512", maps=GENERATE.maps, recipe=1,
)  # fmt: skip
CAPTURE = CaptureSpec(
    study="test", backbone=BACKBONE, corpus="books", length="256", budgets=(10.0, 30.0), anchors=AnchorSpec(),
    maps=MapsSpec("512", 512), packs=4, queries=4, seed=0, recipe=1,
)  # fmt: skip


@dataclass(frozen=True)
class Stage:
    """One of them, with its inputs.

    Attributes:
        given: spec and inputs.
        files: what it writes by its flags, as names in a folder. Snakemake deletes those without an underscore where
            the job fails.
    """

    name: str
    given: list[str]
    files: dict[str, str]

    @property
    def outputs(self) -> list[str]:
        return [name for name in self.files.values() if not name.startswith("_")]

    def arguments(self, out: Path) -> list[str]:
        """Of the command line, for a folder that takes the outputs."""
        written = [word for flag, name in self.files.items() for word in (flag, str(out / name))]
        return [self.name, *self.given, *written]

    def made(self, out: Path) -> dict[str, bytes]:
        """The outputs that are there; of the log of a training all but the seconds, which differ every time."""
        files = {name: (out / name).read_bytes() for name in self.outputs if (out / name).exists()}
        return {name: without_seconds(data) if name.endswith(".csv") else data for name, data in files.items()}


def train(assets: Path, spec: TrainSpec = TRAIN) -> Stage:
    files = {"--checkpoint": "_checkpoints/maps.safetensors", "--out": "maps.safetensors", "--log-csv": "log.csv"}
    return Stage("train", ["--spec", to_json(spec), "--assets", str(assets)], files)


def decoding(spec: Settings, assets: Path, prompts: Path, phi: Path) -> Stage:
    """A generation or forced decoding."""
    inputs = ["--assets", str(assets), "--prompts", str(prompts), "--phi", str(phi)]
    name, out = ("force", "f.parquet") if isinstance(spec, ForceSpec) else ("generate", "all.jsonl")
    return Stage(name, ["--spec", to_json(spec), *inputs], {"--store": "_store/rows.jsonl", "--out": out})


def capture(assets: Path, phi: Path) -> Stage:
    inputs = ["--spec", to_json(CAPTURE), "--assets", str(assets), "--phi", str(phi)]
    return Stage("capture", inputs, {"--heads": "heads.parquet", "--mass": "mass.parquet"})


def without_seconds(log: bytes) -> bytes:
    rows = list(csv.reader(io.StringIO(log.decode())))
    at = rows[0].index("seconds")
    return "\n".join(",".join(row[:at] + row[at + 1 :]) for row in rows).encode()


# ---- processes -------------------------------------------------------------------------------------------------------

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def start(stage: Stage, out: Path, log: Path) -> BaseProcess:
    """A stage whose stdout and stderr go to `log`."""
    return forks.start("residual_mass.cli", stage.arguments(out), log, ENVIRONMENT)


def run(stage: Stage, out: Path, log: Path) -> int:
    """The exit status, negative for a signal."""
    return forks.run("residual_mass.cli", stage.arguments(out), log, ENVIRONMENT)
