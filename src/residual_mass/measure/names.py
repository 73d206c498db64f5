"""Names of models, texts and folders as a user writes them: which are the same, and how they are shown."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from residual_mass.spec.texts import ASSETS


def normalised(name: str) -> str:
    """Returns a path without `.` and slashes that mean nothing; a folder called like a corpus keeps its `./`.

    Raises:
        ValueError: the name is empty.
    """
    if not name:
        raise ValueError("a model or text has an empty name; write . for the current folder")
    path = str(Path(name))
    return f"./{path}" if path in ASSETS and name != path else path


def distinct(texts: Iterable[str]) -> tuple[str, ...]:
    """Returns normalised names of corpora, files and folders, without further names of the same ones."""
    found: dict[str, str] = {}
    for name in map(normalised, texts):
        place = name if name in ASSETS else os.path.realpath(name)
        found.setdefault(place, name)
    return tuple(found.values())


def printable(name: str) -> str:
    """Returns a name for files and terminals: bytes that are not UTF-8, and characters that do not print, escaped."""
    text = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    escaped = []
    for character in text:
        escape = character.encode("unicode_escape").decode()
        escaped.append(character if character.isprintable() else escape)
    return "".join(escaped)


def title_of(name: str) -> str:
    """Returns the last part of a path, which is never empty, as it is shown."""
    own = Path(name).name
    real = Path(os.path.realpath(name))
    return printable(own if own not in ("", "..") else real.name or str(real))


def text_name(folder: str) -> str:
    """Returns the name of the text that is a folder."""
    return printable(folder) if Path(folder).name not in ("", "..") else title_of(folder)


def require_utf8(path: str, what: str) -> None:
    """Raises ValueError if a path has bytes that are not UTF-8, which libraries and JSON cannot write."""
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{what} {printable(path)}: this name is not UTF-8; rename it, or choose another folder"
        ) from None
