"""Memory that runs out while prompts are decoded, and models and maps that give no numbers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import TINY
from tests.records import give_manifest, record
from tests.small_assets import MODEL_ID, REVISION, write_assets
from torch import nn

from residual_mass.benchmarks import generate, prompts
from residual_mass.core.settings import AnchorSpec, MapSpec, MapsSpec
from residual_mass.diagnostics import capture, kernels, residual_errors
from residual_mass.files import read_jsonl
from residual_mass.methods.arms import ArmSpec
from residual_mass.model import engine as engine_module
from residual_mass.model.engine import NotFiniteError, SharedPrefillEngine
from residual_mass.model.loading import Backbone, load_backbone
from residual_mass.model.phi_maps import HeadShape, PhiMaps, write_safetensors
from residual_mass.study.specs import (
    BackboneSpec,
    CaptureSpec,
    GenerateSpec,
    KernelsSpec,
    PromptsSpec,
    ResidualErrorsSpec,
)

SMALL = BackboneSpec("test", MODEL_ID, REVISION, "assets", "float32", "tiny", 2048, False, name="tiny")
ARMS = (ArmSpec("full"), ArmSpec("topk", 3.0), ArmSpec("topk_phi", 3.0, "1k"))
SPEC = GenerateSpec(
    study="test", backbone=SMALL, benchmark="babilong", length="1k", tasks=("babilong_qa1", "babilong_qa2"), examples=3,
    arms=ARMS, anchors=AnchorSpec(), budget_length="nominal", chat_template=False, truncate_to="1k",
    maps=(MapsSpec("1k", 1024),), answer_margin=0, stop_when_saturated=False, batch_tokens=6 * 1024,
    allow_extrapolation=False, recipe=1,
)  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Assets, prompts of two tasks and random maps in one folder."""
    folder = tmp_path_factory.mktemp("small")
    write_assets(folder / "assets")
    spec = PromptsSpec("babilong", "1k", "tiny", MODEL_ID, REVISION, "assets", "assets", examples=3, seed=3, recipe=1)
    prompts.run(spec, folder / "assets", folder / "prompts" / "manifest.json")
    torch.manual_seed(1)
    shape = HeadShape.of(load_backbone(SMALL, folder / "assets").model.config)
    training = {"model_id": MODEL_ID, "revision": REVISION, "length": 1024}
    PhiMaps(shape, MapSpec(d_emb=8, d_phi=8), training).save(folder / "phi.safetensors")
    record(folder / "phi.safetensors")
    return folder


Generate = Callable[[GenerateSpec], list[dict[str, Any]]]


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
    with room_for(0, []), pytest.raises(ValueError) as caught:
        run(SPEC)
    assert str(caught.value).startswith("babilong_qa") and " out of memory with this prompt alone (" in str(
        caught.value
    )
    assert str(caught.value).endswith("use a device with more memory, or shorter prompts (truncate_to)")


def test_the_next_batch_starts_as_small_as_the_last_one_ended(run: Generate) -> None:
    """Two batches of three; the second is not tried whole."""
    tried: list[int] = []
    with room_for(len(ARMS), tried):
        run(replace(SPEC, batch_tokens=3 * 1024))
    assert [rows for rows in tried if rows > len(ARMS)] == [3 * len(ARMS)]


# ---- what is not finite ----------------------------------------------------------------------------------------------


@pytest.fixture
def backbone(tiny_assets: Path) -> Backbone:
    """One that a test may damage."""
    return load_backbone(TINY, tiny_assets, torch.device("cpu"))


def maps_of(backbone: Backbone) -> PhiMaps:
    torch.manual_seed(2)
    return PhiMaps(backbone.shape, MapSpec(d_emb=8, d_phi=8), {"model_id": TINY.model_id, "revision": TINY.revision})


def engine(backbone: Backbone, phi: PhiMaps) -> SharedPrefillEngine:
    return SharedPrefillEngine(
        backbone, [ArmSpec("topk", 40.0), ArmSpec("topk_phi", 40.0)], AnchorSpec(2, 3), phi, None
    )


PROMPTS = [list(range(5, 60)), list(range(30, 70))]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_names_its_layer(backbone: Backbone, value: float) -> None:
    backbone.model.model.layers[1].self_attn.k_proj.weight.data[3, 5] = value
    with pytest.raises(NotFiniteError) as caught:
        engine(backbone, maps_of(backbone)).generate(PROMPTS, 4)
    assert caught.value.prompt == 0
    assert str(caught.value) == (
        "the keys or values of layer 1 are not finite; test/Tiny-Llama has damaged weights or overflows in float32: "
        "fetch it again, or choose another dtype"
    )


def test_logits_that_are_no_numbers_are_noticed_after_the_last_layer(backbone: Backbone) -> None:
    backbone.model.lm_head.weight.data[7] = float("nan")
    with pytest.raises(NotFiniteError, match=r"^the logits after it are not finite; test/Tiny-Llama has damaged"):
        engine(backbone, maps_of(backbone)).generate(PROMPTS, 4)


def test_one_prompt_among_others_is_named(backbone: Backbone) -> None:
    """An embedding that only the second prompt reads."""
    backbone.model.model.embed_tokens.weight.data[65] = float("nan")
    with pytest.raises(NotFiniteError) as caught:
        engine(backbone, maps_of(backbone)).generate(PROMPTS, 4)
    assert caught.value.prompt == 1


@pytest.mark.parametrize("side", ["key", "query"])
def test_maps_that_overflow_are_named_and_do_not_pass_for_top_k(backbone: Backbone, side: str) -> None:
    phi = maps_of(backbone)
    getattr(phi, side)[2].out_bias.data[:] = 3e38
    getattr(phi, side)[2].out.data[:] = 3e38
    with pytest.raises(NotFiniteError) as caught:
        engine(backbone, phi).generate(PROMPTS, 4)
    where = "the summary of layer 2 is" if side == "key" else "the logits of generated token 2 under topk_phi are"
    assert str(caught.value).startswith(f"{where} not finite; the feature maps are damaged, or diverged")


def test_a_model_that_fails_while_it_decodes_is_named(backbone: Backbone) -> None:
    """Weights that are damaged between the prompt and the third token."""
    calls = []

    def damage(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        calls.append(output)
        if len(calls) == len(PROMPTS) + 1:
            backbone.model.lm_head.weight.data[:] = float("nan")

    backbone.model.lm_head.register_forward_hook(damage)
    with pytest.raises(NotFiniteError) as caught:
        engine(backbone, maps_of(backbone)).generate(PROMPTS, 6)
    assert str(caught.value).startswith(
        "the logits of generated token 3 under topk are not finite; test/Tiny-Llama has"
    )


def test_what_a_finished_row_decodes_does_not_stop_the_others(
    backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row ends with its first token and decodes on, to no number; its example and its arm have others."""
    phi = maps_of(backbone)
    expected = engine(backbone, phi).generate(PROMPTS, 5)
    batch_of = engine_module.greedy

    def overflowing(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        token, finite = batch_of(logits)
        return token, finite & (torch.arange(len(finite)) != 0)

    add, ends = engine_module._Batch.add, iter([True])

    def ended(batch: engine_module._Batch, tokens: list[int]) -> None:
        add(batch, tokens)
        if next(ends, False):
            batch.finish[0][0] = "eos"

    monkeypatch.setattr(engine_module._Batch, "add", ended)
    monkeypatch.setattr(engine_module, "greedy", overflowing)
    found = engine(backbone, phi).generate(PROMPTS, 5)
    assert (found[0][0].finish, len(found[0][0].tokens)) == ("eos", 1)
    assert found[0][1] == expected[0][1] and found[1] == expected[1]


def test_keys_that_overflow_are_not_blamed_on_the_maps(backbone: Backbone) -> None:
    made = engine(backbone, maps_of(backbone))
    layers, _ = made.read([PROMPTS[0]])
    layers[1].keys[0, 0, 7, 3] = float("inf")
    with pytest.raises(NotFiniteError, match=r"^the keys or values of layer 1 are not finite; test/Tiny-Llama has"):
        made._decoder(layers, [len(PROMPTS[0])], 2)


def test_tries_that_run_out_of_memory_do_not_count_as_work(backbone: Backbone) -> None:
    made = engine(backbone, maps_of(backbone))
    with room_for(0, []), pytest.raises(torch.OutOfMemoryError):
        made.generate(PROMPTS, 4)
    assert made.work == engine_module.Work()


def test_the_generate_stage_names_task_and_example(small: Path, run: Generate, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(spec: BackboneSpec, assets: Path) -> Backbone:
        made = load_backbone(spec, assets)
        made.model.model.layers[0].self_attn.v_proj.weight.data[0, 0] = float("nan")
        return made

    monkeypatch.setattr(generate, "load_backbone", damaged)
    with pytest.raises(
        ValueError, match=r"^babilong_qa[12] example \d: the keys or values of layer 0 are not finite; "
    ):
        run(SPEC)


def test_maps_with_a_value_that_is_no_number_are_not_loaded(backbone: Backbone, tmp_path: Path) -> None:
    phi = maps_of(backbone)
    phi.key[1].up.data[0, 0, 0] = float("nan")
    phi.save(path := tmp_path / "phi.safetensors")
    with pytest.raises(ValueError) as caught:
        PhiMaps.load(path)
    assert str(caught.value) == f"{path}: key.1.up holds values that are not finite; delete the file and train again"


@pytest.mark.parametrize(
    "header",
    [
        "{}", "[1]", '{"shape": 1, "map": {}, "training": {}}', "{" * 9000, "no JSON",
        '{"shape": {"layers": 1000000000, "query_heads": 1, "kv_heads": 1, "head_dim": 1}, "map": {}, "training": {}}',
        '{"shape": {"layers": 1, "query_heads": -1, "kv_heads": 1, "head_dim": 0}, "map": {}, "training": {}}',
        '{"shape": {"layers": 1, "query_heads": 1, "kv_heads": 1, "head_dim": 9}, "map": [], "training": 1}',
    ],
)  # fmt: skip
def test_a_header_that_describes_no_maps_is_refused(header: str, tmp_path: Path) -> None:
    write_safetensors(path := tmp_path / "phi.safetensors", {"a": torch.zeros(1)}, {"residual_mass_phi": header})
    with pytest.raises(ValueError) as caught:
        PhiMaps.load(path)
    assert str(caught.value).startswith(f"{path}: ") and str(caught.value).endswith("; delete the file and train again")


MAPS, PLACE = (MapsSpec("1k", 1024),), {"corpus": "wiki", "length": "256"}
DIAGNOSTICS: dict[str, Callable[[Path, Path, Path], None]] = {
    "capture": lambda assets, phi, out: capture.run(
        CaptureSpec(study="test", backbone=TINY, **PLACE, budgets=(25.0,), anchors=AnchorSpec(), maps=MAPS[0], packs=1,
                    queries=2, seed=0, recipe=1),
        assets, phi, None, out / "heads.parquet", out / "mass.parquet",
    ),
    "kernels": lambda assets, phi, out: kernels.run(
        KernelsSpec(study="test", backbone=TINY, **PLACE, budget_percent=25.0, anchors=AnchorSpec(), maps=MAPS, layer=1,
                    head=0, queries=2, seed=0, recipe=1),
        assets, [phi], None, out / "kernels.parquet",
    ),
    "residual-errors": lambda assets, phi, out: residual_errors.run(
        ResidualErrorsSpec(study="test", backbone=TINY, corpora=("wiki",), length="256", methods=("topk", "topk_phi"),
                           budgets=(25.0,), anchors=AnchorSpec(), maps=MAPS[0], packs=1, queries=2, seed=0,
                           bootstrap_resamples=9, recipe=1),
        assets, phi, out / "heads.parquet", out / "errors.csv",
    ),
}  # fmt: skip


@pytest.fixture
def folder(tiny_assets: Path, small: Path, tmp_path: Path) -> Path:
    """Assets of the byte-level model, with text."""
    (assets := tmp_path / "assets").mkdir()
    (assets / "models").symlink_to(tiny_assets / "models")
    give_manifest(assets)
    items = ",".join(f'{{"context": [["Title {i}", ["Paragraph {i} of {i * i}. ", "It ends."]]]}}' for i in range(500))
    (assets / "qa").mkdir()
    (assets / "qa" / "hotpotqa.json").write_text(f"[{items}]")
    return assets


@pytest.mark.parametrize("stage", DIAGNOSTICS)
def test_diagnostics_name_the_layer_that_is_not_finite(
    stage: str, backbone: Backbone, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maps_of(backbone).save(phi := tmp_path / "phi.safetensors")
    record(phi)
    DIAGNOSTICS[stage](folder, phi, tmp_path / "whole")
    assert any((tmp_path / "whole").iterdir())
    backbone.model.model.layers[1].self_attn.q_proj.weight.data[2, 2] = float("nan")
    module = {"capture": capture, "kernels": kernels, "residual-errors": residual_errors}[stage]
    monkeypatch.setattr(module, "load_backbone", lambda *_: backbone)
    with pytest.raises(ValueError) as caught:
        DIAGNOSTICS[stage](folder, phi, tmp_path / "out")
    assert str(caught.value).startswith("tiny: the queries, keys or values of layer 1 are not finite; test/Tiny-Llama")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("stage", DIAGNOSTICS)
def test_diagnostics_name_the_layer_whose_maps_overflow(
    stage: str, backbone: Backbone, folder: Path, tmp_path: Path
) -> None:
    maps = maps_of(backbone)
    for layer_map in (maps.key[1], maps.query[1]):
        layer_map.out.data[:] = 3e38
    maps.save(phi := tmp_path / "phi.safetensors")
    record(phi)
    with pytest.raises(ValueError, match=r"layer 1.* not finite; the feature maps are damaged, or diverged"):
        DIAGNOSTICS[stage](folder, phi, tmp_path / "out")
    assert not (tmp_path / "out").exists()
