"""The phi file: round trip, and messages for damaged and foreign files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.conftest import TINY, byte_tokenizer, save_tiny, tiny_llama
from tokenizers.processors import TemplateProcessing

from residual_mass.files import sha256_of
from residual_mass.model.loading import TEMPLATE_DATE, Backbone, encode, encode_chat, load_backbone
from residual_mass.model.phi_maps import HeadShape, PhiMaps
from residual_mass.spec.settings import MapSpec

SHAPE = HeadShape(layers=2, query_heads=4, kv_heads=2, head_dim=6)


@pytest.mark.parametrize("spec", [MapSpec(d_emb=8, d_phi=4), MapSpec(kind="hedgehog", d_phi=4)])
def test_round_trip_is_bitwise(tmp_path: Path, spec: MapSpec) -> None:
    maps = PhiMaps(SHAPE, spec, {"model_id": "a/b", "revision": "r", "length": 64})
    path = tmp_path / "phi.safetensors"
    maps.save(path)
    loaded = PhiMaps.load(path)
    assert loaded.shape == SHAPE and loaded.map == spec and loaded.training_facts == maps.training_facts
    assert loaded.sha256 == sha256_of(path)
    for name, tensor in maps.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name])
    assert [p.name for p in tmp_path.iterdir()] == ["phi.safetensors"]


def test_foreign_and_missing_files_are_named(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="no phi maps"):
        PhiMaps.load(tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="no such file"):
        PhiMaps.load(tmp_path / "none.safetensors")


def test_damaged_weights_are_named_before_loading(tiny_assets: Path, tmp_path: Path) -> None:
    copy = tmp_path / "assets"
    shutil.copytree(tiny_assets, copy)
    weights = copy / "models" / "tiny-llama" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match="model.safetensors: damaged"):
        load_backbone(TINY, copy)
    with pytest.raises(ValueError, match="no model here"):
        load_backbone(TINY, tmp_path / "nothing")


def test_identity_follows_the_weights(tiny_backbone: Backbone, tiny_assets: Path, tmp_path: Path) -> None:
    save_tiny(tiny_llama(seed=1), tmp_path)
    assert load_backbone(TINY, tmp_path).identity != tiny_backbone.identity
    assert load_backbone(TINY, tiny_assets).identity == tiny_backbone.identity


def test_a_second_bos_is_refused() -> None:
    tokenizer = byte_tokenizer()
    assert encode(tokenizer, "abc") == tokenizer("abc").input_ids
    with pytest.raises(ValueError, match="BOS"):
        encode(tokenizer, "<s>abc")


def test_a_chat_template_keeps_the_count_of_bos() -> None:
    tokenizer = byte_tokenizer()
    with pytest.raises(ValueError, match="no chat template; set chat_template to false"):
        encode_chat(tokenizer, "abc")
    tokenizer.chat_template = "<s>[{{ messages[0]['content'] }}] {{ date_string }}:"
    ids, front = encode_chat(tokenizer, "abc")
    assert tokenizer.decode(ids) == f"<s>[abc] {TEMPLATE_DATE}:" and ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.decode(front) == "<s>["
    bos = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)])
    tokenizer.backend_tokenizer.post_processor = bos
    assert encode_chat(tokenizer, "abc") == (ids, front), "what the tokenizer would add is not added to the template's"
    tokenizer.chat_template = "[{{ messages[0]['content'] }}]"
    with pytest.raises(ValueError, match="BOS"):
        encode_chat(tokenizer, "abc")
