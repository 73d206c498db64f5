"""Packed caches of texts that were read, for prompts that continue them; the least recently used leave first.

Shape letters: L = tokens of a text.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from residual_mass.decode.packed_backend import PackedCache
from residual_mass.kernels.layout import BLOCK
from residual_mass.model.rotary import Frequencies

log = logging.getLogger(__name__)


class Kept:
    """Caches by the token ids that they hold, in bounded memory, and on disk where a folder is given.

    A cache is copied when it is taken, so several texts may continue the same one, each by itself.

    Args:
        make: returns an empty cache.
        limit: most bytes of all caches in memory.
        folder: for caches that leave the memory, each in a file that is named after its text; None drops them.
        frequencies: of the model; a text does not continue one whose keys have other rotary frequencies.
    """

    def __init__(
        self, make: Callable[[], PackedCache], limit: int, folder: Path | None, frequencies: Frequencies
    ) -> None:
        self.make = make
        self.frequencies = frequencies
        self.limit = limit
        self.folder = folder
        self.entries: OrderedDict[bytes, tuple[Tensor, PackedCache]] = OrderedDict()
        """Token ids [L] and cache by digest of the ids, the least recently used first."""

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for _, cache in self.entries.values())

    def take(self, ids: Tensor) -> PackedCache:
        """Returns a cache of the longest kept beginning of a text [L], without its last token: a copy, or an empty one.

        A kept text may differ at its end, by up to 63 tokens, if these can be removed from its cache: an answer that
        was broken off, or whose end has other tokens when it is written down and read again.
        """
        found = self._from_memory(ids)
        held = 0 if found is None else found.get_seq_length()
        stored = self._from_folder(ids, held)
        if stored is not None:
            return stored
        return self.make() if found is None else found

    def put(self, ids: Tensor, cache: PackedCache) -> None:
        """Keeps a cache and the text [L] that it holds; others leave until all fit."""
        digest = digest_of(ids)
        self.entries.pop(digest, None)
        self.entries[digest] = (ids.clone(), cache)
        while self.nbytes > self.limit:
            _, (oldest, left) = self.entries.popitem(last=False)
            self._store(oldest, left)

    def save(self) -> None:
        """Writes all caches to the folder, if there is one."""
        for ids, cache in list(self.entries.values()):
            self._store(ids, cache)

    def _from_memory(self, ids: Tensor) -> PackedCache | None:
        matches = []
        for digest, (own, _) in self.entries.items():
            common = common_length(own, ids[:-1])
            keys_fit = self.frequencies.same([common, len(own), len(ids)])
            if common > 0 and len(own) - common < BLOCK and keys_fit:
                matches.append((common, digest, len(own) - common))
        for _, digest, surplus in sorted(matches, reverse=True):
            cache = copy.deepcopy(self.entries[digest][1])
            if try_crop(cache, surplus):
                self.entries.move_to_end(digest)
                return cache
        return None

    def _from_folder(self, ids: Tensor, held: int) -> PackedCache | None:
        """Returns the cache of a beginning that is longer than `held`, from the folder; None if there is none."""
        if self.folder is None:
            return None
        names = [path.name for path in self.folder.glob("[0-9]*-*.safetensors")]
        lengths = {int(name.partition("-")[0]) for name in names}
        for length in sorted(lengths, reverse=True):
            path = self._path(ids[:length])
            keys_fit = self.frequencies.same([length, len(ids)])
            if not held < length < len(ids) or not keys_fit or not path.is_file():
                continue
            try:
                cache = self.make().load(path)
            except ValueError as error:
                log.warning("not used: %s", error)
                continue
            if cache.get_seq_length() == length:
                return cache
        return None

    def _store(self, ids: Tensor, cache: PackedCache) -> None:
        if self.folder is None or self._path(ids).is_file():
            return
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            cache.save(self._path(ids))
        except (OSError, ValueError) as error:
            log.warning("a cache of %d tokens is not kept: %s", len(ids), error)

    def _path(self, ids: Tensor) -> Path:
        return self.folder / f"{len(ids)}-{digest_of(ids).hex()}.safetensors"


def digest_of(ids: Tensor) -> bytes:
    return hashlib.sha256(ids.to(torch.int64).numpy().tobytes()).digest()


def common_length(one: Tensor, other: Tensor) -> int:
    """Returns the number of tokens that two texts have in common at their beginning."""
    shorter = min(len(one), len(other))
    different = (one[:shorter] != other[:shorter]).nonzero()
    return int(different[0]) if len(different) else shorter


def try_crop(cache: PackedCache, count: int) -> bool:
    """Removes the last tokens of a cache; returns whether it could: they must still be unpacked."""
    if count == 0:
        return True
    if len(cache.packed_layers) < len(cache.layers):  # windows have forgotten what was before these tokens
        return False
    try:
        cache.crop(-count)
    except ValueError:
        return False
    return True
