"""Append-only store of decoded rows: an interrupted, extended or repeated job computes only what is missing."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from residual_mass.files import errors_naming, jsonl, locked, sha256_text
from residual_mass.spec.arms import ArmSpec
from residual_mass.spec.specs import ForceSpec, GenerateSpec

log = logging.getLogger(__name__)

StoredRow = dict[str, Any]
GENERATED_FIELDS = frozenset("key task index method budget_percent maps k cut_tokens text phi_sha prompt_sha".split())
"""The fields of a generated row that later stages read."""
ROW_REMEDY = "delete the line, and the row is computed again"


def row_key(
    spec: GenerateSpec | ForceSpec,
    arm: ArmSpec,
    identity: str,
    shas: Mapping[str, str],
    nominal: int | None,
    **further: Any,
) -> str:
    """Returns a hash of everything that determines a row.

    Args:
        identity: of the backbone.
        shas: sha256 of the feature maps by label.
        nominal: L in the budget formula; None takes the prefix's own length.
        further: values that only the stage has.
    """
    fields = {
        "backbone": identity,
        "phi": shas.get(arm.maps or ""),
        "arm": {**arm.rule.identity, "budget_percent": arm.budget_percent},
        "anchors": asdict(spec.anchors),
        "nominal_length": nominal,
        "recipe": spec.recipe,
    }
    return sha256_text(json.dumps(fields | further, sort_keys=True))


class RowStore:
    """The rows of one store file by key. As a context manager it keeps other jobs from writing to the file.

    Args:
        path: the file.
        fields: names of the values that every row has, including `key`.

    Raises:
        ValueError: another job uses the store, or a line is malformed (a torn last one is cut off instead).
        OSError: the file cannot be written (a full disk, for example); names it.
    """

    def __init__(self, path: Path, fields: frozenset[str]) -> None:
        self.path = path
        self.fields = fields
        self.rows: dict[str, StoredRow] = {}

    def __enter__(self) -> RowStore:
        with ExitStack() as opened:
            opened.enter_context(locked(self.path))
            with errors_naming(self.path):
                self._file = opened.enter_context(open(self.path, "a+b", buffering=0))
            self._read()
            self._opened = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # `append` has raised it already, and the rows of its earlier calls are on disk
            self._opened.close()

    def append(self, rows: Iterable[StoredRow]) -> None:
        """Adds rows durably: once this returns, they survive a killed process or machine. If it raises, no row is
        added, so that a resumed run decodes the same rows together as an undisturbed one.
        """
        fresh = list(rows)
        with errors_naming(self.path):
            size = self._file.seek(0, os.SEEK_END)
            data = jsonl(fresh).encode()
            try:
                while data:  # a nearly full disk takes a part of it
                    data = data[self._file.write(data) :]
                os.fsync(self._file.fileno())
            except OSError:
                self._file.truncate(size)
                raise
        self.rows |= {row["key"]: row for row in fresh}

    def _read(self) -> None:
        self._file.seek(0)
        content = self._file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            log.warning("%s: cutting off a torn last line (%d bytes)", self.path, len(content) - whole)
            with errors_naming(self.path):
                self._file.truncate(whole)
        for number, line in enumerate(content[:whole].split(b"\n")[:-1], start=1):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if not isinstance(row, dict) or not row.keys() >= self.fields or not isinstance(row["key"], str):
                raise ValueError(f"{self.path}:{number}: not a row of this store; {ROW_REMEDY}")
            if self.rows.setdefault(row["key"], row) != row:
                raise ValueError(f"{self.path}:{number}: differs from an earlier row of its key; delete one of them")
