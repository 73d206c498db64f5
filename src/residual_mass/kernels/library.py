"""Loads the compiled kernels that this CPU has instructions for.

`RESIDUAL_MASS_KERNELS` names others: avx512, avx2, portable, or off for none. `RESIDUAL_MASS_CPU=plain` makes portable
the best.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import warnings
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch  # first: the kernels take the OpenMP runtime that it has loaded
from torch import Tensor

from residual_mass.kernels.cpu import is_plain

FOLDER = Path(__file__).parent
SWITCH = "RESIDUAL_MASS_KERNELS"
TARGETS = ("portable", "avx2", "avx512")
"""Instruction sets in ascending order; `target` of a library returns the index of the best for this CPU."""
INTERFACE = 7
"""Result of `interface` of a library that was built from these sources."""
LAYOUT = 4
"""Number of the layout of buffers and of what is told of them, which saved states of packed caches have."""
WIDTHS = (32, 64, 80, 96, 112, 128, 192, 256)
"""Supported head dimensions."""
SIZE_FIELDS = ("batch", "heads", "width", "bits", "blocks", "room", "segments")
ADDRESS_FIELDS = (
    "slots", "gap", "k", "recents", "keys", "scales", "rows", "values", "value_scales", "bounds", "mean_values",
    "slope", "deviations", "recent",
)  # fmt: skip


class Weights(NamedTuple):
    """A weight [N, K] in codes: integers, which `model.to(dtype)` leaves as they are.

    Shape letters: G = groups of columns; B = blocks of 16 rows, C = spans of 32 columns, both rounded up.

    Attributes:
        words: [B, C, bits, 16] int32, codes as products.hpp has them.
        scales: [B, G, 1 or 2, 16] int16, the bits of scales in half precision, and of minimums where there are.
        exponents: [16 B] int32, of the powers of 2 by which they are multiplied.
        rows: N.
        group: columns of a group: a power of 2, from 16 on.
        middle: the code of 0 where there are no minimums; else 0.
    """

    words: Tensor
    scales: Tensor
    exponents: Tensor
    rows: int
    group: int
    middle: int


class Buffers(ctypes.Structure):
    """Sizes and addresses of a layer's cache, the same as `Buffers` in common.hpp."""

    _fields_ = [(name, ctypes.c_int32) for name in SIZE_FIELDS] + [(name, ctypes.c_void_p) for name in ADDRESS_FIELDS]


Views = ctypes.c_int64 * 25
"""Address and strides of up to five tensors of four dimensions; an address is 0 where there is none."""


class Library:
    """Functions of one library, with tensors as pointers. Raises OSError if it is missing, damaged or outdated."""

    def __init__(self, target: str) -> None:
        self.target = target
        file = FOLDER / f"_{target}.so"
        own = ctypes.CDLL(str(file))
        self._functions = own
        current = hasattr(own, "interface") and own.interface() == INTERFACE
        if not (current and all(map(own.serves, WIDTHS))):
            raise OSError(f"_{target}.so is of another version of this package")
        for name in ("attend", "prompt", "pack", "clusters"):
            getattr(own, name).restype = ctypes.c_int64
        own.attend.argtypes = [ctypes.c_void_p, Views, *(6 * [ctypes.c_int]), ctypes.c_float]
        pointer, number = ctypes.c_void_p, ctypes.c_int
        weights = [*(3 * [pointer]), *(6 * [number])]
        own.multiply.restype = ctypes.c_int64
        own.multiply.argtypes = [*weights, pointer, number, number, pointer, number, number]
        own.dequantise.argtypes = [*weights, number, pointer, number]
        own.prompt.argtypes = [ctypes.c_void_p, Views, *(9 * [ctypes.c_int]), ctypes.c_float]

    def __deepcopy__(self, memo: dict[int, object]) -> Library:
        return self

    def __reduce__(self) -> NoReturn:
        raise ValueError("a PackedCache cannot be pickled: write it by `save`, and read it by `load`")

    def best_target(self) -> str:
        """Returns the best target for this CPU."""
        return TARGETS[0 if is_plain() else self._functions.target()]

    def attend(
        self, buffers: Buffers, full: bool, residual: bool, threads: int, factor: float, query: Tensor, *others: Tensor
    ) -> bool:
        """Runs `attend` of kernels.cpp with tensors in the order of its `Views`, all float32 or all bfloat16; returns
        whether there was room for the tokens.
        """
        _, heads, tokens, _ = query.shape
        tensors = views(query, *others)
        narrow = query.dtype == torch.bfloat16
        done = self._functions.attend(
            ctypes.byref(buffers), tensors, full, residual, threads, heads, tokens, narrow, factor
        )
        if done < 0:
            raise MemoryError("no memory is left for the attention of a packed cache")
        return bool(done)

    def multiply(self, weights: Weights, x: Tensor, output: Tensor, first: int = 0) -> None:
        """Writes the products [M, N] of x [M, K] with a weight to columns of `output`, from `first` on; x and output
        are contiguous, both float32 or both bfloat16. What `load` returns serves torch's dispatcher as well
        (`operations.py`), which takes less time; this serves any library.
        """
        count, columns = x.shape
        weight = self._weights(weights, columns)
        activations = x.data_ptr(), count, x.dtype == torch.bfloat16
        place = output.data_ptr() + first * output.itemsize, output.shape[1]
        done = self._functions.multiply(*weight, *activations, *place, torch.get_num_threads())
        if done < 0:
            raise MemoryError("no memory is left for a product of packed weights")

    def dequantise(self, weights: Weights, by_column: Tensor) -> None:
        """Writes a weight [K, N rounded up to a block], float32 or bfloat16."""
        weight = self._weights(weights, len(by_column))
        narrow = by_column.dtype == torch.bfloat16
        self._functions.dequantise(*weight, narrow, by_column.data_ptr(), torch.get_num_threads())

    @staticmethod
    def _weights(weights: Weights, columns: int) -> tuple[int, ...]:
        """Returns what the kernels take of a weight [N, K], in the order of `Weights` in products.hpp."""
        words, scales, exponents, rows, group, middle = weights
        addresses = words.data_ptr(), scales.data_ptr(), exponents.data_ptr()
        # The last is 1 where there are minimums.
        return *addresses, rows, columns, words.shape[2], group, middle, scales.shape[2] - 1

    @property
    def multiply_operation(self) -> ctypes.c_void_p:
        """Address of `multiply_operation` of kernels.cpp, which torch's dispatcher calls."""
        return ctypes.cast(self._functions.multiply_operation, ctypes.c_void_p)

    def connect(self, functions: ctypes.Array[ctypes.c_int64]) -> None:
        """Gives the library the functions of torch that its operations call, in the order of torch.hpp."""
        self._functions.connect(functions)

    def prompt(self, held: Buffers | None, tensors: Views, *numbers: float) -> None:
        """Runs `prompt` of kernels.cpp over the tokens of a cache, or of none, and those of the tensors."""
        if self._functions.prompt(None if held is None else ctypes.byref(held), tensors, *numbers) < 0:
            raise MemoryError("no memory is left for the attention of a prompt")

    def call(self, name: str, *arguments: int | Tensor | Views | None) -> None:
        """Runs `pack` or `clusters` of kernels.cpp."""
        getattr(self._functions, name)(*map(_passed, arguments))


def views(*tensors: Tensor) -> Views:
    """Returns the addresses and strides of tensors of four dimensions."""
    numbers: list[int] = []
    for x in tensors:
        numbers.append(x.data_ptr())
        numbers.extend(x.stride())
    return Views(*numbers)


def source_of(keys: Tensor, values: Tensor) -> tuple[Views, int]:
    """Returns what the kernels take of keys and values [H, n, D], one of `KERNEL_DTYPES` both."""
    narrow = keys.dtype == torch.bfloat16
    return views(keys.unsqueeze(0), values.unsqueeze(0)), int(narrow)


def _passed(argument: int | Tensor | Views | None) -> object:
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, Views):
        return argument
    # ctypes passes a bare integer in 32 bits.
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
    # From the best down, past those that were not built.
    for target in [wanted] if wanted else TARGETS[best:0:-1]:
        with contextlib.suppress(OSError):
            return Library(target)
    return Library("portable")
