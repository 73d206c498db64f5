"""Streams a text corpus from the hub in a reproducible random order, so that an interrupted run can be resumed."""

from __future__ import annotations

import glob
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from residual_mass.backbones.asset_texts import SEPARATOR
from residual_mass.backbones.loading import special_prefix
from residual_mass.inputs.hub_commits import commit_of
from residual_mass.inputs.hub_data import HUB
from residual_mass.inputs.hub_folder import HubFolder, NotPrefetchedError, StoredPart, in_one_line, reader_of
from residual_mass.inputs.texts import ASSET_CORPORA

if TYPE_CHECKING:
    from datasets import IterableDataset

log = logging.getLogger(__name__)

BLOCK = 1024
"""Documents shuffled together; all of them are read before the first sequence, and after a resume."""
LANES = 8
"""Shards read in parallel, because documents of one shard may be alike (one class of patents)."""
WAITS = (5.0, 20.0, 60.0)
"""Seconds before each retry after a network failure, on top of the library's own retries."""


@dataclass
class _Place:
    """A position in a stream from which to read again.

    Attributes:
        index: number of the sequence that begins here.
        block: number of the block within the epoch.
        lanes: for every lane, [place in the lane, the library's state of that shard] at the start of the block; None at
            the start of the epoch.
        document: index within the shuffled block.
        token: index within the document.
        shards: number of shards of the data set; 0 until the epoch's first read.
    """

    index: int = 0
    epoch: int = 0
    block: int = 0
    lanes: list[list[Any]] | None = None
    document: int = 0
    token: int = 0
    shards: int = 0


class _Lane:
    """Some shards of a streamed data set, read one after another."""

    def __init__(
        self, open_shard: Callable[[int], IterableDataset], shards: Sequence[int], place: int = 0, state: Any = None
    ):
        self.open_shard, self.shards = open_shard, shards
        self._enter(place, state)

    def take(self, count: int) -> list[dict[str, Any]]:
        """Returns the next `count` rows, or fewer at the end of the lane."""
        taken: list[dict[str, Any]] = []
        while len(taken) < count and self.place < len(self.shards):
            row = next(self.iterator, None)
            if row is None:
                self._enter(self.place + 1, None)
            else:
                taken.append(row)
        return taken

    def position(self) -> list[Any]:
        """Returns [place, state] after the last row taken."""
        return [self.place, None if self.rows is None else self.rows.state_dict()]

    def _enter(self, place: int, state: Any) -> None:
        self.place, self.rows = place, None
        if place < len(self.shards):
            self.rows = self.open_shard(self.shards[place])
            if state is not None:
                self.rows.load_state_dict(state)
            self.iterator = iter(self.rows)


class HubStream:
    """Sequences packed from a streamed data set, in a new order in each epoch; an earlier index restarts the stream.

    The library cannot save its shuffle buffer, so this class shuffles: it puts the shards of a train split into a
    random order, reads LANES of them in parallel, and shuffles each BLOCK of documents. The library's own state tells
    where in its shards a block begins. A test split is read in order, because its rows may be lines of one text.

    Reads prefetched shards from their folder and others from the hub, with the same sequences.
    """

    def __init__(
        self,
        name: str,
        tokenizer: PreTrainedTokenizerBase,
        length: int,
        seed: int,
        slot: int = 0,
        slots: int = 1,
        hub: HubFolder | None = None,
    ):
        assert 0 <= slot < slots
        self.hub = hub
        self.name, self.tokenizer, self.length, self.seed = name, tokenizer, length, seed
        self.slot, self.slots, self.source = slot, slots, HUB[name]
        self.seek(asdict(_Place()))

    def sequence(self, index: int) -> list[int]:
        """Returns the token ids of the index-th sequence, skipping the ones before it.

        Raises:
            ValueError: the data set cannot be read, lacks the column or is shorter than one sequence, or a shard was
                not prefetched. The position is unchanged.
        """
        if index < self.at.index:
            self.seek(asdict(_Place()))
        while True:
            before = self.position()
            try:
                ids = self._next()
            except BaseException:  # also an interrupt, after which a checkpoint may be written
                self.seek(before)
                raise
            if self.at.index == index + 1:
                return ids

    def begins_again(self) -> bool:
        return self.at.epoch > 0

    def position(self) -> dict[str, Any]:
        return asdict(self.at)

    def seek(self, position: dict[str, Any]) -> None:
        """Moves to a position; reads nothing until the next sequence is requested."""
        self.at = _Place(**position)
        self.lanes: list[_Lane] | None = None
        self.texts: list[str] | None = None
        self.tokens: list[int] | None = None

    def _next(self) -> list[int]:
        front = special_prefix(self.tokenizer)
        wanted = self.length - len(front)
        ids: list[int] = []
        whole_epoch = self.at.index == 0  # only the first sequence surely begins with an epoch
        while len(ids) < wanted:
            if self.texts is None:
                self.texts = self._read_block()
            if not self.texts:
                if whole_epoch:
                    raise ValueError(self._shortage(len(ids), wanted))
                whole_epoch = True
                self.seek(asdict(_Place(index=self.at.index, epoch=self.at.epoch + 1)))
            elif self.at.document == len(self.texts):
                self._leave_block()
            else:
                ids += self._take(wanted - len(ids))
        self.at.index += 1
        return front + ids

    def _take(self, count: int) -> list[int]:
        """Takes at most `count` tokens of the current document; moves to the next document after the last one."""
        if self.tokens is None:
            text = self.texts[self.at.document]
            self.tokens = self.tokenizer(text + SEPARATOR, add_special_tokens=False).input_ids if text.strip() else []
        taken = self.tokens[self.at.token : self.at.token + count]
        self.at.token += len(taken)
        if self.at.token == len(self.tokens):
            self.at.document, self.at.token, self.tokens = self.at.document + 1, 0, None
        return taken

    def _leave_block(self) -> None:
        self.at.block, self.at.document = self.at.block + 1, 0
        self.at.lanes = [lane.position() for lane in self.lanes]
        self.texts = None

    def _read_block(self) -> list[str]:
        """Reads and shuffles the documents of the current block; returns none at the end of the epoch."""
        texts = [self._text(row) for row in self._read_rows()]
        if self._shuffles():
            self._rng(f"{self.at.epoch}/{self.at.block}").shuffle(texts)
        return texts

    def _read_rows(self) -> list[dict[str, Any]]:
        """Reads the rows of the block, again from its start after a temporary failure."""
        if self.at.shards not in (0, self._shards):
            raise ValueError(
                f"corpus {self.name!r}: data set {self.source.path} has {self._shards} shards, but had "
                f"{self.at.shards} when the run was interrupted; delete the checkpoint to begin anew"
            )
        self.at.shards = self._shards
        shards = self._shards_of_lanes()
        positions = self.at.lanes or [[0, None]] * len(shards)
        for wait in (*WAITS, None):
            try:  # only calls of the library, which raises a dozen unrelated classes
                if self.lanes is None:
                    lanes = zip(shards, positions, strict=True)
                    self.lanes = [_Lane(self._open_shard, own, *position) for own, position in lanes]
                return [row for lane in self.lanes for row in lane.take(BLOCK // len(self.lanes))]
            except NotPrefetchedError:
                self.lanes = None
                raise
            except Exception as error:
                self.lanes = None
                if wait is None or not _may_pass(error):
                    raise ValueError(_unreadable(self.name, error)) from error
                log.warning("corpus %r: %s; trying again in %g s", self.name, in_one_line(error), wait)
                time.sleep(wait)
        raise AssertionError("the last attempt returns or raises")

    def _text(self, row: dict[str, Any]) -> str:
        if self.source.column not in row:
            raise ValueError(
                f"corpus {self.name!r}: data set {self.source.path} has no column {self.source.column!r}, only "
                f"{', '.join(row)}; name the one with the text in hub_data.HUB, or choose {either(ASSET_CORPORA)}"
            )
        return row[self.source.column] or ""

    @cached_property
    def _stored(self) -> StoredPart | None:
        return None if self.hub is None else self.hub.part(self.source.part)

    @cached_property
    def _shards(self) -> int:
        return self._rows.num_shards if self._stored is None else self._stored.shards

    @cached_property
    def _rows(self) -> IterableDataset:
        """Opens the data set on the hub at the recorded commit."""
        import datasets

        path, configuration, split, _ = self.source
        commit = commit_of(path, self.hub)
        try:
            return datasets.load_dataset(path, configuration, split=split, streaming=True, revision=commit)
        except Exception as error:  # see _read_rows; no retry, so that a run that cannot begin fails at once
            raise ValueError(_unreadable(self.name, error)) from error

    def _open_shard(self, number: int) -> IterableDataset:
        from datasets.distributed import split_dataset_by_node

        file = None if self._stored is None else self._stored.file(number)
        shard = self._shard_on_hub(number) if file is None else open_file(file)
        return shard if self._has_own_shards() else split_dataset_by_node(shard, self.slot, self.slots)

    def _shard_on_hub(self, number: int) -> IterableDataset:
        from huggingface_hub.constants import HF_HUB_OFFLINE

        if self._stored is not None and HF_HUB_OFFLINE:
            raise NotPrefetchedError(
                f"corpus {self.name!r}: the run continues in shard {number} of {self.source.path}, which was not "
                "prefetched; run the target `prefetch` with more phi.steps on a machine with network, then copy the "
                "folder here"
            )
        if self._rows.num_shards != self._shards:
            raise NotPrefetchedError(
                f"corpus {self.name!r}: the hub has {self._rows.num_shards} shards of {self.source.path}, but the "
                f"prefetched folder lists {self._shards}; run the target `prefetch` with more phi.steps"
            )
        return self._rows.shard(num_shards=self._shards, index=number)

    def _has_own_shards(self) -> bool:
        """Whether each slot has shards of its own; otherwise slots share the rows of every shard."""
        return self._shards >= self.slots

    def _shards_of_lanes(self) -> list[list[int]]:
        """Returns the shards of each lane of this slot, in the order of the epoch."""
        if not self._shuffles():
            return [list(range(self._shards))]
        return assign_lanes(self.name, self._shards, self.seed, self.slot, self.slots, self.at.epoch)

    def _shuffles(self) -> bool:
        return self.source.split == "train"

    def _rng(self, what: str) -> random.Random:
        return _rng(self.seed, self.name, self.slot, what)

    def _shortage(self, tokens: int, wanted: int) -> str:
        slot = f" (slot {self.slot} of {self.slots})" if self.slots > 1 else ""
        if tokens == 0:
            empty = f"data set {self.source.path} has no text in column {self.source.column!r}"
            return f"corpus {self.name!r}{slot} is empty: {empty}; choose {either(ASSET_CORPORA)}"
        return too_small(self.name, tokens, wanted) + slot


def assign_lanes(name: str, shards: int, seed: int, slot: int, slots: int, epoch: int) -> list[list[int]]:
    """Assigns to each lane of a slot the shards that it reads in an epoch, in order.

    A slot keeps its shards over the epochs, so that slots never share text. With fewer shards than slots, every slot
    reads some rows of all shards.
    """
    own = list(range(slot, shards, slots) if shards >= slots else range(shards))
    _rng(seed, name, slot, f"{epoch}/shards").shuffle(own)
    lanes = min(LANES, len(own))
    return [own[lane::lanes] for lane in range(lanes)]


def open_file(file: Path) -> IterableDataset:
    """Opens a local data file as a stream of rows."""
    import datasets

    files = [glob.escape(str(file))]  # the library expands names as patterns
    return datasets.load_dataset(reader_of(file), data_files=files, split="train", streaming=True)


def _rng(seed: int, name: str, slot: int, what: str) -> random.Random:
    return random.Random(f"{seed}/{name}/{slot}/{what}")


def either(names: Sequence[str]) -> str:
    """Joins names as "a, b or c"."""
    return f"{', '.join(names[:-1])} or {names[-1]}"


def too_small(name: str, tokens: int, wanted: int) -> str:
    return (
        f"corpus {name!r} holds {tokens} tokens, fewer than one sequence of {wanted}; choose a shorter length or "
        "another corpus"
    )


def _unreadable(name: str, error: Exception) -> str:
    return (
        f"corpus {name!r}: data set {HUB[name].path} cannot be read ({in_one_line(error)}); check the network, log in "
        f"with `hf auth login` if the data set asks for access, or choose {either(ASSET_CORPORA)}"
    )


def _may_pass(error: Exception) -> bool:
    """Whether a retry may succeed: after failures of network or server, not of access or data."""
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    if isinstance(error, HfHubHTTPError) and error.response is not None and error.response.status_code < 500:
        return error.response.status_code in (408, 429)  # too slow, too often
    refusals = (DatasetsError, FileNotFoundError, PermissionError, OfflineModeIsEnabled)
    return not isinstance(error, (*refusals, ValueError, TypeError, LookupError))
