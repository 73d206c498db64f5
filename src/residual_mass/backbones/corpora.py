"""Long texts as token sequences of one exact length, addressable by index so that an interrupted run finds its place.

A corpus is a list of documents (the assets) or a stream of them (the hub). Documents are packed until the length is
reached. Several slots may draw on one corpus at the same time; no two of them share a draw from documents at hand or a
stretch of a stream.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from transformers import PreTrainedTokenizerBase

from residual_mass.backbones.loading import special_prefix

if TYPE_CHECKING:
    from datasets import IterableDataset

log = logging.getLogger(__name__)

SEPARATOR = "\n\n"
HELD_OUT_SHARE = 20
"""One document in this many is held out of training."""
BLOCK = 1024
"""Documents of a stream that are shuffled together: as many are read before the first sequence, and after a resume."""
LANES = 8
"""Shards that are read side by side, as neighbours within a shard may be of one kind (one class of patents)."""
WAITS = (5.0, 20.0, 60.0)
"""Seconds before each new try after a network failure in mid-stream; the library has tried many times by then."""
BOOK_CHARACTERS = 20_000
"""Length from which a run of paragraphs of a book is a document: some 5,000 tokens."""
BOOK_BEGINS = re.compile(r"\*\*\* ?START OF TH(E|IS) PROJECT GUTENBERG", re.IGNORECASE)
BOOK_IS_OVER = re.compile(
    r"The Project Gutenberg eBook of|End of (the )?Project Gutenberg|\*\*\* ?END OF TH(E|IS) PROJECT GUTENBERG",
    re.IGNORECASE,
)
"""Lines between which books of Project Gutenberg stand; what is outside is headers and licences, much alike."""


class HubText(NamedTuple):
    """Where a text corpus lies on the hub."""

    path: str
    configuration: str | None
    split: str
    column: str


HUB = {
    "fineweb": HubText("HuggingFaceFW/fineweb", None, "train", "text"),
    "arxiv": HubText("ccdv/arxiv-summarization", None, "train", "article"),
    "bigpatent": HubText("NortheasternUniversity/big_patent", "all", "train", "description"),
    "wikitext": HubText("Salesforce/wikitext", "wikitext-103-raw-v1", "test", "text"),
}
"""The paper's training corpora (train splits) and its diagnostics text (test split: held out)."""
ASSET_CORPORA = ("sotu", "wiki", "pydoc")
"""Texts of the assets that are trained on, but for the documents held out."""
HELD_OUT_ONLY = ("books", "wikitext")
"""Texts that no recipe trains on, so that progress can be measured on a source it never saw."""


class Corpus(Protocol):
    def sequence(self, index: int) -> list[int]:
        """Token ids of the index-th sequence."""

    def position(self) -> Any:
        """A JSON value: where the sequence after the last one made begins."""

    def seek(self, position: Any) -> None:
        """Goes where `position` was taken, so that the next sequence costs what it would have cost there."""


class PackedDocuments:
    """Sequences drawn from documents at hand: a random start document, a random offset when it is longer than
    needed. Every sequence is made from its number alone, so there is no place to keep.
    """

    def __init__(
        self,
        name: str,
        documents: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        length: int,
        seed: int,
        slot: int = 0,
        slots: int = 1,
    ):
        assert 0 <= slot < slots
        if not documents:
            raise ValueError(f"corpus {name!r} is empty; choose another one")
        self.name, self.documents, self.tokenizer, self.length, self.seed = name, documents, tokenizer, length, seed
        self.slot, self.slots = slot, slots

    def sequence(self, index: int) -> list[int]:
        rng = random.Random(f"{self.seed}/{self.name}/{index * self.slots + self.slot}")
        front = special_prefix(self.tokenizer)
        wanted = self.length - len(front)
        start = rng.randrange(len(self.documents))
        ids: list[int] = []
        for step in range(len(self.documents)):
            document = self.documents[(start + step) % len(self.documents)]
            more = self.tokenizer(document + SEPARATOR, add_special_tokens=False).input_ids
            if not ids and len(more) > wanted:
                offset = rng.randrange(len(more) - wanted + 1)
                more = more[offset:]
            ids += more
            if len(ids) >= wanted:
                return front + ids[:wanted]
        raise ValueError(_too_small(self.name, len(ids), wanted))

    def position(self) -> None:
        return None

    def seek(self, position: Any) -> None:
        assert position is None


@dataclass
class _Place:
    """A place in a stream, told by what leads there; its tokens are found again.

    Attributes:
        index: of the sequence that begins here.
        block: number of the block within the epoch.
        lanes: [place in the lane, the library's state of that shard] of every lane where the block begins; None where
            the epoch does.
        document: within the block as shuffled.
        token: within the document.
        shards: of the data set when it was read; 0 where nothing of the epoch has been read.
    """

    index: int = 0
    epoch: int = 0
    block: int = 0
    lanes: list[list[Any]] | None = None
    document: int = 0
    token: int = 0
    shards: int = 0


class _Lane:
    """Some shards of a streamed data set, one after the other, from a position on."""

    def __init__(
        self, open_shard: Callable[[int], IterableDataset], shards: Sequence[int], place: int = 0, state: Any = None
    ):
        self.open_shard, self.shards = open_shard, shards
        self._enter(place, state)

    def take(self, count: int) -> list[dict[str, Any]]:
        """The next rows: `count`, or fewer where the lane ends."""
        taken: list[dict[str, Any]] = []
        while len(taken) < count and self.place < len(self.shards):
            row = next(self.iterator, None)
            if row is None:
                self._enter(self.place + 1, None)
            else:
                taken.append(row)
        return taken

    def position(self) -> list[Any]:
        """[place, state] after the last row taken."""
        return [self.place, None if self.rows is None else self.rows.state_dict()]

    def _enter(self, place: int, state: Any) -> None:
        self.place, self.rows = place, None
        if place < len(self.shards):
            self.rows = self.open_shard(self.shards[place])
            if state is not None:
                self.rows.load_state_dict(state)
            self.iterator = iter(self.rows)


class HubStream:
    """Sequences packed from a streamed data set, in another order each epoch; an earlier index restarts the stream.

    Shuffling is ours: the library's shuffle buffer is lost with the process. The shards of a train split are put into
    a random order, LANES of them are read side by side, and the BLOCK documents read next are shuffled among
    themselves; the library's own state says where in its shards a block begins. A test split is read in order, as its
    rows may be the lines of a running text.
    """

    def __init__(
        self, name: str, tokenizer: PreTrainedTokenizerBase, length: int, seed: int, slot: int = 0, slots: int = 1
    ):
        assert 0 <= slot < slots
        self.name, self.tokenizer, self.length, self.seed = name, tokenizer, length, seed
        self.slot, self.slots, self.source = slot, slots, HUB[name]
        self.seek(asdict(_Place()))

    def sequence(self, index: int) -> list[int]:
        """Token ids of the index-th sequence; those between the last one and it are made and dropped.

        Raises:
            ValueError: the data set cannot be read, lacks the column, or is shorter than one sequence. The stream
                stays where it was.
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

    def position(self) -> dict[str, Any]:
        return asdict(self.at)

    def seek(self, position: dict[str, Any]) -> None:
        """Nothing is read until the next sequence is asked for."""
        self.at = _Place(**position)
        self.lanes: list[_Lane] | None = None
        self.texts: list[str] | None = None
        self.tokens: list[int] | None = None

    def _next(self) -> list[int]:
        front = special_prefix(self.tokenizer)
        wanted = self.length - len(front)
        ids: list[int] = []
        whole_epoch = self.at.index == 0  # the first sequence begins with an epoch, others in one or with one
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
        """At most `count` tokens of the document at hand; the last of them leads to the next document."""
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
        """The documents of the block at hand as shuffled; none where the epoch is over."""
        texts = [self._text(row) for row in self._read_rows()]
        if self._shuffles():
            self._rng(f"{self.at.epoch}/{self.at.block}").shuffle(texts)
        return texts

    def _read_rows(self) -> list[dict[str, Any]]:
        """The block's rows, read again from its start after a failure that may pass."""
        if self.at.shards not in (0, self._rows.num_shards):
            raise ValueError(
                f"corpus {self.name!r}: data set {self.source.path} has {self._rows.num_shards} shards, but had "
                f"{self.at.shards} when the run was interrupted; delete the checkpoint to begin anew"
            )
        self.at.shards = self._rows.num_shards
        shards = self._shards_of_lanes()
        positions = self.at.lanes or [[0, None]] * len(shards)
        for wait in (*WAITS, None):
            try:  # calls of the library alone: it raises a dozen unrelated classes, its network clients' among them
                if self.lanes is None:
                    lanes = zip(shards, positions, strict=True)
                    self.lanes = [_Lane(self._open_shard, of_lane, *position) for of_lane, position in lanes]
                return [row for lane in self.lanes for row in lane.take(BLOCK // len(self.lanes))]
            except Exception as error:
                self.lanes = None
                if wait is None or not _may_pass(error):
                    raise ValueError(_unreadable(self.name, error)) from error
                log.warning("corpus %r: %s; trying again in %g s", self.name, _in_one_line(error), wait)
                time.sleep(wait)
        raise AssertionError("the last try returns or raises")

    def _text(self, row: dict[str, Any]) -> str:
        if self.source.column not in row:
            raise ValueError(
                f"corpus {self.name!r}: data set {self.source.path} has no column {self.source.column!r}, only "
                f"{', '.join(row)}; name the one with the text in corpora.HUB, or choose {_choices(ASSET_CORPORA)}"
            )
        return row[self.source.column] or ""

    @cached_property
    def _rows(self) -> IterableDataset:
        """The data set, opened when it is first needed and as it is then."""
        import datasets

        path, configuration, split, _ = self.source
        try:
            return datasets.load_dataset(path, configuration, split=split, streaming=True)
        except Exception as error:  # see _read_rows; not tried again: a run that cannot begin says so at once
            raise ValueError(_unreadable(self.name, error)) from error

    def _open_shard(self, number: int) -> IterableDataset:
        from datasets.distributed import split_dataset_by_node

        shard = self._rows.shard(num_shards=self._rows.num_shards, index=number)
        return shard if self._has_own_shards() else split_dataset_by_node(shard, self.slot, self.slots)

    def _has_own_shards(self) -> bool:
        """Whether slots share out the shards, so that none reads what it does not use; else the rows of each shard."""
        return self._rows.num_shards >= self.slots

    def _shards_of_lanes(self) -> list[list[int]]:
        """The numbers of this slot's shards in the order of the epoch. A slot has the same shards in every epoch, or
        it would come to what another one had.
        """
        own = self._has_own_shards()
        shards = list(range(self.slot, self._rows.num_shards, self.slots) if own else range(self._rows.num_shards))
        if not self._shuffles():
            return [shards]
        self._rng(f"{self.at.epoch}/shards").shuffle(shards)
        lanes = min(LANES, len(shards))
        return [shards[lane::lanes] for lane in range(lanes)]

    def _shuffles(self) -> bool:
        return self.source.split == "train"

    def _rng(self, what: str) -> random.Random:
        return random.Random(f"{self.seed}/{self.name}/{self.slot}/{what}")

    def _shortage(self, tokens: int, wanted: int) -> str:
        of_slot = f" (slot {self.slot} of {self.slots})" if self.slots > 1 else ""
        if tokens == 0:
            empty = f"data set {self.source.path} has no text in column {self.source.column!r}"
            return f"corpus {self.name!r}{of_slot} is empty: {empty}; choose {_choices(ASSET_CORPORA)}"
        return _too_small(self.name, tokens, wanted) + of_slot


class Cycle:
    """The paper's 1:1:1 mixture: sequence i comes from corpus i mod n."""

    def __init__(self, corpora: Sequence[Corpus]):
        self.corpora = list(corpora)

    def sequence(self, index: int) -> list[int]:
        return self.corpora[index % len(self.corpora)].sequence(index // len(self.corpora))

    def position(self) -> list[Any]:
        return [corpus.position() for corpus in self.corpora]

    def seek(self, position: list[Any]) -> None:
        for corpus, of_corpus in zip(self.corpora, position, strict=True):
            corpus.seek(of_corpus)


def training_corpus(
    names: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    seed: int,
    assets: Path,
    slot: int = 0,
    slots: int = 1,
) -> Cycle:
    """The named corpora in turn, as one of `slots` parallel streams gets them: no two share a draw or a stretch.

    Raises:
        ValueError: a name is unknown or held out, or its files are not there.
    """
    for name in names:
        _check_trained(name)

    def corpus(name: str) -> Corpus:
        if name in HUB:
            return HubStream(name, tokenizer, length, seed, slot, slots)
        documents = [d for d in _documents(name, assets) if not is_held_out(d)]
        return PackedDocuments(name, documents, tokenizer, length, seed, slot, slots)

    return Cycle([corpus(name) for name in names])


def held_out_corpus(name: str, tokenizer: PreTrainedTokenizerBase, length: int, seed: int, assets: Path) -> Corpus:
    """Text that training never sees: an asset corpus's held-out documents, or all of a text that is held out whole."""
    _check_held_out(name)
    if name in HUB:
        return HubStream(name, tokenizer, length, seed)
    held_out = [d for d in _documents(name, assets) if name in HELD_OUT_ONLY or is_held_out(d)]
    return PackedDocuments(f"{name} (held out)", held_out, tokenizer, length, seed)


def check_corpora(names: Sequence[str], assets: Path, held_out: Sequence[str] = ()) -> None:
    """What can be said without a tokenizer, so before a model is loaded.

    Args:
        names: corpora to train on.
        held_out: corpora to measure on.

    Raises:
        ValueError: a corpus is unknown or not for this use, or its files are not there.
    """
    for name in names:
        _check_trained(name)
    for name in held_out:
        _check_held_out(name)
    for name in dict.fromkeys([*names, *held_out]):
        if name not in HUB:
            _documents(name, assets)


def is_held_out(document: str) -> bool:
    """Decided by the text itself, so that it does not depend on order or on what else the corpus holds."""
    return hashlib.sha256(document.encode()).digest()[0] % HELD_OUT_SHARE == 0


def _check_trained(name: str) -> None:
    known = [*ASSET_CORPORA, *(each for each in HUB if each not in HELD_OUT_ONLY)]
    if name in HELD_OUT_ONLY:
        raise ValueError(f"corpus {name!r} is held out to measure on; training on it would spoil that; take {known[0]}")
    if name not in known:
        raise ValueError(f"corpus {name!r} is unknown; known are {', '.join(known)}")


def _check_held_out(name: str) -> None:
    known = [*ASSET_CORPORA, *HELD_OUT_ONLY]
    if name in HUB and name not in HELD_OUT_ONLY:
        raise ValueError(f"corpus {name!r} is trained on whole, so none of it is held out; choose {_choices(known)}")
    if name not in known:
        raise ValueError(f"corpus {name!r} is unknown; known are {', '.join(known)}")


def _choices(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _documents(name: str, assets: Path) -> list[str]:
    """Raises ValueError where the assets lack them."""
    readers = {"sotu": _speeches, "wiki": _paragraphs, "pydoc": _topics, "books": _book_parts}
    return readers[name](assets)


def _speeches(assets: Path) -> list[str]:
    return [file.read_text(encoding="utf-8") for file in _files(assets / "corpora" / "sotu")]


def _paragraphs(assets: Path) -> list[str]:
    """The distinct Wikipedia paragraphs among HotpotQA's contexts, titled."""
    file = assets / "qa" / "hotpotqa.json"
    if not file.is_file():
        raise ValueError(f"{file}: no such file; run the assets stage")
    items = json.loads(file.read_text(encoding="utf-8"))
    return sorted({f"{title}\n{''.join(sentences)}" for item in items for title, sentences in item["context"]})


def _topics(assets: Path) -> list[str]:
    """Python's own language reference as it ships with the interpreter: technical prose."""
    from pydoc_data.topics import topics

    return [text for _, text in sorted(topics.items())]


def _book_parts(assets: Path) -> list[str]:
    """Runs of paragraphs in the order of the books, so that a sequence longer than one reads on in the same book."""
    files = _files(assets / "corpora" / "books")
    return [part for file in files for book in _books(file.read_text(encoding="utf-8")) for part in _runs(book)]


def _books(text: str) -> list[list[str]]:
    """Paragraphs of each book of a file."""
    books: list[list[str]] = [[]]
    inside = True  # the first book may have lost its header
    for line in text.splitlines():
        if BOOK_BEGINS.match(line):
            inside = True
            books.append([])
        elif BOOK_IS_OVER.match(line):
            inside = False
        elif inside:
            books[-1].append(line)
    return [re.split(r"\n\s*\n", "\n".join(lines).strip()) for lines in books if any(lines)]


def _runs(paragraphs: Sequence[str]) -> list[str]:
    """Consecutive paragraphs joined to documents of BOOK_CHARACTERS or a little more; the last may be shorter."""
    runs: list[list[str]] = []
    size = BOOK_CHARACTERS
    for paragraph in paragraphs:
        if size >= BOOK_CHARACTERS:
            runs.append([])
            size = 0
        runs[-1].append(paragraph)
        size += len(paragraph) + len(SEPARATOR)
    return [SEPARATOR.join(run) for run in runs]


def _files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.txt"))
    if not files:
        raise ValueError(f"{folder}: no texts in it; run the assets stage")
    return files


def _too_small(name: str, tokens: int, wanted: int) -> str:
    return (
        f"corpus {name!r} holds {tokens} tokens, fewer than one sequence of {wanted}; choose a shorter length or "
        "another corpus"
    )


def _unreadable(name: str, error: Exception) -> str:
    return (
        f"corpus {name!r}: data set {HUB[name].path} cannot be read ({_in_one_line(error)}); check the network, log in "
        f"with `hf auth login` if the data set asks for access, or choose {_choices(ASSET_CORPORA)}"
    )


def _in_one_line(error: Exception) -> str:
    """Class and message of an error; those of the hub run over several lines, of which the first says what it is."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    return f"{type(error).__name__}: {first}"


def _may_pass(error: Exception) -> bool:
    """Whether a new try may succeed: after a failure of network or server, but not if refused or the data are wrong."""
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    if isinstance(error, HfHubHTTPError) and error.response is not None and error.response.status_code < 500:
        return error.response.status_code in (408, 429)  # too slow, too often
    refusals = (DatasetsError, FileNotFoundError, PermissionError, OfflineModeIsEnabled)
    return not isinstance(error, (*refusals, ValueError, TypeError, LookupError))
