"""A method holds keys and values of a prompt in memory only once while it generates."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from tests.unit.model.test_generation import generated, model_of
from torch import Tensor

from residual_mass import partial_kv

LENGTH, STEPS = 400, 6


def live() -> dict[int, int]:
    """Bytes by address of all storages on the CPU that a tensor refers to; other tests may have left some behind."""
    gc.collect()
    found = {}
    for one in gc.get_objects():
        if issubclass(type(one), Tensor):
            with contextlib.suppress(RuntimeError, NotImplementedError):  # a tensor without storage, such as a fake one
                found[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
    return found


@pytest.mark.parametrize(
    ("cache", "pad", "fold"),
    [
        ("dynamic", 0, None),
        ("static", 30, 2),
        pytest.param("dynamic", 30, 2, marks=pytest.mark.slow),
        pytest.param("static", 0, None, marks=pytest.mark.slow),
    ],
)
def test_keys_and_values_are_held_once(cache: str, pad: int, fold: int | None) -> None:
    """By the cache: beside it top-K keeps masks of the prompt's tokens, and the indices of its anchors."""
    model, held = model_of("Llama"), []
    ids = torch.randint(2, 90, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    ids[0, :pad], mask[0, :pad] = 1, 0

    def count(tokens: Tensor, scores: Tensor) -> Tensor:
        if tokens.shape[1] == LENGTH + STEPS:
            held.append(sum(size for place, size in live().items() if place not in before))
        return scores

    before = live()
    options = {"attention_mask": mask, "logits_processor": [count], "cache_implementation": cache}
    generated(model, ids, **options)
    with partial_kv(model, "topk", 0.1, fold=fold):
        generated(model, ids, **options)
    plain, ours = held
    config = model.config
    cached = 2 * 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * (LENGTH + STEPS)
    assert plain > cached, "the count misses the cache"
    assert ours - plain < cached / 20
