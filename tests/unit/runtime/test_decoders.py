"""The fused decoder and the prototype against the evaluation's engine, token by token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.conftest import TINY
from tests.needs import GPU, needs
from tests.unit.model.test_decoding import random_maps

from residual_mass.core.settings import AnchorSpec, MapSpec
from residual_mass.methods.arms import ArmSpec
from residual_mass.model.engine import SharedPrefillEngine
from residual_mass.model.hook import Prefill, prefill
from residual_mass.model.loading import Backbone, load_backbone
from residual_mass.model.phi_maps import PhiMaps
from residual_mass.model.prefix import retrieved_by
from residual_mass.model.static_decode import StaticDecoder, fill_buffers
from residual_mass.runtime.prototype import PrototypeDecoder
from residual_mass.study.labels import METHODS

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


@pytest.mark.parametrize("budget", [5.0, 20.0, 100.0])
@pytest.mark.parametrize("method", METHODS)
def test_both_decode_what_the_engine_decodes(
    method: str, budget: float, tiny_backbone: Backbone, phi: PhiMaps, prompts: list[list[int]]
) -> None:
    arm = ArmSpec(method, None if method == "full" else budget)
    expected = engine_tokens(tiny_backbone, arm, phi, prompts)
    read = prefill(tiny_backbone.model, prompts)
    k = retrieved_by(arm, LENGTH, ANCHORS, None)
    fused = StaticDecoder(tiny_backbone.model, fill_buffers([fresh(read)], STEPS), method, k, ANCHORS, phi, STEPS)
    prototype = PrototypeDecoder(tiny_backbone.model, fresh(read), method, k, ANCHORS, phi, STEPS)
    for decoder in (fused, prototype):
        for _ in range(2):  # a second run starts from the same prompt
            decoder.prepare()
            assert decoder.run(read.next_token).tolist() == expected
    torch.testing.assert_close(fused.logits, prototype.logits, rtol=1e-3, atol=1e-3)


def test_rows_that_were_read_one_by_one(tiny_backbone: Backbone, phi: PhiMaps, prompts: list[list[int]]) -> None:
    together = prefill(tiny_backbone.model, prompts)
    singly = [prefill(tiny_backbone.model, [prompt]) for prompt in prompts]
    first = torch.cat([read.next_token for read in singly])
    assert torch.equal(first, together.next_token)
    tokens = [
        StaticDecoder(tiny_backbone.model, fill_buffers(reads, STEPS), "topk_phi", 5, ANCHORS, phi, STEPS).run(first)
        for reads in ([fresh(together)], [fresh(read) for read in singly])
    ]
    assert torch.equal(*tokens)


def test_what_a_step_reads_lies_in_rows(tiny_backbone: Backbone, phi: PhiMaps, prompts: list[list[int]]) -> None:
    """Kernels take the buffers as they are, and the torch path would copy them anew in every step."""
    caches = fill_buffers([prefill(tiny_backbone.model, prompts)], STEPS)
    decoder = StaticDecoder(tiny_backbone.model, caches, "topk_phi", 5, ANCHORS, phi, STEPS)
    tensors = [x for cache in decoder.caches for x in cache if isinstance(x, torch.Tensor)]
    assert len(tensors) == 7 * len(caches)
    assert all(x.is_contiguous() for x in tensors)


@pytest.mark.gpu
@needs(GPU)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_graphs_replay_what_runs_without_them(
    method: str, batch: int, tiny_assets: Path, phi: PhiMaps, prompts: list[list[int]]
) -> None:
    backbone = load_backbone(TINY, tiny_assets, torch.device("cuda"))
    read = prefill(backbone.model, prompts[:batch])
    arguments = (method, 5, ANCHORS, phi, STEPS)
    plain = StaticDecoder(backbone.model, fill_buffers([fresh(read)], STEPS), *arguments)
    recorded = StaticDecoder(backbone.model, fill_buffers([fresh(read)], STEPS), *arguments)
    recorded.prepare()
    assert len(recorded.graphs) == (STEPS if method == "full" else 1) and not plain.graphs
    assert plain.attention.__module__ == recorded.attention.__module__ == "residual_mass.core.fused.triton_path"
    for first in (read.next_token, read.next_token + 1, read.next_token):
        assert torch.equal(recorded.run(first).clone(), plain.run(first))
        torch.testing.assert_close(recorded.logits, plain.logits, rtol=1e-4, atol=1e-4)
    prototype = PrototypeDecoder(backbone.model, fresh(read), *arguments)
    prototype.prepare()
    assert torch.equal(prototype.run(read.next_token), plain.run(read.next_token))
