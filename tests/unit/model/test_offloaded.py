"""Models whose weights accelerate keeps in memory or on disk between passes, against the same models without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import ModelHook, SequentialHook, add_hook_to_module
from tests.conftest import byte_tokenizer, tiny_llama
from tests.needs import KERNELS, needs
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel

from residual_mass import PackedCache, PhiMaps, partial_generate, partial_kv
from residual_mass.decode.engine import SharedPrefillEngine
from residual_mass.decode.forced import ForcedDecoder
from residual_mass.methods import METHODS, Method
from residual_mass.model.layers import device_of
from residual_mass.model.loading import wrap_model
from residual_mass.model.phi_maps import HeadShape
from residual_mass.spec.arms import ArmSpec
from residual_mass.spec.settings import AnchorSpec, MapSpec

CPU = torch.device("cpu")
SPREAD = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu"}


def made(tied: bool = False) -> LlamaForCausalLM:
    """Heads that the kernels serve, frozen; with `tied` one matrix embeds and predicts."""
    model = tiny_llama(layers=2, heads=2, kv_heads=1, width=64)
    if tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    model.generation_config.eos_token_id = None
    return model.requires_grad_(False)


WAYS: dict[str, Callable[[PreTrainedModel, Path], PreTrainedModel]] = {
    "memory": lambda model, _: cpu_offload(model, execution_device=CPU),
    "disk": lambda model, folder: disk_offload(model, folder, execution_device=CPU),
    "a layer": lambda model, folder: dispatch_model(
        model, SPREAD | {"lm_head": "cpu"}, main_device="cpu", offload_dir=folder
    ),
    "the embedding": lambda model, folder: dispatch_model(
        model, SPREAD | {"model.embed_tokens": "disk", "lm_head": "disk"}, main_device="cpu", offload_dir=folder
    ),
}
ways = pytest.mark.parametrize("way", WAYS)


def offloaded(way: str, folder: Path, tied: bool = False) -> PreTrainedModel:
    model = WAYS[way](made(tied), folder)
    assert any(parameter.is_meta for parameter in model.parameters())
    return model


def prompt(length: int) -> Tensor:
    return torch.randint(2, 258, (1, length), generator=torch.Generator().manual_seed(length))


def maps_of(model: PreTrainedModel, method: Method) -> PhiMaps | None:
    torch.manual_seed(0)
    maps = PhiMaps(HeadShape.of(model.config), MapSpec(d_emb=12, d_phi=4)).requires_grad_(False)
    return maps if method.needs_maps else None


def texts(model: PreTrainedModel, method: Method) -> list[Tensor]:
    settings = {"method": method, "budget": 0.3 if method.chooses else None, "phi": maps_of(model, method)}
    found = [partial_generate(model, prompt(60), max_new_tokens=4, **settings)]
    with partial_kv(model, **settings):
        found.append(model.generate(prompt(60), max_new_tokens=4, do_sample=False, pad_token_id=1))
    return found


@pytest.mark.parametrize("method", METHODS, ids=lambda one: one.name)
def test_texts_are_those_without_it(method: Method, tmp_path: Path) -> None:
    for ours, theirs in zip(texts(offloaded("disk", tmp_path), method), texts(made(), method), strict=True):
        assert torch.equal(ours, theirs)


@ways
@pytest.mark.parametrize("tied", [False, True])
def test_wherever_weights_are(way: str, tied: bool, tmp_path: Path) -> None:
    model = offloaded(way, tmp_path, tied)
    for method in (one for one in METHODS if one.name in ("topk", "full", "topk_phi")):
        for ours, theirs in zip(texts(model, method), texts(made(tied), method), strict=True):
            assert torch.equal(ours, theirs)
    assert device_of(model) == CPU


@ways
def test_prompts_that_are_shared(way: str, tmp_path: Path) -> None:
    arms = [ArmSpec("full"), ArmSpec("topk_phi", 30.0), ArmSpec("topk_moments", 30.0)]
    prompts, given, found = [prompt(60)[0].tolist(), prompt(40)[0].tolist()], [5, 6, 7], []
    for model in (made(), offloaded(way, tmp_path)):
        backbone = wrap_model(model, byte_tokenizer(), "m", "r")
        maps = PhiMaps(backbone.shape, MapSpec(d_emb=12, d_phi=4), {"model_id": "m", "revision": "r"})
        for parameter in maps.parameters():
            nn.init.constant_(parameter, 0.1)
        engine = SharedPrefillEngine(backbone, arms, AnchorSpec(), maps.requires_grad_(False), None)
        tokens = [[each.tokens for each in row] for row in engine.generate(prompts, 4)]
        decoder = ForcedDecoder(engine, prompts[0])
        found.append((tokens, [decoder.full(given)[0], *decoder.logits(arms[1:], given)]))
    assert found[0][0] == found[1][0]
    for theirs, ours in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@needs(KERNELS)
@ways
def test_a_packed_cache(way: str, tmp_path: Path) -> None:
    found = []
    for model in (made(), offloaded(way, tmp_path)):
        cache = PackedCache(model, "scan4")
        with partial_kv(model, "scan4", 0.4, cache=cache):
            options = {"past_key_values": cache, "do_sample": False, "pad_token_id": 1}
            found.append(model.generate(prompt(90), max_new_tokens=4, **options))
    assert torch.equal(*found)


class Runs(ModelHook):
    """Of a module that runs on another device than its weights are on, which no test can have."""

    def __init__(self, execution_device: int | str) -> None:
        self.execution_device = execution_device


@pytest.mark.parametrize("whole", [False, True], ids=["embedding", "model"])
@pytest.mark.parametrize("chained", [False, True])
def test_token_ids_go_to_where_the_embedding_runs(whole: bool, chained: bool) -> None:
    model = made()
    hook = SequentialHook(ModelHook(), Runs("meta")) if chained else Runs("meta")
    add_hook_to_module(model if whole else model.model.embed_tokens, hook)
    assert device_of(model).type == "meta"


def test_the_first_parameter_may_be_elsewhere() -> None:
    model = made()
    model.register_parameter("adapter", nn.Parameter(torch.zeros(2, device="meta")))
    assert next(model.parameters()).is_meta and device_of(model) == CPU


def test_a_model_without_weights_is_refused_in_one_line() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(made().config)
    with pytest.raises(ValueError, match="^LlamaForCausalLM has no weights, because it is on the meta device: load.*$"):
        partial_generate(model, prompt(9), max_new_tokens=2, method="topk", budget=0.5)
