"""The Triton kernels of decode steps and training: interpreted, compiled for absent GPUs, and run on a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from tests.needs import GPU, NO_GPU, TRITON, needs
from torch import Tensor

from residual_mass.core.feature_maps import FoldedMap

triton = pytest.importorskip("triton", reason=TRITON.reason)

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel

METHODS = ("topk", "topk_phi", "topk_phi_nosub", "moments", "shared moments", "scan", "scan, moments")
KERNELS = ("score", "scan", "select", "gather", "moments", "merge", "map")
OF_TRAINING = ("maxima", "sums", "query_gradient", "key_gradient")
CHECKS = [Path(__file__).with_name(f"{name}_checks.py") for name in ("triton", "prefix", "backend", "score_matching")]


def run_checks(checks: Path, marker: str, interpret: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", "-m", marker, checks]
    environment = os.environ | {"TRITON_INTERPRET": interpret}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=checks.parents[3])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "passed" in ended.stdout and "skipped" not in ended.stdout, ended.stdout


@pytest.mark.slow
@needs(NO_GPU)  # a GPU runs the same compiled
@pytest.mark.parametrize("checks", CHECKS, ids=lambda path: path.stem)
def test_under_the_interpreter(checks: Path) -> None:
    run_checks(checks, "not gpu", interpret="1")


@pytest.mark.gpu
@needs(GPU)
@pytest.mark.parametrize("checks", CHECKS, ids=lambda path: path.stem)
def test_on_a_gpu(checks: Path) -> None:
    run_checks(checks, "", interpret="0")


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


@dataclass
class Compiled:
    """Kernels that would have been launched, by hash. Nothing runs."""

    capability: int
    kernels: dict[str, CompiledKernel]


@pytest.fixture(params=[80, 90])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compiled:
    from triton.runtime.jit import JITFunction

    seen = Compiled(request.param, {})
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: object, grid: object, warmup: bool, **options: object) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        seen.kernels[kernel.hash] = kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(triton.runtime.driver, "_active", AbsentGpu(request.param))
    return seen


SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}
"""Bytes that one block may have at most; Triton asks the device only when it loads a kernel."""


@pytest.mark.slow
@needs(NO_GPU)  # a GPU compiles for itself
@pytest.mark.parametrize(("group", "d", "m"), [(3, 64, 32), (4, 64, 64), (3, 128, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_compile_to_machine_code(
    compiled: Compiled, tmp_path: Path, dtype: torch.dtype, group: int, d: int, m: int
) -> None:
    """Of a small odd shape, and of the heads of Llama-3.2 1B and 3B; every method, in long and in short contexts, the
    shortest of which are one block and one share.
    """
    for method in METHODS:
        step(dtype, method, 1, group, d, m, length=5000)
    names = {kernel.name for kernel in compiled.kernels.values()}
    assert names == {f"{name}_kernel" for name in KERNELS}
    before = len(compiled.kernels)
    for generated in (2, 15, 16):
        for method in METHODS:
            step(dtype, method, generated, group, d, m, length=5000)
    assert len(compiled.kernels) == before, "a step with another number of generated tokens compiles anew"
    for length, room, k in ((4096, 32, 21), (4095, 32, 144), (40, 4, 1)):
        for method in METHODS:
            step(dtype, method, 1, group, d, m, length, room, k)
    for arms, length, most in ((12, 5000, 31), (1, 5000, 2602), (17, 4096, 0)):
        prefix_step(dtype, arms * group, d, m, length, most)
    check(compiled, tmp_path)
    for kernel in compiled.kernels.values():
        if kernel.name in ("score_kernel", "scan_kernel", "map_kernel"):  # scores in TF32 would select other tokens
            ptx = kernel.asm["ptx"]
            assert ("mma" in ptx) == (dtype == torch.bfloat16) and "tf32" not in ptx


@pytest.mark.slow
@needs(NO_GPU)
@pytest.mark.parametrize(
    ("dtype", "rows", "d", "m"),
    [
        (dtype, *shape)
        for dtype in (torch.bfloat16, torch.float32)
        for shape in ((1, 64, 32), (400, 64, 64), (300, 128, 64))
    ]
    + [(torch.bfloat16, 300, 128, 128)],
)
def test_kernels_of_training_compile_to_machine_code(
    compiled: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, rows: int, d: int,
    m: int,
) -> None:  # fmt: skip
    from tests.unit.core.objective_checks import Problem, some_rows

    from residual_mass.gpu.training import TritonPasses

    monkeypatch.setattr(Problem, "passes", TritonPasses)
    Problem(some_rows(rows, 5000), 5000, d, m, dtype=dtype).results()
    assert {kernel.name for kernel in compiled.kernels.values()} == {f"{name}_kernel" for name in OF_TRAINING}
    check(compiled, tmp_path)


def check(compiled: Compiled, folder: Path) -> None:
    for kernel in compiled.kernels.values():
        assert len(kernel.asm["cubin"]) > 0
        assert kernel.metadata.shared <= SHARED_MEMORY[compiled.capability], kernel.name
        assert stack_of(kernel, folder) == 0, f"{kernel.name} spills registers"


def stack_of(kernel: CompiledKernel, folder: Path) -> int:
    """Bytes of memory that a thread keeps what has no place in its registers in."""
    binary = folder / f"{kernel.hash}.cubin"
    binary.write_bytes(kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    usage = subprocess.run([tool, "-res-usage", binary], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", usage)[1])


def prefix_step(dtype: torch.dtype, rows: int, d: int, m: int, length: int, most: int) -> None:
    """One step of rows of all methods over a prefix that they share."""
    from residual_mass.core.moments import MomentState
    from residual_mass.gpu.cache import DecodeCache, MethodRows
    from residual_mass.gpu.path import terms_over_prefix

    heads = (2, 8)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*heads, *shape, dtype=dtype)

    first, last = torch.tensor([[0, 0], [length, length - 9]], dtype=torch.int32)
    summary = empty(length, m), empty(m, d + 1), empty(m)
    cache = DecodeCache(empty(length, d, dtype=dtype), empty(length, d, dtype=dtype), first, last, length, *summary)
    moments = [
        MomentState(empty(p), empty(p, d), empty(p, d), empty(c, d, d), empty(c, d, d), empty(p))
        for p, c in ((1, 1), (64, 1))
    ]
    k, kinds = torch.zeros(2, rows, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
    terms_over_prefix(
        empty(rows, d, dtype=dtype), cache, empty(rows, m), MethodRows(k, kinds, most),
        [(state, torch.arange(3)) for state in moments], sink=4, tail=16, scale=d**-0.5,
    )  # fmt: skip


def step(
    dtype: torch.dtype,
    method: str,
    generated: int,
    group: int,
    d: int,
    m: int,
    length: int,
    room: int = 32,
    k: int = 31,
) -> None:
    """One step of one of METHODS."""
    from residual_mass.core.moments import MomentState
    from residual_mass.gpu import path
    from residual_mass.gpu.cache import DecodeCache, PackedKeys

    kv_heads = 8

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype)

    buffers = [empty(1, kv_heads, length + room, d) for _ in range(2)]
    first, last = torch.tensor([[0], [length]], dtype=torch.int32)
    cache, log_query = DecodeCache(*buffers, first, last, length), None
    if "phi" in method:
        folded = FoldedMap(*(empty(kv_heads * group, *shape) for shape in ((d, m), (512, m), (d, 512), (512,), (m,))))
        log_query = path.QueryMap(folded, dtype)(empty(1, kv_heads * group, d))
        summary, log_shift = (empty(1, kv_heads, m, *tail, dtype=torch.float32) for tail in ((d + 1,), ()))
        cache = cache._replace(features=empty(1, kv_heads, length, m), summary=summary, log_shift=log_shift)
    if "moments" in method:
        parts = 20
        each, covariance = (1, kv_heads, parts), (1, kv_heads, 1 if "shared" in method else parts, d, d)
        shapes = each, (*each, d), (*each, d), covariance, covariance, each
        cache = cache._replace(moments=MomentState(*(empty(*shape, dtype=torch.float32) for shape in shapes)))
    if "scan" in method:
        blocks = (1, kv_heads, triton.cdiv(length, 64))
        scales = (empty(*blocks, d, dtype=torch.bfloat16) for _ in range(2))
        cache = cache._replace(scan=PackedKeys(empty(*blocks, d // 2, 64, dtype=torch.uint8), *scales))
    path.decode_attention(
        empty(1, kv_heads * group, d), cache, log_query,
        k=k, sink=4, tail=16, subtracts=method == "topk_phi", generated=generated, scale=d**-0.5,
    )  # fmt: skip
