"""Mistakes of a library user raise one line with the likely meaning."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.unit.model.test_own_residuals import AllOfIt
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaModel

from residual_mass import partial_generate, partial_kv
from residual_mass.methods import Method, Moments, Residual
from residual_mass.methods.arms import percent_written
from residual_mass.model.loading import Backbone

SHARE = "is not a share of the prompt's tokens in (0, 1]: "


@pytest.mark.parametrize(
    ("budget", "line"),
    [
        (2, f"budget=2 {SHARE}for 2 % write 0.02"),
        ("4%", f"budget='4%' {SHARE}for 4 % write 0.04"),
        (1, "budget=1 may mean 1 % or the whole prompt: write 0.01 or 1.0"),
        (0, f"budget=0 {SHARE}for 2 % write 0.02"),
        (None, "method topk chooses tokens: give a budget, such as budget=0.02 for 2 % of the prompt"),
        ("1/0", f"budget='1/0' {SHARE}for 2 % write 0.02"),
    ],
)
def test_a_budget_that_is_no_share(budget: Any, line: str, tiny_backbone: Backbone) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"), partial_kv(tiny_backbone.model, "topk", budget):
        pass


@pytest.mark.parametrize(
    ("budget", "percent"),
    [(0.07, 7), (0.14, 14), (0.29, 29), (0.57, 57), (0.0055, 0.55), ("0.02", 2), (1.0, 100)],
)
def test_a_budget_is_the_percentage_that_is_written(budget: Any, percent: float, tiny_backbone: Backbone) -> None:
    """In floats 100 * 0.07 is a little above 7, and K would be one token too many."""
    with pytest.warns(UserWarning), partial_kv(tiny_backbone.model, "topk", budget) as session:
        assert session.decoding.arm.budget_percent == percent


def test_a_budget_in_percent() -> None:
    assert [percent_written(text) for text in ("2", "0.5", "4%", "0.02 %", "100")] == [2, 0.5, 4, 0.02, 100]
    with pytest.raises(ValueError, match=r"^budget 0.02 may mean 2 % or 0.02 %: write 2 or 0.02%$"):
        percent_written("0.02")
    for text in ("0", "-2", "200", "nan", "two", "", "%"):
        with pytest.raises(ValueError, match=f"^budget '{text}' is not a number of percent in .0, 100., such as 2$"):
            percent_written(text)


@dataclass(frozen=True)
class WithoutTerms(Residual):
    summary_bytes = AllOfIt.summary_bytes


@dataclass(frozen=True)
class WithoutUpdate(AllOfIt):
    prepare = AllOfIt.terms


@dataclass
class Loose(Residual):
    terms = summary_bytes = AllOfIt.terms


NO = "is no instance of a frozen dataclass that inherits from"


@pytest.mark.parametrize(
    ("make", "error", "line"),
    [
        (WithoutTerms, TypeError, "Can't instantiate abstract class WithoutTerms .* '?terms'?"),
        (
            lambda: Method("mine", residual=WithoutUpdate()),
            ValueError,
            r"residual WithoutUpdate\(\) has one of prepare and update without the other",
        ),
        (lambda: Method("mine", residual=Moments), ValueError, f"residual <class .*Moments'> {NO} Residual"),
        (lambda: Method("mine", residual=Loose()), ValueError, rf"residual Loose\(\) {NO} Residual"),
        (lambda: Method("mine", selector=Moments()), ValueError, f"selector Moments.* {NO} Selector"),
    ],
)
def test_a_part_that_is_no_selector_or_residual(make: Any, error: type[Exception], line: str) -> None:
    with pytest.raises(error, match=f"^{line}"):
        make()


@pytest.mark.parametrize(
    ("method", "similar"),
    [
        ("topk_moment", "topk_moments, "),
        ("x", ""),
        (None, ""),
    ],
)
def test_an_unknown_method(method: Any, similar: str, tiny_backbone: Backbone) -> None:
    line = re.escape(f"method {method!r} is unknown; the most similar are {similar}")
    with pytest.raises(ValueError, match=f"^{line}[^,]+(, [^,]+)*$") as error, partial_kv(tiny_backbone.model, method):
        pass
    assert str(error.value).count(", ") == 2


SIZES = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (
            "gpt2",
            "model is a str, not a model of transformers; load one with AutoModelForCausalLM.from_pretrained(...)",
        ),
        (torch.nn.Linear(2, 2), "model is a Linear, not a model of transformers; load one with "),
        (BertForMaskedLM(BertConfig(**SIZES)), "BertForMaskedLM reads what follows a token, as encoders do; take a "),
    ],
)
def test_what_is_no_decoder_only_model(model: Any, line: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(line)}"), partial_kv(model, "topk", 0.1):
        pass
    with pytest.raises(ValueError, match=f"^{re.escape(line)}"):
        partial_generate(model, torch.ones(1, 5, dtype=torch.long), max_new_tokens=3, method="topk", budget=0.1)


def test_generation_needs_a_language_model_head() -> None:
    with pytest.raises(ValueError, match="^LlamaModel has no language-model head; load it with AutoModelForCausalLM$"):
        partial_generate(
            LlamaModel(LlamaConfig(**SIZES)),
            torch.ones(1, 5, dtype=torch.long),
            max_new_tokens=3,
            method="topk",
            budget=0.1,
        )
