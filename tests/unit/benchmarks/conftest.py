"""Prompts frozen from the small assets folder."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import nltk
import pytest
import wonderwords
from tests.records import record
from tests.small_assets import MODEL_ID, REVISION, write_assets

from residual_mass.benchmarks import prompts
from residual_mass.model.loading import load_backbone
from residual_mass.model.phi_maps import HeadShape, PhiMaps
from residual_mass.spec.settings import MapSpec
from residual_mass.spec.specs import BackboneSpec, PromptsSpec
from residual_mass.spec.tasks import tasks_of


@pytest.fixture(scope="session")
def benchmark_assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assets = tmp_path_factory.mktemp("assets")
    write_assets(assets)
    return assets


class FewWords(wonderwords.RandomWord):
    """One word in a hundred."""

    def __init__(self) -> None:
        super().__init__()
        self._categories = {kind: words[::100] for kind, words in self._categories.items()}


@pytest.fixture(scope="session")
def few_words(benchmark_assets: Path) -> None:
    """Imported, the harness's RULER joins all adjectives and nouns, which takes 10 s, and downloads what NLTK lacks."""
    nltk.data.path.insert(0, str(benchmark_assets / "nltk_data"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wonderwords, "RandomWord", FewWords)
        importlib.import_module("lm_eval.tasks.ruler.prepare_niah")


@pytest.fixture(scope="session")
def tokenizer(benchmark_assets: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(benchmark_assets / "models" / "tiny-llama")


@pytest.fixture(scope="session")
def prompts_spec() -> PromptsSpec:
    return PromptsSpec(
        "ruler", "1k", "tiny", MODEL_ID, REVISION, "assets", "assets", examples=2, seed=3, recipe=1,
        tasks=tasks_of("ruler", 1024),
    )  # fmt: skip


@pytest.fixture(scope="session")
def manifest(
    few_words: None, benchmark_assets: Path, prompts_spec: PromptsSpec, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Frozen prompts of all tasks at 1k; read only."""
    out = tmp_path_factory.mktemp("prompts") / "manifest.json"
    prompts.run(prompts_spec, benchmark_assets, out)
    return out


@pytest.fixture(scope="session")
def backbone_spec(prompts_spec: PromptsSpec) -> BackboneSpec:
    """Of the small assets."""
    return BackboneSpec(
        "test", prompts_spec.model_id, prompts_spec.revision, "assets", "float32", "tiny", 2048, False, name="tiny"
    )


@pytest.fixture(scope="session")
def phi(benchmark_assets: Path, backbone_spec: BackboneSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random feature maps of it; read only."""
    import torch

    torch.manual_seed(1)
    backbone = load_backbone(backbone_spec, benchmark_assets)
    training = {"model_id": backbone_spec.model_id, "revision": backbone_spec.revision, "length": 1024}
    path = tmp_path_factory.mktemp("phi") / "tiny_1k.safetensors"
    PhiMaps(HeadShape.of(backbone.model.config), MapSpec(d_emb=8, d_phi=8), training).save(path)
    record(path)
    return path
