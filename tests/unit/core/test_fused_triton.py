"""The Triton kernels of the fused decode: run by the interpreter, compiled for GPUs that are not there, run on one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="Triton comes with torch for CUDA, else `make test-all` installs it")

CHECKS = Path(__file__).with_name("triton_checks.py")


def run_checks(marker: str, interpret: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", "-m", marker, CHECKS]
    environment = os.environ | {"TRITON_INTERPRET": interpret}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=CHECKS.parents[3])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "passed" in ended.stdout and "skipped" not in ended.stdout, ended.stdout


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the same runs compiled")
def test_under_the_interpreter() -> None:
    run_checks("not gpu", interpret="1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu() -> None:
    run_checks("", interpret="0")


class AbsentGpu:
    """What Triton's compiler asks of a driver."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # Triton keeps compiled kernels by device

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture(params=[80, 90])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict:
    """Kernels that would have been launched, by hash: their name and code. Nothing runs."""
    from triton.runtime.jit import JITFunction

    seen = {}
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: object, grid: object, warmup: bool, **options: object) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        seen[kernel.hash] = (self.__name__, kernel.asm)

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(triton.runtime.driver, "_active", AbsentGpu(request.param))
    return seen


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU compiles for itself")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_compile_down_to_machine_code(compiled: dict, dtype: torch.dtype) -> None:
    for subtracts in (True, False):
        step(dtype, subtracts, generated=1)
    names = {name for name, _ in compiled.values()}
    assert names == {f"{name}_kernel" for name in ("score", "refine", "select", "gather", "merge")}
    code = {name: asm["ptx"] for name, asm in compiled.values()}
    assert all(len(asm["cubin"]) > 0 for _, asm in compiled.values())
    # Scores rounded to TF32 would select other tokens.
    assert ("mma" in code["score_kernel"]) == (dtype == torch.bfloat16) and "tf32" not in code["score_kernel"]
    before = len(compiled)
    for generated in (2, 15, 16):
        step(dtype, True, generated)
    assert len(compiled) == before, "a step with another number of generated tokens compiles anew"


def step(dtype: torch.dtype, subtracts: bool, generated: int) -> None:
    from residual_mass.core.fused import triton_path
    from residual_mass.core.fused.cache import DecodeCache

    length, room, kv_heads, group, d, m = 5000, 32, 2, 3, 64, 32

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype)

    buffers = [empty(1, kv_heads, length + room, d) for _ in range(2)]
    first, last = torch.tensor([[0], [length]], dtype=torch.int32)
    cache = DecodeCache(
        *buffers, first, last, length, empty(1, kv_heads, length, m),
        empty(1, kv_heads, m, d + 1, dtype=torch.float32), empty(1, kv_heads, m, dtype=torch.float32),
    )  # fmt: skip
    triton_path.decode_attention(
        empty(1, kv_heads * group, d), cache, empty(1, kv_heads * group, m, dtype=torch.float32),
        k=31, sink=4, tail=16, subtracts=subtracts, generated=generated, scale=d**-0.5,
    )  # fmt: skip
