"""What this package asks about the CPU and its compiler, apart from what torch decides for itself.

`RESIDUAL_MASS_CPU=plain` answers every question as a CPU without vector instructions and without a compiler would.
"""

from __future__ import annotations

import os
import shutil
import sys

import torch

PLAIN = "RESIDUAL_MASS_CPU"


def is_plain() -> bool:
    """Returns whether every question is answered with no.

    Raises:
        ValueError: `RESIDUAL_MASS_CPU` has a value other than plain.
    """
    value = os.environ.get(PLAIN, "")
    if value not in ("", "plain"):
        raise ValueError(f"{PLAIN} is {value!r}; the one value that it has is plain")
    return value == "plain"


def has_bfloat16() -> bool:
    """Returns whether torch multiplies matrices in bfloat16 by instructions of their own here.

    It takes none where ATEN_CPU_CAPABILITY names fewer instructions than the CPU has.
    """
    return has_amx() or (multiplies_pairs() and _torch_takes_avx512())


def has_amx() -> bool:
    """Returns whether torch multiplies matrices in bfloat16 by AMX here."""
    return _has("_is_amx_tile_supported") and _torch_takes_avx512()


def multiplies_pairs() -> bool:
    """Returns whether this CPU multiplies pairs of bfloat16 (AVX-512 BF16), as the kernels for AVX-512 then do."""
    return _has("_is_avx512_bf16_supported")


def _has(query: str) -> bool:
    """Returns what a function of torch.cpu says, which other versions of torch may lack."""
    return not is_plain() and getattr(torch.cpu, query, bool)()


def _torch_takes_avx512() -> bool:
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def compiler_refusal() -> str | None:
    """Returns why `torch.compile` finds no compiler here, in one line; None if it finds one."""
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler {compiler}: install one, or name another by the variable CXX"
    if is_plain():
        return f"{PLAIN}=plain stands for a machine without a C++ compiler: unset it"
    return None
