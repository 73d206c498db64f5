"""Keys of which a few channels have a much larger range than the others, as a large bias that is rotated gives them."""

from __future__ import annotations

import pytest
import torch
from tests.needs import KERNELS, needs
from tests.unit.kernels.conftest import targets
from tests.unit.kernels.reference import eight, planes
from tests.unit.kernels.test_steps import check, check_all, drawn, made, step
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from residual_mass import Text, backend_for
from residual_mass.decode.backend import CacheBackend
from residual_mass.decode.packed_backend import PackedBackend
from residual_mass.decode.torch_backend import TorchBackend
from residual_mass.kernels import LayerCache
from residual_mass.kernels.library import WIDTHS, Library
from residual_mass.methods.arms import arm_of

pytestmark = needs(KERNELS)
SHAPES = [*({"width": width} for width in WIDTHS), *({"group": group, "heads": 1} for group in (1, 2, 4, 5, 8))]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("target", targets())
def test_channels_that_turn_with_a_large_bias_do_not_coarsen_the_others(
    target: str, bits: int, shape: dict[str, int]
) -> None:
    """A rotated bias has its whole range in every block. Rounding the query costs no more than rounding the keys does,
    in a step, also one that scans, and in full attention of several tokens, where one query needs it and the next not.
    """
    library = Library(target)
    keys, values, query = made(600, **shape)
    angle = torch.arange(600.0)[:, None] * torch.tensor([0.43, 0.27])
    keys[..., [8, 9]] += 300 * angle.cos()
    query[:, ::2, 8:10] *= 4
    query[:, 1::2, 8:10] *= 0.01
    scale = query.shape[-1] ** -0.5
    prompt, last = (keys[:, :, :599], values[:, :, :599]), (keys[:, :, 599:], values[:, :, 599:])
    whole, scanned = (LayerCache(library, *prompt, [0], bits=bits, k=[k], clusters=1) for k in (600, 9))
    output, _ = step(whole, query, last, scale)
    exact, rounded = outputs_of(keys, values, query, scale), outputs_of(*restored(whole), query, scale)
    assert (output - rounded).norm() < (exact - rounded).norm()
    check(whole, query)
    check(scanned, query)
    check_all(scanned, torch.stack((query, query.flip(1), 0.1 * query), 2), drawn(scanned, 3))


TURNING, STILL = [8, 9, 40, 41], [30, 31, 62, 63]
"""Channels of 64 that turn within a block of tokens, and such that hardly rotate."""


@pytest.mark.parametrize(("bias", "channels"), [(20, TURNING), (100, TURNING), (300, STILL)])
def test_a_model_with_a_large_bias_in_its_keys_keeps_its_distance_in_packed_caches(
    bias: float, channels: list[int]
) -> None:
    """Next tokens of packed caches that are read whole are as near to full attention as those of 8 bits in torch."""
    model = biased(bias, channels)
    prompt = torch.randint(2, 258, (1, 600), generator=torch.Generator().manual_seed(1))

    def steps(name: str, budget: float | None, kind: type[CacheBackend]) -> Tensor:
        text = Text(model, backend_for(model, arm_of(name, budget), kinds=[kind]))
        text.read(prompt)
        logits = [text.step(torch.tensor([[token]]))[0, -1] for token in range(40, 48)]
        return torch.stack(logits).log_softmax(-1)

    with torch.no_grad():
        full = steps("full", None, TorchBackend)
        distances = {}
        for name, budget, packed in (("cache8", None, False), ("cache8", None, True), ("scan4", 1.0, True)):
            ours = steps(name, budget, PackedBackend if packed else TorchBackend)
            distances[name, packed] = float((full.exp() * (full - ours)).sum(-1).mean())
    most = 2 * distances["cache8", False] + 2e-3  # the query has a rounding of its own
    assert distances["cache8", True] < most
    assert distances["scan4", True] < most


def biased(bias: float, channels: list[int]) -> Qwen2ForCausalLM:
    """A model in float64 with a bias in some channels of its keys, and 7 query heads of each KV head."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=258,
        hidden_size=896,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=14,
        num_key_value_heads=2,
        initializer_range=0.06,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config).double().eval()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.q_proj.bias, std=0.5)
        keys = torch.zeros(2, 64, dtype=torch.float64)
        keys[:, channels] = bias * torch.randn(2, len(channels), dtype=torch.float64).sign()
        layer.self_attn.k_proj.bias.data.copy_(keys.flatten())
    return model


def outputs_of(keys: Tensor, values: Tensor, query: Tensor, scale: float) -> Tensor:
    """Attention in float64 of queries [1, H G, D] to keys and values [1, H, L, D]."""
    heads, width = keys.shape[1], keys.shape[3]
    grouped = query.double().view(1, heads, -1, width)
    return ((grouped @ keys.double().mT * scale).softmax(-1) @ values.double()).flatten(1, 2)


def restored(cache: LayerCache) -> tuple[Tensor, Tensor]:
    """Keys and values of the first row of a cache, as it has rounded them."""
    heads = []
    for head in range(cache.heads):
        if cache.bits == 8:
            codes, rows = eight(cache, 0, head)
        else:
            high, low, rows = planes(cache, 0, head)
            codes = 16 * high + low
        middle, step = cache.scales[0, head].double().repeat_interleave(64, 0).unbind(1)
        recent = cache.recent[0, head, : int(cache.recents)].double()
        count = int(cache.slots)
        own = (middle + step * (codes - 127.5))[:count]
        heads.append((torch.cat((recent[:, 0], own)), torch.cat((recent[:, 1], rows[:count]))))
    keys, values = zip(*heads, strict=True)
    return torch.stack(keys)[None], torch.stack(values)[None]
