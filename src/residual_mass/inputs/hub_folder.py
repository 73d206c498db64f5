"""The part of an assets folder that was prefetched from the Hugging Face hub: models and data sets as plain files.

Everything lies in `hub/models/<id>` and `hub/data_sets/<id>` under the repository's own file names; `hub.json` beside
them says of which commit, with size and sha256. What the folder holds is read from it, with or without a network.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from residual_mass.files import read_json, sha256_of
from residual_mass.inputs.hub_data import REVISIONS, HubPart

MANIFEST = "hub.json"
FOLDERS = {"models": "hub/models", "data_sets": "hub/data_sets"}
"""Where the repositories of each kind lie; the keys are those of the manifest."""
READERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv", ".txt": "text"}
"""What the library `datasets` reads a file with, by its ending; a compressed file has another one after it."""
PACKED = (".gz", ".zst", ".xz", ".bz2")
REMEDY = "run the target `prefetch` on a machine with network, and bring the folder here"

Kind = Literal["models", "data_sets"]


class NotPrefetchedError(ValueError):
    """The folder lacks what it should hold, or holds something else; the message names the file and the remedy."""


@dataclass(frozen=True)
class HubFolder:
    """What the folder `assets` holds of the hub: nothing, where nothing was prefetched into it."""

    assets: Path

    @property
    def manifest(self) -> Path:
        return self.assets / MANIFEST

    def content(self) -> dict[str, dict[str, Any]]:
        """The manifest: `models` and `data_sets`, each by repository.

        Raises:
            NotPrefetchedError: it is damaged.
        """
        if not self.manifest.is_file():
            return {"models": {}, "data_sets": {}}
        content = read_json(self.manifest)
        if not _is_sound(content):
            raise NotPrefetchedError(f"{self.manifest}: does not say what was prefetched; delete it and {REMEDY}")
        return content

    def damaged(self) -> Iterator[Path]:
        """Files that are not those that the manifest vouches for; a missing one is none of them."""
        for kind, repositories in self.content().items():
            for name, entry in repositories.items():
                for file, facts in entry["files"].items():
                    path = self.file(kind, name, file)
                    if path.is_file() and sha256_of(path) != facts["sha256"]:
                        yield path

    def folder(self, kind: Kind, repository: str) -> Path:
        return self.assets / FOLDERS[kind] / repository

    def file(self, kind: Kind, repository: str, name: str) -> Path:
        """Where a file of a repository lies; a name, which comes from the hub, must not lead out of the folder."""
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ValueError(f"{repository}: a file is named {name!r}, which leads out of its folder; choose another")
        return self.folder(kind, repository) / name

    def model(self, model_id: str, revision: str) -> Path | None:
        """The folder of a model, every file of it checked; None where it was not prefetched.

        Raises:
            NotPrefetchedError: it is of another revision, incomplete or damaged.
        """
        entry = self.content()["models"].get(model_id)
        if entry is None:
            return None
        self.check_revision("models", model_id, entry, revision)
        for name in entry["files"]:
            self.checked("models", model_id, entry, name)
        return self.folder("models", model_id)

    def part(self, part: HubPart) -> StoredPart | None:
        """A part of a data set; None where it was not prefetched.

        Raises:
            NotPrefetchedError: it is of another revision than is pinned.
        """
        entry = self.content()["data_sets"].get(part.data_set)
        if entry is None or key_of(part) not in entry["parts"]:
            return None
        self.check_revision("data_sets", part.data_set, entry, REVISIONS.get(part.data_set))
        return StoredPart(self, part, entry)

    def check_revision(self, kind: Kind, repository: str, entry: dict[str, Any], wanted: str | None) -> None:
        if wanted not in (None, entry["revision"]):
            raise NotPrefetchedError(
                f"{self.manifest}: holds {repository} at {entry['revision']}, but {wanted} is asked for; ask for the "
                f"one it holds, or delete {self.folder(kind, repository)} with its entry and run `prefetch` again"
            )

    def checked(self, kind: Kind, repository: str, entry: dict[str, Any], name: str) -> Path:
        """A file of a repository, with the sha256 that the manifest vouches for."""
        file = self.file(kind, repository, name)
        if (problem := self.problem(kind, repository, entry, name)) is not None:
            raise NotPrefetchedError(f"{problem}; {REMEDY}")
        if _sha256(file, file.stat().st_mtime_ns) != entry["files"][name]["sha256"]:
            raise NotPrefetchedError(f"{file}: not the file that {self.manifest} vouches for (sha256); {REMEDY}")
        return file

    def problem(self, kind: Kind, repository: str, entry: dict[str, Any], name: str) -> str | None:
        """What is wrong with a file as far as a glance tells: that it is not there, or of another size."""
        file, size = self.file(kind, repository, name), entry["files"][name]["bytes"]
        if not file.is_file():
            return f"{file}: no such file"
        found = file.stat().st_size
        return None if found == size else f"{file}: has {found} bytes, not {size}"


@dataclass(frozen=True)
class StoredPart:
    """The data files of one part, in the order in which the library reads them from the hub.

    Of a corpus that is read in part only, some of them are there.
    """

    hub: HubFolder
    part: HubPart
    entry: dict[str, Any]
    """Of the data set in the manifest."""

    @property
    def revision(self) -> str:
        return self.entry["revision"]

    @property
    def shards(self) -> int:
        """Number of data files on the hub."""
        return self.entry["parts"][key_of(self.part)]["shards"]

    @property
    def _files(self) -> dict[str, str]:
        return self.entry["parts"][key_of(self.part)]["files"]

    def names(self) -> dict[int, str]:
        """Names of the files that were prefetched, by their place among all."""
        files = self._files
        return {int(number): files[number] for number in sorted(files, key=int)}

    def file(self, number: int) -> Path | None:
        """One data file, checked; None where it was not prefetched."""
        name = self._files.get(str(number))
        return None if name is None else self.hub.checked("data_sets", self.part.data_set, self.entry, name)

    def files(self) -> list[Path]:
        """All of them, checked."""
        names = self.names().values()
        return [self.hub.checked("data_sets", self.part.data_set, self.entry, name) for name in names]


def _is_sound(content: Any) -> bool:
    """Whether a manifest holds what its readers look for, and everything is of its type."""
    if not _is_mapping(content, dict) or set(content) != set(FOLDERS):
        return False
    for kind, repositories in content.items():
        for entry in repositories.values():
            texts = [entry.get(name) for name in ("revision", "commit")] if isinstance(entry, dict) else [None]
            if not all(isinstance(text, str) for text in texts) or not _is_mapping(entry.get("files"), dict):
                return False
            for facts in entry["files"].values():
                if not isinstance(facts.get("bytes"), int) or not isinstance(facts.get("sha256"), str):
                    return False
            if kind == "data_sets" and not _are_parts(entry.get("parts"), set(entry["files"])):
                return False
    return True


def _are_parts(parts: Any, files: set[str]) -> bool:
    """Whether each part of a data set has a number of shards and names files that are listed."""
    return _is_mapping(parts, dict) and all(
        isinstance(part.get("shards"), int)
        and _is_mapping(part.get("files"), str)
        and all(number.isdecimal() for number in part["files"])
        and set(part["files"].values()) <= files
        and isinstance(part.get("streams", []), list)
        for part in parts.values()
    )


def _is_mapping(value: Any, of: type) -> bool:
    return isinstance(value, dict) and all(isinstance(inner, of) for inner in value.values())


def key_of(part: HubPart) -> str:
    """How the manifest calls a part of a data set."""
    return f"{part.configuration or ''}/{part.split}"


def reader_of(file: Path) -> str:
    """What the library `datasets` reads a data file with."""
    suffixes = [suffix for suffix in file.suffixes if suffix not in PACKED]
    if not suffixes or suffixes[-1] not in READERS:
        raise ValueError(f"{file}: a data file of a kind that is not read here; known are {', '.join(READERS)}")
    return READERS[suffixes[-1]]


@cache
def _sha256(file: Path, _: int) -> str:
    """Once per process and state of the file: some have gigabytes and are opened again and again."""
    return sha256_of(file)
