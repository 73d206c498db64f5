"""On a GPU: the same tokens as on the CPU, and runs in bfloat16."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from tests.conftest import TINY, byte_tokenizer
from tests.needs import GPU, needs

from residual_mass.decode.engine import SharedPrefillEngine
from residual_mass.model.loading import load_backbone
from residual_mass.model.phi_maps import PhiMaps
from residual_mass.spec.arms import ArmSpec
from residual_mass.spec.settings import AnchorSpec, MapSpec

pytestmark = [pytest.mark.gpu, needs(GPU)]
ARMS = [ArmSpec("full"), ArmSpec("topk", 20.0), ArmSpec("topk_phi", 20.0), ArmSpec("topk_phi_nosub", 20.0)]


def generate(assets: Path, device: str, dtype: str, d_phi: int = 8) -> list[list[list[int]]]:
    spec = dataclasses.replace(TINY, dtype=dtype)
    backbone = load_backbone(spec, assets, torch.device(device))
    torch.manual_seed(0)
    facts = {"model_id": spec.model_id, "revision": spec.revision}
    phi = PhiMaps(backbone.shape, MapSpec(d_emb=24, d_phi=d_phi), facts)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(2, 258, (n,), generator=generator).tolist() for n in (150, 97)]
    engine = SharedPrefillEngine(backbone, ARMS, AnchorSpec(), phi.requires_grad_(False), nominal_length=None)
    return [[g.tokens for g in row] for row in engine.generate(prompts, 12)]


def test_engine_tokens_equal_those_of_the_cpu(tiny_assets: Path) -> None:
    assert generate(tiny_assets, "cuda", "float32") == generate(tiny_assets, "cpu", "float32")


def test_bfloat16_decodes_to_the_end(tiny_assets: Path) -> None:
    end = byte_tokenizer().eos_token_id
    for tokens in (tokens for row in generate(tiny_assets, "cuda", "bfloat16") for tokens in row):
        assert len(tokens) == 12 or tokens[-1] == end
