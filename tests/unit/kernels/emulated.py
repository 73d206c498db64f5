"""Kernels compiled for another kind of CPU, run by an emulator: a `Library` that sends every call to its process.

A call takes copies of all memory that its arguments name, and brings them back.
"""

from __future__ import annotations

import ctypes
import struct
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from residual_mass.kernels import library
from residual_mass.kernels.buffers import shapes_of
from residual_mass.kernels.library import ADDRESS_FIELDS, SIZE_FIELDS, Buffers, Library, Views, Weights, views

FUNCTIONS = ("attend", "pack", "clusters", "prompt", "multiply", "dequantise")
Span = tuple[int, int]
"""Address and bytes of memory."""


def build(compiler: str, folder: Path) -> Path:
    """Compiles emulated.cpp with the kernels; raises CalledProcessError."""
    program = folder / "kernels"
    flags = "-std=c++20 -O3 -fno-math-errno -static -Wno-psabi -Wno-subobject-linkage".split()
    source = Path(__file__).with_suffix(".cpp")
    subprocess.run([compiler, *flags, f"-I{library.FOLDER}", str(source), "-o", str(program)], check=True)
    return program


class EmulatedLibrary(Library):
    """Calls are those of `Library`; one thread serves."""

    def __init__(self, command: Sequence[str]) -> None:
        self.target = "portable"
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def close(self) -> None:
        self._process.communicate()

    def best_target(self) -> str:
        return self.target

    def attend(
        self, buffers: Buffers, full: bool, residual: bool, threads: int, factor: float, query: Tensor, *others: Tensor
    ) -> bool:
        _, heads, tokens, _ = query.shape
        tensors = views(query, *others)
        of_factor = ctypes.c_float(factor)
        narrow = query.dtype == torch.bfloat16
        arguments = [buffers, tensors, full, residual, threads, heads, tokens, narrow, of_factor]
        spans = [*map(_span_of_tensor, (query, *others)), *_spans_of_buffers(buffers)]
        return bool(self._call("attend", arguments, spans))

    def prompt(self, held: Buffers | None, tensors: Views, *numbers: float) -> None:
        width, batch, heads, query_heads, count, keys = numbers[:6]
        *whole, narrow, factor = numbers
        item = 2 if narrow else 4
        new = (batch, heads, keys, width)
        shapes = ((batch, query_heads, count, width), new, new, (batch, count, query_heads, width))
        items = (item, item, item, item, 4)
        spans = []
        for place, (shape, size) in enumerate(zip((*shapes, (batch, count, query_heads, 1)), items, strict=True)):
            address, *strides = tensors[5 * place : 5 * place + 5]
            if address:
                spans.append(_span(address, shape, strides, size))
        if held is not None:
            spans += _spans_of_buffers(held)
        self._call("prompt", [held, tensors, *whole, narrow, ctypes.c_float(factor)], spans)

    def multiply(self, weights: Weights, x: Tensor, output: Tensor, first: int = 0) -> None:
        tensors = [*weights[:3], x, output]
        place = output.data_ptr() + first * output.itemsize
        numbers = (len(x), x.dtype == torch.bfloat16, place, output.shape[1], 1)
        arguments = [*self._weights(weights, x.shape[1]), x, *numbers]
        self._call("multiply", arguments, map(_span_of_tensor, tensors), addresses=(0, 1, 2, 12))

    def dequantise(self, weights: Weights, by_column: Tensor) -> None:
        arguments = [*self._weights(weights, len(by_column)), by_column.dtype == torch.bfloat16, by_column, 1]
        self._call("dequantise", arguments, map(_span_of_tensor, (*weights[:3], by_column)), addresses=(0, 1, 2))

    def call(self, name: str, *arguments: int | Tensor | Views | None) -> None:
        spans = [_span_of_tensor(x) for x in arguments if isinstance(x, Tensor)]
        units, count = arguments[3:5] if name == "pack" else arguments[2:4]
        for source, narrow in zip(arguments, arguments[1:], strict=False):
            if isinstance(source, Views):
                for at in (0, 5):
                    shape = (1, units, count, arguments[0])
                    spans.append(_span(source[at], shape, source[at + 1 : at + 5], 2 if narrow else 4))
        self._call(name, arguments, spans)

    def _call(
        self, name: str, arguments: Sequence[object], spans: Iterable[Span], addresses: Sequence[int] = ()
    ) -> int:
        """Calls a function; `addresses` are the places of numbers that are addresses, too."""
        structures = [x for x in arguments if isinstance(x, ctypes.Structure | ctypes.Array | ctypes.c_float)]
        memory = merged([*spans, *((ctypes.addressof(x), ctypes.sizeof(x)) for x in structures)])
        sent = [_numbers(FUNCTIONS.index(name), len(memory))]
        for address, size in memory:
            sent += [_numbers(address, size), ctypes.string_at(address, size)]
        places = [place for each in structures for place in _places(each)]
        sent += [_numbers(len(places), *places), _numbers(len(arguments))]
        for place, x in enumerate(arguments):
            if isinstance(x, Tensor):
                sent.append(_numbers(1, x.data_ptr()))
            elif x in structures:
                sent.append(_numbers(1, ctypes.addressof(x)))
            else:
                sent.append(_numbers(int(place in addresses), int(x or 0)))
        pipe = self._process
        pipe.stdin.write(b"".join(sent))
        pipe.stdin.flush()
        (result,) = struct.unpack("<q", pipe.stdout.read(8))
        own = {place: ctypes.string_at(place, 8) for place in places}
        for address, size in memory:
            ctypes.memmove(address, pipe.stdout.read(size), size)
        for place, address in own.items():  # they came back as those of the other process
            ctypes.memmove(place, address, 8)
        return result


def _numbers(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}q", *numbers)


def _span(address: int, shape: Sequence[int], strides: Sequence[int], item: int) -> Span:
    last = sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))
    return address, (last + 1) * item if all(shape) else 0


def _span_of_tensor(x: Tensor) -> Span:
    return _span(x.data_ptr(), x.shape, x.stride(), x.element_size())


def _spans_of_buffers(buffers: Buffers) -> Iterable[Span]:
    """Yields the memory of a cache by the shapes that its buffers must have."""
    sizes = {name: getattr(buffers, name) for name in SIZE_FIELDS}
    for name, (shape, dtype) in shapes_of(sizes | {"summed": 0}).items():
        if name in ADDRESS_FIELDS:
            bytes_of = torch.Size(shape).numel() * torch.tensor([], dtype=dtype).element_size()
            yield getattr(buffers, name) or 0, bytes_of


def _places(structure: object) -> list[int]:
    """Addresses of the addresses in a structure."""
    start = ctypes.addressof(structure)
    if isinstance(structure, Buffers):
        return [start + getattr(Buffers, name).offset for name in ADDRESS_FIELDS]
    return [start + 8 * at for at in range(0, 25, 5)] if isinstance(structure, Views) else []


def merged(spans: Iterable[Span]) -> list[Span]:
    """Spans that cover these and do not touch each other."""
    found: list[Span] = []
    for address, size in sorted(span for span in spans if span[0]):
        if found and address <= sum(found[-1]):  # also where one ends and the next begins
            start, before = found.pop()
            address, size = start, max(start + before, address + size) - start
        found.append((address, size))
    return found
