"""Documents of the texts that a user names: equal numbers of tokens, of which no two overlap."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from residual_mass.backbones.asset_texts import SEPARATOR
from residual_mass.backbones.corpora import held_out_corpus, independent_sequences
from residual_mass.backbones.loading import special_prefix
from residual_mass.inputs.texts import ASSETS
from residual_mass.measure.command import Asked
from residual_mass.measure.models import require_assets

log = logging.getLogger(__name__)

EMBEDDED = ("wiki", "code")
"""Corpora that are measured on where the user names no text."""
FILES = "files"
"""What single files are called together; a folder is a text of its own."""
CHARACTERS = 16
"""Of a file that are read for each token wanted."""


@dataclass(frozen=True)
class Text:
    """One text.

    Attributes:
        sequences: token ids of each document: prompt, the token after it, and the continuation.
        sources: files that they were cut from, or corpora.
    """

    name: str
    sequences: list[list[int]]
    sources: int


def read(asked: Asked, tokenizer: PreTrainedTokenizerBase, size: int) -> list[Text]:
    """Cuts every text into up to `asked.documents` documents of `size` tokens.

    Raises:
        ValueError: a file is missing or no text, or a text is shorter than one document; names it.
    """
    named = asked.texts or EMBEDDED
    corpora = [name for name in named if name in ASSETS and not Path(name).exists()]
    paths = [Path(name) for name in named if name not in corpora]
    texts = [_of_corpus(name, asked, tokenizer, size) for name in corpora]
    by_name = {str(path): list(_in_folder(path)) for path in paths if path.is_dir()}
    if files := [path for path in paths if not path.is_dir()]:
        by_name[FILES] = [_text_of(path) for path in files]
    return [*texts, *(_of_files(name, contents, asked, tokenizer, size) for name, contents in by_name.items())]


def _of_corpus(name: str, asked: Asked, tokenizer: PreTrainedTokenizerBase, size: int) -> Text:
    """The study's documents."""
    require_assets(asked.assets_folder)
    corpus = held_out_corpus(name, tokenizer, size, asked.seed, asked.assets_folder)
    sequences = independent_sequences(corpus, asked.documents)
    return Text(name, sequences, len(sequences))


def _text_of(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(
            f"{path}: no such file, nor a text of the assets ({', '.join(ASSETS)}); check the name"
        ) from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not a text in UTF-8; leave it out or convert it") from None
    if "\0" in text:
        raise ValueError(f"{path}: holds bytes that no text has; leave it out")
    return text


def _in_folder(folder: Path) -> Iterator[str]:
    """The texts in a folder and those below, without hidden files and files of another kind."""
    left_out = 0
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        if any(part.startswith(".") for part in path.relative_to(folder).parts):
            continue
        try:
            yield _text_of(path)
        except ValueError:
            left_out += 1
    if left_out:
        log.warning("%s: %d files left out that are no texts in UTF-8", folder, left_out)


def _of_files(name: str, contents: Sequence[str], asked: Asked, tokenizer: PreTrainedTokenizerBase, size: int) -> Text:
    front = special_prefix(tokenizer)
    wanted = size - len(front)
    longest = CHARACTERS * size * asked.documents
    tokens = (tokenizer(text[:longest] + SEPARATOR, add_special_tokens=False).input_ids for text in contents)
    runs = list(_runs(tokens, wanted))
    if not runs or len(runs[0]) < wanted:
        held = len(runs[0]) if runs else 0
        raise ValueError(
            f"text {name}: {held:,} tokens, and one document is {wanted:,} (--length {asked.length}, and --tokens "
            f"{asked.tokens} after it); give more text or a shorter --length"
        )
    sequences = [front + part for part in windows(runs, wanted, asked.documents)]
    return Text(name, sequences, min(len(contents), len(sequences)))


def _runs(texts: Iterator[list[int]], size: int) -> Iterator[list[int]]:
    """Joins short texts with those that follow, so that every run has `size` tokens; the last may be shorter if it is
    the only one.
    """
    run: list[int] = []
    found = False
    for text in texts:
        run = run + text
        if len(run) >= size:
            yield run
            run, found = [], True
    if run and not found:
        yield run


def windows(runs: Sequence[Sequence[int]], size: int, count: int) -> list[list[int]]:
    """Cuts up to `count` windows of `size` tokens that do not overlap, as evenly over the runs, and over each of them,
    as it goes.
    """
    if len(runs) > count:
        runs = [runs[number * len(runs) // count] for number in range(count)]
    room = [len(run) // size for run in runs]
    taken = [0] * len(runs)
    while sum(taken) < min(count, sum(room)):
        fewest = min((number for number in range(len(runs)) if taken[number] < room[number]), key=taken.__getitem__)
        taken[fewest] += 1
    return [
        list(run[start : start + size])
        for run, number in zip(runs, taken, strict=True)
        for start in _starts(len(run), size, number)
    ]


def _starts(length: int, size: int, count: int) -> list[int]:
    return [number * (length - size) // max(count - 1, 1) for number in range(count)]
