"""Estimators with their own function: it sees exactly the unread tokens, and its result is what is added."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from residual_mass import methods
from residual_mass.core.accounting import Terms, exact_terms
from residual_mass.core.selection import exhaustive_topk, least_read
from residual_mass.decode.engine import SharedPrefillEngine
from residual_mass.methods import METHODS, CacheOnly, Method, Residual, Seen, Step, method_named
from residual_mass.model.loading import Backbone
from residual_mass.spec.arms import ArmSpec
from residual_mass.spec.labels import PAPER_METHODS
from residual_mass.spec.settings import AnchorSpec

STEPS = 10


@dataclass(frozen=True)
class AllOfIt(Residual):
    """No estimate: the unread tokens' exact terms."""

    def terms(self, seen: Seen, state: tuple[()]) -> Terms:
        return exact_terms(seen.scores, seen.values, seen.unread)

    def summary_bytes(self, step: Step) -> float:
        return 0


@dataclass(frozen=True)
class Nothing(AllOfIt):
    """A denominator of zero, whatever the numerator: nothing is added."""

    def terms(self, seen: Seen, state: tuple[()]) -> tuple[Tensor, Tensor, Tensor]:
        shape = seen.scores.shape[:-1]
        return torch.full((*shape, seen.values.shape[-1]), 7.0), torch.zeros(shape), torch.full(shape, 50.0)


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    more = (Method("topk_all", residual=AllOfIt()), Method("topk_nothing", residual=Nothing()))
    monkeypatch.setattr(methods, "METHODS", METHODS + more)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """One of anchors alone among them."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(2, 258, (n,), generator=generator).tolist() for n in (120, 12, 90, 100)]


def tokens(backbone: Backbone, arms: list[ArmSpec], prompts: list[list[int]]) -> list[list[list[int]]]:
    engine = SharedPrefillEngine(backbone, arms, AnchorSpec(4, 16), None, nominal_length=None)
    return [[generation.tokens for generation in row] for row in engine.generate(prompts, STEPS)]


def test_arms_side_by_side_each_get_their_own(tiny_backbone: Backbone, prompts: list[list[int]]) -> None:
    arms = [ArmSpec("topk_all", 18.0), ArmSpec("topk", 18.0), ArmSpec("full"), ArmSpec("topk_nothing", 18.0)]
    made = tokens(tiny_backbone, arms, prompts)
    for everything, topk, full, none in made:
        assert everything == full and none == topk
    assert any(topk != full for _, topk, full, _ in made), "top-K must differ from full, or equality shows nothing"


OWN = [one.name for one in METHODS if one.name not in PAPER_METHODS]


@pytest.mark.parametrize("name", [name for name in OWN if not isinstance(method_named(name).selector, CacheOnly)])
def test_nothing_unread_leaves_nothing_to_estimate(
    name: str, tiny_backbone: Backbone, prompts: list[list[int]]
) -> None:
    """At 100 %, and on a prompt of anchors alone, every method is full attention."""
    made = tokens(tiny_backbone, [ArmSpec(name, 100.0), ArmSpec("full")], prompts)
    assert all(arm == full for arm, full in made)


def test_the_threshold_is_the_least_score_read() -> None:
    """Also with ties, with K = 0 (the largest of all), and with an empty mid-region."""
    scores = torch.tensor([[5.0, 1.0, 4.0, 4.0, 2.0], [0.0, 3.0, 1.0, 2.0, 9.0], [1.0, 2.0, 3.0, 4.0, 5.0]])[None, None]
    mid = torch.tensor([False, True, True, True, True]).expand(1, 1, 1, 5)
    retrieved = exhaustive_topk(scores, mid, torch.tensor([2, 0, 9]))
    assert least_read(scores, mid, retrieved).tolist() == [[[4.0, 9.0, 2.0]]]
    empty = exhaustive_topk(scores, mid & False, torch.tensor([2, 0, 9]))
    assert least_read(scores, mid & False, empty).tolist() == [[[0.0, 0.0, 0.0]]]
