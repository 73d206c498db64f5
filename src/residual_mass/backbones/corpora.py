"""Texts as token sequences of a fixed length, addressable by index so that an interrupted run can be resumed.

A corpus packs documents, from a list (assets) or a stream (hub), into sequences. Several slots may read one corpus in
parallel, each with its own draws of documents or its own part of the stream.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from residual_mass.backbones.asset_texts import SEPARATOR, read_documents
from residual_mass.backbones.hub_stream import HubStream, either, too_small
from residual_mass.backbones.loading import special_prefix
from residual_mass.inputs.hub_data import HUB, STREAMED
from residual_mass.inputs.hub_folder import HubFolder
from residual_mass.inputs.texts import HELD_OUT_ONLY, MEASURED, TRAINED

HELD_OUT_SHARE = 20
"""One document in this many is held out of training."""
DRAWS = 20
"""Sequences that are drawn for each one wanted, in search of those that share no document."""


class Corpus(Protocol):
    def sequence(self, index: int) -> list[int]:
        """Returns the token ids of the index-th sequence."""

    def begins_again(self) -> bool:
        """Whether the text was exhausted, so that the last sequence repeats earlier text."""

    def position(self) -> Any:
        """Returns where the next sequence begins, as a JSON value."""

    def seek(self, position: Any) -> None:
        """Continues from a `position`, without reading the text before it again."""


class PackedDocuments:
    """Sequences that begin at a random document, or at a random offset within one that is long enough.

    A sequence depends only on its index, so the position is None.
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
        return self._drawn(index)[0]

    def disjoint(self, draws: int) -> Iterator[list[int]]:
        """Yields those of the first sequences that share no document with an earlier one."""
        used: set[int] = set()
        for ids, documents in map(self._drawn, range(draws)):
            if not documents & used:
                used |= documents
                yield ids

    def _drawn(self, index: int) -> tuple[list[int], set[int]]:
        """Returns the token ids of the index-th sequence, and the documents that they are of."""
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
                used = {(start + number) % len(self.documents) for number in range(step + 1)}
                return front + ids[:wanted], used
        raise ValueError(too_small(self.name, len(ids), wanted))

    def begins_again(self) -> bool:
        return False  # random draws never end

    def position(self) -> None:
        return None

    def seek(self, position: Any) -> None:
        assert position is None


class Cycle:
    """The paper's 1:1:1 mixture: sequence i comes from corpus i mod n."""

    def __init__(self, corpora: Sequence[Corpus]):
        self.corpora = list(corpora)

    def sequence(self, index: int) -> list[int]:
        return self.corpora[index % len(self.corpora)].sequence(index // len(self.corpora))

    def begins_again(self) -> bool:
        return any(corpus.begins_again() for corpus in self.corpora)

    def position(self) -> list[Any]:
        return [corpus.position() for corpus in self.corpora]

    def seek(self, position: list[Any]) -> None:
        for corpus, own in zip(self.corpora, position, strict=True):
            corpus.seek(own)


def training_corpus(
    names: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    seed: int,
    assets: Path,
    slot: int = 0,
    slots: int = 1,
) -> Cycle:
    """Builds the cycle over the named corpora for one of `slots` parallel readers.

    Raises:
        ValueError: a corpus is unknown or held out, or its files are missing.
    """
    for name in names:
        _check_trained(name)

    def corpus(name: str) -> Corpus:
        if name in HUB:
            return HubStream(name, tokenizer, length, seed, slot, slots, HubFolder(assets))
        documents = [d for d in read_documents(name, assets) if not is_held_out(d)]
        return PackedDocuments(name, documents, tokenizer, length, seed, slot, slots)

    return Cycle([corpus(name) for name in names])


def held_out_corpus(name: str, tokenizer: PreTrainedTokenizerBase, length: int, seed: int, assets: Path) -> Corpus:
    """Builds a corpus that is never trained on: the held-out documents of `name`, or all of one in HELD_OUT_ONLY."""
    _check_held_out(name)
    if name in HUB:
        return HubStream(name, tokenizer, length, seed, hub=HubFolder(assets))
    held_out = [d for d in read_documents(name, assets) if name in HELD_OUT_ONLY or is_held_out(d)]
    return PackedDocuments(f"{name} (held out)", held_out, tokenizer, length, seed)


def independent_sequences(corpus: Corpus, count: int) -> list[list[int]]:
    """Returns `count` sequences, or fewer where the text ends, of which no two share text: of a list of documents those
    that share no document, of a stream those that follow one another until it begins again.
    """
    drawn = corpus.disjoint(count * DRAWS) if isinstance(corpus, PackedDocuments) else _until_it_begins_again(corpus)
    return list(itertools.islice(drawn, count))


def _until_it_begins_again(corpus: Corpus) -> Iterator[list[int]]:
    for index in itertools.count():
        sequence = corpus.sequence(index)
        if corpus.begins_again():
            return
        yield sequence


def check_corpora(names: Sequence[str], assets: Path, held_out: Sequence[str] = ()) -> None:
    """Checks corpora before a model is loaded.

    Args:
        names: corpora to train on.
        held_out: corpora to measure on.

    Raises:
        ValueError: a corpus is unknown or not for this use, or its files are missing.
    """
    for name in names:
        _check_trained(name)
    for name in held_out:
        _check_held_out(name)
    for name in dict.fromkeys([*names, *held_out]):
        if name not in HUB:
            read_documents(name, assets)


def is_held_out(document: str) -> bool:
    """Whether a document is held out; depends only on its text, not on order or other documents."""
    return hashlib.sha256(document.encode()).digest()[0] % HELD_OUT_SHARE == 0


def _check_trained(name: str) -> None:
    if name in HELD_OUT_ONLY:
        raise ValueError(f"corpus {name!r} is held out for measurements; train on {TRAINED[0]} instead")
    _check_known(name, TRAINED)


def _check_held_out(name: str) -> None:
    if name in STREAMED:
        raise ValueError(f"all of corpus {name!r} is trained on, none is held out; choose {either(MEASURED)}")
    _check_known(name, MEASURED)


def _check_known(name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise ValueError(f"corpus {name!r} is unknown; known are {', '.join(known)}")
