"""GGUF files as models: their codes are kept, and they compute what transformers computes of them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType
from tests.conftest import byte_tokenizer, tiny_llama
from tests.unit.model.gguf_files import RANDOM, blocks, write_gguf
from tests.unit.model.weights import by_hand
from torch import Tensor, nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

from residual_mass import load_gguf
from residual_mass.files import sha256_of
from residual_mass.model.gguf_blocks import FORMATS, codes_of_blocks
from residual_mass.model.loading import backbone_identity, load_backbone
from residual_mass.model.packed_linear import PackedEmbedding, PackedLinear
from residual_mass.spec.parsing import parsed
from residual_mass.spec.sections import RegisteredBackbone
from residual_mass.spec.specs import BackboneSpec

HALF = 2.0**-11
"""Largest relative error of rounding to half precision."""
SHAPE = {
    "vocab_size": 258, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.1,
}  # fmt: skip
IDS = torch.arange(3, 43)[None]


def weight_of(rows: np.ndarray, kind: str) -> tuple[PackedLinear, Tensor]:
    """A layer of the blocks, and the weight that gguf's own code reads from them."""
    stored = torch.from_numpy(gguf.dequantize(rows, GGMLQuantizationType[kind])).double()
    codes = codes_of_blocks(torch.from_numpy(rows), kind)
    return PackedLinear(codes, stored.shape[1], None, torch.float32), stored


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("rows, columns", [(1, 256), (17, 512), (48, 768)])
def test_codes_and_scales_are_those_of_the_blocks(kind: str, rows: int, columns: int) -> None:
    """Bit for bit where a scale is half a number; otherwise scale and minimum are rounded to one, and nothing else."""
    original = np.random.default_rng(rows).standard_normal((rows, columns)).astype(np.float32)
    original[0] *= 1e-3
    original[:, :32] = 0
    layer, stored = weight_of(blocks(original, kind), kind)
    read = by_hand(layer)
    assert layer.kept and layer.bits == FORMATS[kind].bits
    if kind not in RANDOM:
        assert torch.equal(read, stored) and layer.error == 0
        return
    groups = stored.unflatten(1, (-1, layer.group))
    # The grid of a group spans 2^bits steps; its minimum can be as far from 0, and takes up half of the rounding.
    steps = groups.amax(-1) - groups.amin(-1) + groups.abs().amax(-1)
    off = (read - stored).view_as(groups).abs().amax(-1)
    assert bool((off <= 3 * HALF * steps).all())
    error = ((read - stored).square().sum() / stored.square().sum()).sqrt()
    torch.testing.assert_close(layer.error, float(error), rtol=1e-3, atol=0)


def test_the_outermost_codes_of_8_bits() -> None:
    """llama.cpp writes -127 to 127, other tools -128."""
    rows = blocks(np.ones((16, 64), np.float32), "Q8_0").reshape(16, 2, 34)
    rows[:, :, 2:] = np.array([128, 127] * 16, np.uint8)
    layer, stored = weight_of(rows.reshape(16, -1), "Q8_0")
    x = torch.linspace(-3, 2, 64)[None]
    torch.testing.assert_close(layer(x).double(), x.double() @ stored.T, rtol=1e-4, atol=1e-3)


def by_layer(name: str) -> str:
    """A format for each kind of layer, as llama.cpp mixes them."""
    kinds = {"q_proj": "Q4_0", "k_proj": "Q5_0", "v_proj": "Q8_0", "o_proj": "Q4_1", "gate": "Q5_1", "up": "Q4_K"}
    kinds |= {"down": "Q6_K", "embed": "Q5_K", "lm_head": "Q8_0"}
    return next(kind for part, kind in kinds.items() if part in name)


def qwen(tied: bool) -> PreTrainedModel:
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPE, head_dim=64, tie_word_embeddings=tied)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    return model


def llama() -> PreTrainedModel:
    return tiny_llama(layers=2, width=64)


def gemma() -> PreTrainedModel:
    torch.manual_seed(0)
    return Gemma2ForCausalLM(Gemma2Config(**SHAPE, head_dim=64, sliding_window=64, tie_word_embeddings=True)).eval()


@pytest.mark.parametrize(
    "architecture, make", [("qwen2", lambda: qwen(False)), ("qwen2", lambda: qwen(True)), ("llama", llama)]
)
def test_a_packed_file_computes_what_transformers_computes(architecture: str, make: object, tmp_path: Path) -> None:
    """In float64, so that weights alone can differ: by the scales of formats with blocks of 256."""
    model = make()
    file = tmp_path / "tiny.gguf"
    tiny = model.config.intermediate_size % 256 != 0
    write_gguf(file, model, lambda name: "Q5_1" if tiny and "down" in name else by_layer(name), architecture)
    packed, tokenizer = load_gguf(file, torch.float64)
    whole, _ = load_gguf(file, torch.float64, packed=False)
    for name, layer in whole.named_modules():
        if isinstance(layer, (nn.Linear, nn.Embedding)):
            own = packed.get_submodule(name)
            assert isinstance(own, (PackedLinear, PackedEmbedding))
            size = layer.weight.square().mean().sqrt()
            assert float((own.weight - layer.weight).abs().max() / size) < 0.02, name
    assert not [name for name, tensor in packed.named_parameters() if tensor.ndim > 1]
    off = (packed(IDS).logits - whole(IDS).logits).abs().max() / whole(IDS).logits.std()
    assert float(off) < 0.02
    ids = tokenizer("ab c", return_tensors="pt").input_ids
    assert tokenizer.decode(packed.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None)[0]).startswith(
        "ab c"
    )


@pytest.mark.parametrize("make, architecture", [(lambda: qwen(True), "qwen2"), (gemma, "gemma2"), (llama, "llama")])
def test_formats_with_scales_of_their_own_change_nothing(make: object, architecture: str, tmp_path: Path) -> None:
    """Float64 products of weights that are bit for bit those that transformers dequantises."""
    file = tmp_path / "tiny.gguf"
    write_gguf(file, make(), lambda name: "Q8_0" if "embed" in name else "Q5_0", architecture)
    packed, _ = load_gguf(file, torch.float64)
    whole, _ = load_gguf(file, torch.float64, packed=False)
    torch.testing.assert_close(packed(IDS).logits, whole(IDS).logits, rtol=1e-9, atol=1e-9)
    assert packed.generate(IDS, max_new_tokens=3).shape == whole.generate(IDS, max_new_tokens=3).shape


@pytest.mark.parametrize(
    "kind, how",
    [
        ("Q2_K", "4 bits in groups of 16, codes kept"), ("Q3_K", "4 bits in groups of 16, codes kept"),
        ("IQ4_XS", "8 bits in groups of 32, codes kept"), ("IQ4_NL", "8 bits in groups of 32, codes kept"),
        ("IQ3_S", "8 bits in groups of 32, rounded"), ("IQ2_XXS", "8 bits in groups of 32, rounded"),
    ],
)  # fmt: skip
def test_files_of_few_bits_are_packed(kind: str, how: str, tmp_path: Path) -> None:
    """Levels that lie on no even grid are within 8 bits of a group, others within the rounding of their scales."""
    file = tmp_path / "tiny.gguf"
    write_gguf(file, qwen(False), lambda name: "Q6_K" if "embed" in name or "head" in name else kind, "qwen2")
    packed, _ = load_gguf(file, torch.float64)
    whole, _ = load_gguf(file, torch.float64, packed=False)
    assert not [name for name, tensor in packed.named_parameters() if tensor.ndim > 1]
    layer = packed.model.layers[1].mlp.down_proj
    wanted = whole.model.layers[1].mlp.down_proj.weight
    assert layer.how() == f"in {how}"
    groups = wanted.unflatten(1, (-1, layer.group))
    off = (layer.weight - wanted).view_as(groups).abs().amax(-1)
    # Half a step of 8 bits, and what rounding two numbers to half precision can do to a weight.
    assert bool((off <= groups.abs().amax(-1) * (0.5 / 127 + 3 * HALF)).all())
    assert packed.generate(IDS, max_new_tokens=3).shape == whole.generate(IDS, max_new_tokens=3).shape


def test_what_has_no_codes_stays_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file, llama(), lambda name: None if "embed" in name or "layers.0" in name else "Q4_0")
    packed, _ = load_gguf(file, torch.float32)
    first, second = (packed.model.layers[layer].mlp.up_proj for layer in (0, 1))
    assert type(first) is nn.Linear and isinstance(second, PackedLinear)
    assert type(packed.model.embed_tokens) is nn.Embedding
    with pytest.raises(ValueError, match="save_pretrained: the model's weights are packed"):
        packed.save_pretrained(tmp_path / "saved")


def test_what_transformers_keeps_in_float32_stays_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules_strict", ["post_attention_layernorm"])
    write_gguf(tmp_path / "tiny.gguf", llama(), lambda name: "Q4_0")
    packed, _ = load_gguf(tmp_path / "tiny.gguf", torch.bfloat16)
    layer = packed.model.layers[0]
    assert layer.post_attention_layernorm.weight.dtype == torch.float32
    assert layer.input_layernorm.weight.dtype == layer.mlp.up_proj.weight.dtype == torch.bfloat16


def test_factors_of_rotary_frequencies_are_applied(tmp_path: Path) -> None:
    """Files of Llama 3 have them, and transformers does not read them."""
    factors = np.linspace(1, 8, 32).astype(np.float32)
    write_gguf(tmp_path / "with.gguf", llama(), lambda name: "Q8_0", rope=factors)
    write_gguf(tmp_path / "without.gguf", llama(), lambda name: "Q8_0")
    for packed in (True, False):
        found, _ = load_gguf(tmp_path / "with.gguf", torch.float32, packed)
        plain, _ = load_gguf(tmp_path / "without.gguf", torch.float32, packed)
        expected = plain.model.rotary_emb.inv_freq / torch.from_numpy(factors)
        torch.testing.assert_close(found.model.rotary_emb.inv_freq, expected)


Header = Callable[[GGUFWriter], None]
SHORT = np.linspace(1, 1.3, 32).astype(np.float32)
LONG = np.linspace(1, 30, 32).astype(np.float32)


def linear(writer: GGUFWriter) -> None:
    writer.add_rope_scaling_type(RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(4.0)


def old_linear(writer: GGUFWriter) -> None:
    """As in files of 2023."""
    writer.add_float32("llama.rope.scale_linear", 4.0)


def yarn(writer: GGUFWriter) -> None:
    writer.add_rope_scaling_type(RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(128)


def tuned_yarn(writer: GGUFWriter) -> None:
    yarn(writer)
    writer.add_rope_scaling_yarn_beta_fast(16.0)
    writer.add_rope_scaling_yarn_beta_slow(2.0)
    writer.add_rope_scaling_yarn_attn_factor(1.25)


def longrope(columns: int, original: int, attention: float | None = None) -> Header:
    """As files of Phi-3 have it, which name no type."""

    def add(writer: GGUFWriter) -> None:
        writer.add_pad_token_id(1)
        writer.add_rope_dimension_count(columns)
        writer.add_rope_scaling_orig_ctx_len(original)
        if attention is not None:
            writer.add_rope_scaling_attn_factors(attention)
        writer.add_tensor("rope_factors_long.weight", LONG[: columns // 2])
        writer.add_tensor("rope_factors_short.weight", SHORT[: columns // 2])

    return add


def phi(columns: int, original: int, attention: float | None = None) -> PreTrainedModel:
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": original}
    rope |= {"short_factor": SHORT[: columns // 2].tolist(), "long_factor": LONG[: columns // 2].tolist()}
    rope |= {"partial_rotary_factor": columns / 64}
    if attention is not None:
        rope |= {"attention_factor": attention}
    shape = SHAPE | {"pad_token_id": 1, "bos_token_id": None, "eos_token_id": None}
    return Phi3ForCausalLM(Phi3Config(**shape, original_max_position_embeddings=original, rope_parameters=rope))


def scaled_llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SHAPE, head_dim=64, rope_parameters=rope_of("linear", factor=4.0)))


def scaled_qwen(**others: Any) -> PreTrainedModel:
    rope = rope_of("yarn", factor=4.0, original_max_position_embeddings=128, **others)
    return Qwen2ForCausalLM(Qwen2Config(**SHAPE, head_dim=64, rope_parameters=rope))


def scaled_gemma() -> PreTrainedModel:
    """Its last layer alone has full attention."""
    rope = {"full_attention": rope_of("linear", factor=4.0), "sliding_attention": rope_of("default")}
    shape = SHAPE | {"num_hidden_layers": 6}
    return Gemma3ForCausalLM(Gemma3TextConfig(**shape, head_dim=64, sliding_window=512, rope_parameters=rope))


def starcoder() -> PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": 1e6}
    return Starcoder2ForCausalLM(Starcoder2Config(**SHAPE, rope_parameters=rope))


def rope_of(kind: str, **others: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **others}


def with_base(more: Header) -> Header:
    def add(writer: GGUFWriter) -> None:
        writer.add_rope_freq_base(10000.0)
        writer.add_sliding_window(512)
        more(writer)

    return add


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    "architecture, make, more",
    [
        ("llama", scaled_llama, linear),
        ("llama", scaled_llama, old_linear),
        ("qwen2", scaled_qwen, yarn),
        ("qwen2", lambda: scaled_qwen(beta_fast=16.0, beta_slow=2.0, attention_factor=1.25), tuned_yarn),
        ("gemma3", scaled_gemma, with_base(linear)),
        ("phi3", lambda: phi(64, 256), longrope(64, 256)),
        ("phi3", lambda: phi(64, 32, 1.25), longrope(64, 32, 1.25)),
        ("phi3", lambda: phi(32, 256), longrope(32, 256)),
        ("starcoder2", starcoder, lambda writer: writer.add_rope_freq_base(1e6)),
    ],
)
@torch.no_grad()
def test_frequencies_are_scaled_as_the_header_says(
    architecture: str, make: Callable[[], PreTrainedModel], more: Header, packed: bool, tmp_path: Path
) -> None:
    """What transformers does not read of it; 40 tokens are beyond the context of training where that is 32."""
    torch.manual_seed(0)
    model = make().eval()
    kind = GGMLQuantizationType.Q8_0
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.copy_(torch.from_numpy(gguf.dequantize(gguf.quantize(parameter.numpy(), kind), kind)))
    write_gguf(tmp_path / "tiny.gguf", model, lambda name: "Q8_0", architecture, more=more)
    found, _ = load_gguf(tmp_path / "tiny.gguf", torch.float64, packed)
    torch.testing.assert_close(found(IDS).logits, model.double()(IDS).logits, rtol=1e-8, atol=1e-8)


def stated(name: str, value: str | float) -> Header:
    add = "add_string" if isinstance(value, str) else "add_float32"
    return lambda writer: getattr(writer, add)(f"llama.rope.{name}", value)


def lone_factors(writer: GGUFWriter) -> None:
    yarn(writer)
    writer.add_tensor("rope_factors_long.weight", LONG)


def longrope_by_factor(writer: GGUFWriter) -> None:
    longrope(64, 256)(writer)
    writer.add_rope_scaling_factor(4.0)


@pytest.mark.parametrize(
    "more, said",
    [
        (stated("scaling.type", "dynamic"), "llama.rope.scaling.type is dynamic, which is not applied"),
        (stated("scaling.type", "longrope"), "llama.rope.scaling.type is longrope, which needs rope_factors_long"),
        (longrope_by_factor, "llama.rope.scaling.type is longrope, which needs .* and no llama.rope.scaling.factor"),
        (stated("scaling.attn_factor", 1.5), "llama.rope.scaling.attn_factor is 1.5, which is not applied"),
        (stated("scaling.new_factor", 2.0), "llama.rope.scaling.new_factor is 2.0, which is not applied"),
        (stated("freq_base_swa", 5000.0), "llama.rope.freq_base_swa is 5000.0, which is not applied"),
        (lone_factors, "rope_factors_long.weight is not applied beside llama.rope.scaling.type yarn"),
    ],
)
def test_other_scalings_are_refused(more: Header, said: str, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file, llama(), lambda name: "Q8_0", more=more)
    for packed in (True, False):
        with pytest.raises(ValueError, match=f"^{file}: {said}.*; take the model's safetensors") as error:
            load_gguf(file, packed=packed)
        assert "\n" not in str(error.value)


def test_a_scaling_that_an_architecture_lacks_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file, phi(64, 256), lambda name: "Q8_0", "phi3", more=yarn)
    with pytest.raises(
        ValueError, match=f"^{file}: phi3.rope.scaling does not fit the architecture .*got yarn.*; take"
    ):
        load_gguf(file)


def test_factors_of_another_shape_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file, llama(), lambda name: "Q8_0", rope=SHORT[:3])
    for packed in (True, False):
        with pytest.raises(ValueError, match=r"rope_freqs.weight does not fit .*; take the model's safetensors"):
            load_gguf(file, packed=packed)


def no_scaling(writer: GGUFWriter) -> None:
    """As many files have it."""
    writer.add_rope_scaling_type(RopeScalingType.NONE)
    writer.add_rope_scaling_orig_ctx_len(512)
    writer.add_rope_scaling_attn_factors(1.0)


def test_a_scaling_by_one_changes_nothing(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", llama(), lambda name: "Q8_0", more=no_scaling)
    found, _ = load_gguf(tmp_path / "tiny.gguf")
    torch.testing.assert_close(found.model.rotary_emb.inv_freq, llama().model.rotary_emb.inv_freq)


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_a_part_of_a_model_is_to_be_joined(has_tokenizer: bool, tmp_path: Path) -> None:
    file = tmp_path / "tiny-00001-of-00002.gguf"
    write_gguf(
        file, llama(), lambda name: "Q8_0", more=lambda writer: writer.add_uint16("split.count", 2),
        has_tokenizer=has_tokenizer,
    )  # fmt: skip
    with pytest.raises(ValueError, match=f"^{file}: one of 2 parts of a model; join .* `llama-gguf-split --merge"):
        load_gguf(file)


def test_a_file_without_a_tokenizer_takes_another(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file, llama(), lambda name: "Q8_0", has_tokenizer=False)
    with pytest.raises(ValueError, match=rf"^{file}: the file has no tokenizer; name one: .* in lm-eval$"):
        load_gguf(file)
    given = byte_tokenizer()
    model, tokenizer = load_gguf(file, tokenizer=given)
    assert tokenizer is given and isinstance(model.lm_head, PackedLinear)


def spec_of(file: Path, revision: str) -> BackboneSpec:
    return BackboneSpec(
        name="tiny", study="own", model_id=str(file), revision=revision, source="gguf", dtype="float32",
        tokenizer="bytes", context=512,
    )  # fmt: skip


def test_a_study_takes_the_file_that_its_hash_names(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file, llama(), lambda name: "Q4_1")
    sha256 = sha256_of(file)
    backbone = load_backbone(spec_of(file, sha256), tmp_path, torch.device("cpu"))
    assert isinstance(backbone.model.lm_head, PackedLinear) and backbone.encode("abc") == [255, 66]
    assert backbone.identity == backbone_identity(spec_of(file, sha256), tmp_path)
    with pytest.raises(ValueError, match=f"{file}: its SHA-256 is {sha256}, not {'0' * 64}; fetch the file again"):
        load_backbone(spec_of(file, "0" * 64), tmp_path, torch.device("cpu"))


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"model_id": "Qwen/Qwen3-4B"}, "is no GGUF file; write its path, or OWNER/NAME/FILE.gguf"),
        ({"revision": "main"}, "revision main is no SHA-256"),
        ({"source": "hub", "revision": "0" * 40, "model_id": "a/b/c.gguf"}, "is no name on the hub; write OWNER/NAME"),
    ],
)
def test_a_registered_file_has_a_name_and_a_hash(changed: dict[str, str], message: str) -> None:
    entry = {
        "title": "A", "study": "mini", "model_id": "models/a.gguf", "revision": "0" * 64, "source": "gguf",
        "dtype": "float32", "tokenizer": "a", "context": 512,
    }  # fmt: skip
    parsed(RegisteredBackbone, entry, "backbones.a.")
    with pytest.raises(ValueError, match=message):
        parsed(RegisteredBackbone, entry | changed, "backbones.a.")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """In one line that names the file."""
    whole = tmp_path / "whole.gguf"
    write_gguf(whole, llama(), lambda name: "Q4_0")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole.read_bytes()[:-4096])
    other = tmp_path / "other.gguf"
    other.write_text("no model")
    for file in (cut, other):
        with pytest.raises(ValueError, match=rf"^{file}: cannot be loaded .*; fetch it again$"):
            load_gguf(file)
    long = tmp_path / "long.gguf"
    tokens = struct.pack("<IQ", gguf.GGUFValueType.STRING, 258)
    assert tokens in whole.read_bytes()
    long.write_bytes(whole.read_bytes().replace(tokens, struct.pack("<IQ", gguf.GGUFValueType.STRING, 2**60), 1))
    with pytest.raises(ValueError, match=rf"^{long}: cannot be loaded .*; fetch it again$"):
        load_gguf(long)
    lacking = llama()
    del lacking.model.layers[1].mlp.up_proj
    write_gguf(tmp_path / "lacking.gguf", lacking, lambda name: "Q4_0")
    narrow = llama()
    narrow.model.layers[0].mlp.up_proj = nn.Linear(256, 64, bias=False)
    write_gguf(tmp_path / "narrow.gguf", narrow, lambda name: "Q4_0")
    with pytest.raises(ValueError, match=r"up_proj.weight is \[64, 256\] in its tensors, \[96, 256\] by its header"):
        load_gguf(tmp_path / "narrow.gguf")
    with pytest.raises(ValueError, match=r"lacks tensors \(1, first model.layers.1.mlp.up_proj.weight\)"):
        load_gguf(tmp_path / "lacking.gguf")
    with pytest.raises(ValueError, match="nothing.gguf: no such file, and no name on the hub"):
        load_gguf(tmp_path / "nothing.gguf")
