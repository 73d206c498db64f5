"""Long texts as token sequences of one exact length, addressable by index so that an interrupted run finds its place.

A corpus is a list of documents (the assets) or a stream of them (the hub). Documents are packed until the length is
reached.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from transformers import PreTrainedTokenizerBase

from residual_mass.backbones.loading import special_prefix

SEPARATOR = "\n\n"
HELD_OUT_SHARE = 20
"""One document in this many is held out of training."""


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


class Corpus(Protocol):
    def sequence(self, index: int) -> list[int]:
        """Token ids of the index-th sequence."""


class PackedDocuments:
    """Sequences drawn from documents at hand: a random start document, a random offset when it is longer than
    needed.
    """

    def __init__(self, name: str, documents: Sequence[str], tokenizer: PreTrainedTokenizerBase, length: int, seed: int):
        if not documents:
            raise ValueError(f"corpus {name!r} is empty")
        self.name, self.documents, self.tokenizer, self.length, self.seed = name, documents, tokenizer, length, seed

    def sequence(self, index: int) -> list[int]:
        rng = random.Random(f"{self.seed}/{self.name}/{index}")
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
        raise ValueError(f"corpus {self.name!r} holds {len(ids)} tokens, fewer than one sequence of {wanted}")


class HubStream:
    """Sequences packed from a streamed data set, shuffled anew each epoch; an earlier index restarts the stream."""

    BUFFER = 10_000

    def __init__(self, name: str, tokenizer: PreTrainedTokenizerBase, length: int, seed: int):
        self.name, self.tokenizer, self.length, self.seed = name, tokenizer, length, seed
        self.next_index, self.stream = 0, self._packed()

    def sequence(self, index: int) -> list[int]:
        if index < self.next_index:
            self.next_index, self.stream = 0, self._packed()
        while True:
            ids = next(self.stream)
            self.next_index += 1
            if self.next_index == index + 1:
                return ids

    def _packed(self) -> Iterator[list[int]]:
        front = special_prefix(self.tokenizer)
        wanted = self.length - len(front)
        ids: list[int] = []
        for epoch in itertools.count():
            found = 0
            for text in self._texts(epoch):
                ids += self.tokenizer(text + SEPARATOR, add_special_tokens=False).input_ids
                while len(ids) >= wanted:
                    found += 1
                    yield front + ids[:wanted]
                    ids = ids[wanted:]
            if not found:
                raise ValueError(f"corpus {self.name!r} holds fewer than one sequence of {self.length} tokens")

    def _texts(self, epoch: int) -> Iterator[str]:
        import datasets

        source = HUB[self.name]
        try:
            rows = datasets.load_dataset(source.path, source.configuration, split=source.split, streaming=True)
            if source.split == "train":  # a test split's rows may be the lines of a running text
                rows = rows.shuffle(seed=self.seed + epoch, buffer_size=self.BUFFER)
            yield from (row[source.column] for row in rows if row[source.column].strip())
        except OSError as error:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"corpus {self.name!r}: data set {source.path} cannot be read ({reason})") from None


class Cycle:
    """The paper's 1:1:1 mixture: sequence i comes from corpus i mod n."""

    def __init__(self, corpora: Sequence[Corpus]):
        self.corpora = list(corpora)

    def sequence(self, index: int) -> list[int]:
        return self.corpora[index % len(self.corpora)].sequence(index // len(self.corpora))


def training_corpus(
    names: Sequence[str], tokenizer: PreTrainedTokenizerBase, length: int, seed: int, assets: Path
) -> Cycle:
    """The named corpora in turn.

    Raises:
        ValueError: a name is unknown or its files are not there.
    """
    return Cycle([_corpus(name, tokenizer, length, seed, assets) for name in names])


def held_out_corpus(name: str, tokenizer: PreTrainedTokenizerBase, length: int, seed: int, assets: Path) -> Corpus:
    """Text that training never sees: an asset corpus's held-out documents, or a hub corpus's test split."""
    if name in HUB and HUB[name].split != "train":
        return HubStream(name, tokenizer, length, seed)
    documents = _documents(name, assets)
    held_out = [d for d in documents if is_held_out(d)]
    return PackedDocuments(f"{name} (held out)", held_out, tokenizer, length, seed)


def is_held_out(document: str) -> bool:
    """Decided by the text itself, so that it does not depend on order or on what else the corpus holds."""
    return hashlib.sha256(document.encode()).digest()[0] % HELD_OUT_SHARE == 0


def _corpus(name: str, tokenizer: PreTrainedTokenizerBase, length: int, seed: int, assets: Path) -> Corpus:
    if name in HUB:
        if HUB[name].split != "train":
            raise ValueError(f"corpus {name!r} is held out for diagnostics; training on it would spoil them")
        return HubStream(name, tokenizer, length, seed)
    documents = [d for d in _documents(name, assets) if not is_held_out(d)]
    return PackedDocuments(name, documents, tokenizer, length, seed)


def _documents(name: str, assets: Path) -> list[str]:
    readers: dict[str, Callable[[Path], list[str]]] = {"sotu": _speeches, "wiki": _paragraphs, "pydoc": _topics}
    if name not in readers:
        known = ", ".join([*readers, *HUB])
        raise ValueError(f"corpus {name!r} is unknown; known are {known}")
    return readers[name](assets)


def _speeches(assets: Path) -> list[str]:
    files = sorted((assets / "corpora" / "sotu").glob("*.txt"))
    return [file.read_text(encoding="utf-8") for file in files]


def _paragraphs(assets: Path) -> list[str]:
    """The distinct Wikipedia paragraphs among HotpotQA's contexts, titled."""
    items = json.loads((assets / "qa" / "hotpotqa.json").read_text(encoding="utf-8"))
    return sorted({f"{title}\n{''.join(sentences)}" for item in items for title, sentences in item["context"]})


def _topics(assets: Path) -> list[str]:
    """Python's own language reference as it ships with the interpreter: technical prose."""
    from pydoc_data.topics import topics

    return [text for _, text in sorted(topics.items())]
