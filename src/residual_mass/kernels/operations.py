"""Operations that torch's dispatcher calls in the kernels themselves, without Python: products of packed weights.

A compiled step calls them 120 times, and through Python a call takes as long as a small product. They are registered by
functions in C that libtorch has for this and keeps, so that a build of the kernels needs nothing of torch.
"""

from __future__ import annotations

import ctypes
import functools
import threading

import torch
from torch import Tensor

from residual_mass.kernels.library import Library, load

NAMESPACE = "residual_mass"
FILE = __file__.encode()
"""Where torch says that operations are from; it keeps the address."""
MOST = 4
"""Weights of one operation, as `MOST` of kernels.cpp."""
WEIGHT = ", Tensor words0, Tensor scales0, Tensor exponents0, int rows0, int group0, int middle0"
"""Its arguments."""
FUNCTIONS = (
    "aoti_torch_get_data_ptr", "aoti_torch_get_dim", "aoti_torch_get_sizes", "aoti_torch_get_dtype",
    "aoti_torch_is_contiguous", "aoti_torch_empty_strided", "aoti_torch_delete_tensor_object",
)  # fmt: skip
"""In the order of `Torch` in torch.hpp."""


_registering = threading.Lock()


def product_operations() -> tuple[torch._ops.OpOverload, ...]:
    """Returns operations for 1 to `MOST` weights; none without kernels.

    One takes contiguous activations [.., K] in float32 or bfloat16, the number of threads, and the fields of `Weights`,
    those of one weight after the other. It returns the products side by side, [.., the sum of N].

    Raises:
        AttributeError: this torch has no such functions.
    """
    with _registering:
        return _registered()


@functools.cache
def _registered() -> tuple[torch._ops.OpOverload, ...]:
    library = load()
    if library is None:
        return ()
    torch_itself = ctypes.CDLL(torch._C.__file__)  # names are looked up in the libraries that it needs, too
    _connect(library, torch_itself)
    names = []
    weights = ""
    for count in range(1, MOST + 1):
        name = f"products_{count}"
        qualified = f"{NAMESPACE}::{name}"
        weights += WEIGHT.replace("0", str(count))
        torch.library.define(qualified, f"(Tensor x, int threads{weights}) -> Tensor")
        torch.library.register_fake(qualified)(_like_products)
        names.append(name)
    _implement(torch_itself, names, library.multiply_operation)
    defined = getattr(torch.ops, NAMESPACE)
    return tuple(getattr(defined, name).default for name in names)


def _connect(library: Library, torch_itself: ctypes.CDLL) -> None:
    """Gives a library the functions of torch and the numbers of its dtypes."""
    numbers = []
    for name in FUNCTIONS:
        function = getattr(torch_itself, name)
        address = ctypes.cast(function, ctypes.c_void_p)
        numbers.append(address.value)
    numbers.append(torch_itself.aoti_torch_dtype_float32())
    numbers.append(torch_itself.aoti_torch_dtype_bfloat16())
    array = ctypes.c_int64 * len(numbers)
    library.connect(array(*numbers))


def _implement(torch_itself: ctypes.CDLL, names: list[str], function: ctypes.c_void_p) -> None:
    """Makes a function of the kernels the implementation of operations on CPUs."""
    place = ctypes.c_void_p()
    line = ctypes.c_uint32(0)
    failed = torch_itself.aoti_torch_library_init_impl(NAMESPACE.encode(), b"CPU", FILE, line, ctypes.byref(place))
    for name in names:
        failed = failed or torch_itself.aoti_torch_library_impl(place, name.encode(), function)
    if failed:
        raise RuntimeError("torch does not register the operations of the kernels")


def _like_products(x: Tensor, threads: int, *weights: Tensor | int) -> Tensor:  # noqa: ARG001
    return x.new_empty(*x.shape[:-1], sum(weights[3::6]))
