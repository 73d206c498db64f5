"""Our decoders and the prototype against the evaluation's engine, token by token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.conftest import TINY
from tests.needs import GPU, needs
from tests.unit.model.test_decoding import random_maps
from transformers import PreTrainedModel

from residual_mass.decode.backend import Backend, Prefill
from residual_mass.decode.engine import SharedPrefillEngine
from residual_mass.decode.recording import prefill
from residual_mass.decode.terms import retrieved_by
from residual_mass.decode.torch_backend import TorchBackend
from residual_mass.gpu.backend import TritonBackend
from residual_mass.model.loading import Backbone, load_backbone
from residual_mass.model.phi_maps import PhiMaps
from residual_mass.runtime.decoders import TextDecoder
from residual_mass.runtime.prototype import PrototypeDecoder
from residual_mass.spec.arms import ArmSpec
from residual_mass.spec.labels import PAPER_METHODS
from residual_mass.spec.settings import AnchorSpec, MapSpec

ANCHORS, STEPS, LENGTH = AnchorSpec(4, 16), 10, 150


@pytest.fixture(scope="module", params=["rezero", "hedgehog"])
def phi(request: pytest.FixtureRequest, tiny_backbone: Backbone) -> PhiMaps:
    return random_maps(tiny_backbone, MapSpec(request.param, d_emb=24, d_phi=16))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return torch.randint(2, 258, (2, LENGTH), generator=torch.Generator().manual_seed(1)).tolist()


def fresh(read: Prefill) -> Prefill:
    """The same prefill, to be used up."""
    return read._replace(layers=dict(read.layers))


def engine_tokens(backbone: Backbone, arm: ArmSpec, phi: PhiMaps | None, prompts: list[list[int]]) -> list[list[int]]:
    engine = SharedPrefillEngine(backbone, [arm], ANCHORS, phi, nominal_length=None)
    ended = backbone.model.generation_config.eos_token_id
    backbone.model.generation_config.eos_token_id = None  # the decoders under test know no end
    try:
        return [row[0].tokens[1:] for row in engine.generate(prompts, STEPS + 1)]
    finally:
        backbone.model.generation_config.eos_token_id = ended


def decoder_of(
    kind: type[Backend], model: PreTrainedModel, arm: ArmSpec, phi: PhiMaps | None, read: Prefill
) -> TextDecoder:
    backend = kind.open(model, arm, ANCHORS, phi if arm.needs_maps else None, None, STEPS)
    backend.take(read)
    return TextDecoder(model, backend, STEPS)


@pytest.mark.parametrize("budget", [5.0, 20.0, 100.0])
@pytest.mark.parametrize("method", PAPER_METHODS)
def test_both_decode_what_the_engine_decodes(
    method: str, budget: float, tiny_backbone: Backbone, phi: PhiMaps, prompts: list[list[int]]
) -> None:
    arm = ArmSpec(method, None if method == "full" else budget)
    expected = engine_tokens(tiny_backbone, arm, phi, prompts)
    read = prefill(tiny_backbone.model, prompts)
    k = retrieved_by(arm, LENGTH, ANCHORS, None)
    ours = decoder_of(TorchBackend, tiny_backbone.model, arm, phi, fresh(read))
    prototype = PrototypeDecoder(tiny_backbone.model, fresh(read), method, k, ANCHORS, phi, STEPS)
    for decoder in (ours, prototype):
        for _ in range(2):  # a second run starts from the same prompt
            decoder.prepare()
            assert decoder.run(read.next_token).tolist() == expected
    torch.testing.assert_close(ours.logits, prototype.logits, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@needs(GPU)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("method", PAPER_METHODS)
def test_graphs_replay_what_runs_without_them(
    method: str, batch: int, tiny_assets: Path, phi: PhiMaps, prompts: list[list[int]]
) -> None:
    backbone = load_backbone(TINY, tiny_assets, torch.device("cuda"))
    read = prefill(backbone.model, prompts[:batch])
    arm = ArmSpec(method, None if method == "full" else 5.0)
    plain = decoder_of(TorchBackend, backbone.model, arm, phi, fresh(read))
    recorded = decoder_of(TritonBackend, backbone.model, arm, phi, fresh(read))
    k = retrieved_by(arm, LENGTH, ANCHORS, None)
    prototype = PrototypeDecoder(backbone.model, fresh(read), method, k, ANCHORS, phi, STEPS)
    for first in (read.next_token, read.next_token + 1, read.next_token):
        for decoder in (plain, recorded, prototype):
            decoder.prepare()
        expected = plain.run(first)
        assert torch.equal(recorded.run(first), expected)
        assert torch.equal(prototype.run(first), expected)
        torch.testing.assert_close(recorded.logits, plain.logits, rtol=1e-4, atol=1e-4)
    assert recorded.recorded and not plain.recorded
    assert len(recorded.text.backend.graphs) == (STEPS if method == "full" else 1)
