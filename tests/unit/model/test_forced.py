"""A continuation as one chunk against the same tokens one step at a time."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.unit.model.test_decoding import ANCHORS, SHAPES, backbone_of, random_maps
from torch import Tensor

from residual_mass.decode.engine import NotFiniteError, SharedPrefillEngine
from residual_mass.decode.forced import ForcedDecoder
from residual_mass.model.loading import Backbone
from residual_mass.spec.arms import ArmSpec

ARMS = [ArmSpec("full")] + [
    ArmSpec(method, budget) for method in ("topk", "topk_phi", "topk_phi_nosub") for budget in (8.0, 15.0, 100.0)
]
LENGTHS = (150, 12, 97)
"""Of prompts that the loop decodes together, padded; the second has anchors alone."""
T = 7


def random_ids(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(2, 258, (n,), generator=generator).tolist() for n in lengths]


def engine_of(backbone: Backbone) -> SharedPrefillEngine:
    return SharedPrefillEngine(backbone, ARMS, ANCHORS, random_maps(backbone).to(backbone.model.dtype), None)


@torch.no_grad()
def one_by_one(engine: SharedPrefillEngine, prompts: list[list[int]], tokens: list[list[int]], dense: bool) -> Tensor:
    """Log-probabilities [prompts, arms, T, V] of the engine's decode steps, fed with given tokens.

    For dense states, the arms' generated keys and values are replaced before each step by those of full attention.
    """
    layers, _ = engine.read(prompts)
    lengths = [len(prompt) for prompt in prompts]
    decoder = engine.decoder(layers, lengths, engine.arms, T, engine.summaries(layers))
    steps = []
    text = engine.text(decoder, lengths)
    for step in range(T):
        if dense:
            copy_full_into_arms(decoder, lengths, step)
        steps.append(text.step(torch.tensor([[tokens[e][step]] for e in range(len(prompts)) for _ in ARMS]))[:, 0])
    return torch.stack(steps, dim=1).log_softmax(-1).unflatten(0, (len(prompts), len(ARMS)))


def copy_full_into_arms(decoder: Any, lengths: list[int], step: int) -> None:
    full, *parts = decoder.parts
    for part, layer in ((one, layer) for one in parts for layer in one.generated):
        keys, values = part.generated[layer]
        for e, cache in enumerate(full.caches[layer]):
            rows = slice(e * len(part.arms), (e + 1) * len(part.arms))
            keys[rows], values[rows] = (x[:, :, lengths[e] : lengths[e] + step] for x in cache)


def as_a_chunk(engine: SharedPrefillEngine, prompt: list[int], tokens: list[int], dense: bool) -> Tensor:
    """Log-probabilities [arms, T, V] of the same."""
    decoder = ForcedDecoder(engine, prompt)
    full, layers = decoder.full(tokens)
    partial = decoder.logits(ARMS[1:], tokens, layers if dense else None)
    return torch.stack([full, *partial]).log_softmax(-1)


@SHAPES
@pytest.mark.parametrize("dense", [False, True], ids=["own", "dense"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_a_chunk_equals_its_tokens_one_by_one(
    dtype: torch.dtype, tolerance: float, dense: bool, heads: int, kv_heads: int
) -> None:
    backbone = backbone_of(heads, kv_heads)
    backbone.model.to(dtype)
    engine = engine_of(backbone)
    prompts, tokens = random_ids(*LENGTHS), random_ids(*[T] * len(LENGTHS))
    steps = one_by_one(engine, prompts, tokens, dense)
    for e, prompt in enumerate(prompts):
        chunk = as_a_chunk(engine, prompt, tokens[e], dense)
        torch.testing.assert_close(chunk, steps[e], atol=tolerance, rtol=tolerance)
    # The longest prompt has a mid-region, so that the arms differ from each other and from full attention there.
    ends = steps[0, :, -1]
    assert torch.pdist(ends[[0, 1, 2, 4, 5, 8]].double()).min() > 1e-3, "equal arms would show nothing"
    torch.testing.assert_close(ends[[3, 6]], ends[[0, 0]], atol=max(tolerance, 1e-4), rtol=0)  # everything retrieved


def test_a_layer_that_skips_the_hook_is_refused(tiny_backbone: Backbone) -> None:
    """Without it every arm would be read as full attention over the continuation alone."""
    backbone = copy.deepcopy(tiny_backbone)
    decoder = ForcedDecoder(engine_of(backbone), random_ids(150)[0])
    skipped = backbone.model.model.layers[1].self_attn
    skipped.forward = lambda hidden_states, **_: (torch.zeros_like(hidden_states), None)
    with pytest.raises(ValueError, match=r"^LlamaForCausalLM bypasses .* in layers \[1\]$"):
        list(decoder.logits(ARMS[1:3], random_ids(T)[0]))


def test_what_is_not_finite_names_arm_and_layer(tiny_backbone: Backbone) -> None:
    decoder = ForcedDecoder(engine_of(tiny_backbone), random_ids(150)[0])
    decoder.prefix[1].values[:, :, -1] = torch.nan
    with pytest.raises(NotFiniteError, match=r"under topk, from layer 1 on, are not finite"):
        list(decoder.logits(ARMS[1:3], random_ids(T)[0]))
