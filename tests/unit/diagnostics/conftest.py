"""Held-out text and random maps for the tiny backbone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.conftest import TINY, save_tiny, tiny_llama
from tests.records import give_manifest, record

from residual_mass.model.loading import Backbone, load_backbone
from residual_mass.model.phi_maps import PhiMaps
from residual_mass.spec.settings import MapSpec


@pytest.fixture
def folder(tiny_assets: Path, tmp_path: Path) -> Path:
    (tmp_path / "qa").mkdir()
    (tmp_path / "models").symlink_to(tiny_assets / "models")
    give_manifest(tmp_path)
    items = [{"context": [[f"Title {i}", [f"Paragraph number {i} of {i * i}. ", "It ends."]]]} for i in range(300)]
    (tmp_path / "qa" / "hotpotqa.json").write_text(json.dumps(items))
    return tmp_path


REZERO = MapSpec(d_emb=20, d_phi=8)


def random_maps(backbone: Backbone, folder: Path, kind: MapSpec = REZERO, length: int = 512) -> Path:
    torch.manual_seed(5)
    facts = {"model_id": TINY.model_id, "revision": TINY.revision, "length": length}
    PhiMaps(backbone.shape, kind, facts).save(path := folder / f"{kind.kind}.safetensors")
    record(path)
    return path


@pytest.fixture
def phi(tiny_backbone: Backbone, tmp_path: Path) -> Path:
    return random_maps(tiny_backbone, tmp_path)


def with_groups_of_three(folder: Path, out: Path) -> tuple[Backbone, Path]:
    """Makes the folder's tiny backbone one of a single layer with 6 query heads on 2 KV heads; that and maps for it."""
    (folder / "models").unlink()  # a link to those of all tests
    save_tiny(tiny_llama(layers=1, heads=6, kv_heads=2), folder)
    backbone = load_backbone(TINY, folder, torch.device("cpu"))
    return backbone, random_maps(backbone, out)
