"""Every method in every situation of a text, by every backend, against the slow reference in float64.

A situation is a batch of prompts, and what a text reads and steps over. Each row is checked against a text of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from tests.conftest import TINY, byte_tokenizer, tiny_llama
from tests.needs import KERNELS, needs
from tests.unit.decode.reference import Slow
from torch import Tensor
from transformers import PreTrainedModel

from residual_mass.decode.backend import LayerCall
from residual_mass.decode.engine import SharedPrefillEngine
from residual_mass.decode.forced import ForcedDecoder
from residual_mass.decode.packed_backend import PackedBackend
from residual_mass.decode.text import Text
from residual_mass.decode.torch_backend import TorchBackend
from residual_mass.methods import METHODS, Method, QuantisedScan, ScanRegression, method_named
from residual_mass.methods.arms import Arm
from residual_mass.model.loading import Backbone
from residual_mass.model.phi_maps import HeadShape, PhiMaps
from residual_mass.spec.arms import ArmSpec
from residual_mass.spec.settings import AnchorSpec, MapSpec

ANCHORS = AnchorSpec(2, 4)
NAMES = [one.name for one in METHODS]


@dataclass(frozen=True)
class Situation:
    """What a batch of texts does.

    Attributes:
        lengths: real tokens of the rows' prompts.
        side: of the padding.
        script: "read" or "step", the number of tokens, and how many at a time.
        budget: percent of each prompt.
    """

    script: tuple[tuple[str, int, int], ...]
    lengths: tuple[int, ...] = (40,)
    side: str = "left"
    budget: float = 35.0

    @property
    def columns(self) -> int:
        return max(self.lengths)

    def real(self) -> Tensor | None:
        """[B, C] of the prompts."""
        if len(set(self.lengths)) == 1 and self.side != "holes":
            return None
        real = torch.zeros(len(self.lengths), self.columns, dtype=torch.bool)
        for row, length in enumerate(self.lengths):
            if self.side == "left":
                real[row, self.columns - length :] = True
            elif self.side == "right":
                real[row, :length] = True
            else:
                holes = torch.randperm(self.columns, generator=torch.Generator().manual_seed(row))
                real[row, holes[:length]] = True
        return real

    def ids(self) -> Tensor:
        count = sum(count for _, count, _ in self.script)
        draw = torch.Generator().manual_seed(1)
        return torch.randint(2, 258, (len(self.lengths), count), generator=draw)


ROWS = (40, 23)
TURN = ("read", 40, 40), ("step", 5, 1), ("read", 9, 9), ("step", 1, 1)
SITUATIONS = {
    "alone": Situation((("read", 40, 40), ("step", 5, 1))),
    "left": Situation((("read", 40, 40), ("step", 4, 1)), ROWS),
    "right": Situation((("read", 40, 40), ("step", 4, 1)), ROWS, "right"),
    "holes": Situation((("read", 40, 40), ("step", 4, 1)), (36, 40, 21), "holes"),
    "pieces": Situation((("read", 40, 7), ("step", 4, 1)), ROWS),
    "turns": Situation((*TURN, *TURN[2:], ("step", 2, 2))),
    "turns of rows": Situation((("read", 40, 40), ("step", 3, 1), ("read", 9, 4), ("step", 3, 1)), ROWS),
    "at once": Situation((("read", 40, 40), ("step", 7, 7), ("step", 3, 1)), ROWS),
    "anchors alone": Situation((("read", 6, 6), ("step", 3, 1)), (6, 5, 1)),
    "K of 0": Situation((("read", 40, 40), ("step", 3, 1)), ROWS, budget=4.0),
    "all": Situation((("read", 40, 40), ("step", 3, 1)), ROWS, budget=100.0),
    "joins": Situation((("read", 40, 40), ("step", 140, 1)), ROWS),
    "joins at once": Situation((("read", 40, 40), ("step", 140, 140)), ROWS),
}  # fmt: skip


@cache
def model_of(width: int = 16, heads: int = 4, kv_heads: int = 2) -> PreTrainedModel:
    model = tiny_llama(layers=2, heads=heads, kv_heads=kv_heads, width=width).double()
    model.generation_config.eos_token_id = None
    return model.requires_grad_(False)


@cache
def calm_model() -> PreTrainedModel:
    """Heads of a width that the kernels serve, with attention neither flat nor at one token."""
    model = tiny_llama(layers=2, heads=2, kv_heads=1, width=64).double().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.mul_(0.4)
    return model


@cache
def maps_of(model: PreTrainedModel, kind: str = "rezero") -> PhiMaps:
    torch.manual_seed(3)
    facts = {"model_id": TINY.model_id, "revision": TINY.revision, "length": 512}
    maps = PhiMaps(HeadShape.of(model.config), MapSpec(kind, d_emb=12, d_phi=6), facts)
    for name, parameter in maps.named_parameters():
        if name.endswith("alpha"):
            parameter.data.normal_()
    return maps.double().requires_grad_(False)


def arm_at(method: str | Method, percent: float) -> Arm:
    rule = method_named(method)
    return Arm(rule, percent if rule.chooses else None)


@torch.no_grad()
def logits_of(text: Text, ids: Tensor, script: tuple[tuple[str, int, int], ...]) -> Tensor:
    """[B, T, V] after every token that is a step, and after every read."""
    found, start = [], 0
    for kind, count, size in script:
        logits = [getattr(text, kind)(piece) for piece in ids[:, start : start + count].split(size, 1)]
        found += logits if kind == "step" else logits[-1:]
        start += count
    return torch.cat(found, 1)


@cache
def expected(model: PreTrainedModel, method: str | Method, name: str, row: int, kind: str = "rezero") -> Tensor:
    """Those of one row of a situation under the reference, which takes one token at a time."""
    situation = SITUATIONS[name]
    arm = arm_at(method, situation.budget)
    phi = maps_of(model, kind) if arm.needs_maps else None
    real = situation.real()
    own = None if real is None else real[row : row + 1]
    script = tuple((what, count, count if what == "read" else 1) for what, count, _ in situation.script)
    slow = Slow(arm, ANCHORS, phi, None if real is None else real[row])
    return logits_of(Text(model, slow, own), situation.ids()[row : row + 1], script)


def found_by(kind: type, model: PreTrainedModel, method: str | Method, name: str, maps: str = "rezero") -> Tensor:
    situation = SITUATIONS[name]
    arm = arm_at(method, situation.budget)
    phi = maps_of(model, maps) if arm.needs_maps else None
    backend = kind.open(model, arm, ANCHORS, phi, None, 0)
    return logits_of(Text(model, backend, situation.real()), situation.ids(), situation.script)


QUICK = ("full", "topk", "topk_phi", "topk_moments", "topk_importance", "scan4_regression_64", "pages", "cache8")
"""Their summaries take in what joins in every way that there is: not at all, by sums, by places, clusters and pages."""
PAIRS = [
    pytest.param(method, name, marks=[] if method in QUICK or name in ("left", "turns") else [pytest.mark.slow])
    for method in NAMES
    for name in SITUATIONS
    if "joins" not in name
]


@pytest.mark.parametrize(("method", "name"), PAIRS)
def test_torch(method: str, name: str) -> None:
    model = model_of()
    found = found_by(TorchBackend, model, method, name)
    for row, own in enumerate(found):
        torch.testing.assert_close(own, expected(model, method, name, row)[0], rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in NAMES]
)
def test_torch_joins_at_every_64_tokens(method: str) -> None:
    """One token at a time or all at once."""
    model = model_of()
    for name in ("joins", "joins at once"):
        found = found_by(TorchBackend, model, method, name)
        for row, own in enumerate(found):
            torch.testing.assert_close(own, expected(model, method, "joins", row)[0], rtol=0, atol=1e-9)


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (3, 3), (4, 1)])
@pytest.mark.parametrize("method", ["topk_phi", "topk_phi_nosub", "scan4_moments"])
def test_groups_of_heads_and_the_other_maps(method: str, heads: int, kv_heads: int) -> None:
    model = model_of(8, heads, kv_heads)
    found = found_by(TorchBackend, model, method, "left", "hedgehog")
    for row, own in enumerate(found):
        torch.testing.assert_close(own, expected(model, method, "left", row, "hedgehog")[0], rtol=0, atol=1e-9)


# ---- an evaluation's arms --------------------------------------------------------------------------------------------


@torch.no_grad()
def test_arms_of_an_evaluation() -> None:
    """All methods side by side over two prompts, whose tokens never join; and given tokens, all at once."""
    model, situation = model_of(), SITUATIONS["alone"]
    arms = [ArmSpec(name, None if name == "full" else situation.budget) for name in NAMES]
    engine = SharedPrefillEngine(Backbone(TINY, model, byte_tokenizer(), "tiny"), arms, ANCHORS, maps_of(model), None)
    prompts = [situation.ids()[:, :length] for length in ROWS]
    results = engine.generate([ids[0].tolist() for ids in prompts], 4)
    given = torch.tensor([[5, 99, 7, 200, 31]])
    for ids, row in zip(prompts, results, strict=True):
        decoder = ForcedDecoder(engine, ids[0].tolist())
        forced = [decoder.full(given[0].tolist())[0], *decoder.logits(arms[1:], given[0].tolist())]
        for arm, generation, logits in zip(arms, row, forced, strict=True):
            slow = Slow(
                Arm(arm.rule, arm.budget_percent), ANCHORS, maps_of(model) if arm.needs_maps else None, joins=False
            )
            text = Text(model, slow)
            tokens = [text.read(ids)[:, -1:].argmax(-1)]
            for _ in range(3):
                tokens.append(text.step(tokens[-1]).argmax(-1))
            assert generation.tokens == torch.cat(tokens, 1)[0].tolist(), arm
            slow.held.clear()
            text = Text(model, slow)
            text.read(ids)
            torch.testing.assert_close(logits, text.step(given)[0], rtol=0, atol=1e-9)


# ---- ties and extreme scores -----------------------------------------------------------------------------------------


def tied(draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Five different tokens, again and again, whose scores tie; queries, keys and values [1, H, 50, 16]."""
    which = torch.randint(0, 5, (50,), generator=draw)
    keys = torch.randint(-3, 4, (1, 2, 5, 16), generator=draw).double()[:, :, which]
    values = torch.randn(1, 2, 5, 16, generator=draw, dtype=torch.double)[:, :, which]
    return torch.randn(1, 4, 50, 16, generator=draw, dtype=torch.double), keys, values


def extreme(draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of some thousands, whose exponentials overflow."""
    query, key, value = (torch.randn(1, heads, 50, 16, generator=draw, dtype=torch.double) for heads in (4, 2, 2))
    return 1e4 * query, key, value


def zero(draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """All scores are the same, and all tokens."""
    return tuple(x[:, :, :1].expand(-1, -1, 50, -1) for x in (x * (i > 0) for i, x in enumerate(tied(draw))))


SCORES = [(method, make) for method in NAMES for make in (tied, extreme, zero)]
SCORES.remove(("topk_importance", tied))  # its sample is of places, and which of equal tokens is read is not said


@pytest.mark.parametrize(("method", "make"), SCORES)
@torch.no_grad()
def test_ties_and_extreme_scores(method: str, make: Callable[[torch.Generator], tuple[Tensor, Tensor, Tensor]]) -> None:
    model = model_of()
    arm = arm_at(method, 35.0)
    phi = maps_of(model) if arm.needs_maps else None
    query, key, value = make(torch.Generator().manual_seed(0))
    found = []
    for backend in (Slow(arm, ANCHORS, phi), TorchBackend.open(model, arm, ANCHORS, phi, None, 0)):
        outputs = []
        for part in (slice(0, 40), *(slice(token, token + 1) for token in range(40, 50))):
            call = LayerCall(
                model.model.layers[0].self_attn, query[:, :, part], key[:, :, part], value[:, :, part], None, 0.25
            )
            outputs.append((backend.read if part.start == 0 else backend.step)(call))
        found.append(torch.cat(outputs, 1))
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-9)


# ---- packed ----------------------------------------------------------------------------------------------------------

PACKED = ["full", "cache8", "scan4", "scan4_regression_64", Method("few", "few", QuantisedScan(4), ScanRegression(8))]
WHOLE = [name for name in SITUATIONS if name not in ("pieces", "turns of rows")]
"""Situations in which several prompts are read at once, and by one call."""


@needs(KERNELS)
@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.slow] * ("once" in one)) for one in WHOLE])
@pytest.mark.parametrize("method", PACKED, ids=lambda method: getattr(method, "name", method))
def test_packed(method: str | Method, name: str) -> None:
    """Codes of 8 bits differ from numbers by little, and scans of 4 bits by less than half of what top-K leaves out."""
    model = calm_model()
    found = found_by(PackedBackend, model, method, name).log_softmax(-1)
    name = name.removesuffix(" at once")
    for row, own in enumerate(found):
        right, full, topk = (expected(model, one, name, row)[0].log_softmax(-1) for one in (method, "full", "topk"))
        bound = 1e-3 if method in ("full", "cache8") else 1e-3 + 0.5 * distance(full, topk)
        assert distance(right, own) < bound


def distance(one: Tensor, other: Tensor) -> float:
    """Mean Kullback-Leibler divergence of log probabilities [T, V]."""
    return float((one.exp() * (one - other)).sum(-1).mean())
