"""Packed cache of one layer for the compiled kernels, with a decode step and full attention of several tokens.

Shape letters: B = batch rows, H = KV heads, G = query heads of a KV head, L = prefix columns, T = new tokens, D = head
dimension, S = clusters.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from residual_mass.kernels.library import WIDTHS, Layer, Library

BLOCK = 64
"""Tokens of a block."""
ROUNDS = 6
"""Rounds of Lloyd's algorithm."""
SAMPLE = 2048
"""Tokens that Lloyd's algorithm runs on."""
LOG2_E = 1.4426950408889634


class LayerCache:
    """Keys and values of one layer, in blocks of one of three formats, and the first and last tokens in float32.

    With `bits` = 4, keys have 8 bits in two planes of 4, with a scale for each channel of a block; values have 8 bits
    with a scale for each token; tokens are sorted by cluster. A step scans the high plane, reads the K best tokens of
    each query head from both planes, and estimates the others by regression on their scanned scores, as
    `ScanRegression` does. With 8 (keys and values in the same 8 bits) and 16 (bfloat16), a step reads every token.

    The float32 tokens are the first `sink` and the last `tail` of each row, and all added tokens. When their buffer is
    full, the oldest `BLOCK` of them after the sinks become a new block, with a cluster of its own.
    """

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
            k: [B] tokens that a query head reads exactly, in addition to those in float32; unused if all are read.
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
        self.library, self.bits, self.sink, self.width = library, bits, sink, width
        self.batch, self.heads, self.clusters = batch, heads, clusters
        self.k = _integers([0] * batch if k is None else k)
        tokens = [length - start for start in first]
        middle = [max(0, count - sink - tail) for count in tokens]
        self.slots, self.gap = _integers(middle), torch.zeros(batch, 2, dtype=torch.int32)
        self.recents = _integers([count - mid for count, mid in zip(tokens, middle, strict=True)])
        self.merged = _integers([0] * batch)
        self.recent = torch.zeros(batch, heads, sink + tail + room, 2, width)
        self.residual = residual and bits == 4
        self._allocate(max(-(-max(middle, default=0) // BLOCK), 1))
        for row, start in enumerate(first):
            inner = slice(start + sink, start + sink + middle[row])
            columns = torch.arange(start, length)
            ends = columns[(columns < inner.start) | (columns >= inner.stop)]
            self.recent[row, :, : len(ends)] = torch.stack((keys[row][:, ends], values[row][:, ends]), 2)
            if middle[row]:
                self._fill(row, keys[row, :, inner], values[row, :, inner])
        self._layer: Layer | None = None

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

    def choose(self, k: Sequence[int], residual: bool) -> None:
        """Sets how many tokens [B] a query head reads exactly from planes, and whether to estimate the others."""
        self.k.copy_(_integers(k))
        self.residual, self._layer = residual and self.bits == 4, None

    def state(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """Returns the tensors and the numbers that `restored` takes."""
        public = {name: x for name, x in vars(self).items() if not name.startswith("_")}
        tensors = {name: x for name, x in public.items() if isinstance(x, Tensor)}
        return tensors, {name: int(x) for name, x in public.items() if isinstance(x, int)}

    @classmethod
    def restored(cls, library: Library, tensors: dict[str, Tensor], numbers: dict[str, int]) -> LayerCache:
        """Restores a cache from the output of `state`."""
        cache = cls.__new__(cls)
        vars(cache).update(tensors, **numbers, library=library, _layer=None)
        cache.recent = cache.recent.float()  # states that older versions wrote have bfloat16
        return cache

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Adds one token per row: keys and values [B, H, D]."""
        self.extend(keys.unsqueeze(2), values.unsqueeze(2))

    def extend(self, keys: Tensor, values: Tensor) -> None:
        """Adds up to a block of tokens per row: keys and values [B, H, T, D], in float32 until more tokens are added.

        Raises:
            ValueError: more tokens than a block has.
        """
        count = keys.shape[2]
        self.reserve(count)
        rows, at = torch.arange(self.batch)[:, None], self.recents[:, None] + torch.arange(count)
        self.recent[rows, :, at, 0] = keys.transpose(1, 2).float()
        self.recent[rows, :, at, 1] = values.transpose(1, 2).float()
        self.recents += count

    def reserve(self, count: int) -> None:
        """Makes room for up to a block of tokens per row, so that adding them moves no tokens to the blocks.

        Raises:
            ValueError: more tokens than a block has.
        """
        if count > BLOCK:
            raise ValueError(f"{count} tokens at once, more than a block of {BLOCK}")
        if int(self.recents.max()) + count > self.recent.shape[2]:
            self._merge(count)
            if (short := int(self.recents.max()) + count - self.recent.shape[2]) > 0:  # no row has a whole block
                self.recent, self._layer = torch.nn.functional.pad(self.recent, (0, 0, 0, 0, 0, short)), None

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
        layer.query, layer.output, layer.log_mass = query.data_ptr(), output.data_ptr(), log_mass.data_ptr()
        run(layer, self.bits)
        return output, log_mass

    def _structure(self) -> Layer:
        """Returns the sizes and addresses of the buffers."""
        layer = Layer(
            batch=self.batch, heads=self.heads, width=self.width, blocks=self.blocks, room=self.recent.shape[2],
            segments=self.bounds.shape[2], residual=self.residual,
        )  # fmt: skip
        for name, _ in Layer._fields_:
            if isinstance(buffer := getattr(self, name, None), Tensor):
                setattr(layer, name, ctypes.c_void_p(buffer.data_ptr()))
        return layer

    def _allocate(self, blocks: int) -> None:
        """Allocates `blocks` empty blocks and, with planes, the clusters."""
        lead, width, self.blocks = (self.batch, self.heads), self.width, blocks
        code = {4: width // 2, 8: width, 16: 2 * width}[self.bits]
        self.keys = torch.zeros(*lead, blocks, BLOCK * code, dtype=torch.uint8)
        segments = 0
        if self.bits < 16:
            self.scales = torch.zeros(*lead, blocks, 2, width, dtype=torch.bfloat16)
        if self.bits == 4:
            self.rows = torch.zeros(*lead, blocks, BLOCK, 3 * width // 2 + 2, dtype=torch.uint8)
            segments = self.clusters
            self.slope = torch.zeros(*lead, width, width, dtype=torch.bfloat16)
            self.deviations = torch.zeros(*lead, width)
        else:
            self.values = torch.zeros(*lead, blocks, BLOCK * code, dtype=torch.uint8)
        if self.bits == 8:
            self.value_scales = torch.zeros(*lead, blocks * BLOCK)
        self.bounds = torch.zeros(*lead, segments, 2, dtype=torch.int32)
        self.mean_values = torch.zeros(*lead, segments, width, dtype=torch.bfloat16)

    def _fill(self, row: int, keys: Tensor, values: Tensor) -> None:
        """Packs the tokens [H, n, D] between the ends of a row's prompt."""
        keys, values = keys.float().contiguous(), values.float().contiguous()
        order = None
        if self.bits == 4:
            order, *summary = self._summarised(keys, values, self.clusters)
            self.bounds[row], self.mean_values[row] = summary[0], summary[1]
            self.slope[row], self.deviations[row] = summary[2], summary[3].sqrt()
        self._pack(row, 0, keys, values, order)

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

    def _merge(self, count: int) -> None:
        """Makes a block of the oldest float32 tokens after the sinks, in every row without room for `count` more."""
        full = (self.recents + count > self.recent.shape[2]) & (self.recents >= self.sink + BLOCK)
        for row in full.nonzero().flatten().tolist():
            block = -(-int(self.slots[row]) // BLOCK)
            clusters = self.clusters + int(self.merged[row])
            if block == self.blocks or (self.bits == 4 and clusters == self.bounds.shape[2]):
                self._grow(max(4, block // 8))
            oldest = slice(self.sink, self.sink + BLOCK)
            keys, values = (self.recent[row, :, oldest, part].contiguous() for part in (0, 1))
            if self.bits == 4:
                self._add_cluster(row, block * BLOCK, keys, values)
            self._pack(row, block, keys, values, None)
            if self.slots[row] % BLOCK:
                self.gap[row, 0], self.gap[row, 1] = self.slots[row], block * BLOCK
            self.slots[row] = (block + 1) * BLOCK
            self.recent[row, :, self.sink : -BLOCK] = self.recent[row, :, self.sink + BLOCK :].clone()
            self.recents[row] -= BLOCK

    def _add_cluster(self, row: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Adds a block as a cluster, and updates the covariance and variance within clusters."""
        _, _, mean, slope, variance = self._summarised(keys, values, 1)
        number = self.clusters + int(self.merged[row])
        self.bounds[row, :, number] = torch.tensor([start, start + BLOCK], dtype=torch.int32)
        self.mean_values[row, :, number] = mean[:, 0].to(torch.bfloat16)
        before = int(self.slots[row]) - int(self.gap[row].diff())
        share = BLOCK / (before + BLOCK)
        self.slope[row] = torch.lerp(self.slope[row].float(), slope, share).to(torch.bfloat16)
        self.deviations[row] = torch.lerp(self.deviations[row].square(), variance, share).sqrt()
        self.merged[row] += 1

    def _grow(self, blocks: int) -> None:
        """Allocates more blocks and, with planes, as many more clusters."""
        for name, per_block in (
            ("keys", 1), ("scales", 1), ("rows", 1), ("values", 1), ("value_scales", BLOCK),
            ("bounds", self.bits == 4), ("mean_values", self.bits == 4),
        ):  # fmt: skip
            if isinstance(buffer := getattr(self, name, None), Tensor):
                more = buffer.new_zeros(*buffer.shape[:2], blocks * per_block, *buffer.shape[3:])
                setattr(self, name, torch.cat((buffer, more), 2))
        self.blocks += blocks
        self._layer = None


def _integers(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(list(numbers), dtype=torch.int32)
