"""The pipeline of docs/kvpress.md, if kvpress is installed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from tests.conftest import tiny_llama
from tests.needs import KVPRESS, needs
from tests.unit.test_docs import blocks
from transformers import DynamicCache

from residual_mass import partial_generate
from residual_mass.methods.arms import arm_of
from residual_mass.model.loading import Backbone

TOKENS = 12
pytestmark = needs(KVPRESS)


@pytest.fixture
def page(tiny_backbone: Backbone, tmp_path: Path) -> dict[str, object]:
    """The names that the page's example leaves, with a tiny model in place of the mini study's."""
    tiny_llama().save_pretrained(tmp_path)
    tiny_backbone.tokenizer.save_pretrained(tmp_path)
    (example,) = blocks("kvpress.md", "python")
    names: dict[str, object] = {}
    exec(re.sub(r'^folder = ".*"$', f"folder = {str(tmp_path)!r}", example, flags=re.MULTILINE), names)
    return names


def test_the_pipeline_answers_as_generation_by_the_method_does(page: dict[str, object]) -> None:
    """Each question after the same context, whatever was answered before; `topk` at 2 % is far from full attention."""
    pipeline, model, context, questions = (page[name] for name in ("pipeline", "model", "context", "questions"))
    parts = pipeline.preprocess(context, questions, "", 10_000)
    found = {}
    for method, budget in (("scan4_regression_64", 0.1), ("topk", 0.02), ("full", None)):
        pipeline.arm = arm_of(method, budget)
        found[method] = pipeline(context, questions=questions, max_new_tokens=TOKENS)["answers"]
        expected = []
        for question in parts["questions_ids"]:
            prompt = torch.cat((parts["context_ids"], question), 1)
            output = partial_generate(model, prompt, max_new_tokens=TOKENS, method=method, budget=budget)
            expected.append(pipeline.tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True))
        assert found[method] == expected
    assert found["scan4_regression_64"] == page["answers"] and found["topk"] != found["full"]


def test_a_context_of_which_a_press_removed_tokens_is_refused(page: dict[str, object]) -> None:
    """By hand, because kvpress' own presses fail under this transformers."""
    pipeline, model = page["pipeline"], page["model"]
    parts = pipeline.preprocess(page["context"], page["questions"], "", 10_000)
    cache = DynamicCache()
    with torch.no_grad():
        model.model(parts["context_ids"], past_key_values=cache)
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, 1:], layer.values[:, :, 1:]
    with pytest.raises(ValueError, match="a press removed tokens"):
        pipeline.generate_answer(parts["questions_ids"][0], cache, parts["context_ids"].shape[1], 4)
