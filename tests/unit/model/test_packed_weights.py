"""`pack_weights`: codes, products, whole models of every family, and what a packed model can and cannot do."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from accelerate import cpu_offload
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from tests.conftest import tiny_llama
from tests.unit.model.families import FAMILIES, Family, cases
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, distribute_tensor
from transformers import AutoModelForCausalLM, FalconConfig, FalconForCausalLM, PreTrainedModel

from residual_mass import pack_weights, partial_generate
from residual_mass.model import packed_weights
from residual_mass.model.packed_weights import GROUPS, Linear4, Linear8, PackedEmbedding, PackedLinear
from residual_mass.model.weight_codes import codes_of_4_bits

BF16 = 2.0**-8
"""Largest relative error of rounding to bfloat16."""
GGUF = {"Q4_0": GGMLQuantizationType.Q4_0, "Q4_1": GGMLQuantizationType.Q4_1}


def by_hand(layer: PackedLinear) -> Tensor:
    """The weight [N, K] in float64, code by code."""
    rows, columns = layer.out_features, layer.in_features
    if isinstance(layer, Linear8):
        return layer.codes[:, :columns].double() * layer.scales.double()[:, None]
    block, apart = layer.layout
    flat = layer.codes.flatten().tolist()
    width = 2 * layer.codes.shape[1]
    weight = torch.empty(rows, columns, dtype=torch.float64)
    for row in range(rows):
        within = row % block
        high = within // apart % 2
        byte = within // 2 if apart == 1 else within % apart
        for column in range(columns):
            start = row // block * block * width // 2
            packed = flat[start + column * block // 2 + byte]
            code = packed >> 4 if high else packed & 15
            scale, zero = layer.scales[column // layer.group, row].double()
            weight[row, column] = (code - 8) * scale + zero
    return weight


# ---- codes -----------------------------------------------------------------------------------------------------------


def assert_kept(weight: Tensor, codes: Tensor, scale: Tensor, kept: torch.dtype) -> None:
    """Codes are those given, and weights differ by no more than rounding scale and zero to bfloat16 makes.

    A few levels that are rounded to bfloat16 lie on several grids.
    """
    found = codes_of_4_bits(weight.to(kept), 32)
    if kept != torch.bfloat16 or codes.max() > 8:
        assert torch.equal(found.codes.to(torch.uint8), codes)
    back = (found.codes.view(len(codes), -1, 32) - 8) * found.scale.float()[..., None] + found.zero.float()[..., None]
    off = (back - weight.view_as(back)).abs().amax(-1)
    rounding = 15 * scale.abs() * BF16 + found.zero.abs().float() * BF16
    if kept != torch.float32:
        rounding += torch.finfo(kept).eps * weight.view_as(back).abs().amax(-1)
    assert bool((off <= 1.01 * rounding).all())


@pytest.mark.parametrize("kept", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("lowest, highest", [(0, 15), (3, 12), (4, 8)])
def test_codes_of_dequantised_weights_are_kept(lowest: int, highest: int, kept: torch.dtype) -> None:
    """Also where no weight has an outer code: those of a group that spans k steps are then counted from the lowest."""
    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(lowest, highest + 1, (48, 6, 32), generator=draw)
    codes[..., 0] = lowest
    codes[..., 1] = highest
    codes[..., 2] = lowest + 1
    scale = (torch.rand(48, 6, generator=draw) + 0.1).half().float()
    low = (scale * -(3.3 + 3 * torch.rand(48, 6, generator=draw))).half().float()
    weight = ((codes - lowest) * scale[..., None] + low[..., None]).flatten(1)
    assert_kept(weight, (codes - lowest).flatten(1).to(torch.uint8), scale, kept)


@pytest.mark.parametrize("kept", [torch.float32, torch.float16, torch.bfloat16])
def test_codes_around_zero_are_kept_for_steps_of_either_sign(kept: torch.dtype) -> None:
    """As in Q4_0, where the weight of largest magnitude has code 0."""
    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (48, 6, 32), generator=draw)
    codes[..., 5] = 0
    scale = (torch.rand(48, 6, generator=draw) + 0.1).half().float()
    scale[::2] *= -1
    weight = ((codes - 8) * scale[..., None]).flatten(1)
    assert_kept(weight, codes.flatten(1).to(torch.uint8), scale, kept)


@pytest.mark.parametrize("kind", GGUF)
def test_a_gguf_weight_is_not_rounded_to_other_codes(kind: str) -> None:
    original = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    stored = torch.from_numpy(dequantize(quantize(original.numpy(), GGUF[kind]), GGUF[kind]))
    step = original.view(64, 3, 32).abs().amax(-1) / 8
    layer = Linear4(stored, None, 32)
    off = (by_hand(layer) - stored).abs().view(64, 3, 32).amax(-1)
    assert off.max() > 0
    assert bool((off <= 24 * step * BF16).all()), "a twentieth of a step; a second rounding could be half of one off"


def write_gguf(path: Path, model: PreTrainedModel) -> None:
    """A small Llama as llama.cpp quantises it: layers in Q4_1 and Q4_0 in turn, the tied embedding in Q8_0."""
    writer = GGUFWriter(path, "llama")
    config = model.config
    writer.add_context_length(512)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "model.layers": "blk",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    for name, parameter in model.named_parameters():
        if name.startswith("lm_head"):
            continue
        kind = list(GGUF.values())["layers.1" in name] if parameter.ndim == 2 else None
        kind = GGMLQuantizationType.Q8_0 if "embed" in name else kind
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        weight = parameter.detach().numpy()
        writer.add_tensor(name, weight if kind is None else quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gguf_file_keeps_its_codes(dtype: torch.dtype, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_llama(layers=2))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=dtype)
    weights = {name: layer.weight.detach() for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    pack_weights(model)
    assert model.generate(ids_of(5), max_new_tokens=3, do_sample=False, eos_token_id=None).shape == (1, 8)
    compared = 0
    for name, weight in weights.items():
        layer = model.get_submodule(name)
        if isinstance(layer, Linear4):
            groups = weight.double().unflatten(1, (-1, 32))
            off = (by_hand(layer).view_as(groups) - groups).abs().amax(-1)
            low, high = groups.aminmax(dim=-1)
            assert bool((off <= (high - low) / 15 / 4).all()), "a second rounding to 16 levels could be off by a half"
            compared += 1
    assert compared == 14


def test_other_weights_are_rounded_to_the_nearest_of_16_levels() -> None:
    weight = torch.randn(32, 128, generator=torch.Generator().manual_seed(0))
    weight[3] = 0.25
    weight[4] = 0
    for group in GROUPS[:3]:
        layer = Linear4(weight, None, group)
        off = (by_hand(layer) - weight).view(32, -1, group)
        groups = weight.double().view(32, -1, group)
        low, high = groups.aminmax(dim=-1, keepdim=True)
        step = (high - low) / 15
        nearest = low + step * ((groups - low) / step.clamp_min(1e-9)).round()
        least = (nearest - groups).square().mean(-1)
        assert bool((off.square().mean(-1) <= 1.02 * least + (0.25 * BF16) ** 2).all())
        assert bool((least[0] > 0).all())


# ---- layers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("columns, rows", [(64, 64), (33, 1), (7, 130), (100, 48)])
@pytest.mark.parametrize("bits", [4, 8])
def test_products_are_those_of_the_codes(bits: int, columns: int, rows: int, dtype: torch.dtype) -> None:
    """For few rows of activations and for many, for widths that torch's products do not take, and out of order."""
    draw = torch.Generator().manual_seed(columns)
    weight = torch.randn(rows, columns, generator=draw)
    bias = nn.Parameter(torch.randn(rows, generator=draw).to(dtype))
    layer = Linear4(weight, bias, 32) if bits == 4 else Linear8(weight, bias)
    exact = by_hand(layer)
    torch.testing.assert_close(layer.dequantised(torch.float64), exact, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer.weight.double(), exact, rtol=0, atol=2 * torch.finfo(dtype).eps * 4)
    for count in (1, 5, layer.most_rows, layer.most_rows + 1, 70):
        x = torch.randn(columns, count, generator=draw).to(dtype).T
        output = layer(x[None])
        assert output.dtype == dtype and output.shape == (1, count, rows)
        expected = F.linear(x.double(), exact, bias.double())
        size = F.linear(x.double().abs(), exact.abs(), bias.double().abs())
        precision = BF16 if count <= layer.most_rows else min(BF16, torch.finfo(dtype).eps)
        off = (output[0].double() - expected).abs()
        assert bool((off <= 4 * precision * size + 1e-12).all())


@pytest.mark.parametrize("bits", [4, 8])
def test_a_layer_keeps_its_scales_through_conversions(bits: int) -> None:
    """1e-7 is 0 in float16 steps of 6e-8 at best, and a scale that was rounded there would stay wrong."""
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) * 1e-6
    layer = Linear4(weight, None, 32) if bits == 4 else Linear8(weight, None)
    before = layer.dequantised(torch.float32)
    layer.half().double().to(torch.float32)
    assert torch.equal(layer.dequantised(torch.float32), before)
    assert layer.scales.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="packed for a CPU, and the model is on meta"):
        layer.to("meta")(torch.ones(1, 64, device="meta"))


# ---- models ----------------------------------------------------------------------------------------------------------


def ids_of(length: int) -> Tensor:
    return torch.randint(2, 99, (1, length), generator=torch.Generator().manual_seed(length))


def in_float64(family: Family) -> PreTrainedModel:
    model = family.build().double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the other has no float64
    return model


def with_weights_of(model: PreTrainedModel, packed: PreTrainedModel) -> PreTrainedModel:
    """A model whose linear layers have the weights that another one has in codes."""
    for name, layer in packed.named_modules():
        if isinstance(layer, PackedLinear):
            plain = model.get_submodule(name)
            weight = layer.dequantised(torch.float64)
            plain.weight = nn.Parameter(weight if isinstance(plain, nn.Linear) else weight.T)
    shared = packed.get_input_embeddings()
    if isinstance(shared, PackedEmbedding):
        model.get_input_embeddings().weight = nn.Parameter(shared.weight)
    return model


OTHERS = {family.name for family in FAMILIES} - {"Llama", "Qwen 3 MoE", "Gemma 3", "GPT-2", "Jamba"}
MIXED = {"Mamba"}
"""Casts activations to the dtype of its head's weight."""


@pytest.mark.filterwarnings("ignore:pack_weights. most of")
@cases(FAMILIES, slow=OTHERS)
@pytest.mark.parametrize("bits", [4, 8])
@torch.no_grad()
def test_families(bits: int, family: Family) -> None:
    """A prompt's logits are those of a model with the weights of the codes; steps have activations in bfloat16."""
    model = pack_weights(in_float64(family), bits)
    reference = with_weights_of(in_float64(family), model)
    ids = ids_of(40)
    plain = reference(ids).logits
    size = float(plain.std())
    if family.name not in MIXED:
        torch.testing.assert_close(model(ids).logits, plain, rtol=0, atol=1e-9 * size)
    few = ids[:, :12]
    torch.testing.assert_close(model(few).logits, reference(few).logits, rtol=0, atol=0.3 * size)
    assert not torch.equal(in_float64(family)(ids).logits, plain)

    model = pack_weights(family.build(), bits)
    made = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert made.shape == (1, 44)
    if family.refusal is None:
        ours = partial_generate(model, ids, max_new_tokens=4, method="topk", budget=1.0)
        assert ours.shape == (1, 44)


def test_falcon_has_a_linear_layer_of_its_own() -> None:
    config = FalconConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_kv_heads=2, alibi=False,
        new_decoder_architecture=True,
    )  # fmt: skip
    model = pack_weights(FalconForCausalLM(config).eval())
    assert isinstance(model.transformer.h[0].self_attention.query_key_value, Linear4)
    model.generate(ids_of(40), max_new_tokens=4, do_sample=False, eos_token_id=None)


def test_the_head_gets_8_bits_and_a_weight_of_its_own() -> None:
    model = tiny_llama(layers=2)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    embedding = model.get_input_embeddings().weight.detach().clone()
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert pack_weights(model) is model
    assert isinstance(model.lm_head, Linear8) and isinstance(model.model.layers[0].mlp.up_proj, Linear4)
    model.tie_weights()
    assert isinstance(model.lm_head, Linear8) and not model.config.tie_word_embeddings
    head = by_hand(model.lm_head)
    torch.testing.assert_close(head, embedding.double(), rtol=0, atol=float(embedding.abs().max()) / 200)
    shared = model.get_input_embeddings()
    assert isinstance(shared, PackedEmbedding) and not list(shared.parameters())
    ids = ids_of(12)
    torch.testing.assert_close(shared(ids).double(), head[ids], rtol=4 * BF16, atol=0)
    torch.testing.assert_close(copy.deepcopy(model).float().get_input_embeddings()(ids), head[ids].float())
    texts = {
        method: partial_generate(model, ids, max_new_tokens=4, method=method, budget=1.0) for method in ("topk", "full")
    }
    assert torch.equal(texts["topk"], texts["full"])
    assert model.packed_weights.startswith("15 linear layers in 4 bits in groups of 32 (head: 8), ")
    assert " nan" not in model.packed_weights


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_the_rest_is_in_bfloat16_where_that_is_fast(
    dtype: torch.dtype, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_weights, "has_bfloat16", lambda: fast)
    model = tiny_llama(layers=2).to(dtype)
    frequencies = model.model.rotary_emb.inv_freq
    model._keep_in_fp32_modules_strict = {"post_attention_layernorm"}
    pack_weights(model)
    expected = torch.bfloat16 if fast and dtype != torch.float64 else dtype
    assert {p.dtype for n, p in model.named_parameters() if "post_attention" not in n} == {expected}
    assert model.model.layers[0].post_attention_layernorm.weight.dtype == dtype
    assert model.model.rotary_emb.inv_freq is frequencies
    assert model.model.embed_tokens(ids_of(3)).dtype == expected


def test_routers_and_layers_with_hooks_stay() -> None:
    model = tiny_llama(layers=2)
    layer = model.model.layers[0]
    layer.mlp.router = nn.Linear(64, 4)
    seen = []
    layer.mlp.up_proj.register_forward_hook(lambda *args: seen.append(1))
    pack_weights(model)
    model(ids_of(4))
    assert type(layer.mlp.router) is nn.Linear and type(layer.mlp.up_proj) is nn.Linear and seen
    assert isinstance(layer.mlp.down_proj, Linear4)


def test_a_module_in_two_places_is_packed_once() -> None:
    model = tiny_llama(layers=2)
    first, second = model.model.layers
    second.mlp = first.mlp
    pack_weights(model)
    assert second.mlp is first.mlp and isinstance(first.mlp.up_proj, Linear4)


def test_most_of_the_weights_in_experts_warns() -> None:
    family = next(family for family in FAMILIES if family.name == "gpt-oss")
    with pytest.warns(UserWarning, match="most of GptOssForCausalLM stays as it is: 9 linear layers"):
        pack_weights(family.build())


@torch.no_grad()
def test_copies_and_states_give_the_same_logits(tmp_path: Path) -> None:
    model = pack_weights(tiny_llama(layers=2))
    ids = ids_of(5)
    expected = model(ids).logits.detach()
    assert torch.equal(copy.deepcopy(model)(ids).logits, expected)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    other = tiny_llama(layers=2)
    for parameter in other.parameters():
        parameter.normal_()
    pack_weights(other)
    assert not torch.equal(other(ids).logits, expected)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(other(ids).logits, expected)
    for convert in (PreTrainedModel.half, PreTrainedModel.float):
        converted = convert(copy.deepcopy(model))(ids).logits
        torch.testing.assert_close(converted.double(), expected.double(), rtol=0, atol=0.1 * float(expected.std()))


def test_what_a_packed_model_cannot_do_is_said(tmp_path: Path) -> None:
    model = pack_weights(tiny_llama(layers=2))
    with pytest.raises(
        ValueError, match="^save_pretrained: the model's weights are packed; call save_pretrained before"
    ):
        model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="^resize_token_embeddings: the model's weights are packed"):
        model.resize_token_embeddings(300)
    assert not list(tmp_path.iterdir()) and model.get_input_embeddings().num_embeddings == model.vocab_size
    with pytest.raises(ValueError, match="has packed weights already"):
        pack_weights(model, 8)
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(tiny_llama(layers=2).state_dict())
    with pytest.raises(KeyError, match="weight"):
        model.lm_head.weight = model.get_input_embeddings().weight


@pytest.mark.parametrize("bits", [4, 8])
def test_a_layer_compiles_in_one_graph(bits: int) -> None:
    model = pack_weights(tiny_llama(layers=2), bits)
    layer = model.model.layers[0].mlp
    compiled = torch.compile(layer, fullgraph=True, dynamic=False, backend="aot_eager")
    for rows in (1, 40):
        x = torch.randn(1, rows, 64, generator=torch.Generator().manual_seed(0)).to(model.dtype)
        with torch.no_grad():
            assert torch.equal(compiled(x), layer(x))


SCRIPT = """
import sys, torch
from residual_mass.model.packed_weights import Linear4, Linear8, layout_here
draw = torch.Generator().manual_seed(0)
weight = torch.randn(100, 48, generator=draw)
layer = Linear4(weight, None, 32)
for each in (layer, Linear8(weight, None)):
    x = torch.randn(3, 48, generator=draw).bfloat16()
    expected = x.double() @ each.dequantised(torch.float64).T
    assert (each(x) - expected).abs().max() < 0.02 * expected.abs().max()
print(layout_here())
state = torch.load(sys.argv[1])
for load in (lambda: layer.load_state_dict(state), lambda: torch.load(sys.argv[2], weights_only=False)):
    try:
        load()
        print("loaded")
    except ValueError as error:
        print(error)
"""


@pytest.mark.slow
def test_codes_for_another_cpu_are_refused(tmp_path: Path) -> None:
    layer = Linear4(torch.randn(100, 48), None, 32)
    torch.save(layer.state_dict(), tmp_path / "state.pt")
    torch.save(layer, tmp_path / "layer.pt")
    printed = {}
    for capability in ("default", "avx2"):
        run = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(tmp_path / "state.pt"), str(tmp_path / "layer.pt")],
            env={**os.environ, "ATEN_CPU_CAPABILITY": capability}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        layout, *lines = run.stdout.splitlines()
        same = layout == str(packed_weights.layout_here())
        for line in lines:
            assert line == "loaded" if same else line.startswith("the weights were packed for another CPU (blocks of ")
        printed[capability] = layout
    assert printed["default"] == "(32, 1)"


# ---- refusals --------------------------------------------------------------------------------------------------------


def refused(model: nn.Module, line: str, **arguments: object) -> None:
    before = dict(model.named_modules())
    with pytest.raises(ValueError, match=line) as raised:
        pack_weights(model, **arguments)
    assert "\n" not in str(raised.value)
    assert {name: id(module) for name, module in model.named_modules()} == {n: id(m) for n, m in before.items()}


class Adapter(nn.Module):
    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer


def test_arguments() -> None:
    model = tiny_llama(layers=2)
    for bits in (3, 4.0, "4", True):
        refused(model, f"^bits is {bits!r}, not 4 or 8$", bits=bits)
    for group in (16, 48, None):
        refused(model, f"^group is {group}, not one of 32, 64, 128, 256$", group=group)
    refused(nn.Linear(4, 4), "^pack_weights takes a model of transformers, not a Linear: ")
    refused(torch.compile(model), "^pack_weights takes a model of transformers, not a OptimizedModule: ")


def test_models_whose_weights_are_not_plain_numbers_on_a_cpu() -> None:
    refused(tiny_llama(layers=2).train(), r"^LlamaForCausalLM is in training mode.*call model\.eval\(\)$")
    with torch.device("meta"):
        refused(tiny_llama(layers=2), "has no weights in memory .*is on the meta device")
    model = tiny_llama(layers=2)
    model.model.layers[1].mlp.up_proj = Adapter(model.model.layers[1].mlp.up_proj)
    refused(model, r"has an adapter \(model\.layers\.1\.mlp\.up_proj\): merge")
    model = tiny_llama(layers=2)
    cpu_offload(model)
    refused(model, "is placed by accelerate|is on the meta device")
    model = tiny_llama(layers=2)
    down = model.model.layers[1].mlp.down_proj
    down.weight = nn.Parameter(down.weight.detach().to(torch.float8_e4m3fn))
    refused(model, r"has quantised weights already \(model.layers.1.mlp.down_proj.weight is torch.float8_e4m3fn\)")
    model = tiny_llama(layers=2)
    model.model.layers[1].mlp.register_buffer("qweight", torch.zeros(8, 64, dtype=torch.int32))
    refused(model, r"has quantised weights already \(model.layers.1.mlp.qweight is torch.int32\)")
    model = tiny_llama(layers=2)
    first, second = model.model.layers
    second.mlp.up_proj.weight = first.mlp.up_proj.weight
    refused(model, "ties model.layers.1.mlp.up_proj to model.layers.0.mlp.up_proj, and packed weights cannot be tied")


def test_sharded_weights() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = tiny_llama(layers=2)
        up = model.model.layers[0].mlp.up_proj
        up.weight = nn.Parameter(distribute_tensor(up.weight.detach(), DeviceMesh("cpu", [0])))
        refused(model, r"has weights of another kind \(model.layers.0.mlp.up_proj.weight is a DTensor\)")
    finally:
        torch.distributed.destroy_process_group()
