"""Packed cache of one layer for the compiled kernels, with a decode step and full attention of several tokens.

Shape letters: B = batch rows, H = KV heads, G = query heads of a KV head, L = prefix columns, T = new tokens, D = head
dimension, S = clusters of a prompt.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from residual_mass.kernels.library import WIDTHS, Layer, Library

Method = TypeVar("Method", bound=Callable[..., Any])

BLOCK = 64
"""Tokens of a block."""
ROUNDS = 6
"""Rounds of Lloyd's algorithm."""
SAMPLE = 2048
"""Tokens that Lloyd's algorithm runs on."""
LOG2_E = 1.4426950408889634
NUMBERS = (
    "batch",
    "heads",
    "width",
    "bits",
    "clusters",
    "sink",
    "tail",
    "room",
    "blocks",
    "segments",
    "residual",
    "summed",
)
"""Attributes of a `LayerCache` that its saved state has beside the tensors."""


def outside_autograd(method: Method) -> Method:
    """Runs a method that writes to buffers without gradients, and outside of `torch.inference_mode`, of which tensors
    cannot be written to later.
    """

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode(False), torch.no_grad():
            return method(*args, **kwargs)

    return run  # type: ignore[return-value]


class LayerCache:
    """Keys and values of one layer, in blocks of one of three formats, and the first and last tokens in float32.

    With `bits` = 4, keys have 8 bits in two planes of 4, with a scale for each channel of a block; values have 8 bits
    with a scale for each token; tokens are sorted by cluster. A step scans the high plane, reads the K best tokens of
    each query head from both planes, and estimates the others by regression on their scanned scores, as
    `ScanRegression` does. With 8 (keys and values in the same 8 bits) and 16 (bfloat16), a step reads every token.

    The float32 tokens are the first `sink` and the last `tail` of each row, and all added tokens. When their buffer is
    full, the oldest `BLOCK` of them after the sinks become a new block. Tokens that join the blocks get clusters of
    their own: of S, as large a share as the new tokens are of all tokens in the blocks then, rounded up.
    """

    @outside_autograd
    def __init__(
        self,
        library: Library,
        keys: Tensor,
        values: Tensor,
        first: Sequence[int],
        *,
        bits: int = 4,
        k: Sequence[int] | None = None,
        sink: int = 4,
        tail: int = 16,
        room: int = BLOCK,
        clusters: int = 64,
        residual: bool = True,
    ) -> None:
        """Packs a prompt.

        Args:
            keys, values: [B, H, L, D], left-padded.
            first: [B] first column of each row after the padding.
            bits: format of the blocks, 4 (planes), 8 or 16.
            k: [B] tokens that a query head reads exactly, in addition to those in float32, until `choose` sets them;
                unused if all are read.
            sink, tail: tokens at both ends that are kept in float32.
            room: added tokens that stay in float32.
            clusters: S.
            residual: whether to estimate the tokens that are not read.

        Raises:
            ValueError: the head dimension, the bits, the clusters or the room are not supported.
        """
        batch, heads, length, width = keys.shape
        if width not in WIDTHS:
            raise ValueError(f"the kernels support head dimensions of {', '.join(map(str, WIDTHS))}, not {width}")
        if bits not in (4, 8, 16):
            raise ValueError(f"bits is {bits}, not 4, 8 or 16")
        if clusters < 1:
            raise ValueError(f"clusters is {clusters}, not 1 or more")
        if room < BLOCK:
            raise ValueError(f"room is {room}, not a block of {BLOCK} tokens or more")
        self.library, self.bits, self.sink, self.tail, self.width = library, bits, sink, tail, width
        self.batch, self.heads, self.clusters = batch, heads, clusters
        tokens = [length - start for start in first]
        middle = [max(0, count - sink - tail) for count in tokens]
        self.blocks = max(-(-max(middle, default=0) // BLOCK), 1)
        self.segments = clusters if bits == 4 else 0
        self.room = sink + tail + room
        self.residual = residual and bits == 4
        self.summed = False
        """Whether `covariance` is kept. Until tokens join those of the prompt, `slope` is all there is."""
        self._layer: Layer | None = None
        self._chosen: tuple[Callable[[int], int], list[int]] | None = None
        """What `k` was set by."""
        self._resize()
        self.k.copy_(_integers([0] * batch if k is None else k))
        self.counted.copy_(_integers(tokens))
        self.slots.copy_(_integers(middle))
        self.recents.copy_(self.counted - self.slots)
        for row, start in enumerate(first):
            inner = slice(start + sink, start + sink + middle[row])
            columns = torch.arange(start, length, device="cpu")
            ends = columns[(columns < inner.start) | (columns >= inner.stop)]
            self.recent[row, :, : len(ends)] = torch.stack((keys[row][:, ends], values[row][:, ends]), 2)
            if middle[row]:
                self._write(row, 0, keys[row, :, inner], values[row, :, inner])

    @property
    def bytes(self) -> int:
        """Bytes of the cache in memory."""
        return sum(x.numel() * x.element_size() for x in vars(self).values() if isinstance(x, Tensor))

    def read_bytes(self, group: int) -> int:
        """Returns the bytes that a step with `group` query heads per KV head reads: tokens in float32; whole blocks or,
        with planes, the scan, the rows that each query head chooses, and the summary that estimates the others.
        """
        in_blocks = self.slots - self.gap.diff().squeeze(1)
        blocks = int((-(-self.slots // BLOCK)).sum())
        buffers = [getattr(self, name, None) for name in ("keys", "scales", "values", "value_scales")]
        block_bytes = sum(x.nbytes for x in buffers if x is not None) // (self.batch * self.heads * self.blocks)
        total = self.heads * (blocks * block_bytes + int(self.recents.sum()) * 8 * self.width)
        if self.bits == 4:
            chosen = int(torch.minimum(self.k, in_blocks).sum())
            total += self.heads * group * chosen * self.rows.shape[-1]
        if self.residual:
            total += sum(x.nbytes for x in (self.bounds, self.mean_values, self.slope, self.deviations))
        return total

    @property
    def tokens(self) -> list[int]:
        """Number of tokens in each row."""
        return (self.slots - self.gap.diff().squeeze(1) + self.recents).tolist()

    def choose(self, k: Callable[[int], int], residual: bool) -> None:
        """Sets how many tokens a query head reads exactly from planes, and whether to estimate the others.

        Args:
            k: returns that number for a row of so many tokens. The row's tokens are counted after a prompt, after a
                further turn (`read`), and whenever tokens join the blocks; between these, added tokens are in float32.
        """
        self.residual = residual and self.bits == 4
        chosen = k, self.counted.tolist()
        if chosen != self._chosen:  # seldom, and a step of every layer asks
            self.k.copy_(_integers([k(count) for count in chosen[1]]))
            self._chosen = chosen

    def state(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """Returns the tensors and the numbers that `restored` takes."""
        return {name: getattr(self, name) for name in self._shapes()}, {
            name: int(getattr(self, name)) for name in NUMBERS
        }

    @classmethod
    @outside_autograd
    def restored(cls, library: Library, tensors: Mapping[str, Tensor], numbers: Mapping[str, int]) -> LayerCache:
        """Restores a cache from the output of `state`, with buffers of its own.

        Raises:
            ValueError: they are not what `state` returns; says which tensor or number is at fault, and how.
        """
        _check_numbers(numbers)
        cache = cls.__new__(cls)
        vars(cache).update(numbers, residual=bool(numbers["residual"]), summed=bool(numbers["summed"]))
        cache.library = library
        cache._layer = None
        cache._chosen = None
        _check_buffers(tensors, cache._shapes())
        vars(cache).update({name: x.clone() for name, x in tensors.items()})
        cache._check_places()
        return cache

    @outside_autograd
    def __deepcopy__(self, memo: dict[int, Any]) -> LayerCache:
        return self.restored(self.library, *self.state())

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Adds one token per row: keys and values [B, H, D]."""
        self.extend(keys.unsqueeze(2), values.unsqueeze(2))

    @outside_autograd
    def extend(self, keys: Tensor, values: Tensor) -> None:
        """Adds up to a block of tokens per row: keys and values [B, H, T, D], in float32 until more tokens are added.

        Raises:
            ValueError: more tokens than a block has.
        """
        self.reserve(keys.shape[2])
        self._store(keys, values)

    @outside_autograd
    def reserve(self, count: int) -> None:
        """Makes room for up to a block of tokens per row, so that adding them moves no tokens to the blocks.

        Raises:
            ValueError: more tokens than a block has.
        """
        if count > BLOCK:
            raise ValueError(f"{count} tokens at once, more than a block of {BLOCK}")
        self._make_room(count)

    @outside_autograd
    def read(
        self, query: Tensor, keys: Tensor, values: Tensor, scale: float, threads: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Adds the tokens of a further turn, any number, and computes their full attention as `attend` does.

        Those that join the blocks are clustered together at the end.

        Args:
            query: [B, H G, T, D].
            keys, values: [B, H, T, D].
            scale, threads: as for `step`.

        Returns:
            Outputs and logarithms, as `attend`.
        """
        before, counts, slots = self.recent.clone(), self.recents.tolist(), self.slots.tolist()
        parts = []
        for piece in zip(*(x.split(BLOCK, 2) for x in (query, keys, values)), strict=True):
            self._make_room(piece[1].shape[2], clustered=False)
            self._store(*piece[1:])
            parts.append(self.attend(piece[0], scale, threads))
        for row, (count, old) in enumerate(zip(counts, slots, strict=True)):
            place = -(-old // BLOCK) * BLOCK
            joined = slice(self.sink, self.sink + int(self.slots[row]) - place)
            if self.bits == 4 and int(self.slots[row]) > old:
                both = (torch.cat((before[row, :, :count, i], x[row].float()), 1) for i, x in enumerate((keys, values)))
                self._write(row, place, *(x[:, joined] for x in both))
        self.counted.copy_(_integers(self.tokens))
        outputs, log_masses = zip(*parts, strict=True)
        return torch.cat(outputs, 2), torch.cat(log_masses, 2)

    @outside_autograd
    def drop(self, count: int) -> None:
        """Removes the last tokens of every row. All tokens that were added after a `reserve` for them can be removed.

        Raises:
            ValueError: `count` is larger than the number of float32 tokens after the sinks.
        """
        most = int((self.recents - self.sink * (self.slots > 0)).min())
        if count > most:
            raise ValueError(f"only the last {most} tokens of a packed cache can be removed, not {count}")
        self.recents -= count

    def step(self, query: Tensor, scale: float, threads: int | None = None) -> tuple[Tensor, Tensor]:
        """Computes the attention of one query per row and query head.

        Args:
            query: [B, H G, D].
            scale: of scores.
            threads: number of threads, torch's if None. The results do not depend on it.

        Returns:
            Outputs [B, H G, D] float32, and the logarithm of the sum of all softmax terms [B, H G] float32, to merge
            them with outputs over other tokens.
        """
        output, log_mass = self._run(self.library.step, query.unsqueeze(2), scale, threads)
        return output.squeeze(2), log_mass.squeeze(2)

    def attend(self, query: Tensor, scale: float, threads: int | None = None) -> tuple[Tensor, Tensor]:
        """Computes full attention of the last T tokens: each reads all tokens up to itself, with both planes. A block
        of tokens is read once for all queries.

        Args:
            query: [B, H G, T, D], in the order of the tokens.
            scale, threads: as for `step`.

        Returns:
            Outputs [B, H G, T, D] and logarithms [B, H G, T], as `step`.
        """
        return self._run(self.library.attend, query, scale, threads)

    def _run(
        self, run: Callable[[Layer, int], None], query: Tensor, scale: float, threads: int | None
    ) -> tuple[Tensor, Tensor]:
        query = (query.float() * (scale * LOG2_E)).contiguous()
        output, log_mass = torch.empty_like(query), query.new_empty(query.shape[:3])
        if self._layer is None:
            self._layer = self._structure()
        layer = self._layer
        layer.queries, layer.group = query.shape[2], query.shape[1] // self.heads * query.shape[2]
        layer.threads = torch.get_num_threads() if threads is None else threads
        layer.residual = self.residual
        layer.query, layer.output, layer.log_mass = query.data_ptr(), output.data_ptr(), log_mass.data_ptr()
        run(layer, self.bits)
        return output, log_mass

    def _structure(self) -> Layer:
        """Returns the sizes and addresses of the buffers."""
        layer = Layer(
            batch=self.batch, heads=self.heads, width=self.width, blocks=self.blocks, room=self.room,
            segments=self.segments,
        )  # fmt: skip
        for name, _ in Layer._fields_:
            if isinstance(buffer := getattr(self, name, None), Tensor):
                setattr(layer, name, ctypes.c_void_p(buffer.data_ptr()))
        return layer

    def _shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Returns the shape and the dtype of every buffer; comments on `Layer` in common.hpp say what they hold."""
        rows, heads, width, blocks = (self.batch,), (self.batch, self.heads), self.width, self.blocks
        block_bytes = BLOCK * width * self.bits // 8
        shapes = {name: (rows, torch.int32) for name in ("slots", "k", "recents", "used", "counted")}
        shapes["gap"] = ((*rows, 2), torch.int32)
        shapes["recent"] = ((*heads, self.room, 2, width), torch.float32)
        shapes["keys"] = ((*heads, blocks, block_bytes), torch.uint8)
        shapes["bounds"] = ((*heads, self.segments, 2), torch.int32)
        shapes["mean_values"] = ((*heads, self.segments, width), torch.bfloat16)
        if self.bits < 16:
            shapes["scales"] = ((*heads, blocks, 2, width), torch.bfloat16)
        if self.bits == 4:
            shapes["rows"] = ((*heads, blocks, BLOCK, 3 * width // 2 + 2), torch.uint8)
            shapes["slope"] = ((*heads, width, width), torch.bfloat16)
            shapes["deviations"] = ((*heads, width), torch.float32)
        else:
            shapes["values"] = ((*heads, blocks, block_bytes), torch.uint8)
        if self.bits == 8:
            shapes["value_scales"] = ((*heads, blocks * BLOCK), torch.float32)
        if self.summed:
            shapes["covariance"] = ((*heads, width, width), torch.float32)
        return shapes

    def _resize(self) -> None:
        """Gives every buffer its shape; what is new is zero."""
        for name, (shape, dtype) in self._shapes().items():
            old = getattr(self, name, None)
            if old is None or old.shape != shape:
                new = torch.zeros(shape, dtype=dtype, device="cpu")
                if old is not None:
                    new[:, :, : old.shape[2]] = old
                setattr(self, name, new)
        self._layer = None

    def _check_places(self) -> None:
        """Raises ValueError naming a buffer with places outside of other buffers."""
        slots, recents, (start, end) = self.slots.long(), self.recents.long(), self.gap.long().unbind(1)
        in_blocks = slots - (end - start)
        first, last = self.bounds.long().unbind(-1)
        right = {
            "slots": (slots >= 0) & (slots <= BLOCK * self.blocks),
            "gap": (start >= 0) & (start <= end) & (end <= slots),
            "recents": (recents >= self.sink * (in_blocks > 0)) & (recents <= self.room),
            "k": self.k >= 0,
            "counted": self.counted >= 0,
            "used": (self.used >= 0) & (self.used <= self.segments),
            "bounds": (first >= 0) & (first <= last) & (last <= slots[:, None, None]),
        }
        if self.bits == 4:
            right["sum of bounds"] = (last - first).sum(-1) == in_blocks[:, None]
        for name, each in right.items():
            if not bool(each.all()):
                raise ValueError(f"{name} has numbers out of range")

    def _store(self, keys: Tensor, values: Tensor) -> None:
        """Adds tokens, keys and values [B, H, T, D], for which there is room."""
        count = keys.shape[2]
        rows = torch.arange(self.batch, device="cpu")[:, None]
        at = self.recents[:, None] + torch.arange(count, device="cpu")
        self.recent[rows, :, at, 0] = keys.transpose(1, 2).float()
        self.recent[rows, :, at, 1] = values.transpose(1, 2).float()
        self.recents += count

    def _make_room(self, count: int, clustered: bool = True) -> None:
        """Makes room for `count` tokens per row in float32; those that join the blocks are clustered, or not yet."""
        if int(self.recents.max()) + count <= self.room:
            return
        self._merge(count, clustered)
        if (short := int(self.recents.max()) + count - self.room) > 0:  # no row has a whole block
            self.room += short
            self._resize()

    def _write(self, row: int, place: int, keys: Tensor, values: Tensor, clustered: bool = True) -> None:
        """Writes tokens [H, n, D] to a row's blocks, from a place that starts a block on; with planes, in clusters."""
        keys, values = keys.float().contiguous(), values.float().contiguous()
        if (more := -(-(place + keys.shape[1]) // BLOCK) - self.blocks) > 0:
            self.blocks += max(more, 4, self.blocks // 8)
            self._resize()
        order = self._add_clusters(row, place, keys, values) if clustered and self.bits == 4 else None
        self._pack(row, place // BLOCK, keys, values, order)

    def _add_clusters(self, row: int, place: int, keys: Tensor, values: Tensor) -> Tensor:
        """Clusters tokens [H, n, D] that are to be in the blocks from a place on; returns their order [H, n]."""
        count, before = keys.shape[1], place - int(self.gap[row].diff())
        share = count / (before + count)
        parts = -(-self.clusters * count // (before + count))
        first = int(self.used[row])
        if first + parts > self.segments:
            self.segments = first + parts + max(4, self.segments // 8)
            self._resize()
        order, bounds, means, covariance, variance = self._summarised(keys, values, parts)
        self.bounds[row, :, first : first + parts] = bounds + place
        self.mean_values[row, :, first : first + parts] = means
        self.used[row] = first + parts
        self.deviations[row] = torch.lerp(self.deviations[row].square(), variance, share).sqrt()
        self._add_covariance(row, covariance, share)
        return order

    def _add_covariance(self, row: int, covariance: Tensor, share: float) -> None:
        """Adds the covariance [H, D, D] of tokens that are this share of all in the blocks.

        It is summed in float32: in bfloat16 a small share would be lost.
        """
        if share < 1 and not self.summed:
            self.summed = True
            self.covariance = self.slope.float()
        if share < 1:
            self.covariance[row] = torch.lerp(self.covariance[row], covariance, share)
            self.slope[row] = self.covariance[row]
            return
        self.slope[row] = covariance
        if self.summed:
            self.covariance[row] = self.slope[row]  # as if the row were alone

    def _summarised(self, keys: Tensor, values: Tensor, parts: int) -> tuple[Tensor, ...]:
        """Returns order [H, n] and bounds [H, S, 2] int32 of clusters, mean values [H, S, D], and C' [H, D, D] and
        variance of values [H, D] within clusters, float32.
        """
        heads, count, width = keys.shape
        order, bounds = (keys.new_empty(*shape, dtype=torch.int32) for shape in ((heads, count), (heads, parts, 2)))
        moments = [keys.new_empty(heads, *shape) for shape in ((parts, width), (width, width), (width,))]
        work = keys.new_empty(heads, -(-parts // 64) * 64 * (2 * width + 1) + count)
        self.library.call(
            "clusters", width, torch.get_num_threads(), heads, count, parts, SAMPLE, ROUNDS,
            keys, values, order, bounds, *moments, work, work.shape[1],
        )  # fmt: skip
        return order, bounds, *moments

    def _pack(self, row: int, block: int, keys: Tensor, values: Tensor, order: Tensor | None) -> None:
        """Writes tokens [H, n, D] to a row's blocks, from `block` on."""
        heads, count, width = keys.shape

        def at(name: str) -> Tensor | None:
            buffer = getattr(self, name, None)
            return None if buffer is None else buffer[row, :, block * BLOCK if name == "value_scales" else block :]

        rows = "rows" if self.bits == 4 else "values"
        self.library.call(
            "pack", width, self.bits, torch.get_num_threads(), heads, count, count, self.blocks,
            keys, values, order, at("keys"), at("scales"), at(rows), at("value_scales"),
        )  # fmt: skip

    def _merge(self, count: int, clustered: bool) -> None:
        """Makes a block of the oldest float32 tokens after the sinks, in every row without room for `count` more."""
        full = (self.recents + count > self.room) & (self.recents >= self.sink + BLOCK)
        for row in full.nonzero().flatten().tolist():
            old = int(self.slots[row])
            place = -(-old // BLOCK) * BLOCK
            if place > old:
                self.gap[row, 0] = old
                self.gap[row, 1] = place
            self.slots[row] = place + BLOCK
            oldest = self.recent[row, :, self.sink : self.sink + BLOCK]
            self._write(row, place, oldest[:, :, 0], oldest[:, :, 1], clustered)
            self.recent[row, :, self.sink : -BLOCK] = self.recent[row, :, self.sink + BLOCK :].clone()
            self.recents[row] -= BLOCK
            self.counted[row] = self.tokens[row]


def _check_numbers(numbers: Mapping[str, int]) -> None:
    """Raises ValueError unless these can be the numbers of a `LayerCache`."""
    if set(numbers) != set(NUMBERS):
        raise ValueError(f"its numbers are {', '.join(numbers)}, not {', '.join(NUMBERS)}")
    for name, number in numbers.items():
        least = 1 if name in ("batch", "heads", "clusters", "blocks") else 0
        if type(number) is not int or number < least:
            raise ValueError(f"{name} is {number!r}, not a number from {least} on")
    allowed = {"bits": (4, 8, 16), "width": WIDTHS, "residual": (0, 1), "summed": (0, 1)}
    for name, choices in allowed.items():
        if numbers[name] not in choices:
            raise ValueError(f"{name} is {numbers[name]}, not one of {', '.join(map(str, choices))}")
    if numbers["room"] < numbers["sink"] + numbers["tail"] + BLOCK:
        raise ValueError(f"room is {numbers['room']}, below {BLOCK} tokens and those at the ends")


def _check_buffers(tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
    """Raises ValueError unless the tensors have these names, shapes and dtypes, and finite numbers."""
    for name in sorted({*tensors, *shapes}):
        if name not in shapes or name not in tensors:
            raise ValueError(f"{name} is {'missing' if name in shapes else 'unknown'}")
        tensor, (shape, dtype) = tensors[name], shapes[name]
        if (tensor.shape, tensor.dtype) != (shape, dtype):
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}, not {dtype} {list(shape)}")
        if dtype.is_floating_point and not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} has numbers that are not finite")


def _integers(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(list(numbers), dtype=torch.int32, device="cpu")
