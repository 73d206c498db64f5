"""Prompts that models read by the compiled kernels, against the models themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.needs import KERNELS, TRANSFORMERS_5, needs
from tests.unit.model.families import FAMILIES, WINDOW
from tests.unit.model.test_families import assert_same, generated, ids_of
from torch import Tensor

from residual_mass.decode.generate import partial_kv
from residual_mass.kernels.prompt import prompt_attention, prompt_library
from residual_mass.model import hook


@needs(KERNELS)
@needs(TRANSFORMERS_5)
@pytest.mark.parametrize(
    ("name", "windows"), [("Llama", (None, None)), ("Gemma 3", (WINDOW, None)), ("gpt-oss", (WINDOW, None))]
)
@pytest.mark.filterwarnings("ignore:partial_kv. no decode step")
@pytest.mark.parametrize("method", ["full", "scan4"])
def test_a_prompt_is_read_as_the_model_reads_it(
    name: str, windows: tuple[int | None, ...], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernels in every layer, with windows and sinks; one with padding by torch."""
    calls: list[int | None] = []

    def told(*tensors: Any, window: int | None, **options: Any) -> Tensor:
        calls.append(window)
        return prompt_attention(*tensors, window=window, **options)

    monkeypatch.setattr(hook, "prompt_attention", told)
    model = next(family for family in FAMILIES if family.name == name).build(head_dim=32)
    ids = ids_of(150)
    expected = generated(model, ids, steps=1)
    padded = torch.cat((torch.ones_like(ids[:, :9]), ids), 1)
    mask = (torch.arange(159) >= 9)[None].long()
    query = torch.zeros(1, 4, 150, 32)
    with partial_kv(model, method, None if method == "full" else 1.0):
        assert_same(generated(model, ids, steps=1), expected, 1e-4)
        served = prompt_library(query, query, query) is not None
        assert calls == list(windows) * served
        assert_same(generated(model, padded, mask, steps=1), expected, 1e-4)
        assert len(calls) == len(windows) * served
