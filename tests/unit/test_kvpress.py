"""The press of docs/kvpress.md in kvpress' own pipeline and in `generate`, if kvpress is installed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from tests.conftest import tiny_llama
from tests.needs import KVPRESS, needs
from tests.unit.test_docs import blocks
from transformers import DynamicCache

from residual_mass import partial_kv
from residual_mass.model.loading import Backbone

QUESTION, TOKENS = "Where is the red key?", 12
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


def test_the_pipeline_answers_as_partial_kv_does(page: dict[str, object]) -> None:
    """Step by step, with the question read exactly after the context, as one prompt."""
    pipeline, press, model = page["pipeline"], page["press"], page["model"]
    parts = pipeline.preprocess(page["context"], [QUESTION], "", 10_000)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(parts["context_ids"], past_key_values=cache)
        with partial_kv(model, **press.settings) as session:
            tokens = [model(parts["questions_ids"][0], past_key_values=cache).logits[0, -1].argmax()]
            while len(tokens) < TOKENS and tokens[-1] != model.generation_config.eos_token_id:
                tokens.append(model(tokens[-1].view(1, 1), past_key_values=cache).logits[0, -1].argmax())
    assert page["answer"] == pipeline.tokenizer.decode(torch.stack(tokens), skip_special_tokens=True)
    assert session.partial_calls[0] == len(tokens) - 1


def test_generate_under_the_press(page: dict[str, object]) -> None:
    model, press, inputs = page["model"], page["press"], page["inputs"]
    with partial_kv(model, **press.settings):
        expected = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    assert torch.equal(page["output"], expected)
    assert press.session.partial_calls[0] > 0
