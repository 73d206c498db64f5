"""What is one model, and what is another: in memory, and as files in a folder."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import TINY, byte_tokenizer, save_tiny, tiny_llama
from tests.unit.model.families import FAMILIES, Family, cases
from tests.unit.model.test_offloaded import made, offloaded, ways
from torch.testing._internal.two_tensor import TwoTensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from residual_mass import pack_weights, partial_kv
from residual_mass.model.identity import difference, digest_of, files_digest, identity_of
from residual_mass.model.loading import backbone_identity

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
YARN = ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


def llama(**changes: Any) -> LlamaForCausalLM:
    """The same weights for every configuration."""
    config = tiny_llama(layers=2, width=64).config.to_dict() | {"rope_parameters": ROPE} | changes
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**config)).eval()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rope_parameters": ROPE | {"rope_theta": 500.0}},
         "config.rope_parameters.rope_theta was 10000.0 and is 500.0 here"),
        ({"rope_parameters": YARN}, "config.rope_parameters.rope_type was \"default\" and is \"yarn\" here"),
        ({"rms_norm_eps": 0.1}, "config.rms_norm_eps was 1e-06 and is 0.1 here"),
        ({"max_position_embeddings": 4096}, "config.max_position_embeddings was 2048 and is 4096 here"),
        ({"attention_bias": True}, "config.attention_bias was false and is true here"),
        ({"hidden_act": "gelu"}, "config.hidden_act was \"silu\" and is \"gelu\" here"),
    ],
)  # fmt: skip
def test_another_configuration_is_another_model(fields: dict[str, Any], words: str) -> None:
    differing = difference(identity_of(llama()), identity_of(llama(**fields)))
    assert differing is not None and words in differing and "\n" not in differing


def test_a_window_is_a_fact() -> None:
    family = next(each for each in FAMILIES if each.name == "gpt-oss")
    differing = difference(identity_of(family.build()), identity_of(family.build(sliding_window=9)))
    assert differing is not None and "config.sliding_window was 7 and is 9 here" in differing


def changed(change: Callable[[LlamaForCausalLM], Any]) -> LlamaForCausalLM:
    model = llama()
    with torch.no_grad():
        change(model)
    return model


def one_number(model: LlamaForCausalLM) -> None:
    model.model.layers[1].mlp.down_proj.weight[3, 5] += 1e-3


def two_rows(model: LlamaForCausalLM) -> None:
    rows = model.model.embed_tokens.weight
    rows[[7, 9]] = rows[[9, 7]]


def merged(model: LlamaForCausalLM) -> None:
    """As adapters are merged: no version of the tensor tells."""
    model.model.layers[0].self_attn.k_proj.weight.data += 1e-3


@pytest.mark.parametrize("change", [one_number, two_rows, merged])
def test_other_weights_are_another_model(change: Callable[[LlamaForCausalLM], Any]) -> None:
    assert difference(identity_of(llama()), identity_of(changed(change))) == "its weights have other numbers"


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model.model.layers[1].self_attn, "scaling", 0.5),
        lambda model: setattr(model.model.layers[0].input_layernorm, "variance_epsilon", 0.1),
        lambda model: model.model.rotary_emb.inv_freq.div_(4),
        lambda model: setattr(model.model.layers[0], "scaling", {"adapter": 2.0}),
    ],
)
def test_what_a_module_was_set_to_is_a_fact(change: Callable[[LlamaForCausalLM], Any]) -> None:
    differing = difference(identity_of(llama()), identity_of(changed(change)))
    assert differing == "its modules have other settings, such as constants or adapters"


def test_dtypes_and_packing_are_told_apart() -> None:
    plain, narrow = identity_of(llama()), identity_of(llama().bfloat16())
    assert "dtype was float32 and is bfloat16 here" in str(difference(plain, narrow))
    packed = [identity_of(pack_weights(llama(), **how)) for how in ({"bits": 4}, {"bits": 4, "group": 64}, {"bits": 8})]
    assert len({digest_of(each) for each in (plain, narrow, *packed)}) == 5
    assert "packed weights was none and is 15 linear layers in 8 bits" in str(difference(plain, packed[-1]))
    assert difference(packed[0], identity_of(pack_weights(llama()))) is None


def test_versions_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    before = identity_of(llama())
    monkeypatch.setattr("transformers.__version__", "9.0")
    assert "version of transformers was" in str(difference(before, identity_of(llama())))


@cases(FAMILIES)
def test_a_model_that_was_saved_is_the_same(family: Family, tmp_path: Path) -> None:
    """Before and after it was used, and under a method."""
    model = family.build()
    before = identity_of(model)
    with torch.no_grad():
        model(torch.arange(3, 60)[None])
    assert difference(before, identity_of(model)) is None
    model.save_pretrained(tmp_path)
    assert difference(before, identity_of(type(model).from_pretrained(tmp_path).eval())) is None


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "yarn"])
def test_frequencies_that_follow_the_text_are_no_facts(kind: str) -> None:
    factors = {"short_factor": [1.0] * 32, "long_factor": [2.0] * 32, "original_max_position_embeddings": 64}
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0} | (factors if kind == "longrope" else {})
    model = llama(rope_parameters=rope, max_position_embeddings=64, original_max_position_embeddings=64)
    before = identity_of(model)
    buffers = [buffer.clone() for buffer in model.buffers()]
    with torch.no_grad():
        model(torch.arange(3, 103)[None])
    assert all(map(torch.equal, buffers, model.buffers())) == (kind == "yarn")
    assert difference(before, identity_of(model)) is None
    other = llama(rope_parameters=rope | {"factor": 3.0}, max_position_embeddings=64)
    assert difference(before, identity_of(other)) is not None


def test_how_a_model_is_used_is_no_fact(tmp_path: Path) -> None:
    """Nor where it lies, what generates with it, and what ends its texts."""
    model = llama()
    before = identity_of(model)
    with partial_kv(model, "topk", 0.5):
        assert identity_of(model) == before
    model.train()
    model.requires_grad_(False)
    model.set_attn_implementation("eager")
    model.config.use_cache = False
    model.config.eos_token_id = 7
    model.config.name_or_path = "somewhere/else"
    assert identity_of(model) == before
    assert identity_of(copy.deepcopy(model)) == before
    assert identity_of(torch.compile(model)) == before
    model.model.layers[0] = torch.compile(model.model.layers[0])
    assert identity_of(model) == before
    with torch.inference_mode():
        assert identity_of(llama()) == before


CHILD = """
import sys
from transformers import AutoModelForCausalLM
from residual_mass.model.identity import digest_of, files_digest, identity_of
from pathlib import Path
print(digest_of(identity_of(AutoModelForCausalLM.from_pretrained(sys.argv[1]))), files_digest(Path(sys.argv[1])))
"""


def test_processes_agree(tmp_path: Path) -> None:
    save_tiny(tiny_llama(), tmp_path)
    (folder,) = tmp_path.glob("models/*")
    said = set()
    for seed in "12":
        command = [sys.executable, "-W", "ignore", "-c", CHILD, str(folder)]
        environment = os.environ | {"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": seed}
        said.add(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert said == {f"{digest_of(identity_of(model))} {files_digest(folder)}\n"}


@ways
@pytest.mark.parametrize("tied", [False, True])
def test_weights_count_wherever_they_are(way: str, tied: bool, tmp_path: Path) -> None:
    assert difference(identity_of(made(tied)), identity_of(offloaded(way, tmp_path, tied))) is None


def test_a_model_without_numbers_has_no_identity() -> None:
    with torch.device("meta"):
        model = tiny_llama()
    with pytest.raises(ValueError, match=r"embed_tokens.weight is on the meta device, without numbers"):
        identity_of(model)


def test_parts_of_a_tensor_of_another_class_count() -> None:
    def with_parts(model: PreTrainedModel, other: float) -> PreTrainedModel:
        layer = model.model.layers[0].mlp.up_proj
        two = TwoTensor(layer.weight.data, layer.weight.data * other)
        layer.weight = torch.nn.Parameter(two, requires_grad=False)
        return model

    digests = [digest_of(identity_of(with_parts(llama(), other))) for other in (2.0, 2.0, 3.0)]
    assert digests[0] == digests[1] != digests[2]


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_llama().save_pretrained(tmp_path / "model")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_folder_is_its_content(folder: Path, tmp_path: Path) -> None:
    before = files_digest(folder)
    moved = Path(shutil.copytree(folder, tmp_path / "moved"))
    for file in moved.iterdir():
        os.utime(file, (1, 1))
    (moved / "README.md").write_text("other words")
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in folder.iterdir():
        (linked / file.name).symlink_to(file)
    assert files_digest(moved) == files_digest(linked) == before


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"])
def test_an_edit_of_equal_size_and_time_is_seen(name: str, folder: Path) -> None:
    before = files_digest(folder)
    file = folder / name
    status = file.stat()
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file.stat().st_mtime_ns == status.st_mtime_ns and files_digest(folder) != before


@pytest.mark.parametrize("source", ["assets", "random"])
def test_a_backbone_of_ones_own_is_all_of_its_files(source: str, tmp_path: Path) -> None:
    """No manifest lists them."""
    save_tiny(tiny_llama(), tmp_path)
    (folder,) = tmp_path.glob("models/*")
    spec = replace(TINY, source=source)
    found = [backbone_identity(spec, tmp_path)]
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        content = json.loads((folder / name).read_text()) | {"more": 1}
        (folder / name).write_text(json.dumps(content))
        found.append(backbone_identity(spec, tmp_path))
    assert len(set(found)) == 4
