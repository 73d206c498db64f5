"""The engine and `partial_kv` against plain generation, against attention token by token, against each other and
against runs of single arms and prompts.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.conftest import TINY, byte_tokenizer, save_tiny, tiny_llama
from tests.needs import BFLOAT16, needs
from tests.unit.core import reference
from torch import Tensor, nn
from transformers import PreTrainedModel

from residual_mass.decode.engine import SharedPrefillEngine
from residual_mass.decode.generate import partial_generate
from residual_mass.decode.session import partial_kv
from residual_mass.methods import METHODS, Method
from residual_mass.model.hook import attention_hook, exact_attention
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


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_partial_kv_generate_equals_the_engine_and_a_left_padded_batch(
    method: Method, tiny_backbone: Backbone, phi: PhiMaps, prompts: list[list[int]]
) -> None:
    arm = ArmSpec(method.name, None if method.whole_prefix else 15.0)
    expected = [row[0] for row in run(tiny_backbone, [arm], phi, prompts)]
    longest = max(map(len, prompts))
    ids = torch.tensor([[1] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    with partial_kv(tiny_backbone.model, method, 0.15, phi if method.needs_maps else None) as session:
        assert [plain(tiny_backbone, prompt) for prompt in prompts] == expected
        padded = generated(tiny_backbone, ids, STEPS, mask)
    if method.name in PAPER_METHODS:  # blocks of others begin elsewhere in a padded row
        assert [row[: len(want)] for row, want in zip(padded, expected, strict=True)] == expected
    assert min(session.partial_calls.values()) > 0 and len(session.partial_calls) == 3


class TokenByToken:
    """Attention of decode steps as the paper writes it, one head and one token at a time."""

    def __init__(self, method: str, k: int, anchors: AnchorSpec, phi: PhiMaps) -> None:
        self.method, self.k, self.anchors, self.phi, self.length = method, k, anchors, phi, 0

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        if query.shape[2] > 1:
            self.length = key.shape[2]
            return exact_attention(module, query, key, value, mask, scale)
        heads = range(query.shape[1])
        group = len(heads) // key.shape[1]
        log_query = self.phi.query[module.layer_idx].unfolded(query[0])
        log_key = self.phi.key[module.layer_idx].unfolded(key[0])
        rows = []
        for h in heads:
            kv = h // group
            of_head = (log_query[h, 0], log_key[kv, : self.length])
            rows.append(self._row(query[0, h, 0], key[0, kv], value[0, kv], scale, *of_head))
        return torch.tensor(rows)[None, None]

    def _row(
        self, query: Tensor, keys: Tensor, values: Tensor, scale: float, log_query: Tensor, log_key: Tensor
    ) -> list[float]:
        query, keys, values, log_query, log_key = (
            x.double().tolist() for x in (query, keys, values, log_query.double().exp(), log_key.double().exp())
        )
        sink, tail, n = self.anchors.sink, self.anchors.tail, self.length
        if self.method == "topk":
            scores = [scale * reference.dot(query, key) for key in keys]
            anchors, mid = reference.split(n, sink, tail)
            tokens = [*anchors, *reference.top(scores, mid, self.k), *range(n, len(keys))]
            return reference.attention(query, keys, values, scale, tokens)
        subtract, generated = self.method == "topk_phi", (keys[n:], values[n:])
        return reference.topk_phi(
            query, keys[:n], values[:n], scale, sink, tail, self.k, log_query, log_key, subtract, generated
        )


@torch.no_grad()
def step_logits(model: PreTrainedModel, attention: AbstractContextManager[object], prompt: list[int]) -> Tensor:
    """Of a few given tokens behind the prompt, one step each."""
    with attention:
        cache = model(torch.tensor([prompt]), use_cache=True).past_key_values
        steps = [model(torch.tensor([[token]]), past_key_values=cache).logits for token in (65, 200, 31)]
    return torch.cat(steps)


def backbone_of(heads: int, kv_heads: int) -> Backbone:
    return Backbone(TINY, tiny_llama(layers=2, heads=heads, kv_heads=kv_heads), byte_tokenizer(), "tiny")


SHAPES = pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (3, 3), (4, 1)], ids=["groups of 3", "of 1", "of 4"])


@SHAPES
@pytest.mark.parametrize(("sink", "tail", "k"), [(3, 5, 12), (4, 16, 0), (0, 9, 11)])
@pytest.mark.parametrize("method", ["topk", "topk_phi", "topk_phi_nosub"])
def test_steps_are_those_of_attention_token_by_token(
    method: str, sink: int, tail: int, k: int, heads: int, kv_heads: int, prompts: list[list[int]]
) -> None:
    """A budget of 40 % of a prompt of 50 tokens is 20, anchors included."""
    backbone, prompt = backbone_of(heads, kv_heads), prompts[0][:50]
    model, phi = backbone.model, random_maps(backbone)
    slow = TokenByToken(method, k, AnchorSpec(sink, tail), phi)
    expected = step_logits(model, attention_hook(model, slow), prompt)
    fast = partial_kv(model, method, 0.4, phi, num_sink=sink, num_tail=tail)
    torch.testing.assert_close(step_logits(model, fast, prompt), expected, rtol=1e-4, atol=1e-4)


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
    with pytest.raises(RuntimeError, match=r"attention hook: layers have read \[0, 3\] tokens, expected 3"):
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

    def counted(ids: Tensor, *args: object, **kwargs: object) -> object:
        counts.append(len(ids))
        return forward(ids, *args, **kwargs)

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
    attributes = any(hasattr(layer, "residual_mass_handler") for layer in attention_layers(backbone.model))
    return attributes or backbone.model.config._attn_implementation != "sdpa"


def test_hooks_are_gone_after_the_context_and_after_an_exception(
    tiny_backbone: Backbone, prompts: list[list[int]]
) -> None:
    before = plain(tiny_backbone, prompts[0])
    with partial_kv(tiny_backbone.model, "topk", 0.1):
        assert hooked(tiny_backbone)
        with pytest.raises(ValueError, match="cannot be nested"), partial_kv(tiny_backbone.model, "full"):
            pass
    assert not hooked(tiny_backbone)
    with pytest.raises(RuntimeError, match="inside"), partial_kv(tiny_backbone.model, "topk", 0.1):
        raise RuntimeError("inside")
    assert not hooked(tiny_backbone)

    def failing(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        if module.layer_idx == 1:
            raise RuntimeError("in a layer")
        return exact_attention(module, q, k, v, mask, scale)

    with pytest.raises(RuntimeError, match="in a layer"), attention_hook(tiny_backbone.model, failing):
        tiny_backbone.model(torch.tensor([prompts[0]]))
    assert not hooked(tiny_backbone)
    assert plain(tiny_backbone, prompts[0]) == before


def test_a_prompt_read_before_the_context_is_refused(tiny_backbone: Backbone, prompts: list[list[int]]) -> None:
    model, ids = tiny_backbone.model, torch.tensor([prompts[0]])
    cache = model(ids[:, :-1], use_cache=True).past_key_values
    with partial_kv(model, "topk", 0.2), pytest.raises(ValueError, match="read within the context"):
        model(ids[:, -1:], past_key_values=cache)


def test_maps_that_are_missing_or_of_another_backbone_are_refused(tiny_backbone: Backbone, phi: PhiMaps) -> None:
    with pytest.raises(ValueError, match="needs phi"), partial_kv(tiny_backbone.model, "topk_phi"):
        pass
    other = PhiMaps(replace(phi.shape, kv_heads=1), phi.map)
    with pytest.raises(ValueError, match="kv_heads"), partial_kv(tiny_backbone.model, "topk_phi", 0.1, other):
        pass
    stranger = PhiMaps(phi.shape, phi.map, {"model_id": "other/model", "revision": "x"})
    with pytest.raises(ValueError, match="other/model"):
        SharedPrefillEngine(tiny_backbone, ARMS, ANCHORS, stranger, None)
