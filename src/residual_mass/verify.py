"""Whether results are still what their records say, and belong to this code and configuration; imports nothing heavy.

A result is judged by its record (`provenance.Record`), and so is everything that it was made from, up to the assets,
whose manifest is a record in itself. Every file is hashed once.
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

WORDS = OK, CHANGED, STALE, NO_RECORD = "ok", "changed", "stale", "no record"
RESULTS = "results"
"""The folder in which every file has a record; what else a stage reads is the project's own or brought along."""

Expected = Mapping[str, Job]
"""By the name of a result, the job that would make it now."""


def run(results: Sequence[Path], expected: Path | None) -> bool:
    """Prints one line per result, the files of a folder one by one, and how many there are of each kind.

    Args:
        expected: a JSON file of `Expected`; None compares recipes alone.

    Returns:
        Whether all are ok.

    Raises:
        ValueError: a result is not there, or `expected` is not such JSON; names it.
    """
    verifier = Verifier(None if expected is None else _read_expected(expected))
    verdicts = [(path, verifier.verdict(path)) for path in dict.fromkeys(_results(results))]
    for path, verdict in verdicts:
        print(f"{verdict.word:<9}  {path}{': ' * bool(verdict.reason)}{verdict.reason}")
    counts = Counter(verdict.word for _, verdict in verdicts)
    print(", ".join(f"{counts[word]} {word}" for word in WORDS if counts[word]) or "no result")
    if expected is None:
        print("Of the code, recipes alone were compared; `snakemake --cores 1 verify` asks the configuration as well.")
    return set(counts) == {OK}


@dataclass(frozen=True)
class Verdict:
    """One of `ok`, `changed`, `stale` and `no record`, and why; ok needs no reason."""

    word: str
    reason: str = ""


@dataclass(frozen=True)
class Recorded:
    """What the record of a file says.

    Attributes:
        base: the folder that names in it start from.
        spec: what the stage was told.
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
    """Judges files, each of them once."""

    expected: Expected | None
    hashes: dict[Path, str] = field(default_factory=dict)
    verdicts: dict[Path, Verdict] = field(default_factory=dict)

    def verdict(self, path: Path) -> Verdict:
        path = Path(os.path.abspath(path))
        if path not in self.verdicts:
            self.verdicts[path] = Verdict(STALE)  # holds meanwhile, for records that lead back to themselves
            self.verdicts[path] = self._judge(path)
        return self.verdicts[path]

    def _judge(self, path: Path) -> Verdict:
        try:
            record = _record_of(path)
        except ValueError as error:
            return Verdict(NO_RECORD, str(error))
        if not path.is_file():
            return Verdict(CHANGED, "it is not there, its record is")
        for name, recorded in record.outputs.items():
            if self._sha256(output := record.path(name)) != recorded:
                return Verdict(CHANGED, "it is not what was recorded" if output == path else f"{name} is not its own")
        reason = next(self._reasons(path, record), None)
        return Verdict(OK) if reason is None else Verdict(STALE, reason)

    def _reasons(self, path: Path, record: Recorded) -> Iterator[str]:
        """Why a file that is as it was recorded is no longer what this code and configuration would make."""
        yield from _other_recipe(record) if self.expected is None else self._unexpected(path, record)
        for name, recorded in record.inputs.items():
            source = record.path(name)
            if (found := self._sha256(source)) is None or found != recorded:
                yield f"made from {name}, which is {'gone' if found is None else 'another one now'}"
            elif _has_record(name, source) and (verdict := self.verdict(source)).word != OK:
                yield f"made from {name}, which is {'without record' if verdict.word == NO_RECORD else verdict.word}"

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
        """None where there is no such file."""
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
    """Every file that ought to have a record, and every one that a record is left of.

    Not those that another one's record stands for, and no working files, whose folders begin with an underscore.
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
    """The record beside a file, or that of the manifest which vouches for it.

    Raises:
        ValueError: there is none, or it lacks what it needs to be compared; says which.
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
        raise ValueError("none lies beside it")
    meta = read_json(sidecar)
    parts = [meta.get(name) for name in ("spec", "inputs", "outputs")] if isinstance(meta, dict) else [None]
    if not all(isinstance(part, dict) for part in parts):
        raise ValueError("the one beside it is an earlier version's, without hashes")
    spec, inputs, outputs = parts
    own = next((name for name in outputs if Path(name).name == path.name), None)
    if own is None:
        raise ValueError("the one beside it is of another file")
    base = _base(path, own)
    if base is None:  # moved away from the others, which are sought where they were
        base, outputs = Path.cwd(), {str(path): outputs[own]}
    return Recorded(base, str(meta.get("stage", "")), spec, inputs, outputs)


def _base(path: Path, name: str) -> Path | None:
    """The folder from which `name` names `path`, wherever the two were moved together; None if it does not."""
    parts = Path(name).parts
    return path.parents[len(parts) - 1] if path.parts[-len(parts) :] == parts else None


def _assets_record(manifest: Path) -> Recorded | None:
    """Of the assets, whose manifest lists the hashes of all files; None for any other manifest, or a damaged one."""
    try:
        content = read_json(manifest)
        hashes = {entry["path"]: entry["sha256"] for entry in content["files"]}
        return Recorded(manifest.parent, "assets", {"pins": content["pins"]}, {}, hashes)
    except (ValueError, KeyError, TypeError):
        return None


def _has_record(name: str, source: Path) -> bool:
    """Whether an input is a result itself, or has a record though it lies elsewhere."""
    return Path(name).parts[:1] == (RESULTS,) or beside(source).is_file() or source.name == MANIFEST


def _other_recipe(record: Recorded) -> Iterator[str]:
    recipe = RECIPES.get(record.stage)
    if record.spec.get("recipe") != recipe:
        yield f"spec.recipe was {record.spec.get('recipe')}, is {recipe}"


def _differences(recorded: Any, now: Any, where: str) -> Iterator[str]:
    """Places where two specs differ."""
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
