"""A tiny model whose random answers are printable text, with a chat template, and the folder that serves it."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch
from tests.conftest import byte_tokenizer, tiny_llama
from transformers import LlamaForCausalLM

from residual_mass.serve import command

TEMPLATE = (
    "{% for message in messages %}<s>{{ message.role }}: {{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def flags(out: Path, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args([*words, "--out", str(out)])


@pytest.fixture(scope="session")
def printable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that writes letters and blanks alone, so that its texts are read again as they were."""
    folder = tmp_path_factory.mktemp("models") / "printable"
    model = tiny_llama(width=64)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    letters = tokenizer.convert_tokens_to_ids([*"abcdefghijklmnopqrstuvwxyz", "Ġ"])
    with torch.no_grad():
        others = torch.ones(len(model.lm_head.weight), dtype=torch.bool)
        others[letters] = False
        model.lm_head.weight[others] = 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def model(printable: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(printable)
