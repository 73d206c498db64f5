"""Documents of the corpora in the assets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from residual_mass.files import read_json, read_text
from residual_mass.inputs.assets import require_whole
from residual_mass.inputs.books import books_of
from residual_mass.provenance import MANIFEST

MAKE = "run the assets stage"
SEPARATOR = "\n\n"
"""Separates documents, and the paragraphs of a document."""
RUN_CHARACTERS = 20_000
"""Minimum length of a document made of consecutive paragraphs, about 5,000 tokens."""


def read_documents(name: str, assets: Path) -> list[str]:
    """Reads the documents of a corpus; raises ValueError if its files are missing or changed."""
    readers = {"sotu": _speeches, "wiki": _paragraphs, "pydoc": _topics, "books": _book_parts, "code": _modules}
    require_whole(assets, f"corpora/{name}", *(["qa/hotpotqa.json"] if name == "wiki" else []))
    return readers[name](assets)


def _speeches(assets: Path) -> list[str]:
    return [read_text(file, MAKE) for file in _files(assets / "corpora" / "sotu", "*.txt")]


def _paragraphs(assets: Path) -> list[str]:
    """Returns the distinct Wikipedia paragraphs in HotpotQA's contexts, with their titles."""
    file = assets / "qa" / "hotpotqa.json"
    if not file.is_file():
        raise ValueError(f"{file}: no such file; run the assets stage")
    items = read_json(file)
    try:
        return sorted({f"{title}\n{''.join(sentences)}" for item in items for title, sentences in item["context"]})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file}: holds no questions of HotpotQA ({error!r}); run the assets stage again") from None


def _topics(assets: Path) -> list[str]:
    """Returns the sections of Python's language reference as shipped with the interpreter: technical prose."""
    from pydoc_data.topics import topics

    return [text for _, text in sorted(topics.items())]


def _book_parts(assets: Path) -> list[str]:
    """Returns runs of paragraphs in order, so that a sequence longer than a run continues in the same book."""
    files = _files(assets / "corpora" / "books", "*.txt")
    return [part for file in files for book in books_of(read_text(file, MAKE)) for part in _runs(book)]


def _runs(parts: Sequence[str]) -> list[str]:
    """Joins consecutive paragraphs to documents of at least RUN_CHARACTERS; the last may be shorter."""
    runs: list[list[str]] = []
    size = RUN_CHARACTERS
    for part in parts:
        if size >= RUN_CHARACTERS:
            runs.append([])
            size = 0
        runs[-1].append(part)
        size += len(part) + len(SEPARATOR)
    return [SEPARATOR.join(run) for run in runs]


def _modules(assets: Path) -> list[str]:
    """Returns the source files of a Python package, those of a folder one after another."""
    return [read_text(file, MAKE) for file in _files(assets / "corpora" / "code", "*.py")]


def _files(folder: Path, pattern: str) -> list[Path]:
    files = sorted(folder.glob(pattern))
    if not files:
        raise ValueError(f"{folder}: no texts in it; delete {MANIFEST} of the assets if it is there, and {MAKE}")
    return files
