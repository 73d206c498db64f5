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
    """Returns whether this CPU multiplies matrices in bfloat16 by instructions of its own, as far as torch knows.

    Torch takes them no more where ATEN_CPU_CAPABILITY names fewer instructions than the CPU has.
    """
    if is_plain() or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    queries = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, query, bool)() for query in queries)


def compiler_refusal() -> str | None:
    """Returns why `torch.compile` finds no compiler here, in one line; None if it finds one."""
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler {compiler}: install one, or name another by the variable CXX"
    if is_plain():
        return f"{PLAIN}=plain stands for a machine without a C++ compiler: unset it"
    return None
