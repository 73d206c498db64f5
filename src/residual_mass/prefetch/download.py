"""One file of the hub, fetched and checked; and its libraries' errors, told in one line."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from residual_mass.files import sha256_of

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoFile


def download(repository: str, repo_type: str, commit: str, info: RepoFile, path: Path) -> None:
    """Fetches one file; what an interrupted call has fetched of it lies beside it and is gone on with.

    Raises:
        ValueError: it cannot be had, or is not what the hub says it is.
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
        raise ValueError(f"{repository}: {info.path} came damaged (its hash is not the hub's); run prefetch again")
    part.replace(path)


def part_of(path: Path, commit: str) -> Path:
    """Where a file grows while it is fetched."""
    return path.with_name(f".{path.name}{part_suffix(commit)}")


def part_suffix(commit: str) -> str:
    return f".{commit[:8]}.part"


def bytes_begun(part: Path, info: RepoFile) -> int:
    """Bytes of a file that were fetched by an interrupted call; none, where it holds more than the file has."""
    size = part.stat().st_size if part.is_file() else 0
    return size if size <= info.size else 0


def has_size(file: Path, size: int) -> bool:
    return file.is_file() and file.stat().st_size == size


def matches_hub(path: Path, info: RepoFile) -> bool:
    """Whether a file is the hub's: by its sha256, or by git's hash of a small one."""
    if info.lfs is not None:
        return sha256_of(path) == info.lfs.sha256
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest() == info.blob_id


@contextmanager
def asking(repository: str) -> Iterator[None]:
    """Around calls of the hub's libraries alone: what goes wrong is told in one line, without the token.

    They raise a dozen unrelated classes, their network clients' among them.
    """
    from huggingface_hub import get_token

    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise
        told = _told(repository, error)
        raise ValueError(told.replace(token, "(the token)") if (token := get_token()) else told) from None


def _told(repository: str, error: Exception) -> str:
    from datasets.exceptions import DatasetNotFoundError
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        access = "accept its licence on its page on the hub, then set HF_TOKEN or run `hf auth login`"
        return f"{repository}: asks for access: {access}"
    if isinstance(error, (errors.RevisionNotFoundError, errors.RemoteEntryNotFoundError)):
        return f"{repository}: the hub no longer has the commit, or a file of it ({_first_line(error)}); choose another"
    if isinstance(error, (errors.RepositoryNotFoundError, DatasetNotFoundError)):
        return f"{repository}: not on the hub, or private: check the name, or log in with `hf auth login`"
    return (
        f"{repository}: cannot be fetched ({type(error).__name__}: {_first_line(error)}); check the network and run "
        "prefetch again, what is fetched is kept"
    )


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
