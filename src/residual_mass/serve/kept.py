"""Packed caches of texts that were read, for prompts that share their beginning; the least recently used leave first.

Prompts are read in pieces that end at every `STRIDE` tokens, whether a beginning is kept or not. So what follows a kept
beginning is computed in the same way as if the whole prompt were read, and an answer does not depend on it. Only what
goes on from the end of a text that was answered is read in other pieces.

Shape letters: L = tokens of a text.
"""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from residual_mass.decode.marks import Mark, cache_at, mark_of
from residual_mass.decode.packed_backend import PackedCache

log = logging.getLogger(__name__)

STRIDE = 128
"""Tokens between two places at which a text can be gone back to."""
FAR_STRIDE = 2048
"""The same, more than `NEAR` places before the end of the text."""
STORED = "[0-9]*-" + 64 * "[0-9a-f]" + ".safetensors"
"""Names of files in the folder, with the number of tokens and the digest of a text."""
NEAR = 8


@dataclass
class KeptText:
    """A text with its cache.

    Attributes:
        ids: [L], what the cache holds.
        marks: by number of tokens.
    """

    ids: Tensor
    cache: PackedCache
    marks: dict[int, Mark] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes + sum(mark.nbytes for mark in self.marks.values())

    def mark(self) -> None:
        """Marks the text as it is now; marks far from its end get sparse, but for the last end of an answer."""
        tokens = self.cache.get_seq_length()
        self.marks[tokens] = mark_of(self.cache)
        last_end = max((place for place in self.marks if place % STRIDE), default=0)
        for place in list(self.marks):
            if place < tokens - NEAR * STRIDE and place % FAR_STRIDE and place != last_end:
                del self.marks[place]

    def best(self, ids: Tensor) -> int:
        """Returns the tokens of the longest beginning of ids [L], without the last, that this text can go back to."""
        # The last token is read in any case: its logits choose the first new one.
        common = min(common_length(self.ids, ids), len(ids) - 1)
        places = [place for place in (*self.marks, len(self.ids)) if place <= common]
        return max(places, default=0)

    def at_last_mark(self) -> KeptText:
        """Returns the text as it was at its last mark; an empty one if it has none."""
        last = max(self.marks, default=0)
        return self if last == len(self.ids) else self.at(last) if last else KeptText(self.ids[:0], self.cache)

    def at(self, place: int) -> KeptText:
        """Returns a text that begins with the first tokens of this one and goes on by itself. It can go back to there,
        so that the same request goes on from the same place when it comes again.
        """
        mark = mark_of(self.cache) if place == len(self.ids) else self.marks[place]
        marks = {tokens: held for tokens, held in self.marks.items() if tokens < place} | {place: mark}
        return KeptText(self.ids[:place], cache_at(self.cache, mark), marks)


class Kept:
    """Caches by the token ids that they hold, in bounded memory, and on disk where a folder is given.

    Args:
        make: returns an empty cache.
        limit: most bytes of all caches in memory.
        folder: for caches that leave the memory, each in a file that is named after its text; None drops them. It is
            one of several, for each configuration its own, in a folder of theirs.
        folder_limit: most bytes of the files in all of these folders.
    """

    def __init__(self, make: Callable[[], PackedCache], limit: int, folder: Path | None, folder_limit: int) -> None:
        self.make = make
        self.limit = limit
        self.folder = folder
        self.folder_limit = folder_limit
        self.texts: OrderedDict[bytes, KeptText] = OrderedDict()
        """By digest of the ids, the least recently used first."""

    def take(self, ids: Tensor, beyond: int = 0) -> KeptText:
        """Returns the longest beginning of a text [L], without its last token, that is kept and longer than `beyond`
        tokens; or an empty one.
        """
        best = beyond
        for digest, text in self.texts.items():
            place = text.best(ids)
            if place > best:
                best = place
                found = digest
        # A longer beginning may have left the memory.
        stored = self._from_folder(ids, best)
        if stored is not None:
            return stored
        if best == beyond:
            return KeptText(ids[:0], self.make())
        self.texts.move_to_end(found)
        return self.texts[found].at(best)

    def put(self, text: KeptText) -> None:
        """Keeps a text in place of those that it begins with; others leave until all fit."""
        if len(text.ids) == 0:
            return
        # It would drive out all others, and then itself.
        if text.nbytes > self.limit:
            self._store(text)
            return
        for digest, other in list(self.texts.items()):
            if len(other.ids) <= len(text.ids) and common_length(other.ids, text.ids) == len(other.ids):
                del self.texts[digest]
        self.texts[digest_of(text.ids)] = text
        while sum(each.nbytes for each in self.texts.values()) > self.limit:
            _, oldest = self.texts.popitem(last=False)
            self._store(oldest)

    def save(self) -> None:
        """Writes all caches to the folder, if there is one."""
        for text in self.texts.values():
            self._store(text)

    def _from_folder(self, ids: Tensor, held: int) -> KeptText | None:
        """Returns a beginning that is longer than `held`, from the folder; None if there is none."""
        if self.folder is None:
            return None
        names = [path.name for path in self.folder.glob(STORED)]
        lengths = {int(name.partition("-")[0]) for name in names}
        for length in sorted(lengths, reverse=True):
            path = self._path(ids[:length])
            if not held < length < len(ids) or not path.is_file():
                continue
            try:
                cache = self.make().load(path)
            except OSError as error:
                log.warning("not read: %s", error)
                continue
            except ValueError as error:
                log.warning("not used: %s", error)
                remove(path)
                continue
            if cache.get_seq_length() == length:
                used(path)
                text = KeptText(ids[:length].clone(), cache)
                text.mark()
                return text
        return None

    def _store(self, text: KeptText) -> None:
        """Writes a text as it is and at its last mark: texts that go on from it, or share its beginning, find one."""
        if self.folder is None:
            return
        for place in {len(text.ids), *sorted(text.marks)[-1:]}:
            path = self._path(text.ids[:place])
            if path.is_file():
                used(path)
                continue
            try:
                # Keys and values reveal the texts, which other users must not read.
                self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                (text.cache if place == len(text.ids) else cache_at(text.cache, text.marks[place])).save(path)
            except (OSError, ValueError) as error:
                log.warning("a text of %d tokens is not kept: %s", place, error)
        self._bound_folder()

    def _bound_folder(self) -> None:
        """Removes files of the folders, the least recently used first, until the others fit."""
        states = []
        for file in self.folder.parent.glob(f"*/{STORED}"):
            with suppress(FileNotFoundError):  # another server may have removed it
                states.append((file.stat().st_mtime, file.stat().st_size, file))
        total = 0
        for _, size, file in sorted(states, reverse=True):
            # Removed files count, too, so that everything older than the first of them goes.
            total += size
            if total > self.folder_limit:
                remove(file)

    def _path(self, ids: Tensor) -> Path:
        return self.folder / f"{len(ids)}-{digest_of(ids).hex()}.safetensors"


def used(path: Path) -> None:
    """Notes that a file was used now: `_bound_folder` takes the time of its change for that of its last use."""
    with suppress(OSError):  # a folder that can only be read still serves
        path.touch()


def remove(path: Path) -> None:
    """Removes a file, or says that it cannot be removed."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("not removed: %s", error)


def digest_of(ids: Tensor) -> bytes:
    return hashlib.sha256(ids.to(torch.int64).numpy().tobytes()).digest()


def common_length(one: Tensor, other: Tensor) -> int:
    """Returns the number of tokens that two texts have in common at their beginning."""
    shorter = min(len(one), len(other))
    different = (one[:shorter] != other[:shorter]).nonzero()
    return int(different[0]) if len(different) else shorter
