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

from residual_mass.kernels.buffers import SIZES, require_buffers, require_places, require_sizes, shapes_of
from residual_mass.kernels.clustering import clusters_of
from residual_mass.kernels.layout import BLOCK, bytes_read
from residual_mass.kernels.library import WIDTHS, Buffers, Library, source_of
from residual_mass.kernels.prompt import (
    KERNEL_DTYPES,
    LOG2_E,
    in_one_dtype,
    prompt_attention,
    reads_at_once,
    tensors_of,
)

Function = TypeVar("Function", bound=Callable[..., Any])
Integers = TypeVar("Integers", int, Tensor)


def outside_autograd(function: Function) -> Function:
    """Runs a function that writes to buffers without gradients, and outside of `torch.inference_mode`, of which tensors
    cannot be written to later.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

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

    `step`, `attend` and `read` add T tokens to every row, and return the attention of their queries, [B, T, H G, D] in
    the dtype of the queries. They take:

        query: [B, H G, T, D], in the order of the tokens.
        key, value: [B, H, T, D].
        scale: of scores.
        threads: number of threads, torch's if None. The results do not depend on it.
        log_mass: [B, T, H G] float32, to which the logarithm of the sum of all softmax terms is written, to merge
            outputs with those over other tokens.
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
        tokens = [length - start for start in first]
        middle = [max(0, count - sink - tail) for count in tokens]
        self.library = library
        self.batch = batch
        self.heads = heads
        self.width = width
        self.bits = bits
        self.clusters = clusters
        self.sink = sink
        self.tail = tail
        self.room = sink + tail + room
        self.blocks = max(_blocks_of(max(middle, default=0)), 1)
        self.segments = clusters if bits == 4 else 0
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
            self._pack_prompt(row, keys[row, :, start:], values[row, :, start:])

    def _pack_prompt(self, row: int, keys: Tensor, values: Tensor) -> None:
        """Packs the prompt [H, n, D] of a row: both ends in float32, the tokens between them in blocks."""
        middle = int(self.slots[row])
        inner = slice(self.sink, self.sink + middle)
        for i, x in enumerate((keys, values)):
            # Without a middle the slice is empty, and both ends together are the whole prompt.
            ends = torch.cat((x[:, : inner.start], x[:, inner.stop :]), 1)
            self.recent[row, :, : ends.shape[1], i] = ends
        if middle:
            self._write(row, 0, keys[:, inner], values[:, inner])

    @property
    def bytes(self) -> int:
        """Bytes of the cache in memory."""
        return sum(x.nbytes for x in vars(self).values() if isinstance(x, Tensor))

    def read_bytes(self, group: int) -> int:
        """Returns the bytes that a step with `group` query heads per KV head reads, as `bytes_read` counts them."""
        chosen = group * torch.minimum(self.k, self._in_blocks)
        blocks = _blocks_of(self.slots)
        clusters = self.segments if self.residual else 0
        total = 0
        for ends, used, rows in torch.stack((self.recents, blocks, chosen), 1).tolist():
            total += bytes_read(self.bits, self.width, ends=ends, blocks=used, rows=rows, clusters=clusters)
        return self.heads * total

    @property
    def _in_blocks(self) -> Tensor:
        """[B], tokens of the rows in blocks."""
        # `slots` counts the places of the gap, which hold no token.
        return self.slots - self.gap.diff().squeeze(1)

    @property
    def tokens(self) -> list[int]:
        """Number of tokens in each row."""
        return (self._in_blocks + self.recents).tolist()

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
            k = [self._rule(count) for count in self.counted.tolist()]
            self.k.copy_(_integers(k))

    def state(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """Returns the buffers and the sizes that `restored` takes."""
        sizes = self._sizes()
        buffers = {name: getattr(self, name) for name in shapes_of(sizes)}
        return buffers, sizes

    @classmethod
    @outside_autograd
    def restored(cls, library: Library, buffers: Mapping[str, Tensor], sizes: Mapping[str, int]) -> LayerCache:
        """Restores a cache from the output of `state`, with buffers of its own.

        Raises:
            ValueError: they are not what `state` returns; says which buffer or size is at fault, and how.
        """
        require_sizes(sizes)
        require_buffers(buffers, shapes_of(sizes))
        require_places(buffers, sizes)
        cache = cls.__new__(cls)
        cache.library = library
        cache._buffers = None
        cache._rule = None
        vars(cache).update(sizes)
        cache.residual = bool(sizes["residual"])
        cache.summed = bool(sizes["summed"])
        for name, buffer in buffers.items():
            setattr(cache, name, buffer.clone())
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
        # Without blocks behind them, the first tokens are like the others and can go, too.
        sinks = self.sink * (self.slots > 0)
        most = int((self.recents - sinks).min())
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
        """Adds one token per row, in float32 until more tokens are added, and computes its attention by the method."""
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
        are clustered together at the end.
        """
        # New blocks shift these tokens; the clusters at the end need them as they were.
        before = self.recent.clone()
        recents_before = self.recents.tolist()
        slots_before = self.slots.tolist()
        outputs = []
        at_once = reads_at_once(self.library, self.bits, query)
        if at_once:
            new = in_one_dtype(query, key, value)
            # Before any token is added: the kernel reads those of the cache and those of the call.
            held = self._addresses()
            output = prompt_attention(self.library, *new, scale, held=held, threads=threads, log_mass=log_mass)
            outputs.append(output.to(query.dtype))
        for start in range(0, key.shape[2], BLOCK):
            piece = slice(start, start + BLOCK)
            new = [x[:, :, piece] for x in (query, key, value)]
            new_mass = None if log_mass is None else log_mass[:, piece]
            self._make_room(new[1].shape[2], clustered=False)
            if at_once:
                self._take(*new[1:])
            else:
                outputs.append(self.attend(*new, scale, threads, new_mass))
        if self.bits == 4:
            for row, (recents, slots) in enumerate(zip(recents_before, slots_before, strict=True)):
                if int(self.slots[row]) > slots:
                    earlier = before[row, :, :recents]
                    keys = torch.cat((earlier[:, :, 0], key[row].float()), 1)
                    values = torch.cat((earlier[:, :, 1], value[row].float()), 1)
                    self._write_joined(row, slots, keys, values)
        self.counted.copy_(_integers(self.tokens))
        self._set_k()
        return torch.cat(outputs, 1)

    def _take(self, key: Tensor, value: Tensor) -> None:
        """Adds tokens [B, H, T, D] for which there is room."""
        for row, used in enumerate(self.recents.tolist()):
            place = self.recent[row, :, used : used + key.shape[2]]
            place[:, :, 0] = key[row]
            place[:, :, 1] = value[row]
        self.recents += key.shape[2]

    def _write_joined(self, row: int, slots: int, keys: Tensor, values: Tensor) -> None:
        """Writes the blocks of a further turn once more, in clusters.

        Args:
            slots: places that were taken before the turn.
            keys, values: [H, n, D], the row's tokens that were in float32 then, and those of the turn.
        """
        place = _blocks_of(slots) * BLOCK
        num_joined = int(self.slots[row]) - place
        joined = slice(self.sink, self.sink + num_joined)  # the oldest after the sinks
        self._write(row, place, keys[:, joined], values[:, joined])

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
        tensors = tensors_of(*in_one_dtype(query, key, value), log_mass)
        threads = torch.get_num_threads() if threads is None else threads
        factor = scale * LOG2_E  # the kernels compute powers of 2
        # Without room the kernel does nothing and returns 0, so the same call can be repeated.
        while not self.library.attend(self._addresses(), full, self.residual, threads, factor, *tensors):
            self.reserve(query.shape[2])
        return tensors[3].to(query.dtype)

    def _addresses(self) -> Buffers:
        """Returns the sizes and addresses of the buffers."""
        if self._buffers is None:
            self._buffers = Buffers()
            for name, _ in Buffers._fields_:
                own = getattr(self, name, 0)
                setattr(self._buffers, name, own.data_ptr() if isinstance(own, Tensor) else own)
        return self._buffers

    def _sizes(self) -> dict[str, int]:
        return {name: int(getattr(self, name)) for name in SIZES}

    def _resize(self) -> None:
        """Gives every buffer its shape; what is new is zero."""
        for name, (shape, dtype) in shapes_of(self._sizes()).items():
            old = getattr(self, name, None)
            if old is None or old.shape != shape:
                new = torch.zeros(shape, dtype=dtype, device="cpu")
                if old is not None:
                    new[:, :, : old.shape[2]] = old  # all that grows is on the third axis
                setattr(self, name, new)
        self._buffers = None

    def _make_room(self, count: int, clustered: bool = True) -> None:
        """Makes room for `count` tokens per row in float32; those that join the blocks are clustered, or not yet."""
        if int(self.recents.max()) + count <= self.room:
            return
        self._merge(count, clustered)
        short = int(self.recents.max()) + count - self.room
        if short > 0:  # no row has a whole block
            self.room += short
            self._resize()

    def _merge(self, count: int, clustered: bool) -> None:
        """Makes a block of the oldest float32 tokens after the sinks, in every row without room for `count` more."""
        no_room = self.recents + count > self.room
        full = no_room & (self.recents >= self.sink + BLOCK)
        for row in full.nonzero().flatten().tolist():
            old = int(self.slots[row])
            place = _blocks_of(old) * BLOCK
            if place > old:  # the last block of the prompt is not full, and stays so
                self.gap[row, 0] = old
                self.gap[row, 1] = place
            self.slots[row] = place + BLOCK
            oldest = self.recent[row, :, self.sink : self.sink + BLOCK]
            self._write(row, place, oldest[:, :, 0], oldest[:, :, 1], clustered)
            # A copy, as source and target overlap.
            later = self.recent[row, :, self.sink + BLOCK :].clone()
            self.recent[row, :, self.sink : -BLOCK] = later
            self.recents[row] -= BLOCK
            self.counted[row] = self.tokens[row]
        self._set_k()

    def _write(self, row: int, place: int, keys: Tensor, values: Tensor, clustered: bool = True) -> None:
        """Writes tokens [H, n, D] to a row's blocks, from a place that starts a block on; with planes, in clusters."""
        if keys.dtype not in KERNEL_DTYPES or values.dtype != keys.dtype:
            keys = keys.float()
            values = values.float()
        more = _blocks_of(place + keys.shape[1]) - self.blocks
        if more > 0:
            # By an eighth at least, so that copies cost a constant per token on average.
            self.blocks += max(more, 4, self.blocks // 8)
            self._resize()
        order = None
        if clustered and self.bits == 4:
            order = self._add_clusters(row, place, keys, values)
        self._pack(row, place // BLOCK, keys, values, order)

    def _add_clusters(self, row: int, place: int, keys: Tensor, values: Tensor) -> Tensor:
        """Clusters tokens [H, n, D] that are to be in the blocks from a place on; returns their order [H, n]."""
        count = keys.shape[1]
        total = place - int(self.gap[row].diff()) + count
        share = count / total
        parts = -(-self.clusters * count // total)
        first = int(self.used[row])
        last = first + parts
        if last > self.segments:
            self.segments = last + max(4, self.segments // 8)
            self._resize()
        order, bounds, means, covariance, variance = clusters_of(self.library, keys, values, parts)
        # The kernel counts from the first of these tokens, a step from the first place of the row.
        self.bounds[row, :, first:last] = bounds + place
        self.mean_values[row, :, first:last] = means
        self.used[row] = last
        # Variances within clusters average by shares of tokens; deviations do not.
        earlier = self.deviations[row].square()
        self.deviations[row] = torch.lerp(earlier, variance, share).sqrt()
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

    def _pack(self, row: int, block: int, keys: Tensor, values: Tensor, order: Tensor | None) -> None:
        """Writes tokens [H, n, D] to a row's blocks, from `block` on."""
        heads, count, width = keys.shape

        def at(name: str, place: int = block) -> Tensor | None:
            """Returns the part of the row's buffer from a place on, None if the format has no such buffer."""
            buffer = getattr(self, name, None)
            return None if buffer is None else buffer[row, :, place:]

        rows = at("rows") if self.bits == 4 else at("values")
        value_scales = at("value_scales", block * BLOCK)  # it has an element for each token
        threads = torch.get_num_threads()
        source, narrow = source_of(keys, values)
        self.library.call(
            "pack", width, self.bits, threads, heads, count, self.blocks, source, narrow,
            order, at("keys"), at("scales"), rows, value_scales,
        )  # fmt: skip


def _blocks_of(tokens: Integers) -> Integers:
    """Returns the blocks that hold so many tokens, the last perhaps in part."""
    return -(-tokens // BLOCK)


def _integers(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(list(numbers), dtype=torch.int32, device="cpu")
