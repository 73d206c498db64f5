"""A small training on the tiny backbone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.conftest import TINY
from torch import Tensor

from residual_mass.model.loading import Backbone
from residual_mass.spec.sections import ObjectiveSpec, ReplaySpec
from residual_mass.spec.settings import AnchorSpec, MapSpec
from residual_mass.spec.specs import TrainSpec, VariantSpec
from residual_mass.texts.corpora import Cycle, PackedDocuments
from residual_mass.training.learner import HELD_OUT_QUERIES, HeldOut
from residual_mass.training.teacher import LayerTrace, record_traces, with_targets
from residual_mass.training.trainer import Trainer

LENGTH = 96
OURS = VariantSpec("ours", MapSpec(d_emb=20, d_phi=8, init="positive_random_features"), ObjectiveSpec(lambda_kl=0.5))
SPEC = TrainSpec(
    name="study", backbone=TINY, length=str(LENGTH), variants=(OURS,), corpora=("text",), steps=12, learning_rate=3e-3,
    weight_decay=1e-4, schedule="cosine", warmup_steps=2, sequences_per_step=1, queries_per_step=5, query_window=0.5,
    replay=ReplaySpec(pool=3, reuse=2), anchors=AnchorSpec(4, 16), held_out=("text",),
    eval_budgets=(30.0, 50.0), eval_every=4, checkpoint_every=5, seed=0, recipe=1,
)  # fmt: skip


def corpus(backbone: Backbone, length: int = LENGTH, slot: int = 0, slots: int = 1) -> Cycle:
    documents = [f"Document {i} says {i * 7919 % 10007} things about {chr(97 + i % 26) * 9}." * 3 for i in range(40)]
    return Cycle([PackedDocuments("text", documents, backbone.tokenizer, length, 0)], slot, slots)


def parameters(trainer: Trainer, learner: int = 0) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer.learners[learner].maps.named_parameters()}


@pytest.fixture(scope="session")
def held_out(tiny_backbone: Backbone) -> HeldOut:
    positions = torch.arange(LENGTH, LENGTH + HELD_OUT_QUERIES)

    def prefix(trace: LayerTrace) -> LayerTrace:
        keys, values = trace.keys[:, :LENGTH], trace.values[:, :LENGTH]
        cut = replace(trace, keys=keys, values=values, positions=torch.full_like(positions, LENGTH - 1))
        return with_targets(cut, SPEC.anchors, SPEC.eval_budgets)

    ids = corpus(tiny_backbone, LENGTH + HELD_OUT_QUERIES).sequence(99)
    return {"text": [record_traces(tiny_backbone, ids, positions, prefix)]}


Make = Callable[..., Trainer]


@pytest.fixture
def make(tiny_backbone: Backbone, held_out: HeldOut) -> Make:
    """A trainer whose spec has the given changes."""

    def made(**changes: object) -> Trainer:
        spec = replace(SPEC, **changes)  # type: ignore[arg-type]
        count = spec.sequences_per_step
        corpora = {slot: corpus(tiny_backbone, LENGTH, slot, count) for slot in range(count)}
        return Trainer(spec, tiny_backbone, corpora, held_out)

    return made


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """Checkpoint and log."""
    return tmp_path / "checkpoint.safetensors", tmp_path / "log.csv"
