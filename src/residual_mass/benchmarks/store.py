"""Append-only store of generated rows: an interrupted, extended or repeated job computes only what is missing."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from residual_mass.files import hold, jsonl, naming, sha256_text

logger = logging.getLogger(__name__)

Row = dict[str, Any]
ROW_TYPES: dict[str, type | tuple[type, ...]] = {
    "task": str,
    "index": int,
    "method": str,
    "budget_percent": (int, float, type(None)),
    "maps": (str, type(None)),
    "k": int,
    "cut_tokens": int,
    "text": str,
    "phi_sha": (str, type(None)),
    "prompt_sha": str,
    "key": str,
}
"""The fields of a row that later stages read."""


def wrong_field(row: Row) -> str | None:
    """The first field of ROW_TYPES that is missing or of another type."""
    for name, types in ROW_TYPES.items():
        if name not in row or not isinstance(row[name], types) or isinstance(row[name], bool):
            return name
    return None


def row_key(**inputs: Any) -> str:
    """Hash of everything that determines a row."""
    return sha256_text(json.dumps(inputs, sort_keys=True))


class GenerationStore:
    """The rows of one store file by key; use as a context manager, which holds the file's lock.

    Raises:
        ValueError: another job holds the store, or a line other than a torn last one is malformed.
        OSError: the file cannot be written (a full disk, say); names it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[str, Row] = {}
        self._lines: dict[str, int] = {}
        """Where each row that was read stands."""

    def __enter__(self) -> GenerationStore:
        with naming(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = open(self.path, "a+b")
        try:
            hold(self._file, self.path)
            self._read()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # `append` has told it, and rows that it returned from are on disk
            self._file.close()  # which releases the lock

    def append(self, rows: Iterable[Row]) -> None:
        """Adds rows durably: once this returns, they survive a killed process or machine."""
        fresh = list(rows)
        with naming(self.path):
            self._file.write(jsonl(fresh).encode())
            self._file.flush()
            os.fsync(self._file.fileno())
        self.rows |= {row["key"]: row for row in fresh}

    def require(self, key: str, expected: Row) -> None:
        """Compares the row of that key, where there is one, with fields that the key stands for.

        Raises:
            ValueError: it is damaged; names file and line.
        """
        row = self.rows.get(key, expected)
        if wrong := [name for name, value in expected.items() if row.get(name) != value]:
            raise ValueError(
                f"{self.path}:{self._lines[key]}: {wrong[0]} is not what the row's key stands for; delete the line, it "
                "is computed again"
            )

    def _read(self) -> None:
        self._file.seek(0)
        content = self._file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            logger.warning("%s: cutting off a torn last line (%d bytes)", self.path, len(content) - whole)
            with naming(self.path):
                self._file.truncate(whole)
        for number, line in enumerate(content[:whole].split(b"\n")[:-1], start=1):
            row = _parse(line)
            if row is None:
                raise ValueError(f"{self.path}:{number}: not a generation row; delete the line, it is computed again")
            if self.rows.setdefault(row["key"], row) != row:
                raise ValueError(f"{self.path}:{number}: differs from an earlier row of its key; delete one of them")
            self._lines[row["key"]] = number


def _parse(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and wrong_field(row) is None else None
