"""Estimators with a function of their own: it sees exactly what was not read, and what it returns is what is added."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from residual_mass.backbones.engine import SharedPrefillEngine
from residual_mass.backbones.loading import Backbone
from residual_mass.backbones.partial import partial_kv
from residual_mass.core import estimators
from residual_mass.core.estimators import ESTIMATORS, Estimator, Unread, estimator_named
from residual_mass.core.settings import AnchorSpec, ArmSpec
from residual_mass.study.config import METHODS

STEPS = 10


def all_of_it(unread: Unread) -> tuple[Tensor, Tensor, Tensor]:
    """No estimate: the unread tokens' exact terms, row by row."""
    rows, length = unread.scores.shape[-2:]
    numerator = torch.zeros(*unread.scores.shape[:-1], unread.values.shape[-1])
    denominator, shift = torch.zeros(unread.scores.shape[:-1]), torch.full(unread.scores.shape[:-1], -3.0)
    for place in torch.cartesian_prod(*(torch.arange(size) for size in unread.scores.shape[:2])).tolist():
        for row in range(rows):
            for token in range(length):
                if unread.mask[*place, row, token]:
                    weight = (unread.scores[*place, row, token] + 3.0).exp()
                    numerator[*place, row] += weight * unread.values[*place, token]
                    denominator[*place, row] += weight
    return numerator, denominator, shift


def nothing(unread: Unread) -> tuple[Tensor, Tensor, Tensor]:
    """A denominator of zero, whatever the numerator: nothing is added."""
    shape = unread.scores.shape[:-1]
    return torch.full((*shape, unread.values.shape[-1]), 7.0), torch.zeros(shape), torch.full(shape, 50.0)


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    more = (Estimator("topk_all", residual=all_of_it), Estimator("topk_nothing", residual=nothing))
    monkeypatch.setattr(estimators, "ESTIMATORS", ESTIMATORS + more)
    monkeypatch.setattr(estimators, "NAMES", tuple(one.name for one in ESTIMATORS + more))


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


def test_partial_kv_takes_them_without_maps(tiny_backbone: Backbone, prompts: list[list[int]]) -> None:
    inputs, logits = torch.tensor([prompts[0]]), {}
    for method in ("full", "topk", "topk_all", "topk_nothing"):
        with partial_kv(tiny_backbone.model, method=method, budget=0.2):
            made = tiny_backbone.model.generate(
                inputs, max_new_tokens=2, min_new_tokens=2, do_sample=False,
                return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
        logits[method] = made.logits[-1]
    torch.testing.assert_close(logits["topk_all"], logits["full"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits["topk_nothing"], logits["topk"], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits["topk"], logits["full"])


def test_an_unknown_method_is_told_with_the_known_ones() -> None:
    line = "method 'topk_fi' is unknown; known are full, topk, topk_phi, topk_phi_nosub, topk_all, topk_nothing"
    with pytest.raises(ValueError, match=line):
        estimator_named("topk_fi")
    with pytest.raises(ValueError, match=line):
        ArmSpec("topk_fi", 4.0)


def test_the_papers_methods_come_first() -> None:
    assert tuple(one.name for one in ESTIMATORS)[: len(METHODS)] == METHODS
