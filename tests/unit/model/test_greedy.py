"""Generation on the fast path gives the tokens of `partial_kv` under `model.generate`."""

from __future__ import annotations

import warnings

import pytest
import torch
from tests.unit.model.test_decoding import SHAPES, backbone_of, random_maps
from torch import Tensor

from residual_mass import PhiMaps, partial_generate, partial_kv
from residual_mass.core.settings import MapSpec
from residual_mass.methods import METHODS as ALL
from residual_mass.model.hook import attention_layers
from residual_mass.model.loading import Backbone

METHODS = [one.name for one in ALL if one.fused]


@pytest.fixture(scope="module")
def phi(tiny_backbone: Backbone) -> PhiMaps:
    torch.manual_seed(3)
    maps = PhiMaps(tiny_backbone.shape, MapSpec(d_emb=24, d_phi=8))
    for name, parameter in maps.named_parameters():
        if name.endswith("alpha"):
            parameter.data.normal_()
    return maps.requires_grad_(False)


def test_methods_with_truncated_moments_and_scans_of_4_bits_are_among_them() -> None:
    assert {"topk_phi", "topk_moments", "topk_moments_8"} < set(METHODS)
    assert {"scan4", "scan4_moments"} < set(METHODS)
    assert not {"scan3_regression_32", "pages", "topk_centroids"} & set(METHODS)


def prompt_of(length: int) -> Tensor:
    return torch.randint(2, 258, (1, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("length", [1, 12, 30, 150])
@pytest.mark.parametrize("method", METHODS)
def test_tokens_are_those_of_partial_kv(method: str, length: int, tiny_backbone: Backbone, phi: PhiMaps) -> None:
    prompt, model = prompt_of(length), tiny_backbone.model
    phi = phi if "phi" in method else None
    with partial_kv(model, method, 0.15, phi):
        expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=12)
    ours = partial_generate(model, prompt, max_new_tokens=12, method=method, budget=0.15, phi=phi)
    assert ours.tolist() == expected.tolist() and ours.shape[1] > length + 1
    assert not any(hasattr(layer, "residual_mass_handler") for layer in attention_layers(model))


@SHAPES
@pytest.mark.parametrize("method", METHODS)
def test_tokens_are_those_of_partial_kv_whatever_the_heads_and_anchors(method: str, heads: int, kv_heads: int) -> None:
    backbone, prompt, anchors = backbone_of(heads, kv_heads), prompt_of(60), {"num_sink": 3, "num_tail": 5}
    model, phi = backbone.model, random_maps(backbone) if "phi" in method else None
    with partial_kv(model, method, 0.3, phi, **anchors):
        expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=12)
    ours = partial_generate(model, prompt, max_new_tokens=12, method=method, budget=0.3, phi=phi, **anchors)
    assert ours.tolist() == expected.tolist()


def test_it_stops_behind_an_end_token(tiny_backbone: Backbone, phi: PhiMaps, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, model = prompt_of(150), tiny_backbone.model
    free = partial_generate(model, prompt, max_new_tokens=12, budget=0.15, phi=phi)[0, 150:].tolist()
    for place in (0, 1, 5):
        end = free[place]
        for ends in (end, [257, end]):
            monkeypatch.setattr(model.generation_config, "eos_token_id", ends)
            tokens = partial_generate(model, prompt, max_new_tokens=12, budget=0.15, phi=phi)[0, 150:].tolist()
            assert tokens == free[: free.index(end) + 1]
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    for count in (1, 2):
        assert partial_generate(model, prompt, max_new_tokens=count, budget=0.15, phi=phi).shape == (1, 150 + count)


@pytest.mark.parametrize("place", [0, 1, 5])
def test_end_tokens_of_the_call_are_those_of_generate(place: int, tiny_backbone: Backbone) -> None:
    prompt, model, rest = prompt_of(150), tiny_backbone.model, {"method": "topk_moments", "budget": 0.15}
    free = partial_generate(model, prompt, max_new_tokens=12, eos_token_id=[], **rest)
    assert free.shape == (1, 162)
    end = int(free[0, 150 + place])
    for ends in (end, [257, end]):
        with warnings.catch_warnings(action="ignore"), partial_kv(model, **rest):  # where the first token ends it
            expected = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=12, eos_token_id=ends
            )
        ours = partial_generate(model, prompt, max_new_tokens=12, eos_token_id=ends, **rest)
        assert ours.tolist() == expected.tolist() and ours[0, -1] == end


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": "hello"}, r"^partial_generate takes token ids \[1, L\], not a str: pass tokenizer"),
        ({"input_ids": [[5, 6]]}, "not a list: pass tokenizer"),
        ({"input_ids": prompt_of(20).repeat(2, 1)}, r"takes one prompt \[1, L\], not \[2, 20\]; use partial_kv"),
        ({"input_ids": prompt_of(20)[0]}, r"takes one prompt \[1, L\], not \[20\]"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0, not above 0"),
        ({"phi": None}, r"method topk_phi needs phi maps: pass phi=PhiMaps.load\(...\)"),
        ({"method": "magic"}, "magic"),
        ({"method": "topk_centroids"}, "method topk_centroids has no fast decode step; use partial_kv"),
        ({"budget": 1.5}, "budget=1.5 is not a share"),
    ],
)
def test_refusals(arguments: dict[str, object], message: str, tiny_backbone: Backbone, phi: PhiMaps) -> None:
    common = {"input_ids": prompt_of(20), "max_new_tokens": 3, "budget": 0.2, "phi": phi}
    with pytest.raises(ValueError, match=message):
        partial_generate(tiny_backbone.model, **common | arguments)
