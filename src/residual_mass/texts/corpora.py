"""Texts as token sequences of a fixed length. Sequence i is a function of (seed, i), so a run resumes anywhere."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from residual_mass.files import read_json, read_text
from residual_mass.spec.texts import HELD_OUT_ONLY, HUB, MEASURED, TRAINED
from residual_mass.texts.assets import MAKE, require_whole
from residual_mass.texts.hub import hub_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SEPARATOR = "\n\n"
"""Separates documents, and the paragraphs of a document."""
RUN_CHARACTERS = 20_000
"""Minimum length of a document made of consecutive paragraphs, about 5,000 tokens."""
HELD_OUT_SHARE = 20
"""One document in this many is held out of training."""
DRAWS = 20
"""Maximum number of draws per wanted sequence, to find sequences that share no document."""
BOOK_BEGINS = re.compile(r"\*\*\* ?START OF TH(E|IS) PROJECT GUTENBERG", re.IGNORECASE)
BOOK_ENDS = re.compile(
    r"The Project Gutenberg eBook of|End of (the )?Project Gutenberg|\*\*\* ?END OF TH(E|IS) PROJECT GUTENBERG",
    re.IGNORECASE,
)


class PackedDocuments:
    """Sequences that begin at a random document, or at a random offset within one that is long enough."""

    def __init__(self, name: str, documents: Sequence[str], tokenizer: PreTrainedTokenizerBase, length: int, seed: int):
        if not len(documents):
            raise ValueError(f"corpus {name!r} is empty; choose another one")
        self.name = name
        self.documents = documents
        self.tokenizer = tokenizer
        self.length = length
        self.seed = seed

    def sequence(self, index: int) -> list[int]:
        """Returns the token ids of the index-th sequence; raises ValueError if the corpus holds fewer tokens."""
        ids, _ = self._sampled(index)
        return ids

    def disjoint(self, count: int) -> list[list[int]]:
        """Returns `count` sequences of which no two share a document, or fewer where the corpus has no more."""
        sequences: list[list[int]] = []
        used: set[int] = set()
        for index in range(count * DRAWS):
            ids, documents = self._sampled(index)
            if not documents & used:
                used |= documents
                sequences.append(ids)
            if len(sequences) == count:
                break
        return sequences

    def _sampled(self, index: int) -> tuple[list[int], set[int]]:
        """Returns the token ids of the index-th sequence, and the numbers of its documents."""
        rng = random.Random(f"{self.seed}/{self.name}/{index}")
        front = special_prefix(self.tokenizer)
        wanted = self.length - len(front)
        num_documents = len(self.documents)
        start = rng.randrange(num_documents)
        ids: list[int] = []
        for step in range(num_documents):
            document = self.documents[(start + step) % num_documents]
            more = self.tokenizer(document + SEPARATOR, add_special_tokens=False).input_ids
            if not ids and len(more) > wanted:
                offset = rng.randrange(len(more) - wanted + 1)
                more = more[offset:]
            ids += more
            if len(ids) >= wanted:
                used = {(start + number) % num_documents for number in range(step + 1)}
                return front + ids[:wanted], used
        raise ValueError(
            f"corpus {self.name!r} holds {len(ids)} tokens, fewer than one sequence of {wanted}; choose a shorter "
            "length or another corpus"
        )


class HubDocuments(Sequence[str]):
    """The documents of a corpus on the hub, read from disk one at a time."""

    def __init__(self, name: str):
        part = HUB[name]
        self.rows = hub_rows(part)
        self.column = part.column
        names = self.rows.column_names
        if self.column not in names:
            lacking = f"data set {part} has no column {self.column!r}, only {', '.join(names)}"
            raise ValueError(f"corpus {name!r}: {lacking}; name the one with the text in spec/texts.py")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> str:
        return self.rows[index][self.column] or ""


class Cycle:
    """The paper's 1:1:1 mixture for one of `slots` parallel readers.

    Sequence i of a reader comes from corpus i mod n. Readers share no sequence.
    """

    def __init__(self, corpora: Sequence[PackedDocuments], slot: int = 0, slots: int = 1):
        assert 0 <= slot < slots
        self.corpora = corpora
        self.slot = slot
        self.slots = slots

    def sequence(self, index: int) -> list[int]:
        turn, place = divmod(index, len(self.corpora))
        return self.corpora[place].sequence(turn * self.slots + self.slot)


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
        ValueError: a corpus is not in TRAINED, or its files are missing or changed.
    """
    for name in names:
        if name not in TRAINED:
            raise ValueError(f"corpus {name!r} is not a training corpus; choose {', '.join(TRAINED)}")

    corpora = []
    for name in names:
        documents = read_documents(name, assets)
        if name not in HUB:
            documents = [text for text in documents if not is_held_out(text)]
        corpora.append(PackedDocuments(name, documents, tokenizer, length, seed))
    return Cycle(corpora, slot, slots)


def held_out_corpus(
    name: str, tokenizer: PreTrainedTokenizerBase, length: int, seed: int, assets: Path
) -> PackedDocuments:
    """Builds a corpus of the held-out documents, which are all documents if the corpus is never trained on.

    Raises:
        ValueError: the corpus is not in MEASURED, or its files are missing or changed.
    """
    if name not in MEASURED:
        raise ValueError(f"corpus {name!r} has no held-out text; choose {', '.join(MEASURED)}")
    documents = read_documents(name, assets)
    if name not in HELD_OUT_ONLY:
        documents = [text for text in documents if is_held_out(text)]
    return PackedDocuments(f"{name} (held out)", documents, tokenizer, length, seed)


def is_held_out(document: str) -> bool:
    """Whether a document is held out; depends only on its text, not on order or other documents."""
    return hashlib.sha256(document.encode()).digest()[0] % HELD_OUT_SHARE == 0


def special_prefix(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns the ids that the tokenizer puts before a text: [BOS], [gMASK] and <sop> of GLM's, or often none."""
    ids = tokenizer("a").input_ids
    text = tokenizer("a", add_special_tokens=False).input_ids
    for start in range(len(ids)):
        if ids[start : start + len(text)] == text:
            return ids[:start]
    return []


def read_documents(name: str, assets: Path) -> Sequence[str]:
    """Reads the documents of a corpus; raises ValueError if its files are missing or changed."""
    if name in HUB:
        return HubDocuments(name)
    if name == "pydoc":  # the sections of Python's language reference, as shipped with the interpreter
        from pydoc_data.topics import topics

        return [text for _, text in sorted(topics.items())]
    if name == "wiki":
        return _paragraphs(assets)
    require_whole(assets, f"corpora/{name}")
    folder = assets / "corpora" / name
    files = sorted(folder.glob("*.py" if name == "code" else "*.txt"))
    if not files:
        raise ValueError(f"{folder}: no texts in it; {MAKE}")
    texts = [read_text(file, MAKE) for file in files]
    if name != "books":
        return texts
    runs: list[str] = []
    for text in texts:
        for book in books_of(text):
            runs += _runs(book)  # paragraphs in order, so that a long sequence continues in the same book
    return runs


def books_of(text: str) -> list[list[str]]:
    """Returns the paragraphs of each book in a file, without Project Gutenberg's own text."""
    books: list[list[str]] = [[]]
    inside = True  # the first book may have lost its header
    for line in text.splitlines():
        if BOOK_BEGINS.match(line):
            inside = True
            books.append([])
        elif BOOK_ENDS.match(line):
            inside = False
        elif inside:
            books[-1].append(line)
    return [re.split(r"\n\s*\n", "\n".join(lines).strip()) for lines in books if any(lines)]


def _paragraphs(assets: Path) -> list[str]:
    """Returns the distinct Wikipedia paragraphs in HotpotQA's contexts, with their titles."""
    file = assets / "qa" / "hotpotqa.json"
    require_whole(assets, "qa/hotpotqa.json")
    if not file.is_file():
        raise ValueError(f"{file}: no such file; {MAKE}")
    paragraphs = set()
    try:
        for item in read_json(file):
            for title, sentences in item["context"]:
                paragraphs.add(f"{title}\n{''.join(sentences)}")
        return sorted(paragraphs)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file}: holds no questions of HotpotQA ({error!r}); {MAKE}") from None


def _runs(paragraphs: Sequence[str]) -> list[str]:
    """Joins consecutive paragraphs into documents of at least RUN_CHARACTERS; the last may be shorter."""
    runs: list[list[str]] = []
    size = RUN_CHARACTERS
    for paragraph in paragraphs:
        if size >= RUN_CHARACTERS:
            runs.append([])
            size = 0
        runs[-1].append(paragraph)
        size += len(paragraph) + len(SEPARATOR)
    return [SEPARATOR.join(run) for run in runs]
