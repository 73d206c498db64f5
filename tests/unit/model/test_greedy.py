"""Generation on the fast path gives the tokens of `partial_kv` under `model.generate`."""

from __future__ import annotations

import warnings

import pytest
import torch
from tests.unit.model.test_decoding import backbone_of, random_maps
from torch import Tensor
from transformers import PreTrainedModel

from residual_mass import PhiMaps, partial_generate, partial_kv
from residual_mass.methods import METHODS as ALL
from residual_mass.methods.served import backends_of
from residual_mass.model.layers import attention_layers
from residual_mass.model.loading import Backbone

METHODS = [one.name for one in ALL if "triton" in backends_of(one)]
assert {"topk_phi", "topk_moments", "scan4", "scan4_moments"} < set(METHODS)


@pytest.fixture(scope="module")
def phi(tiny_backbone: Backbone) -> PhiMaps:
    return random_maps(tiny_backbone)


def prompt_of(length: int) -> Tensor:
    return torch.randint(2, 258, (1, length), generator=torch.Generator().manual_seed(length))


def both(model: PreTrainedModel, method: str, prompt: Tensor, budget: float, phi: PhiMaps, **anchors: int) -> Tensor:
    """The tokens of the fast path, which must be those of `partial_kv`."""
    phi = phi if "phi" in method else None
    with partial_kv(model, method, budget, phi, **anchors):
        expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=8)
    ours = partial_generate(model, prompt, max_new_tokens=8, method=method, budget=budget, phi=phi, **anchors)
    assert ours.tolist() == expected.tolist()
    return ours


@pytest.mark.parametrize("method", METHODS)
def test_tokens_are_those_of_partial_kv(method: str, tiny_backbone: Backbone, phi: PhiMaps) -> None:
    """Whatever the length of the prompt, the heads, the anchors and the model's dtype."""
    for length in (1, 30, 150):
        assert both(tiny_backbone.model, method, prompt_of(length), 0.15, phi).shape[1] > length + 1
    layers = attention_layers(tiny_backbone.model)
    assert not any(hasattr(layer, "residual_mass_handler") for layer in layers)
    for heads, kv_heads, dtype in ((3, 3, torch.float32), (4, 1, torch.float64)):
        other = backbone_of(heads, kv_heads)
        both(other.model.to(dtype), method, prompt_of(60), 0.3, random_maps(other), num_sink=3, num_tail=5)


@pytest.mark.parametrize("place", [0, 1, 5])
def test_it_stops_behind_an_end_token_as_generate_does(
    place: int, tiny_backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the call or of the model's configuration."""
    prompt, model, rest = prompt_of(150), tiny_backbone.model, {"method": "topk_moments", "budget": 0.15}
    free = partial_generate(model, prompt, max_new_tokens=12, eos_token_id=[], **rest)
    assert free.shape == (1, 162)
    assert partial_generate(model, prompt, max_new_tokens=1, eos_token_id=[], **rest).equal(free[:, :151])
    end = int(free[0, 150 + place])
    for ends in (end, [257, end]):
        with warnings.catch_warnings(action="ignore"), partial_kv(model, **rest):  # where the first token ends it
            expected = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=12, eos_token_id=ends
            )
        monkeypatch.setattr(model.generation_config, "eos_token_id", ends)
        for given in ({"eos_token_id": ends}, {}):
            ours = partial_generate(model, prompt, max_new_tokens=12, **given, **rest)
            assert ours.tolist() == expected.tolist() and ours[0, -1] == end


def test_it_follows_the_generation_config_of_the_model(
    tiny_backbone: Backbone, phi: PhiMaps, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = both(tiny_backbone.model, "topk", prompt_of(60), 0.2, phi)
    monkeypatch.setattr(tiny_backbone.model.generation_config, "suppress_tokens", plain[0, 62:64].tolist())
    assert not torch.equal(both(tiny_backbone.model, "topk", prompt_of(60), 0.2, phi), plain)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": "hello"}, r"^partial_generate takes token ids \[1, L\], not a str: pass tokenizer"),
        ({"input_ids": [[5, 6]]}, "not a list: pass tokenizer"),
        ({"input_ids": prompt_of(20).repeat(2, 1)}, r"takes one prompt \[1, L\], not \[2, 20\]; use partial_kv"),
        ({"input_ids": prompt_of(20)[0]}, r"takes one prompt \[1, L\], not \[20\]"),
        ({"input_ids": prompt_of(0)}, r"takes one prompt \[1, L\], not \[1, 0\]"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0, not above 0"),
        ({"phi": None}, r"method topk_phi needs phi maps: pass phi=PhiMaps.load\(...\)"),
        ({"method": "topk_centroids"}, "method topk_centroids uses no phi maps: leave phi out"),
    ],
)
def test_refusals(arguments: dict[str, object], message: str, tiny_backbone: Backbone, phi: PhiMaps) -> None:
    common = {"input_ids": prompt_of(20), "max_new_tokens": 3, "budget": 0.2, "phi": phi}
    with pytest.raises(ValueError, match=message):
        partial_generate(tiny_backbone.model, **common | arguments)
