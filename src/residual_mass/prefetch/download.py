"""Downloads single files from the hub and checks them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from residual_mass.files import sha256_of
from residual_mass.inputs.hub_errors import asking

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoFile


def download(repository: str, repo_type: str, commit: str, info: RepoFile, path: Path) -> None:
    """Downloads one file, resuming an interrupted download.

    Unlike `hf_hub_download` and `snapshot_download`, it resumes files and compares hashes.

    Raises:
        ValueError: the download fails, or the file's hash is not the hub's.
    """
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers, disable_progress_bars

    part = part_of(path, commit)
    part.parent.mkdir(parents=True, exist_ok=True)
    if not bytes_begun(part, info):
        part.unlink(missing_ok=True)
    url = hf_hub_url(repository, info.path, repo_type=repo_type, revision=commit)
    disable_progress_bars()
    with asking(repository), open(part, "ab") as stream:
        http_get(url, stream, resume_size=stream.tell(), headers=build_hf_headers(), expected_size=info.size)
    if not matches_hub(part, info):
        part.unlink()
        raise ValueError(f"{repository}: {info.path} arrived damaged (its hash is not the hub's); run prefetch again")
    part.replace(path)


def part_of(path: Path, commit: str) -> Path:
    """Returns the path of a file's partial download."""
    return path.with_name(f".{path.name}{part_suffix(commit)}")


def part_suffix(commit: str) -> str:
    return f".{commit[:8]}.part"


def bytes_begun(part: Path, info: RepoFile) -> int:
    """Returns the bytes of an interrupted download that can be resumed; 0 if it is larger than the file."""
    size = part.stat().st_size if part.is_file() else 0
    return size if size <= info.size else 0


def has_size(file: Path, size: int) -> bool:
    return file.is_file() and file.stat().st_size == size


def matches_hub(path: Path, info: RepoFile) -> bool:
    """Whether the file's sha256, or git hash for a small file, is the hub's."""
    if info.lfs is not None:
        return sha256_of(path) == info.lfs.sha256
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest() == info.blob_id
