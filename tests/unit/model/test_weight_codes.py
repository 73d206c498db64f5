"""Codes of packed weights: kept, rounded, and in how many bits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from tests.conftest import tiny_llama
from tests.unit.model.gguf_files import write_gguf
from tests.unit.model.weights import by_hand
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from residual_mass import pack_weights
from residual_mass.model.packed_linear import PackedLinear
from residual_mass.model.packed_weights import GROUPS
from residual_mass.model.weight_codes import Codes, codes_of_4_bits, codes_of_8_bits

HALF = 2.0**-11
"""Largest relative error of rounding to half precision."""


def packed(codes: Codes, columns: int) -> PackedLinear:
    return PackedLinear(codes, columns, None, torch.float32)


def weights_of(codes: Codes, columns: int) -> Tensor:
    return packed(codes, columns).dequantised(torch.float64)


def assert_kept(weight: Tensor, codes: Tensor, scale: Tensor, kept: torch.dtype) -> None:
    """Codes are those given, and weights differ by no more than rounding scale and minimum to half precision makes.

    A few levels that are rounded to bfloat16 lie on several grids.
    """
    found = codes_of_4_bits(weight.to(kept), 32)
    if kept != torch.bfloat16 or codes.max() > 8:
        assert torch.equal(found.codes, codes)
    groups = weight.double().view(len(codes), -1, 32)
    off = (weights_of(found, codes.shape[1]).view_as(groups) - groups).abs().amax(-1)
    largest = groups.abs().amax(-1) + 15 * scale.abs()
    rounding = HALF * largest
    if kept != torch.float32:
        rounding += torch.finfo(kept).eps * largest
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


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_blocks_of_a_gguf_file_are_kept_bit_for_bit(kind: str) -> None:
    """Codes and scales: the weights are those that gguf's own code reads."""
    original = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    blocks = quantize(original.numpy(), GGMLQuantizationType[kind])
    stored = torch.from_numpy(dequantize(blocks, GGMLQuantizationType[kind]))
    found = codes_of_8_bits(stored, 32) if kind == "Q8_0" else codes_of_4_bits(stored, 32)
    assert found.kept and torch.equal(weights_of(found, 96), stored.double())
    nibbles = torch.from_numpy(blocks).view(64, 3, -1)[..., -16:]
    if kind != "Q8_0":
        assert torch.equal(found.codes.view(64, 3, 32), torch.cat((nibbles & 15, nibbles >> 4), -1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_codes_of_8_bits_are_kept_only_where_there_were_some(dtype: torch.dtype) -> None:
    """Bfloat16 rounds more coarsely than 8 bits do on average."""
    weight = dequantised_from("Q8_0", 64, 96)
    assert codes_of_8_bits(weight.to(dtype), 32).kept
    for plain in (torch.randn(64, 96, generator=torch.Generator().manual_seed(0)), dequantised_from("Q5_0", 64, 96)):
        assert not codes_of_8_bits(plain.to(dtype), 32).kept
    one_off = weight.clone()
    one_off[5, 7] = 2.5 / 127 * weight[5, :32].abs().max()
    assert not codes_of_8_bits(one_off.to(dtype), 32).kept
    layers = pack_weights(tiny_llama().to(dtype), bits=8).packed_weights
    assert "rounded" in layers and "kept" not in layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gguf_file_keeps_its_codes(dtype: torch.dtype, tmp_path: Path) -> None:
    kinds = {"embed": "Q8_0", "lm_head": "Q8_0", "layers.0": "Q4_0", "layers.1": "Q4_1"}
    write_gguf(
        tmp_path / "tiny.gguf", tiny_llama(layers=2), lambda name: next(kinds[part] for part in kinds if part in name)
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=dtype)
    weights = {name: layer.weight.detach() for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    pack_weights(model)
    assert model.generate(torch.arange(2, 7)[None], max_new_tokens=3, do_sample=False, eos_token_id=None).shape == (
        1,
        8,
    )
    compared = 0
    for name, weight in weights.items():
        layer = model.get_submodule(name)
        if isinstance(layer, PackedLinear) and layer.bits == 4:
            groups = weight.double().unflatten(1, (-1, 32))
            off = (by_hand(layer).view_as(groups) - groups).abs().amax(-1)
            low, high = groups.aminmax(dim=-1)
            assert bool((off <= (high - low) / 15 / 4).all()), "a second rounding to 16 levels could be off by a half"
            compared += 1
    assert compared == 14 and model.lm_head.kept


class Blocks(NamedTuple):
    """A format of GGUF files whose weights are codes * scale - lowest, by groups."""

    group: int
    codes: Sequence[int]
    has_lowest: bool = False


MADE = {
    "Q4_K": Blocks(32, range(16), has_lowest=True),
    "Q5_K": Blocks(32, range(32), has_lowest=True),
    "Q6_K": Blocks(16, range(-32, 32)),
    "IQ4_NL": Blocks(32, (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)),
}
"""Formats that `gguf` reads and does not write."""
FINE = ["Q5_0", "Q5_1", "Q8_0", "Q5_K", "Q6_K", "IQ4_NL"]
KINDS = ["Q4_0", "Q4_1", "Q4_K", *FINE]


def dequantised_from(kind: str, rows: int, columns: int) -> Tensor:
    draw = torch.Generator().manual_seed(rows)
    if kind not in MADE:
        kind = GGMLQuantizationType[kind]
        plain = torch.randn(rows, columns, generator=draw).numpy()
        return torch.from_numpy(dequantize(quantize(plain, kind), kind))
    group, codes, has_lowest = MADE[kind]
    choice = torch.randint(len(codes), (rows, columns // group, group), generator=draw)
    most = max(map(abs, codes))
    super_scale = (torch.rand(rows, 1, 1, generator=draw) / 60 / most).half().float()
    scale = torch.randint(32, 64, (rows, columns // group, 1), generator=draw) * super_scale
    lowest = torch.randint(most // 3, 2 * most // 3, (rows, columns // group, 1), generator=draw) * scale
    return (torch.tensor(codes)[choice] * scale - has_lowest * lowest).flatten(1)


def model_of(*kinds: str) -> PreTrainedModel:
    """A small Llama whose layers have weights that were dequantised from these formats, in turn; None: plain ones."""
    model = tiny_llama(layers=len(kinds))
    for kind, layer in zip(kinds, model.model.layers, strict=True):
        for module in layer.modules():
            if isinstance(module, nn.Linear) and kind is not None:
                module.weight = nn.Parameter(dequantised_from(kind, *module.weight.shape))
    return model


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_weights_on_finer_grids_get_8_bits(kind: str, dtype: torch.dtype) -> None:
    """Not those that were kept in 4; in 4 bits, the others would be off by some 7 %."""
    bits = 8 if kind in FINE else 4
    model = pack_weights(model_of(kind).to(dtype))
    plain = model_of(kind)
    for name, layer in model.model.layers.named_modules():
        if isinstance(layer, PackedLinear):
            weight = plain.model.layers.get_submodule(name).weight.double()
            error = float((layer.dequantised(torch.float64) - weight).norm() / weight.norm())
            assert layer.bits == bits and error < 0.01
            assert abs(layer.error - error) < 0.003


def test_a_file_in_several_formats_is_packed_layer_by_layer(caplog: pytest.LogCaptureFixture) -> None:
    """As Q4_K_M is; plain weights are rounded as asked."""
    kinds = ("Q4_K", "Q6_K", None)
    with caplog.at_level("INFO"):
        model = pack_weights(model_of(*kinds))
    assert [layer.mlp.down_proj.bits for layer in model.model.layers] == [4, 8, 4]
    pattern = (
        r"7 linear layers in 4 bits in groups of 32, codes kept \(off by 0\.0\d%\), 8 in 8 bits in groups of 32, "
        r"rounded \(off by 0\.[3-6]\d%\), 7 in 4 bits in groups of 32, rounded \(off by 7\.\d\d%\), "
        r"86% of the weights; "
    )
    assert re.match(pattern, model.packed_weights) and caplog.messages[-1] == model.packed_weights
    alike = pack_weights(model_of(*kinds), mixed=False)
    assert re.match(
        r"7 linear .* kept .*, 14 in 4 bits in groups of 32, rounded \(.*, 1 in 8 bits", alike.packed_weights
    )


def test_codes_that_larger_groups_cannot_keep_stay_in_smaller_ones() -> None:
    model = pack_weights(model_of("Q4_0", None), group=64)
    assert [layer.mlp.down_proj.group for layer in model.model.layers] == [32, 64]
    assert "7 linear layers in 4 bits in groups of 32, codes kept (off by 0." in model.packed_weights


def test_outliers_stay_within_their_group() -> None:
    """One weight of a row, 200 times as large as the others, takes no other group its steps."""
    weight = dequantised_from("Q8_0", 64, 128)
    weight[:, 0] *= 200
    found = codes_of_8_bits(weight, 32)
    off = weights_of(found, 128) - weight
    assert off[:, 32:].norm() < 0.01 * weight[:, 32:].norm()


def test_other_weights_are_rounded_to_the_nearest_of_16_levels() -> None:
    weight = torch.randn(32, 128, generator=torch.Generator().manual_seed(0))
    weight[3] = 0.25
    weight[4] = 0
    for group in GROUPS[:3]:
        off = (by_hand(packed(codes_of_4_bits(weight, group), 128)) - weight).view(32, -1, group)
        groups = weight.double().view(32, -1, group)
        low, high = groups.aminmax(dim=-1, keepdim=True)
        step = (high - low) / 15
        nearest = low + step * ((groups - low) / step.clamp_min(1e-9)).round()
        least = (nearest - groups).square().mean(-1)
        assert bool((off.square().mean(-1) <= 1.02 * least + (0.25 * HALF) ** 2).all())
        assert bool((least[0] > 0).all())


@pytest.mark.parametrize("columns, group", [(33, 32), (100, 64), (160, 128), (300, 256)])
def test_what_fills_up_the_last_group_takes_no_part_in_its_fit(columns: int, group: int) -> None:
    weight = torch.randn(500, columns, generator=torch.Generator().manual_seed(0))
    tail = weight[:, columns // group * group :].double()
    low, high = tail.aminmax(dim=-1, keepdim=True)
    step = ((high - low) / 15).clamp_min(1e-9)
    nearest = low + step * ((tail - low) / step).round()
    off = weights_of(codes_of_4_bits(weight, group), columns)[:, -tail.shape[1] :] - tail
    assert off.square().mean() <= 1.02 * (nearest - tail).square().mean() + (2 * HALF) ** 2 / 12
