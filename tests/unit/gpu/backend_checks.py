"""Checks of `TritonBackend`, under the interpreter and on a GPU; `test_triton.py` runs them.

The reference is `TorchBackend`.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from texts import Case, same, tiny_model
from torch import Tensor
from transformers import PreTrainedModel
from triton_fixtures import poisoned_scratch  # noqa: F401

from residual_mass.decode.torch_backend import TorchBackend
from residual_mass.gpu import backend
from residual_mass.gpu.backend import TritonBackend

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
METHODS = ["topk", "topk_phi", "topk_phi_nosub", "topk_moments", "scan4", "scan4_moments"]
STEPS = 4


@pytest.fixture(autouse=True)
def kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter stands in for the GPU."""
    monkeypatch.setattr(backend, "kernels_run_on", lambda device: True)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model(width=32).to(DEVICE)


def case_of(model: PreTrainedModel, method: str, lengths: tuple[int, ...] = (60, 60)) -> Case:
    case = Case(model, method, lengths)
    assert TritonBackend.refusal(model, case.arm, case.phi) is None
    return case


@pytest.mark.parametrize("lengths", [(60, 60), (60, 41)], ids=["equal lengths", "padding"])
@pytest.mark.parametrize("method", METHODS)
def test_texts_are_those_of_the_torch_backend(model: PreTrainedModel, method: str, lengths: tuple[int, ...]) -> None:
    """Every row retrieves its share of its own tokens."""
    case = case_of(model, method, lengths)
    expected = case.decoded(TorchBackend, STEPS)
    same(case.decoded(TritonBackend, STEPS), expected)
    assert len(set(expected.tokens.flatten().tolist())) > 3, "tokens must differ, or equality shows nothing"


@pytest.mark.parametrize("method", ["topk", "topk_phi", "topk_moments", "scan4"])
@torch.no_grad()
def test_one_recorded_step_serves_all(model: PreTrainedModel, method: str) -> None:
    """A replayed graph does what the host asked for when it was recorded: here the host asks for step 0 every time."""
    case = case_of(model, method)
    expected = case.decoded(TorchBackend, STEPS)
    text = case.text(TritonBackend, STEPS)
    step = partial(text._forward, text.backend.step, logits_to_keep=1)
    for _ in range(2):  # a second run starts from the same prompt
        text.backend.crop(0)
        token = expected.first
        tokens: list[Tensor] = []
        for place in range(STEPS):
            logits = text.backend._advance(step, token, torch.full_like(token, text.tokens + place))
            token = logits[:, -1].argmax(-1, keepdim=True)
            tokens.append(token)
        assert torch.equal(torch.cat(tokens, 1), expected.tokens)
        torch.testing.assert_close(logits[:, -1], expected.logits, rtol=1e-3, atol=1e-3)


def test_buffers_grow_where_a_text_is_longer_than_expected(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have three free columns at first."""
    monkeypatch.setattr(backend, "LEAST_ROOM", 2)
    case = case_of(model, "topk_phi", (14, 11))
    same(case.decoded(TritonBackend, 7, runs=2), case.decoded(TorchBackend, 7))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", ["topk_phi", "scan4_moments"])
def test_other_dtypes(method: str, dtype: torch.dtype) -> None:
    """Of the first step, as later tokens may tie within rounding."""
    model = tiny_model(width=32).to(DEVICE, dtype)
    case = case_of(model, method)
    ours = case.decoded(TritonBackend, 1).logits.float()
    torch.testing.assert_close(ours, case.decoded(TorchBackend, 1).logits.float(), rtol=2e-2, atol=5e-2)
