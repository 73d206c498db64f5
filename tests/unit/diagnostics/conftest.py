"""Held-out text and random maps for the tiny backbone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.conftest import TINY

from residual_mass.backbones.loading import Backbone
from residual_mass.backbones.phi_maps import PhiMaps
from residual_mass.specs import MapSpec


@pytest.fixture
def folder(tiny_assets: Path, tmp_path: Path) -> Path:
    (tmp_path / "qa").mkdir()
    (tmp_path / "models").symlink_to(tiny_assets / "models")
    items = [{"context": [[f"Title {i}", [f"Paragraph number {i} of {i * i}. ", "It ends."]]]} for i in range(300)]
    (tmp_path / "qa" / "hotpotqa.json").write_text(json.dumps(items))
    return tmp_path


@pytest.fixture
def phi(tiny_backbone: Backbone, tmp_path: Path) -> Path:
    torch.manual_seed(5)
    facts = {"model_id": TINY.model_id, "revision": TINY.revision, "length": 512}
    PhiMaps(tiny_backbone.shape, MapSpec(d_emb=20, d_phi=8), facts).save(tmp_path / "phi.safetensors")
    return tmp_path / "phi.safetensors"
