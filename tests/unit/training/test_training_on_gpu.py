"""On a GPU: training takes the same steps as on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.conftest import TINY
from tests.needs import GPU, needs
from tests.unit.training.conftest import OURS, SPEC, corpus, parameters

from residual_mass.model.loading import load_backbone
from residual_mass.spec.sections import ObjectiveSpec, ReplaySpec
from residual_mass.training.trainer import Trainer

pytestmark = [pytest.mark.gpu, needs(GPU)]


@pytest.mark.parametrize("name", ["ours", "residual", "lolcats"])
@pytest.mark.parametrize("replay", [ReplaySpec(1, 1), ReplaySpec(2, 2)], ids=["streamed", "replayed"])
def test_the_maps_move_as_on_the_cpu(tiny_assets: Path, tmp_path: Path, name: str, replay: ReplaySpec) -> None:
    # 16 features, the fewest that the objective's kernels take
    variant = replace(OURS, map=replace(OURS.map, d_phi=16), objective=ObjectiveSpec(name=name, lambda_kl=0.5))
    moved = []
    for device in ("cpu", "cuda"):
        backbone = load_backbone(TINY, tiny_assets, torch.device(device))
        spec = replace(SPEC, variants=(variant,), steps=2, schedule="constant", replay=replay)
        trainer = Trainer(spec, backbone, {0: corpus(backbone)}, {})
        trainer.initialise()
        before = parameters(trainer)
        trainer.train(tmp_path / f"{device}.safetensors", tmp_path / f"{device}.csv")
        moved.append({key: (p - before[key]).cpu() for key, p in parameters(trainer).items()})
    for key, expected in moved[0].items():
        # AdamW's first steps are signs of gradients: a few tiny ones may round to the other side.
        wrong = (moved[1][key] - expected).abs() > 0.1 * expected.abs() + 1e-5
        assert wrong.double().mean() < 0.05, key
