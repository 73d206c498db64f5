"""Prompts read in part by every kind of kernel, against the formula of `core` in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.needs import KERNELS, needs
from tests.unit.kernels.test_prompt import prompt
from torch import Tensor

from residual_mass.core.prompts import PromptCut
from residual_mass.core.prompts import attention_in_part as formula
from residual_mass.kernels.library import WIDTHS, Library
from residual_mass.kernels.prompt import attention_in_part, heads_apart, prompt_attention

pytestmark = needs(KERNELS)

LEFT = 0.1


def expected(query: Tensor, key: Tensor, value: Tensor, scale: float, cut: PromptCut, left: float = LEFT) -> Tensor:
    """Outputs [1, T, H G, D] in float64."""
    keys, values = (x.double().repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    return formula(query.double(), keys, values, scale, left, cut).transpose(1, 2)


def distance(output: Tensor, other: Tensor, value: Tensor) -> float:
    return float((output.double() - other).abs().max() / value.double().norm(dim=-1).max())


SHAPES = [
    *(({"tokens": tokens}, PromptCut()) for tokens in (1, 128, 330)),
    *(({"tokens": 300, "width": width, "heads": 1}, PromptCut(48, 16, 4, 64)) for width in WIDTHS),
    *(({"tokens": 300, "group": group, "heads": 2}, PromptCut(32, 64, 16, 100)) for group in (1, 2, 7)),
    ({"tokens": 333}, PromptCut(192, 0, 0, 1)),
    ({"tokens": 333}, PromptCut(64, 32, 8, 0)),
    ({"tokens": 333}, PromptCut(7, 300, 200, 1000)),
    ({"tokens": 400, "heads": 1}, PromptCut(1, 1, 1, 64)),
]


@pytest.mark.parametrize(("shape", "cut"), SHAPES, ids=str)
def test_a_prompt(library: Library, shape: dict[str, Any], cut: PromptCut) -> None:
    query, key, value = prompt(**shape, factor=2.0)
    scale = key.shape[3] ** -0.5
    output = attention_in_part(library, query, key, value, scale, LEFT, cut, threads=1)
    assert output.is_contiguous()
    assert distance(output, expected(query, key, value, scale, cut), value) < 3e-6
    for threads in (2, 3):
        assert attention_in_part(library, query, key, value, scale, LEFT, cut, threads=threads).equal(output)


@pytest.mark.parametrize("left", [0.0, 0.02, 0.5, 1.0])
def test_shares(library: Library, left: float) -> None:
    query, key, value = prompt(500, factor=2.0)
    cut = PromptCut(64, 32, 8, 128)
    output = attention_in_part(library, query, key, value, 0.125, left, cut)
    assert distance(output, expected(query, key, value, 0.125, cut, left), value) < 3e-6


def test_heads_read_whole_are_full_attention(library: Library) -> None:
    query, key, value = prompt(500)
    whole = torch.tensor([True, False, False, True, True, True])
    output = attention_in_part(library, query, key, value, 0.125, 1.0, PromptCut(32), whole=whole)
    full = prompt_attention(library, query, key, value, 0.125)
    assert distance(output[:, :, whole], full[:, :, whole], value) < 1e-6
    assert distance(output[:, :, ~whole], full[:, :, ~whole], value) > 1e-2


def test_the_last_blocks_alone(library: Library) -> None:
    query, key, value = prompt(500)
    output = attention_in_part(library, query, key, value, 0.125, LEFT, PromptCut(64))
    last = attention_in_part(library, query, key, value, 0.125, LEFT, PromptCut(64), first=6)
    assert last[:, 6 * 64 :].equal(output[:, 6 * 64 :])


def test_masses(library: Library) -> None:
    """Of the terms that are summed; with everything read they are those of full attention."""
    query, key, value = prompt(400)
    masses = torch.empty(2, 1, 400, 6)
    attention_in_part(library, query, key, value, 0.125, 0.0, PromptCut(), log_mass=masses[0])
    prompt_attention(library, query, key, value, 0.125, log_mass=masses[1])
    torch.testing.assert_close(masses[0], masses[1], rtol=1e-5, atol=1e-5)


def test_equal_keys(library: Library) -> None:
    """Whether they are read or stood for, outputs are means of the values."""
    query, key, value = prompt(400)
    key = key[:, :, :1].expand_as(key)
    for left in (0.0, 1.0):
        output = attention_in_part(library, query, key, value, 0.125, left, PromptCut())
        assert distance(output, prompt_attention(library, query, key, value, 0.125), value) < 3e-6


@pytest.mark.parametrize("factor", [0.0, 30.0])
def test_flat_and_extreme_scores(library: Library, factor: float) -> None:
    query, key, value = prompt(400, factor=factor)
    cut = PromptCut(64, 32, 8, 128)
    output = attention_in_part(library, query, key, value, 0.125, LEFT, cut)
    assert distance(output, expected(query, key, value, 0.125, cut), value) < 3e-6 * max(1, factor)


def test_bfloat16(library: Library) -> None:
    query, key, value = (x.bfloat16() for x in prompt(400, factor=2.0))
    cut = PromptCut(64, 32, 8, 128)
    output = attention_in_part(library, query, key, value, 0.125, LEFT, cut)
    assert output.dtype == torch.bfloat16
    assert distance(output, expected(query, key, value, 0.125, cut), value) < 4e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strides_change_nothing(library: Library, dtype: torch.dtype) -> None:
    query, key, value = (x.to(dtype) for x in prompt(300))
    plain = attention_in_part(library, query, key, value, 0.125, LEFT, PromptCut())
    spread = [torch.stack((x, -x), -1)[..., 0] for x in (query, key, value)]
    assert attention_in_part(library, *spread, 0.125, LEFT, PromptCut()).equal(plain)


def test_nan_is_not_hidden(library: Library) -> None:
    query, key, value = prompt(400)
    key[0, 0, 100] = torch.nan
    output = attention_in_part(library, query, key, value, 0.125, LEFT, PromptCut())
    assert output[0, 128:, :3].isnan().all() and output[0, :, 3:].isfinite().all()


def test_a_block_has_a_limit(library: Library) -> None:
    with pytest.raises(ValueError, match="a block of 193 queries"):
        attention_in_part(library, *prompt(10), 0.125, LEFT, PromptCut(193))


def test_heads_apart(library: Library) -> None:
    """Heads whose queries are alike read the same tokens; in head 4 each looks for a token of its own."""
    query, key, value = prompt(700, factor=0.1)
    query[0, 4, 100:] = 8 * key[0, 1, 2:602]
    apart = heads_apart(library, query, key, value, 0.125, 0.9, PromptCut(64), 0.1)
    assert apart.tolist() == [False, False, False, False, True, False]
    output = attention_in_part(library, query, key, value, 0.125, 0.9, PromptCut(64))
    full = prompt_attention(library, query, key, value, 0.125)
    errors = (output - full).norm(dim=-1) / full.norm(dim=-1)
    assert (errors[0, -64:].mean(0) > 0.1).equal(apart)
