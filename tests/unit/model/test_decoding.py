"""The engine of evaluations: arms against runs of single arms and prompts, and what leaves a batch.

And full attention in bfloat16, which is the plain model's.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.conftest import TINY, byte_tokenizer, save_tiny, tiny_llama
from tests.needs import BFLOAT16, needs
from torch import Tensor

from residual_mass.decode.backend import LayerCall
from residual_mass.decode.engine import SharedPrefillEngine
from residual_mass.decode.generate import partial_generate, partial_kv
from residual_mass.decode.recording import Recording
from residual_mass.decode.text import Text
from residual_mass.methods import METHODS
from residual_mass.model.layers import attention_layers
from residual_mass.model.loading import Backbone, load_backbone
from residual_mass.model.phi_maps import PhiMaps
from residual_mass.spec.arms import ArmSpec
from residual_mass.spec.labels import PAPER_METHODS
from residual_mass.spec.settings import AnchorSpec, MapSpec

ANCHORS = AnchorSpec(4, 16)
STEPS = 12
ARMS = [ArmSpec("full")] + [
    ArmSpec(method, budget) for method in ("topk", "topk_phi", "topk_phi_nosub") for budget in (8.0, 15.0, 40.0)
]
SMALL_MAPS = MapSpec(d_emb=24, d_phi=8)


def random_maps(backbone: Backbone, spec: MapSpec = SMALL_MAPS) -> PhiMaps:
    """Random maps, scaled so that the residual is neither nothing nor everything."""
    torch.manual_seed(3)
    facts = {"model_id": backbone.spec.model_id, "revision": backbone.spec.revision, "length": 512}
    maps = PhiMaps(backbone.shape, spec, facts)
    for name, parameter in maps.named_parameters():
        if name.endswith("alpha"):
            parameter.data.normal_()
    return maps.requires_grad_(False)


@pytest.fixture(scope="module")
def phi(tiny_backbone: Backbone) -> PhiMaps:
    return random_maps(tiny_backbone)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, 258, (n,), generator=generator).tolist() for n in (150, 97, 233, 30, 12)]


def plain(backbone: Backbone, prompt: list[int]) -> list[int]:
    return generated(backbone, torch.tensor([prompt]), STEPS)[0]


def generated(backbone: Backbone, ids: Tensor, steps: int, mask: Tensor | None = None) -> list[list[int]]:
    mask = torch.ones_like(ids) if mask is None else mask
    out = backbone.model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=steps)
    return out[:, ids.shape[1] :].tolist()


def run(backbone: Backbone, arms: list[ArmSpec], phi: PhiMaps, prompts: list[list[int]]) -> list[list[list[int]]]:
    engine = SharedPrefillEngine(backbone, arms, ANCHORS, phi, nominal_length=None)
    return [[g.tokens for g in row] for row in engine.generate(prompts, STEPS)]


@needs(BFLOAT16)
@pytest.mark.parametrize("seed", range(2))
def test_full_in_bfloat16_is_the_unmodified_backbone(seed: int, tmp_path: Path) -> None:
    """Our own float32 attention over bfloat16 keys and values would leave its tokens within a few steps.

    One prompt at a time, for in a batch of rows the linear layers may round differently, on some CPUs.
    """
    save_tiny(tiny_llama(seed), tmp_path)
    backbone = load_backbone(replace(TINY, dtype="bfloat16"), tmp_path, torch.device("cpu"))
    backbone.model.generation_config.eos_token_id = None
    prompts = [torch.randint(2, 258, (n,), generator=torch.Generator().manual_seed(seed)) for n in (150, 15)]
    for prompt in prompts:
        ids = prompt.unsqueeze(0)
        expected = generated(backbone, ids, 32)
        engine = SharedPrefillEngine(backbone, [ArmSpec("full")], ANCHORS, None, None)
        assert engine.generate([prompt.tolist()], 32)[0][0].tokens == expected[0]
        with partial_kv(backbone.model, "full") as session:
            assert generated(backbone, ids, 32) == expected
        assert set(session.partial_calls.values()) == {31}
        decoded = partial_generate(backbone.model, ids, max_new_tokens=32, method="full")
        assert decoded[:, len(prompt) :].tolist() == expected
    longest = len(prompts[0])
    padded = torch.stack([F.pad(prompt, (longest - len(prompt), 0), value=1) for prompt in prompts])
    mask = torch.stack([F.pad(torch.ones_like(prompt), (longest - len(prompt), 0)) for prompt in prompts])
    expected = generated(backbone, padded, 32, mask)
    with partial_kv(backbone.model, "full"):
        assert generated(backbone, padded, 32, mask) == expected


def test_an_arm_or_a_prompt_alone_gives_the_tokens_that_it_gives_in_the_batch(
    tiny_backbone: Backbone, phi: PhiMaps, prompts: list[list[int]]
) -> None:
    arms = ARMS + [
        ArmSpec(one.name, (18.0, 25.0)[i % 2]) for i, one in enumerate(METHODS) if one.name not in PAPER_METHODS
    ]
    together = run(tiny_backbone, arms, phi, prompts)
    for a, arm in enumerate(arms):
        assert run(tiny_backbone, [arm], phi, prompts[1:3]) == [[row[a]] for row in together[1:3]], arm
    for e, prompt in enumerate(prompts):
        assert run(tiny_backbone, arms, phi, [prompt]) == [together[e]], e
        assert run(tiny_backbone, [arms[e]], phi, [prompt]) == [[together[e][e]]]
    longest = together[2][: len(ARMS)]
    assert len({tuple(tokens) for tokens in longest}) > 4, "the arms must differ, or equality shows nothing"


def backbone_of(heads: int, kv_heads: int) -> Backbone:
    return Backbone(TINY, tiny_llama(layers=2, heads=heads, kv_heads=kv_heads), byte_tokenizer(), "tiny")


SHAPES = pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (3, 3), (4, 1)], ids=["groups of 3", "of 1", "of 4"])


def test_a_layer_that_does_not_go_through_the_hook_is_told(
    tiny_backbone: Backbone, phi: PhiMaps, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has attention of its own for single tokens; its arms would all report the same."""
    layer = attention_layers(tiny_backbone.model)[1]
    forward = layer.forward

    def bypassing(hidden_states: Tensor, *args: object, **kwargs: object) -> object:
        if hidden_states.shape[1] > 1:
            return forward(hidden_states, *args, **kwargs)
        return torch.zeros_like(hidden_states), None

    monkeypatch.setattr(layer, "forward", bypassing)
    with pytest.raises(
        ValueError, match=r"^LlamaForCausalLM bypasses transformers' attention interface in layers \[1\]$"
    ):
        SharedPrefillEngine(tiny_backbone, ARMS, ANCHORS, phi, None).generate(prompts[:2], 4)
    assert not hooked(tiny_backbone)


def test_k_is_reported_per_prompt_and_convention(
    tiny_backbone: Backbone, phi: PhiMaps, prompts: list[list[int]]
) -> None:
    arms = [ArmSpec("full"), ArmSpec("topk", 15.0)]
    real = SharedPrefillEngine(tiny_backbone, arms, ANCHORS, phi, None).generate(prompts, 2)
    nominal = SharedPrefillEngine(tiny_backbone, arms, ANCHORS, phi, 256).generate(prompts, 2)
    assert [row[1].k for row in real] == [3, 0, 15, 0, 0]
    assert [row[1].k for row in nominal] == [19, 19, 19, 10, 0]
    assert [row[0].k for row in real] == [130, 77, 213, 10, 0]


def test_end_of_sequence_stops_a_row(
    tiny_backbone: Backbone, phi: PhiMaps, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = run(tiny_backbone, ARMS, phi, prompts[:2])
    ends = free[0][0][3]
    monkeypatch.setattr(tiny_backbone.model.generation_config, "eos_token_id", [ends])
    stopped = SharedPrefillEngine(tiny_backbone, ARMS, ANCHORS, phi, None).generate(prompts[:2], STEPS)
    for row, expected in zip(stopped, free, strict=True):
        for generation, tokens in zip(row, expected, strict=True):
            cut = tokens[: tokens.index(ends) + 1] if ends in tokens else tokens
            assert generation.tokens == cut
            assert generation.finish == ("eos" if ends in tokens else "length")


def test_arms_under_several_maps_give_what_they_give_alone(
    tiny_backbone: Backbone, phi: PhiMaps, prompts: list[list[int]]
) -> None:
    """Maps of other shapes and widths, in an order that scatters each group over the arms."""
    torch.manual_seed(4)
    specs = {"wide": MapSpec(d_emb=24, d_phi=12), "hedgehog": MapSpec("hedgehog", d_phi=8)}
    maps = {"first": phi}
    maps |= {label: PhiMaps(phi.shape, spec, phi.training_facts).requires_grad_(False) for label, spec in specs.items()}
    arms = [
        ArmSpec("topk_phi", 15.0, "wide"), ArmSpec("topk", 15.0), ArmSpec("topk_phi", 15.0, "first"), ArmSpec("full"),
        ArmSpec("topk_phi_nosub", 15.0, "wide"), ArmSpec("topk_phi", 15.0, "hedgehog"),
        ArmSpec("topk_phi", 8.0, "first"),
    ]  # fmt: skip
    together = SharedPrefillEngine(tiny_backbone, arms, ANCHORS, maps, None).generate(prompts[:3], STEPS)
    for a, arm in enumerate(arms):
        alone = run(tiny_backbone, [ArmSpec(arm.method, arm.budget_percent)], maps[arm.maps or "first"], prompts[:3])
        assert [row[a].tokens for row in together] == [row[0] for row in alone], arm
    with pytest.raises(ValueError, match="method topk_phi needs phi maps narrow"):
        SharedPrefillEngine(tiny_backbone, [ArmSpec("topk_phi", 8.0, "narrow")], ANCHORS, maps, None)


@pytest.fixture
def sizes(tiny_backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every pass through the model."""
    counts, forward = [], tiny_backbone.model.forward

    def counted(input_ids: Tensor, **options: object) -> object:
        counts.append(len(input_ids))
        return forward(input_ids=input_ids, **options)

    monkeypatch.setattr(tiny_backbone.model, "forward", counted)
    return counts


def test_finished_examples_and_arms_leave_the_batch(
    tiny_backbone: Backbone, phi: PhiMaps, prompts: list[list[int]], sizes: list[int]
) -> None:
    """Rows stop at places of their own, one arm early on all examples; what is left decodes as if nothing had left."""
    arms = [*ARMS, ArmSpec("topk_moments", 15.0)]
    free = run(tiny_backbone, arms, phi, prompts)

    def saturated(example: int, tokens: list[int]) -> bool:
        return tokens == free[example][4][:2] or (len(tokens) > 1 and (sum(tokens) + example) % 5 == 0)

    sizes.clear()
    limits = [STEPS, 3, STEPS, 5, STEPS]
    engine = SharedPrefillEngine(tiny_backbone, arms, ANCHORS, phi, None)
    rows = engine.generate(prompts, limits, saturated)
    for e, row in enumerate(rows):
        for a, generation in enumerate(row):
            stops = [n for n in range(1, limits[e]) if saturated(e, free[e][a][:n])]
            assert generation.tokens == free[e][a][: min([*stops, limits[e]])]
            assert generation.finish == ("saturated" if stops else "length")
    decode = sizes[len(prompts) :]
    assert decode[0] <= len(prompts) * len(arms) and decode[-1] < decode[0] and decode == sorted(decode, reverse=True)
    assert engine.work.prefill_tokens == sum(map(len, prompts))
    assert engine.work.decode_rows == sum(len(generation.tokens) for row in rows for generation in row)


def hooked(backbone: Backbone) -> bool:
    return backbone.model.config._attn_implementation != "sdpa"


def test_the_model_is_as_it_was_after_the_context_and_after_an_exception(
    tiny_backbone: Backbone, prompts: list[list[int]]
) -> None:
    before = plain(tiny_backbone, prompts[0])
    with partial_kv(tiny_backbone.model, "topk", 0.1):
        with pytest.raises(ValueError, match="cannot be nested"), partial_kv(tiny_backbone.model, "full"):
            pass
        plain(tiny_backbone, prompts[0])
    assert not hooked(tiny_backbone)
    with pytest.raises(RuntimeError, match="inside"), partial_kv(tiny_backbone.model, "topk", 0.1):
        raise RuntimeError("inside")
    assert not hooked(tiny_backbone)

    def failing(call: LayerCall) -> None:
        if call.index == 1:
            raise RuntimeError("in a layer")

    with pytest.raises(RuntimeError, match="in a layer"):
        Text(tiny_backbone.model, Recording(failing)).read(torch.tensor([prompts[0]]))
    assert not hooked(tiny_backbone)
    assert plain(tiny_backbone, prompts[0]) == before


def test_maps_that_are_missing_or_of_another_backbone_are_refused(tiny_backbone: Backbone, phi: PhiMaps) -> None:
    with pytest.raises(ValueError, match="needs phi"), partial_kv(tiny_backbone.model, "topk_phi", 0.1):
        pass
    other = PhiMaps(replace(phi.shape, kv_heads=1), phi.map)
    with pytest.raises(ValueError, match="kv_heads"), partial_kv(tiny_backbone.model, "topk_phi", 0.1, other):
        pass
    stranger = PhiMaps(phi.shape, phi.map, {"model_id": "other/model", "revision": "x"})
    with pytest.raises(ValueError, match="other/model"):
        SharedPrefillEngine(tiny_backbone, ARMS, ANCHORS, stranger, None)
