"""Decoding that runs out of memory, and models and maps whose outputs are not finite."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import TINY, save_tiny
from tests.records import give_manifest, record
from tests.refusals import refused
from tests.small_assets import MODEL_ID, REVISION, write_assets
from tests.unit.model.test_decoding import random_maps
from torch import nn

from residual_mass.benchmarks import generate, prompts
from residual_mass.decode.engine import NotFiniteError, SharedPrefillEngine, Work
from residual_mass.diagnostics import capture, kernels, residual_errors
from residual_mass.files import read_jsonl
from residual_mass.model.loading import Backbone, load_backbone
from residual_mass.model.phi_maps import HeadShape, PhiMaps
from residual_mass.spec.arms import ArmSpec
from residual_mass.spec.settings import AnchorSpec, MapSpec, MapsSpec
from residual_mass.spec.specs import (
    BackboneSpec,
    CaptureSpec,
    GenerateSpec,
    KernelsSpec,
    PromptsSpec,
    ResidualErrorsSpec,
)

TASKS = tuple(f"babilong_qa{number}" for number in range(1, 6))
SMALL = BackboneSpec("test", MODEL_ID, REVISION, "assets", "float32", "tiny", 2048, False, name="tiny")
ARMS = (ArmSpec("full"), ArmSpec("topk", 3.0), ArmSpec("topk_phi", 3.0, "1k"))
SPEC = GenerateSpec(
    study="test", backbone=SMALL, benchmark="babilong", length="1k", examples=2,
    tasks=("babilong_qa1", "babilong_qa2", "babilong_qa3"), arms=ARMS, anchors=AnchorSpec(),
    budget_length="nominal", chat_template=False, truncate_to="1k",
    maps=(MapsSpec("1k", 1024),), answer_margin=0, stop_when_saturated=False, batch_tokens=6 * 1024,
    allow_extrapolation=False, recipe=1,
)  # fmt: skip
Generate = Callable[[GenerateSpec], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Assets, prompts of five tasks and random maps in one folder."""
    folder = tmp_path_factory.mktemp("small")
    write_assets(folder / "assets")
    spec = PromptsSpec(
        "babilong", "1k", "tiny", MODEL_ID, REVISION, "assets", "assets", examples=2, seed=3, recipe=1, tasks=TASKS
    )
    prompts.run(spec, folder / "assets", folder / "prompts" / "manifest.json")
    torch.manual_seed(1)
    shape = HeadShape.of(load_backbone(SMALL, folder / "assets").model.config)
    training = {"model_id": MODEL_ID, "revision": REVISION, "length": 1024}
    PhiMaps(shape, MapSpec(d_emb=8, d_phi=8), training).save(folder / "phi.safetensors")
    record(folder / "phi.safetensors")
    return folder


@pytest.fixture
def run(small: Path, tmp_path: Path) -> Generate:
    def rows(spec: GenerateSpec) -> list[dict[str, Any]]:
        store, out = tmp_path / "store.jsonl", tmp_path / "all.jsonl"
        store.unlink(missing_ok=True)
        manifest = small / "prompts" / "manifest.json"
        generate.run(spec, small / "assets", manifest, [small / "phi.safetensors"], store, out)
        return read_jsonl(out)

    return rows


@contextmanager
def room_for(rows: int, tried: list[int]) -> Iterator[None]:
    """Within the context every decode step of more rows than that runs out of memory, in the model's own forward."""

    def check(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        if isinstance(module, nn.Embedding) and output.shape[1] == 1:
            tried.append(len(output))
            if len(output) > rows:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has no more")

    hook = nn.modules.module.register_module_forward_hook(check)
    try:
        yield
    finally:
        hook.remove()


def test_out_of_memory_halves_the_batches_and_changes_nothing_else(
    run: Generate, caplog: pytest.LogCaptureFixture
) -> None:
    alone = run(SPEC)
    tried: list[int] = []
    with room_for(2 * len(ARMS), tried), caplog.at_level(logging.WARNING):
        assert run(SPEC) == alone
    told = [record.getMessage() for record in caplog.records if "out of memory" in record.getMessage()]
    assert len(told) == sum(rows > 2 * len(ARMS) for rows in tried) == 2  # six prompts, then three; never again
    assert told[0].startswith("out of memory with 6 prompts of ") and told[1].startswith("out of memory with 3 ")
    assert {len(line.splitlines()) for line in told} == {1}
    tried.clear()
    with room_for(len(ARMS), tried):  # two batches of three; the second is not tried whole
        run(replace(SPEC, batch_tokens=3 * 1024))
    assert [rows for rows in tried if rows > len(ARMS)] == [3 * len(ARMS)]
    with room_for(0, []), pytest.raises(ValueError) as caught:
        run(SPEC)
    said = str(caught.value)
    assert said.startswith("babilong_qa") and " out of memory with this prompt alone (" in said
    assert said.endswith("use a device with more memory, or shorter prompts (truncate_to)")


# ---- what is not finite ----------------------------------------------------------------------------------------------

NAN, LARGE = float("nan"), 3e38
AT_FAULT = "not finite; test/Tiny-Llama has damaged weights or overflows in float32: fetch it again, or choose another"
PROMPTS = [list(range(5, 60)), list(range(30, 70))]


@pytest.fixture
def backbone(tiny_assets: Path) -> Backbone:
    """One that a test may damage."""
    return load_backbone(TINY, tiny_assets, torch.device("cpu"))


@pytest.fixture
def phi(backbone: Backbone) -> PhiMaps:
    return random_maps(backbone)


def engine(backbone: Backbone, phi: PhiMaps) -> SharedPrefillEngine:
    arms = [ArmSpec("topk", 40.0), ArmSpec("topk_phi", 40.0)]
    return SharedPrefillEngine(backbone, arms, AnchorSpec(2, 3), phi, None)


@pytest.mark.parametrize(
    ("name", "at", "value", "prompt", "what"),
    [
        ("model.layers.1.self_attn.k_proj", (3, 5), NAN, 0, "the keys or values of layer 1 are"),
        ("model.embed_tokens", 65, NAN, 1, "the keys or values of layer 0 are"),  # only the second prompt reads it
        ("lm_head", 7, NAN, 0, "the logits after it are"),
    ],
)
def test_a_weight_that_is_no_number_names_its_place(
    name: str, at: Any, value: float, prompt: int, what: str, backbone: Backbone, phi: PhiMaps
) -> None:
    backbone.model.get_submodule(name).weight.data[at] = value
    with pytest.raises(NotFiniteError) as caught:
        engine(backbone, phi).generate(PROMPTS, 4)
    assert caught.value.prompt == prompt and str(caught.value).startswith(f"{what} {AT_FAULT}")


@pytest.mark.parametrize("side", ["key", "query"])
def test_maps_that_overflow_are_named_and_do_not_pass_for_top_k(side: str, backbone: Backbone, phi: PhiMaps) -> None:
    getattr(phi, side)[2].out_bias.data[:] = getattr(phi, side)[2].out.data[:] = LARGE
    with pytest.raises(NotFiniteError) as caught:
        engine(backbone, phi).generate(PROMPTS, 4)
    where = "the summary of layer 2 is" if side == "key" else "the logits of generated token 2 under topk_phi are"
    assert str(caught.value).startswith(f"{where} not finite; the feature maps are damaged, or diverged")


def test_a_model_that_fails_while_it_decodes_is_named(backbone: Backbone, phi: PhiMaps) -> None:
    """Weights that are damaged between the prompt and the third token; a try without memory is no work."""
    made = engine(backbone, phi)
    with room_for(0, []), pytest.raises(torch.OutOfMemoryError):
        made.generate(PROMPTS, 4)
    assert made.work == Work()
    calls = []

    def damage(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        calls.append(output)
        if len(calls) == len(PROMPTS) + 1:
            backbone.model.lm_head.weight.data[:] = NAN

    backbone.model.lm_head.register_forward_hook(damage)
    with pytest.raises(NotFiniteError) as caught:
        made.generate(PROMPTS, 6)
    assert str(caught.value).startswith(f"the logits of generated token 3 under topk are {AT_FAULT}")


def test_the_generate_stage_names_task_and_example(small: Path, tmp_path: Path) -> None:
    damaged = load_backbone(SMALL, small / "assets").model
    damaged.model.layers[0].self_attn.v_proj.weight.data[0, 0] = NAN
    shutil.copytree(small / "assets", tmp_path / "assets")
    damaged.save_pretrained(tmp_path / "assets" / "models" / "tiny-llama")
    manifest = small / "prompts" / "manifest.json"
    what = r"^babilong_qa[123] example \d: the keys or values of layer 0 are not finite; "
    with pytest.raises(ValueError, match=what):
        generate.run(
            SPEC, tmp_path / "assets", manifest, [small / "phi.safetensors"], tmp_path / "store.jsonl", tmp_path / "out"
        )


def test_maps_with_a_value_that_is_no_number_are_not_loaded(phi: PhiMaps, tmp_path: Path) -> None:
    phi.key[1].up.data[0, 0, 0] = NAN
    phi.save(path := tmp_path / "phi.safetensors")
    with refused(f"{path}: key.1.up holds values that are not finite; delete the file and train again"):
        PhiMaps.load(path)


PLACE = {"study": "test", "backbone": TINY, "length": "256", "anchors": AnchorSpec(), "seed": 0, "queries": 2}
MAPS = MapsSpec("1k", 1024)


def captured(assets: Path, phi: Path, out: Path) -> None:
    spec = CaptureSpec(**PLACE, corpus="wiki", budgets=(25.0,), maps=MAPS, packs=1, recipe=1)
    capture.run(spec, assets, phi, None, out / "heads.parquet", out / "mass.parquet")


def of_one_head(assets: Path, phi: Path, out: Path) -> None:
    spec = KernelsSpec(**PLACE, corpus="wiki", budget_percent=25.0, maps=(MAPS,), layer=1, head=0, recipe=1)
    kernels.run(spec, assets, [phi], None, out / "kernels.parquet")


def compared(assets: Path, phi: Path, out: Path) -> None:
    spec = ResidualErrorsSpec(
        **PLACE, corpora=("wiki",), methods=("topk", "topk_phi"), budgets=(25.0,), maps=MAPS, packs=1,
        bootstrap_resamples=9, recipe=1,
    )  # fmt: skip
    residual_errors.run(spec, assets, phi, out / "heads.parquet", out / "errors.csv")


@pytest.mark.parametrize("fault", ["the model", "the maps"])
@pytest.mark.parametrize("stage", [captured, of_one_head, compared])
def test_diagnostics_name_the_layer_that_is_not_finite(
    stage: Callable[[Path, Path, Path], None], fault: str, backbone: Backbone, phi: PhiMaps, tmp_path: Path
) -> None:
    (assets := tmp_path / "assets" / "qa").mkdir(parents=True)
    items = ",".join(f'{{"context": [["Title {i}", ["Paragraph {i} of {i * i}. ", "It ends."]]]}}' for i in range(500))
    (assets / "hotpotqa.json").write_text(f"[{items}]")
    give_manifest(assets.parent)
    if fault == "the model":
        backbone.model.model.layers[1].self_attn.q_proj.weight.data[2, 2] = NAN
        said = "^tiny: the queries, keys or values of layer 1 are not finite; test/Tiny-Llama"
    else:
        for layer_map in (phi.key[1], phi.query[1]):
            layer_map.out.data[:] = LARGE
        said = r"layer 1.* not finite; the feature maps are damaged, or diverged"
    save_tiny(backbone.model, tmp_path / "assets")
    phi.save(file := tmp_path / "phi.safetensors")
    record(file)
    with pytest.raises(ValueError, match=said):
        stage(assets.parent, file, tmp_path / "out")
    assert not (tmp_path / "out").exists()
