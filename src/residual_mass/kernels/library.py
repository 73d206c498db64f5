"""Loads the compiled kernels that this CPU has instructions for.

`RESIDUAL_MASS_KERNELS` names others: avx512, avx2, portable, or off for none.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
import warnings
from pathlib import Path
from typing import NoReturn

import torch  # first: the kernels take the OpenMP runtime that it has loaded
from torch import Tensor

FOLDER = Path(__file__).parent
SWITCH = "RESIDUAL_MASS_KERNELS"
TARGETS = ("portable", "avx2", "avx512")
"""Instruction sets in ascending order; `target` of a library returns the index of the best for this CPU."""
LAYOUT = 3
"""Result of `layout` of a library that was built from these sources; saved states of packed caches have it too."""
WIDTHS = (32, 64, 80, 96, 112, 128, 192, 256)
"""Supported head dimensions."""


class Layer(ctypes.Structure):
    """Arguments of a step, the same as `Layer` in common.hpp."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in "batch heads group width blocks room segments residual threads".split()),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "slots gap k recents keys scales rows values value_scales bounds mean_values slope deviations recent "
                "query output log_mass scratch"
            ).split()
        ),
        ("queries", ctypes.c_int32),
    ]


class Library:
    """Functions of one library, with tensors as pointers. Raises OSError if it is missing, damaged or outdated."""

    def __init__(self, target: str) -> None:
        self.target = target
        self._functions = ctypes.CDLL(str(FOLDER / f"_{target}.so"))
        own = self._functions
        if not (hasattr(own, "serves") and own.layout() == LAYOUT and all(map(own.serves, WIDTHS))):
            raise OSError(f"_{target}.so is of another version of this package")
        for name in ("step", "pack", "clusters", "scratch_bytes", "attend_bytes"):
            getattr(self._functions, name).restype = ctypes.c_int64
        self._scratch = threading.local()

    def __deepcopy__(self, memo: dict[int, object]) -> Library:
        return self  # functions and scratch memory, which copies of a cache share

    def __reduce__(self) -> NoReturn:
        raise ValueError("a PackedCache cannot be pickled: write it by `save`, and read it by `load`")

    def best_target(self) -> str:
        """Returns the best target for this CPU."""
        return TARGETS[self._functions.target()]

    def step(self, layer: Layer, bits: int) -> None:
        """Runs `step` of kernels.cpp, with scratch memory of this thread."""
        layer.scratch = self._room(self._functions.scratch_bytes(ctypes.byref(layer)))
        self._functions.step(ctypes.byref(layer), bits)

    def attend(self, layer: Layer, bits: int) -> None:
        """Runs `attend` of kernels.cpp, with scratch memory of this thread."""
        layer.scratch = self._room(self._functions.attend_bytes(ctypes.byref(layer)))
        self._functions.attend(ctypes.byref(layer), bits)

    def _room(self, need: int) -> int:
        """Returns the address of `need` bytes of scratch memory."""
        scratch = getattr(self._scratch, "bytes", None)
        if scratch is None or len(scratch) < need:
            scratch = self._scratch.bytes = torch.empty(need + need // 4, dtype=torch.uint8, device="cpu")
        return scratch.data_ptr()

    def call(self, name: str, *arguments: int | Tensor | None) -> None:
        """Runs `pack` or `clusters` of kernels.cpp."""
        getattr(self._functions, name)(*map(_passed, arguments))


def _passed(argument: int | Tensor | None) -> object:
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return ctypes.c_void_p() if argument is None else ctypes.c_int64(argument)


@functools.cache
def load() -> Library | None:
    """Returns the library for this CPU, or the one that `RESIDUAL_MASS_KERNELS` names.

    Returns None if the variable is "off" or, after a warning, if no library was built.

    Raises:
        ValueError: the variable has an unknown value, or names instructions that this CPU lacks.
    """
    wanted = os.environ.get(SWITCH, "")
    if wanted == "off":
        return None
    if wanted and wanted not in TARGETS:
        raise ValueError(f"{SWITCH} is {wanted!r}, not one of {', '.join(TARGETS)}, off")
    try:
        best = TARGETS.index(Library("portable").best_target())
    except OSError as error:
        warnings.warn(
            f"residual_mass.kernels: torch does the work of the CPU kernels, which are not built here ({error}); to "
            "build them, install a C++ compiler and then this package again",
            stacklevel=2,
        )
        return None
    if wanted and TARGETS.index(wanted) > best:
        raise ValueError(f"{SWITCH} is {wanted}, but this CPU has no instructions beyond {TARGETS[best]}")
    for target in [wanted] if wanted else TARGETS[best:0:-1]:
        with contextlib.suppress(OSError):
            return Library(target)
    return Library("portable")
