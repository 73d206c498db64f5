"""`pack_weights`: products, whole models of every family, and what a packed model can and cannot do."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from accelerate import cpu_offload
from tests.conftest import tiny_llama
from tests.needs import HUGE_PAGES, needs
from tests.unit.model.families import FAMILIES, Family, cases
from tests.unit.model.weights import BF16, by_hand
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, distribute_tensor
from torch.nn.utils.parametrizations import weight_norm
from transformers import AutoModelForCausalLM, FalconConfig, FalconForCausalLM, PreTrainedModel

from residual_mass import pack_weights, partial_generate
from residual_mass.kernels.products import MANY
from residual_mass.model import packed_weights
from residual_mass.model.packed_linear import PackedEmbedding, PackedHead, PackedLinear
from residual_mass.model.weight_codes import Codes, codes_of_4_bits, codes_of_8_bits

# ---- layers ----------------------------------------------------------------------------------------------------------


def codes_of(weight: Tensor, bits: int) -> Codes:
    return codes_of_4_bits(weight, 32) if bits == 4 else codes_of_8_bits(weight, 32)


def packed(weight: Tensor, bits: int, bias: nn.Parameter | None = None, kind: type = PackedLinear) -> PackedLinear:
    return kind(codes_of(weight, bits), weight.shape[1], bias, weight.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("columns, rows", [(64, 64), (33, 1), (7, 130), (100, 48)])
@pytest.mark.parametrize("bits", [4, 8])
def test_products_are_those_of_the_codes(bits: int, columns: int, rows: int, dtype: torch.dtype) -> None:
    """For few rows of activations and for many, for odd widths, and out of order; in float64 exactly."""
    draw = torch.Generator().manual_seed(columns)
    weight = torch.randn(rows, columns, generator=draw)
    bias = nn.Parameter(torch.randn(rows, generator=draw).to(dtype))
    layer = packed(weight, bits, bias)
    exact = by_hand(layer)
    torch.testing.assert_close(layer.dequantised(torch.float64), exact, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer.weight.double(), exact, rtol=0, atol=1e-5)
    torch.testing.assert_close(layer.rows(torch.tensor([[rows - 1]]), torch.float64), exact[None, None, -1])
    for count in (1, 5, 40, MANY):
        x = torch.randn(columns, count, generator=draw).to(dtype).T
        output = layer(x[None])
        assert output.dtype == dtype and output.shape == (1, count, rows)
        expected = F.linear(x.double(), exact, bias.double())
        size = F.linear(x.double().abs(), exact.abs(), bias.double().abs())
        sixteen_bits = x.double().abs().amax() / 65534 * exact.abs().sum(1) if dtype != torch.float64 else 0
        off = (output[0].double() - expected).abs()
        assert bool((off <= 2 * torch.finfo(dtype).eps * size + sixteen_bits + 1e-12).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("biased", [False, True])
def test_logits_of_a_head_are_not_rounded(biased: bool, dtype: torch.dtype) -> None:
    """Logits of 32 to 64 are multiples of 1/4 in bfloat16, so the greatest tie there."""
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(3000, 50, generator=draw) / 10
    weight[:, 0] = 10
    bias = nn.Parameter(torch.randn(3000, generator=draw).to(dtype) / 10) if biased else None
    head = packed(weight, 8, bias, PackedHead)
    x = torch.randn(2, 80, 50, generator=draw)
    x[..., 0] = 4
    x = x.to(dtype)
    logits = head(x)
    exact = F.linear(x.double(), head.dequantised(torch.float64), None if bias is None else bias.double())
    assert logits.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(logits.double(), exact, rtol=0, atol=4e-4)
    best, ids = exact.topk(2)
    clear = best[..., 0] - best[..., 1] > 1e-3
    assert clear.float().mean() > 0.9 and torch.equal(logits.argmax(-1)[clear], ids[..., 0][clear])
    if dtype == torch.bfloat16:
        assert not torch.equal(packed(weight, 8, bias)(x).argmax(-1)[clear], ids[..., 0][clear])


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e30])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_layer_keeps_its_scales_through_conversions(bits: int, size: float) -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) * size
    layer = packed(weight, bits)
    before = layer.dequantised(torch.float32)
    torch.testing.assert_close(before, weight, rtol=0, atol=float(weight.abs().max()) / (12 if bits == 4 else 250))
    layer.half().double().to(torch.float32)
    assert torch.equal(layer.dequantised(torch.float32), before)
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
    """In float64, logits are those of a model with the weights of the codes."""
    model = pack_weights(in_float64(family), bits)
    reference = with_weights_of(in_float64(family), model)
    ids = ids_of(40)
    plain = reference(ids).logits
    size = float(plain.std())
    if family.name not in MIXED:
        torch.testing.assert_close(model(ids).logits, plain, rtol=0, atol=1e-9 * size)
    assert not torch.equal(in_float64(family)(ids).logits, plain)

    model = pack_weights(family.build(), bits)
    made = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert made.shape == (1, 44)
    if family.refusal is None:
        ours = partial_generate(model, ids, max_new_tokens=4, method="topk", budget=1.0)
        assert ours.shape == (1, 44)


@pytest.mark.parametrize("fast", [True, False])
def test_tokens_are_those_of_the_exact_product_of_the_head(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_weights, "has_bfloat16", lambda: fast)
    model = pack_weights(tiny_llama(layers=2))
    seen = []
    model.lm_head.register_forward_pre_hook(lambda layer, args: seen.append(args[0][:, -1]))
    ids = torch.cat((ids_of(20), ids_of(20).flip(1)))
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=None,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    exact = torch.stack(seen, 1).double() @ model.lm_head.dequantised(torch.float64).T
    off = (torch.stack(made.logits, 1).double() - exact).abs().max()
    assert off < 2e-4 * exact.std()
    best = exact.topk(2).values
    clear = best[..., 0] - best[..., 1] > 2 * off
    assert clear.float().mean() > 0.8 and torch.equal(made.sequences[:, 20:][clear], exact.argmax(-1)[clear])


def test_falcon_has_a_linear_layer_of_its_own() -> None:
    config = FalconConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_kv_heads=2, alibi=False,
        new_decoder_architecture=True,
    )  # fmt: skip
    model = pack_weights(FalconForCausalLM(config).eval())
    assert model.transformer.h[0].self_attention.query_key_value.bits == 4
    model.generate(ids_of(40), max_new_tokens=4, do_sample=False, eos_token_id=None)


def test_the_head_gets_8_bits_and_a_weight_of_its_own() -> None:
    model = tiny_llama(layers=2)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    embedding = model.get_input_embeddings().weight.detach().clone()
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert pack_weights(model) is model
    assert isinstance(model.lm_head, PackedHead) and model.model.layers[0].mlp.up_proj.bits == 4
    model.tie_weights()
    assert isinstance(model.lm_head, PackedHead) and not model.config.tie_word_embeddings
    head = by_hand(model.lm_head)
    torch.testing.assert_close(head, embedding.double(), rtol=0, atol=float(embedding.abs().max()) / 200)
    shared = model.get_input_embeddings()
    assert isinstance(shared, PackedEmbedding) and not list(shared.parameters())
    ids = ids_of(12)
    torch.testing.assert_close(shared(ids).double(), head[ids], rtol=BF16, atol=0)
    torch.testing.assert_close(copy.deepcopy(model).float().get_input_embeddings()(ids), head[ids].float())
    texts = {
        method: partial_generate(model, ids, max_new_tokens=4, method=method, budget=1.0) for method in ("topk", "full")
    }
    assert torch.equal(texts["topk"], texts["full"])
    linear = r"14 linear layers in 4 bits in groups of 32, rounded \(off by 7\.\d+%\)"
    head = r"1 in 8 bits in groups of 32, rounded \(off by 0\.\d+%\)"
    assert re.match(rf"{linear}, {head}, 100% of the weights; 0\.1 MiB, 0\.3 before$", model.packed_weights)


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
    weight_norm(layer.mlp.gate_proj)
    pack_weights(model)
    model(ids_of(4))
    assert type(layer.mlp.router) is nn.Linear and type(layer.mlp.up_proj) is nn.Linear and seen
    assert isinstance(layer.mlp.gate_proj, nn.Linear) and layer.mlp.down_proj.bits == 4


CHANGES: dict[str, Callable[[nn.Embedding], object]] = {
    "hook": lambda each: each.register_forward_hook(lambda module, args, output: output * 2),
    "hook before": lambda each: each.register_forward_pre_hook(lambda module, args: (args[0].flip(-1),)),
    "forward": lambda each: setattr(each, "forward", lambda ids: F.embedding(ids + 1, each.weight)),
    "max_norm": lambda each: setattr(each, "max_norm", 0.5),
}


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_a_tied_embedding_that_does_more_stays_and_has_weights_of_its_own(change: str) -> None:
    model = tiny_llama(layers=2)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    embedding = model.get_input_embeddings()
    plain = embedding.weight.clone()
    CHANGES[change](embedding)
    expected = copy.deepcopy(embedding)(ids_of(12))
    assert not torch.equal(expected, plain[ids_of(12)])
    pack_weights(model)
    model.tie_weights()
    assert model.get_input_embeddings() is embedding and isinstance(model.lm_head, PackedHead)
    torch.testing.assert_close(embedding(ids_of(12)).float(), expected, rtol=4 * BF16, atol=0)


def test_no_file_of_weights_stays_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is loaded, a norm in the dtype of the file is a view of it, and one view keeps the whole file."""
    monkeypatch.setattr(packed_weights, "has_bfloat16", lambda: False)
    tiny_llama(layers=2).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    views = {parameter.data.data_ptr(): parameter.data for parameter in model.parameters()}
    pack_weights(model)
    assert not views.keys() & {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}


def test_a_module_in_two_places_is_packed_once() -> None:
    model = tiny_llama(layers=2)
    first, second = model.model.layers
    second.mlp = first.mlp
    pack_weights(model)
    assert second.mlp is first.mlp and first.mlp.up_proj.bits == 4


def test_most_of_the_weights_in_experts_warns() -> None:
    family = next(family for family in FAMILIES if family.name == "gpt-oss")
    with pytest.warns(
        UserWarning, match="most of GptOssForCausalLM stays as it is: 8 linear layers in 4 bits .*, 1 in 8"
    ):
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


@needs(HUGE_PAGES)
def test_weights_lie_where_huge_pages_are_asked_for() -> None:
    """Each in a storage of its own, as long as it is."""
    model = pack_weights(tiny_llama(layers=2))
    buffers = [layer.words for layer in model.modules() if isinstance(layer, PackedLinear)]
    maps = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)[1:]
    asked = [each for each in maps if re.search(r"^VmFlags:.* hg( |$)", each, re.MULTILINE)]
    ranges = [[int(end, 16) for end in each.partition(" ")[0].split("-")] for each in asked]
    for buffer in buffers:
        first = buffer.data_ptr()
        assert buffer.untyped_storage().nbytes() == buffer.nbytes
        assert any(low <= first and first + buffer.nbytes <= high for low, high in ranges)


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
    for layer in (model.model.layers[0].mlp, model.lm_head):
        compiled = torch.compile(layer, fullgraph=True, dynamic=False, backend="aot_eager")
        for rows in (1, 40):
            x = torch.randn(1, rows, 64, generator=torch.Generator().manual_seed(0)).to(model.dtype)
            with torch.no_grad():
                assert torch.equal(compiled(x), layer(x))


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


@pytest.mark.parametrize("rows", [1, 40])
def test_a_bias_in_another_dtype_than_the_activations_is_added_whatever_the_number_of_rows(rows: int) -> None:
    layer = packed(torch.randn(6, 32), 8, nn.Parameter(torch.randn(6).bfloat16()))
    x = torch.randn(rows, 32).bfloat16().float()
    output = layer(x)
    assert output.dtype == torch.float32
    exact = F.linear(x, layer.dequantised(torch.float32), layer.bias.float())
    torch.testing.assert_close(output, exact, rtol=0, atol=1e-3)
