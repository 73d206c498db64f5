"""What is asked about this CPU, and the switch that answers no."""

from __future__ import annotations

import pytest
import torch
from tests.conftest import tiny_llama
from tests.needs import KERNELS, needs

from residual_mass import pack_weights
from residual_mass.decode.compiled import compile_refusal
from residual_mass.kernels import cpu, library

QUERIES = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")


@pytest.mark.parametrize("query", QUERIES)
def test_torch_is_asked_for_the_instructions(query: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cpu.PLAIN, raising=False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    for name in QUERIES:
        monkeypatch.setattr(torch.cpu, name, lambda: False, raising=False)
    assert not cpu.has_bfloat16()
    monkeypatch.setattr(torch.cpu, query, lambda: True)
    assert cpu.has_bfloat16()
    with monkeypatch.context() as limited:  # by ATEN_CPU_CAPABILITY
        limited.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
        assert not cpu.has_bfloat16()
    for name in QUERIES:
        monkeypatch.delattr(torch.cpu, name)
    assert not cpu.has_bfloat16()


@needs(KERNELS)
def test_a_plain_cpu_has_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this one has."""
    monkeypatch.setenv(cpu.PLAIN, "plain")
    monkeypatch.setenv("CXX", "sh")  # a program that is there
    monkeypatch.delenv(library.SWITCH, raising=False)
    for name in QUERIES:
        monkeypatch.setattr(torch.cpu, name, lambda: True, raising=False)
    load = library.load.__wrapped__
    assert load().target == load().best_target() == "portable"
    assert {weight.dtype for weight in pack_weights(tiny_llama(layers=1)).parameters()} == {torch.float32}
    assert compile_refusal(tiny_llama(layers=1)).startswith("RESIDUAL_MASS_CPU=plain stands for a machine without")
    monkeypatch.setenv(library.SWITCH, "avx2")
    with pytest.raises(ValueError, match="RESIDUAL_MASS_KERNELS is avx2, but this CPU has no instructions beyond port"):
        load()


def test_another_value_of_the_switch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cpu.PLAIN, "plian")
    with pytest.raises(ValueError, match="RESIDUAL_MASS_CPU is 'plian'; the one value that it has is plain"):
        pack_weights(tiny_llama(layers=1))
    with pytest.raises(ValueError, match="RESIDUAL_MASS_CPU is 'plian'"):
        library.load.__wrapped__()
