"""A folder that cannot be loaded as it stands is refused in one line, which names what is missing and what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.conftest import TINY, byte_tokenizer, tiny_llama
from tests.records import give_manifest
from transformers import LlamaConfig, LlamaModel, LlavaConfig, T5Config

from residual_mass.measure.models import find_model
from residual_mass.model.loading import load_backbone
from residual_mass.model.phi_maps import HeadShape
from residual_mass.spec.specs import BackboneSpec
from residual_mass.texts.assets import model_folder

CPU = torch.device("cpu")
UNREAD = "model.layers.1.mlp.up_proj.weight"


def saved(folder: Path, **changes: Any) -> Path:
    """Saves the tiny model; `changes` are made to its configuration, None removes a key."""
    tiny_llama(layers=2).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    kept = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def refusal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns what is said when the folder is named to `residual-mass measure`, without its own name."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asks a question"))
    with pytest.raises(ValueError) as error:
        load_backbone(find_model(str(folder), folder, CPU), folder, CPU)
    said = str(error.value)
    assert "\n" not in said and len(said) - len(str(folder)) < 450
    return said.removeprefix(f"{folder}: ")


PACKAGES = {
    "gptq": ("optimum", {"bits": 4}),
    "awq": ("gptqmodel", {"bits": 4}),
    "bitsandbytes": ("bitsandbytes", {"load_in_4bit": True}),
    "compressed-tensors": ("compressed_tensors", {}),
    "aqlm": ("aqlm", {}),
}
"""Methods of quantisation with the package that each needs, and some of its settings."""


@pytest.mark.parametrize("method", [method for method, (package, _) in PACKAGES.items() if not find_spec(package)])
def test_a_missing_package_is_to_be_installed(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path, quantization_config={"quant_method": method, **PACKAGES[method][1]})
    said = refusal(folder, monkeypatch)
    assert said.endswith("; install that, or take a model that does without") and "fetch" not in said


def test_weights_quantised_in_an_unknown_way_are_not_read_as_plain_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = refusal(saved(tmp_path, quantization_config={"quant_method": "no_such"}), monkeypatch)
    assert "does not know how its weights are quantised ('no_such'); take weights that are not quantised" in said


def test_blocks_of_fp8_weights_are_scaled(tmp_path: Path) -> None:
    scheme = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
    plain, folder = tiny_llama(layers=2), saved(tmp_path, quantization_config=scheme)
    generator = torch.Generator().manual_seed(0)

    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "proj" in name]:
            rows, columns = tensors[name].shape
            scales = torch.rand(rows // 16, columns // 16, generator=generator)
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scales
            expanded = scales.repeat_interleave(16, 0).repeat_interleave(16, 1)
            plain.get_parameter(name).data = tensors[name].float() * expanded

    change_tensors(folder, quantise)
    model = load_backbone(find_model(str(folder), folder, CPU), folder, CPU).model
    tokens = torch.arange(40)[None]
    torch.testing.assert_close(model(tokens).logits, plain(tokens).logits)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (T5Config(architectures=["T5ForConditionalGeneration"]), "T5ForConditionalGeneration has an encoder; take a "),
        (LlavaConfig(architectures=["LlavaForConditionalGeneration"]), "load it as LlavaForConditionalGeneration in "),
    ],
)
def test_a_class_that_is_no_language_model_is_named(
    config: Any, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path)
    config.save_pretrained(folder)
    assert expected in refusal(folder, monkeypatch)


@pytest.mark.parametrize("place", ["", "someone/code--"])
def test_code_of_a_folder_is_neither_run_nor_asked_for(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "model").mkdir()
    own = {"AutoConfig": f"{place}own.Config", "AutoModelForCausalLM": f"{place}own.Model"}
    saved(folder, model_type="own", auto_map=own)
    (folder / "own.py").write_text(f"open({str(tmp_path / 'run')!r}, 'w')\n")
    assert "it has code of its own, which is never run); take a model whose" in refusal(folder, monkeypatch)
    saved(folder)
    tokenizer = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [f"{place}own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    assert "it has code of its own, which is never run); take a model whose" in refusal(folder, monkeypatch)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda tensors: tensors.pop(UNREAD), f"its files lack tensors (1, first {UNREAD}); fetch or save"),
        (lambda tensors: tensors.update({f"{UNREAD}_scale": torch.ones(1)}), f"has no place for {UNREAD}_scale, one"),
        (lambda tensors: tensors.update({UNREAD: torch.ones(8, 8)}), f"{UNREAD} is [8, 8] in its files, [96, 64] by"),
    ],
)
def test_no_weight_is_drawn_at_random_or_left_out(
    change: Callable[[dict[str, torch.Tensor]], Any], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path)
    change_tensors(folder, change)
    assert expected in refusal(folder, monkeypatch)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_hidden_layers": None}, "its files lack tensors (270, first model.layers.10.input_layernorm.weight)"),
        ({"num_hidden_layers": 1}, "config.json has no place for model.layers.1.input_layernorm.weight, one of 9"),
        ({"intermediate_size": None}, "is [64, 96] in its files, [64, 11008] by config.json"),
        ({"model_type": "llama9"}, "does not know its model_type); update transformers, or correct model_type"),
        ({"model_type": None}, "Should have a `model_type` key in its config.json"),
    ],
)
def test_a_configuration_that_lacks_a_key_is_not_filled_with_defaults(
    changes: dict[str, Any], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert expected in refusal(saved(tmp_path, **changes), monkeypatch)


def test_a_model_without_its_head_is_refused_and_one_with_a_further_head_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path)
    change_tensors(folder, lambda tensors: tensors.update({"value_head.weight": torch.ones(1, 64)}))
    load_backbone(find_model(str(folder), folder, CPU), folder, CPU)
    LlamaModel(tiny_llama(layers=2).config).save_pretrained(folder)
    assert "its files lack tensors (1, first lm_head.weight)" in refusal(folder, monkeypatch)


def test_files_that_are_missing_cut_or_of_another_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path)
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    for cut in (content[:-100], b"", b"version https://git-lfs.github.com/spec/v1\n"):
        weights.write_bytes(cut)
        assert refusal(folder, monkeypatch).endswith("; fetch it again")
    weights.rename(folder / "adapter_model.safetensors")
    assert "(no model.safetensors, nor an index of its parts); save the whole model" in refusal(folder, monkeypatch)
    weights.write_bytes(content)
    (folder / "tokenizer.json").unlink()
    assert "save it there with tokenizer.save_pretrained, or install" in refusal(folder, monkeypatch)


def test_random_weights_need_a_language_model_too(tmp_path: Path) -> None:
    folder = saved(tmp_path / model_folder(TINY.model_id))
    give_manifest(tmp_path)
    spec = BackboneSpec(**{**vars(TINY), "source": "random"})
    assert load_backbone(spec, tmp_path, CPU).shape.layers == 2
    T5Config(architectures=["T5Model"]).save_pretrained(folder)
    with pytest.raises(ValueError, match="T5Model has an encoder"):
        load_backbone(spec, tmp_path, CPU)


def test_the_shape_of_a_model_with_images_is_that_of_its_text() -> None:
    text = LlamaConfig(hidden_size=96, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2, head_dim=16)
    assert HeadShape.of(LlavaConfig(text_config=text)) == HeadShape.of(text) == HeadShape(3, 6, 2, 16)
