"""Packed cache of one layer for the compiled kernels, with a decode step and full attention of several tokens.

Shape letters: B = batch rows, H = KV heads, G = query heads of a KV head, L = prefix columns, T = new tokens, D = head
dimension, S = clusters of a prompt.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from residual_mass.kernels.layout import BLOCK, bytes_read
from residual_mass.kernels.library import WIDTHS, Buffers, Library, Views, views

Method = TypeVar("Method", bound=Callable[..., Any])

ROUNDS = 6
"""Rounds of Lloyd's algorithm."""
SAMPLE = 2048
"""Tokens that Lloyd's algorithm runs on."""
LOG2_E = 1.4426950408889634
DTYPES = (torch.float32, torch.bfloat16)
"""Of keys, values and queries that the kernels read."""
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
        self._buffers: Buffers | None = None
        self._rule: Callable[[int], int] | None = None
        """What sets `k`."""
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
        """Returns the bytes that a step with `group` query heads per KV head reads, as `bytes_read` counts them."""
        in_blocks = self.slots - self.gap.diff().squeeze(1)
        chosen = group * torch.minimum(self.k, in_blocks)
        blocks = -(-self.slots // BLOCK)
        clusters = self.segments if self.residual else 0
        total = 0
        for ends, used, rows in torch.stack((self.recents, blocks, chosen), 1).tolist():
            total += bytes_read(self.bits, self.width, ends=ends, blocks=used, rows=rows, clusters=clusters)
        return self.heads * total

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
        if k is not self._rule:  # seldom, and a step of every layer asks
            self._rule = k
            self._set_k()

    def _set_k(self) -> None:
        if self._rule is not None:
            self.k.copy_(_integers([self._rule(count) for count in self.counted.tolist()]))

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
        cache._buffers = None
        cache._rule = None
        _check_buffers(tensors, cache._shapes())
        vars(cache).update({name: x.clone() for name, x in tensors.items()})
        cache._check_places()
        return cache

    @outside_autograd
    def __deepcopy__(self, memo: dict[int, Any]) -> LayerCache:
        return self.restored(self.library, *self.state())

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
    def drop(self, count: int) -> None:
        """Removes the last tokens of every row. All tokens that were added after a `reserve` for them can be removed.

        Raises:
            ValueError: `count` is larger than the number of float32 tokens after the sinks.
        """
        most = int((self.recents - self.sink * (self.slots > 0)).min())
        if count > most:
            raise ValueError(f"only the last {most} tokens of a packed cache can be removed, not {count}")
        self.recents -= count

    def step(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        threads: int | None = None,
        log_mass: Tensor | None = None,
    ) -> Tensor:
        """Adds one token per row, in float32 until more tokens are added, and computes the attention of its query.

        Args:
            query: [B, H G, 1, D].
            key, value: [B, H, 1, D].
            scale: of scores.
            threads: number of threads, torch's if None. The results do not depend on it.
            log_mass: [B, 1, H G] float32, to which the logarithm of the sum of all softmax terms is written, to merge
                outputs with those over other tokens.

        Returns:
            Outputs [B, 1, H G, D] in the dtype of the query.
        """
        return self._attend(False, query, key, value, scale, threads, log_mass)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        threads: int | None = None,
        log_mass: Tensor | None = None,
    ) -> Tensor:
        """Adds up to a block of tokens per row, as `step`, and computes their full attention: each reads all tokens up
        to itself, with both planes. A block of tokens is read once for all queries.

        Args:
            query: [B, H G, T, D], in the order of the tokens.
            key, value: [B, H, T, D].
            scale, threads: as for `step`.
            log_mass: [B, T, H G], as for `step`.

        Returns:
            Outputs [B, T, H G, D] in the dtype of the query.

        Raises:
            ValueError: more tokens than a block has.
        """
        return self._attend(True, query, key, value, scale, threads, log_mass)

    @outside_autograd
    def read(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        threads: int | None = None,
        log_mass: Tensor | None = None,
    ) -> Tensor:
        """Adds the tokens of a further turn, any number, and computes their full attention. Those that join the blocks
        are clustered together at the end. Arguments and results are those of `attend`.
        """
        before, counts, slots = self.recent.clone(), self.recents.tolist(), self.slots.tolist()
        outputs = []
        for start in range(0, key.shape[2], BLOCK):
            piece = slice(start, start + BLOCK)
            new = [x[:, :, piece] for x in (query, key, value)]
            self._make_room(new[0].shape[2], clustered=False)
            outputs.append(self.attend(*new, scale, threads, None if log_mass is None else log_mass[:, piece]))
        for row, (count, old) in enumerate(zip(counts, slots, strict=True)):
            place = -(-old // BLOCK) * BLOCK
            joined = slice(self.sink, self.sink + int(self.slots[row]) - place)
            if self.bits == 4 and int(self.slots[row]) > old:
                both = (torch.cat((before[row, :, :count, i], x[row].float()), 1) for i, x in enumerate((key, value)))
                self._write(row, place, *(x[:, joined] for x in both))
        self.counted.copy_(_integers(self.tokens))
        self._set_k()
        return torch.cat(outputs, 1)

    def _attend(
        self,
        full: bool,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        threads: int | None,
        log_mass: Tensor | None,
    ) -> Tensor:
        dtype = query.dtype
        if dtype not in DTYPES or key.dtype != dtype or value.dtype != dtype:
            wide = (x.float() for x in (query, key, value))
            return self._attend(full, *wide, scale, threads, log_mass).to(dtype)
        batch, heads, count, width = query.shape
        output = torch.empty((batch, count, heads, width), dtype=dtype, device="cpu")
        tensors = [query, key, value, output]
        if log_mass is not None:
            tensors.append(log_mass.unsqueeze(-1))
        threads = torch.get_num_threads() if threads is None else threads
        while not self.library.attend(self._addresses(), full, self.residual, threads, scale * LOG2_E, *tensors):
            self.reserve(count)
        return output

    def _addresses(self) -> Buffers:
        """Returns the sizes and addresses of the buffers."""
        if self._buffers is None:
            self._buffers = Buffers()
            for name, _ in Buffers._fields_:
                own = getattr(self, name, 0)
                setattr(self._buffers, name, own.data_ptr() if isinstance(own, Tensor) else own)
        return self._buffers

    def _shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Returns the shape and the dtype of every buffer; comments on `Buffers` in common.hpp say what they hold."""
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
        self._buffers = None

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
        if keys.dtype not in DTYPES or values.dtype != keys.dtype:
            keys, values = keys.float(), values.float()
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
        new = functools.partial(torch.empty, dtype=torch.float32, device="cpu")
        order, bounds = (new(heads, *shape, dtype=torch.int32) for shape in ((count,), (parts, 2)))
        moments = [new(heads, *shape) for shape in ((parts, width), (width, width), (width,))]
        work = new(heads, -(-parts // 64) * 64 * (2 * width + 1) + count)
        self.library.call(
            "clusters", width, torch.get_num_threads(), heads, count, parts, SAMPLE, ROUNDS,
            *_source(keys, values), order, bounds, *moments, work, work.shape[1],
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
            "pack", width, self.bits, torch.get_num_threads(), heads, count, self.blocks,
            *_source(keys, values), order, at("keys"), at("scales"), at(rows), at("value_scales"),
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
        self._set_k()


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


def _source(keys: Tensor, values: Tensor) -> tuple[Views, int]:
    """Returns what the kernels take of keys and values [H, n, D], one of `DTYPES` both."""
    return views(keys.unsqueeze(0), values.unsqueeze(0)), int(keys.dtype == torch.bfloat16)


def _integers(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(list(numbers), dtype=torch.int32, device="cpu")
