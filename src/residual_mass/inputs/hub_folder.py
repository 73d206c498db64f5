"""The part of an assets folder that was prefetched from the Hugging Face hub: models and data sets as plain files.

Files are in `hub/models/<id>` and `hub/data_sets/<id>` under their names in the repository. The manifest `hub.json`
lists them with commit, size and sha256. Prefetched files are read from the folder even with a network.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from residual_mass.files import read_json, sha256_of
from residual_mass.inputs.hub_data import REVISIONS, HubPart

HUB_MANIFEST = "hub.json"
FOLDERS = {"models": "hub/models", "data_sets": "hub/data_sets"}
"""Folders of the repositories, by kind; the keys are those of the manifest."""
READERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv", ".txt": "text"}
"""Names of the readers of the library `datasets`, by file suffix."""
COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
REMEDY = "run the target `prefetch` on a machine with network, then copy the folder here"

RepoKind = Literal["models", "data_sets"]


class NotPrefetchedError(ValueError):
    """A file is not in the folder, or is another one; the message names it and the remedy."""


@dataclass(frozen=True)
class HubFolder:
    """The prefetched files of an assets folder, possibly none."""

    assets: Path

    @property
    def manifest(self) -> Path:
        return self.assets / HUB_MANIFEST

    def content(self) -> dict[str, dict[str, Any]]:
        """The manifest: `models` and `data_sets`, each by repository.

        Raises:
            NotPrefetchedError: the file is something else.
        """
        if not self.manifest.is_file():
            return {"models": {}, "data_sets": {}}
        content = read_json(self.manifest)
        if not isinstance(content, dict) or set(content) != set(FOLDERS):
            raise NotPrefetchedError(f"{self.manifest}: not a manifest of prefetched files; delete it and {REMEDY}")
        return content

    def damaged(self) -> Iterator[Path]:
        """Files whose sha256 differs from the manifest, without missing ones."""
        for kind, repositories in self.content().items():
            for name, entry in repositories.items():
                for file, facts in entry["files"].items():
                    path = self.file(kind, name, file)
                    if path.is_file() and sha256_of(path) != facts["sha256"]:
                        yield path

    def folder(self, kind: RepoKind, repository: str) -> Path:
        return self.assets / FOLDERS[kind] / repository

    def file(self, kind: RepoKind, repository: str, name: str) -> Path:
        """The path of a file; raises ValueError where its name, which comes from the hub, leads out of the folder."""
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ValueError(f"{repository}: a file is named {name!r}, which leads out of its folder; choose another")
        return self.folder(kind, repository) / name

    def model(self, model_id: str, revision: str) -> Path | None:
        """The folder of a model, after a check of all its files; None where it was not prefetched.

        Raises:
            NotPrefetchedError: it has another revision, or is incomplete or damaged.
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
            NotPrefetchedError: it has another revision than the pinned one.
        """
        entry = self.content()["data_sets"].get(part.data_set)
        if entry is None or key_of(part) not in entry["parts"]:
            return None
        self.check_revision("data_sets", part.data_set, entry, REVISIONS.get(part.data_set))
        return StoredPart(self, part, entry)

    def check_revision(self, kind: RepoKind, repository: str, entry: dict[str, Any], wanted: str | None) -> None:
        if wanted not in (None, entry["revision"]):
            raise NotPrefetchedError(
                f"{self.manifest}: holds {repository} at {entry['revision']}, but {wanted} is requested; request the "
                f"former, or delete {self.folder(kind, repository)} and its entry and run `prefetch` again"
            )

    def checked(self, kind: RepoKind, repository: str, entry: dict[str, Any], name: str) -> Path:
        """A file of a repository, after a check of its sha256."""
        file = self.file(kind, repository, name)
        if (problem := self.problem(kind, repository, entry, name)) is not None:
            raise NotPrefetchedError(f"{problem}; {REMEDY}")
        if _sha256(file, file.stat().st_mtime_ns) != entry["files"][name]["sha256"]:
            raise NotPrefetchedError(f"{file}: not the file that {self.manifest} lists (sha256); {REMEDY}")
        return file

    def problem(self, kind: RepoKind, repository: str, entry: dict[str, Any], name: str) -> str | None:
        """What is wrong with a file at a glance: it is missing or has another size."""
        file, size = self.file(kind, repository, name), entry["files"][name]["bytes"]
        if not file.is_file():
            return f"{file}: no such file"
        found = file.stat().st_size
        return None if found == size else f"{file}: has {found} bytes, not {size}"


@dataclass(frozen=True)
class StoredPart:
    """The data files of one part, in the order in which the library reads them from the hub.

    Of a streamed corpus, only some files may have been prefetched.

    Attributes:
        entry: the data set's entry in the manifest.
    """

    hub: HubFolder
    part: HubPart
    entry: dict[str, Any]

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
        """Names of the prefetched files, by shard number."""
        files = self._files
        return {int(number): files[number] for number in sorted(files, key=int)}

    def file(self, number: int) -> Path | None:
        """One data file, after a check; None where it was not prefetched."""
        name = self._files.get(str(number))
        return None if name is None else self.hub.checked("data_sets", self.part.data_set, self.entry, name)

    def files(self) -> list[Path]:
        """All prefetched files, after a check."""
        names = self.names().values()
        return [self.hub.checked("data_sets", self.part.data_set, self.entry, name) for name in names]


def key_of(part: HubPart) -> str:
    """The key of a part in the manifest."""
    return f"{part.configuration or ''}/{part.split}"


def reader_of(file: Path) -> str:
    """The name of the reader of the library `datasets` for a data file."""
    suffixes = [suffix for suffix in file.suffixes if suffix not in COMPRESSED]
    if not suffixes or suffixes[-1] not in READERS:
        raise ValueError(f"{file}: data files of this kind cannot be read; known are {', '.join(READERS)}")
    return READERS[suffixes[-1]]


def in_one_line(error: Exception) -> str:
    """Returns class and first line of an error; the hub's messages have several lines."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    return f"{type(error).__name__}: {first}"


@cache
def _sha256(file: Path, _: int) -> str:
    """Cached by modification time, as files of gigabytes are opened repeatedly."""
    return sha256_of(file)
