"""Checks that results match their records, this code and this configuration; imports nothing heavy.

Judges a result by its record (`provenance.Record`), and also everything that it was made from, up to the assets, whose
manifest is a record itself. Hashes every file once.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from residual_mass.files import read_json, sha256_of
from residual_mass.provenance import MANIFEST, SUFFIX, beside
from residual_mass.recipes import RECIPES
from residual_mass.study.jobs import Job
from residual_mass.study.parsing import Slip, parsed
from residual_mass.texts.assets import listed_in

WORDS = OK, CHANGED, STALE, NO_RECORD = "ok", "changed", "stale", "no record"
RESULTS = "results"
"""The folder in which every file has a record; other inputs belong to the project or the user."""

Expected = Mapping[str, Job]
"""Job that would make a result now, by the result's name."""


def run(results: Sequence[Path], expected: Path | None) -> bool:
    """Prints one line per result, expanding folders, and the number of results by status.

    Args:
        expected: a JSON file of `Expected`; None compares only recipes.

    Returns:
        Whether all are ok.

    Raises:
        ValueError: a result is missing, or `expected` is not such JSON; names it.
    """
    verifier = Verifier(None if expected is None else _read_expected(expected))
    statuses = [(path, verifier.status(path)) for path in dict.fromkeys(_results(results))]
    for path, status in statuses:
        print(f"{status.word:<9}  {path}{': ' * bool(status.reason)}{status.reason}")
    counts = Counter(status.word for _, status in statuses)
    print(", ".join(f"{counts[word]} {word}" for word in WORDS if counts[word]) or "no result")
    if expected is None:
        print("Compared only recipes; `snakemake --cores 1 verify` also compares the configuration.")
    return set(counts) == {OK}


@dataclass(frozen=True)
class Status:
    """One of `ok`, `changed`, `stale` and `no record`, and the reason unless ok."""

    word: str
    reason: str = ""


@dataclass(frozen=True)
class Recorded:
    """The record of a file.

    Attributes:
        base: folder to which its file names are relative.
        spec: spec of the stage.
        inputs, outputs: sha256 by name.
    """

    base: Path
    stage: str
    spec: Mapping[str, Any]
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]

    def path(self, name: str) -> Path:
        return Path(os.path.normpath(self.base / os.path.expanduser(name)))


@dataclass
class Verifier:
    """Judges files, each only once."""

    expected: Expected | None
    hashes: dict[Path, str] = field(default_factory=dict)
    statuses: dict[Path, Status] = field(default_factory=dict)

    def status(self, path: Path) -> Status:
        path = Path(os.path.abspath(path))
        if path not in self.statuses:
            self.statuses[path] = Status(STALE)  # placeholder that ends cycles of records
            self.statuses[path] = self._judge(path)
        return self.statuses[path]

    def _judge(self, path: Path) -> Status:
        try:
            record = _record_of(path)
        except ValueError as error:
            return Status(NO_RECORD, str(error))
        if not path.is_file():
            return Status(CHANGED, "missing, but its record exists")
        for name, recorded in record.outputs.items():
            if self._sha256(output := record.path(name)) != recorded:
                return Status(CHANGED, f"{'it' if output == path else name} differs from the record")
        reason = next(self._reasons(path, record), None)
        return Status(OK) if reason is None else Status(STALE, reason)

    def _reasons(self, path: Path, record: Recorded) -> Iterator[str]:
        """Yields why this code and configuration would no longer make a file that matches its record."""
        yield from _other_recipe(record) if self.expected is None else self._unexpected(path, record)
        for name, recorded in record.inputs.items():
            source = record.path(name)
            if (found := self._sha256(source)) is None or found != recorded:
                yield f"made from {name}, which {'is missing' if found is None else 'has changed since'}"
            elif _has_record(name, source) and (status := self.status(source)).word != OK:
                yield f"made from {name}, which {'has' if status.word == NO_RECORD else 'is'} {status.word}"

    def _unexpected(self, path: Path, record: Recorded) -> Iterator[str]:
        now = self._expected_by_path.get(path)
        if now is None:
            yield "no rule makes it"
        elif now.refused:
            yield f"no job makes it: {now.refused}"
        else:
            yield from _differences(record.spec, now.spec, "spec")
            wanted = {Path(os.path.abspath(name)) for name in now.inputs}
            read = {record.path(name): name for name in record.inputs}
            yield from (f"no longer made from {read[source]}" for source in sorted(set(read) - wanted))
            yield from (f"now made from {os.path.relpath(source)} as well" for source in sorted(wanted - set(read)))

    @cached_property
    def _expected_by_path(self) -> dict[Path, Job]:
        return {Path(os.path.abspath(name)): now for name, now in (self.expected or {}).items()}

    def _sha256(self, path: Path) -> str | None:
        """Returns None if there is no such file."""
        if path not in self.hashes and path.is_file():
            self.hashes[path] = sha256_of(path)
        return self.hashes.get(path)


def _results(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from _results_below(path)
        elif path.is_file() or beside(path).is_file():
            yield path
        else:
            raise ValueError(f"{path}: no such file or folder; name a result or a folder of results")


def _results_below(folder: Path) -> Iterator[Path]:
    """Yields every file that should have a record, and every missing one with a record.

    Skips files covered by the manifest of their folder, and working files, whose folders begin with an underscore.
    """
    if (folder / MANIFEST).is_file():
        yield folder / MANIFEST
        return
    for path in sorted(folder.iterdir()):
        if path.name.startswith(("_", ".")):
            continue
        if path.is_dir():
            yield from _results_below(path)
        elif not path.name.endswith(SUFFIX):
            yield path
        elif not (recorded := path.with_name(path.name.removesuffix(SUFFIX))).exists():
            yield recorded


def _record_of(path: Path) -> Recorded:
    """Returns a file's own record, or that of the manifest that lists it.

    Raises:
        ValueError: there is none, or it has no hashes.
    """
    manifest = next((folder / MANIFEST for folder in path.parents if (folder / MANIFEST).is_file()), None)
    if manifest is not None and (path == manifest or not beside(path).is_file()):
        record = _assets_record(manifest) or _read_record(manifest)
        if path in (manifest, *map(record.path, record.outputs)):
            return record
    return _read_record(path)


def _read_record(path: Path) -> Recorded:
    sidecar = beside(path)
    if not sidecar.is_file():
        raise ValueError(f"{sidecar.name} is missing")
    meta = read_json(sidecar)
    parts = [meta.get(name) for name in ("spec", "inputs", "outputs")] if isinstance(meta, dict) else [None]
    if not all(isinstance(part, dict) for part in parts):
        raise ValueError(f"{sidecar.name} has no hashes, as written by an earlier version")
    spec, inputs, outputs = parts
    own = next((name for name in outputs if Path(name).name == path.name), None)
    if own is None:
        raise ValueError(f"{sidecar.name} belongs to another file")
    base = _base(path, own)
    if base is None:  # moved without the others, which are looked up at their old place
        base, outputs = Path.cwd(), {str(path): outputs[own]}
    return Recorded(base, str(meta.get("stage", "")), spec, inputs, outputs)


def _base(path: Path, name: str) -> Path | None:
    """Returns the folder to which `name` is relative if it ends `path`, even after both were moved; else None."""
    parts = Path(name).parts
    return path.parents[len(parts) - 1] if path.parts[-len(parts) :] == parts else None


def _assets_record(manifest: Path) -> Recorded | None:
    """Reads the assets' manifest, which lists the hashes of all files; None for another or a damaged manifest."""
    try:
        return Recorded(manifest.parent, "assets", {"pins": read_json(manifest)["pins"]}, {}, listed_in(manifest))
    except (ValueError, KeyError, TypeError):
        return None


def _has_record(name: str, source: Path) -> bool:
    """Whether an input is a result, or has a record elsewhere."""
    return Path(name).parts[:1] == (RESULTS,) or beside(source).is_file() or source.name == MANIFEST


def _other_recipe(record: Recorded) -> Iterator[str]:
    recipe = RECIPES.get(record.stage)
    if record.spec.get("recipe") != recipe:
        yield f"spec.recipe was {record.spec.get('recipe')}, is {recipe}"


def _differences(recorded: Any, now: Any, where: str) -> Iterator[str]:
    """Yields the differences of two specs."""
    if isinstance(recorded, dict) and isinstance(now, dict):
        for key in sorted(recorded.keys() | now.keys()):
            if key in recorded and key in now:
                yield from _differences(recorded[key], now[key], f"{where}.{key}")
            else:
                yield f"{where}.{key} is {'gone' if key in recorded else 'new'}"
    elif isinstance(recorded, list) and isinstance(now, list) and len(recorded) == len(now):
        for number, pair in enumerate(zip(recorded, now, strict=True)):
            yield from _differences(*pair, f"{where}[{number}]")
    elif recorded != now:
        yield f"{where} was {json.dumps(recorded)}, is {json.dumps(now)}"


def _read_expected(path: Path) -> Expected:
    try:
        return parsed(dict[str, Job], read_json(path))
    except Slip as slip:
        raise ValueError(f"{path}: {slip}; let `snakemake --cores 1 verify` write it") from None
