"""Every method in every situation of a text, by every backend, against the slow reference in float64.

A situation is a batch of prompts, and what a text reads and steps over. Each row is checked against a text of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
import torch
from tests.conftest import TINY, tiny_llama
from tests.unit.decode.reference import Slow
from torch import Tensor
from transformers import PreTrainedModel

from residual_mass.decode.backends import backend_for
from residual_mass.decode.text import Text
from residual_mass.decode.torch_backend import TorchBackend
from residual_mass.methods import METHODS, Method, method_named
from residual_mass.methods.arms import Arm
from residual_mass.model.phi_maps import HeadShape, PhiMaps
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
    backend = backend_for(model, arm, ANCHORS, phi, kinds=[kind])
    return logits_of(Text(model, backend, situation.real()), situation.ids(), situation.script)


@pytest.mark.parametrize("name", [name for name in SITUATIONS if "joins" not in name])
@pytest.mark.parametrize("method", NAMES)
def test_torch(method: str, name: str) -> None:
    model = model_of()
    found = found_by(TorchBackend, model, method, name)
    for row, own in enumerate(found):
        torch.testing.assert_close(own, expected(model, method, name, row)[0], rtol=0, atol=1e-9)


@pytest.mark.parametrize("method", NAMES)
def test_torch_joins_at_every_64_tokens(method: str) -> None:
    """One token at a time or all at once."""
    model = model_of()
    for name in ("joins", "joins at once"):
        found = found_by(TorchBackend, model, method, name)
        for row, own in enumerate(found):
            torch.testing.assert_close(own, expected(model, method, "joins", row)[0], rtol=0, atol=1e-9)
