"""What `TritonBackend` refuses, and its buffers under full attention, which needs no kernels."""

from __future__ import annotations

import pytest
import torch
from texts import Case, same, tiny_model
from transformers import PreTrainedModel

from residual_mass.decode.torch_backend import TorchBackend
from residual_mass.gpu import backend
from residual_mass.gpu.backend import TritonBackend
from residual_mass.methods import method_named
from residual_mass.methods.arms import Arm
from residual_mass.model.phi_maps import HeadShape, PhiMaps
from residual_mass.spec.settings import MapSpec


@pytest.fixture(autouse=True)
def kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "kernels_run_on", lambda device: True)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model(width=32)


def refusal(model: PreTrainedModel, method: str, d_phi: int = 0) -> str | None:
    phi = PhiMaps(HeadShape.of(model.config), MapSpec(d_emb=24, d_phi=d_phi)) if d_phi else None
    return TritonBackend.refusal(model, Arm(method_named(method), 20.0), phi)


def test_what_the_kernels_serve(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    for method in ("full", "topk", "topk_moments", "topk_moments_8", "scan4", "scan4_moments"):
        assert refusal(model, method) is None
        assert refusal(model.bfloat16(), method) is None
    model.float()
    assert refusal(model, "topk_phi", 16) is None
    assert "no tiles" in refusal(model, "topk_phi", 24)
    assert "not scan4_regression_64" in refusal(model, "scan4_regression_64")
    assert "no tiles" in refusal(tiny_model(width=24), "topk")
    assert refusal(tiny_model(width=16), "topk") is None
    assert "no tiles" in refusal(tiny_model(width=16), "scan4"), "half of a packed key is too narrow"
    assert "float64" in refusal(tiny_model(width=32).double(), "topk")
    monkeypatch.setattr(backend, "MOST_HEADS", 1)
    assert "at most 1 query heads" in refusal(model, "scan4")
    monkeypatch.setattr(backend, "kernels_run_on", lambda device: False)
    assert "current GPU" in refusal(model, "topk")


@pytest.mark.parametrize("lengths", [(30, 30), (30, 17)], ids=["equal lengths", "padding"])
def test_full_attention_reads_what_was_written(
    model: PreTrainedModel, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its buffers grow, and again after the tokens were removed."""
    monkeypatch.setattr(backend, "LEAST_ROOM", 2)
    case = Case(model, "full", lengths)
    same(case.decoded(TritonBackend, 25, runs=2), case.decoded(TorchBackend, 25))


def test_a_further_turn_finds_all_tokens_in_the_cache(model: PreTrainedModel) -> None:
    """Steps write to the buffers of the cache; more of the prompt joins what they wrote."""
    case = Case(model, "full", (30, 30))
    caches = []
    with torch.no_grad():
        for kind in (TritonBackend, TorchBackend):
            text = case.text(kind, 0)
            for token in (5, 6, 7):
                text.step(torch.full((2, 1), token))
            text.read(torch.full((2, 4), 8))
            text.step(torch.full((2, 1), 9))
            caches.append(text.backend.cache)
    for ours, expected in zip(*(cache.layers for cache in caches), strict=True):
        assert ours.keys.shape[2] == 38
        torch.testing.assert_close(ours.keys, expected.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.values, expected.values, rtol=1e-4, atol=1e-4)
