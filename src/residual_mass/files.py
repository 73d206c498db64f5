"""Atomic replacement of files, locks, hashes; JSON lines, CSV and Parquet."""

from __future__ import annotations

import csv
import errno
import fcntl
import glob
import hashlib
import io
import json
import logging
import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas

log = logging.getLogger(__name__)

REMAKE = "rerun the rule that makes it"


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yields a temporary file in `path`'s folder, which replaces `path` atomically on success and is removed on an
    exception. Temporary files of killed processes are removed first. The new file has the permissions that the umask
    gives, whatever those of the file before.

    Raises:
        OSError: the file cannot be written (a full disk, for example); names it. Errors of other files are unchanged.
    """
    with errors_naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{path.suffix}")
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    with suppress(OSError):  # on file systems without locks, `remove_leftovers` removes nothing
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        with errors_naming(path, temporary):
            yield temporary
        with errors_naming(path):
            # A library may have put another file in its place: that of safetensors is for its owner alone.
            os.chmod(temporary, stat.S_IMODE(os.fstat(descriptor).st_mode))
            with open(temporary, "rb") as stream:
                os.fsync(stream.fileno())
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
        os.close(descriptor)


def remove_leftovers(path: Path) -> None:
    """Removes temporary files of `path` that killed processes left behind; running processes have theirs locked."""
    # The names that `atomic_write` gives: 8 random digits before the suffix.
    before = glob.escape(f".{path.name}.")
    after = glob.escape(path.suffix)
    for leftover in path.parent.glob(f"{before}{'?' * 8}{after}"):
        with suppress(OSError), open(leftover, "r+b") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            leftover.unlink()
            log.info("%s: removed, left behind by a killed process", leftover)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Locks `path`, which need not exist, for the block; the lock ends with the process.

    Raises:
        ValueError: another process has locked it.
        OSError: its folder cannot be written to; names it.
    """
    from filelock import FileLock, Timeout  # only here, because the library does not need filelock

    lock = FileLock(path.with_name(f".{path.name}.lock"), blocking=False)
    with errors_naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except Timeout:
            raise ValueError(f"{path}: another job is writing to it; wait for that one or stop it") from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP):
                raise
            log.warning("%s: this file system has no locks; run no second job that writes to it", path)
    try:
        yield
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)  # still locked, so no other process can hold it
        lock.release()


def require_writable(*paths: Path) -> None:
    """Raises OSError naming the first of the files that cannot be written. Call it before long work."""
    for path in paths:
        with errors_naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path.parent, buffering=0) as stream:
                stream.write(b"0")  # creating an empty file works on a full disk


@contextmanager
def errors_naming(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Turns an OSError into one that names `path` and the remedy. With `temporary`, the name under which `path` is
    written, errors of other files are unchanged.
    """
    try:
        yield
    except OSError as error:
        files = {str(name) for name in (error.filename, error.filename2) if name is not None}
        if temporary is not None and files and str(temporary) not in files:  # errors of writing name no file
            raise
        reason = error.strerror or str(error)
        remedy = "make room on its disk, or make its folder writable, and run this again"
        raise OSError(f"{path}: cannot be written ({reason}); what was there before is kept; {remedy}") from None


def write_text(path: Path, text: str) -> None:
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


def read_text(path: Path, make: str) -> str:
    """Returns the text of a file.

    Args:
        make: how to make the file, as an instruction to the user.

    Raises:
        ValueError: it is missing, not a file, or not UTF-8; names it.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; {make}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); delete it and {make}") from None


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file; raises ValueError naming it when it is missing or not JSON."""
    return _parsed(path, json.loads)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Returns all rows of a file of JSON lines; raises ValueError naming it when it is missing or damaged."""
    # Not splitlines, which also splits at U+2028 and the like, and prompts contain these.
    return _parsed(path, lambda text: [json.loads(line) for line in text.split("\n") if line])


def _parsed(path: Path, parse: Callable[[str], Any]) -> Any:
    text = read_text(path, REMAKE)
    try:
        return parse(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({error}); delete it and {REMAKE}") from None


def sha256_of(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sha256_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def jsonl(rows: Iterable[dict[str, Any]]) -> str:
    lines = [json.dumps(row, sort_keys=True, ensure_ascii=False) + "\n" for row in rows]
    return "".join(lines)


def csv_text(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Returns the text of a CSV file; missing fields are empty."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def read_csv(path: Path, columns: Iterable[str], stage: str) -> pandas.DataFrame:
    """Returns all rows of a CSV file that `stage` wrote, as strings.

    Raises:
        ValueError: the file is missing or malformed, or lacks one of these columns; names the file.
    """
    import pandas  # only here, so that stages without tables start fast

    def read(stream: IO[bytes]) -> pandas.DataFrame:
        return pandas.read_csv(stream, dtype=str, na_filter=False)

    return _table(path, columns, stage, read)


def write_parquet(path: Path, frame: pandas.DataFrame) -> None:
    """Writes the frame without its index, with checksums by which `read_parquet` detects damage."""
    with atomic_write(path) as temporary:
        frame.to_parquet(temporary, index=False, write_page_checksum=True)


def read_parquet(path: Path, columns: Iterable[str], stage: str) -> pandas.DataFrame:
    """Returns columns of a Parquet file that `stage` wrote, with at least one row; values are not checked.

    Raises:
        ValueError: the file is missing, damaged or empty, or lacks a column; names the file.
    """
    import pandas

    def read(stream: IO[bytes]) -> pandas.DataFrame:
        return pandas.read_parquet(stream, page_checksum_verification=True)

    columns = list(columns)
    frame = _table(path, columns, stage, read)
    if frame.empty:
        raise ValueError(f"{path}: has no rows; delete it and run the {stage} stage again")
    return frame[columns]


def _table(
    path: Path, columns: Iterable[str], stage: str, read: Callable[[IO[bytes]], pandas.DataFrame]
) -> pandas.DataFrame:
    remedy = f"delete it and run the {stage} stage again"
    try:
        with open(path, "rb") as stream:  # given a folder, pandas would read the files in it
            frame = read(stream)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; run the {stage} stage") from None
    except Exception as error:  # a damaged header makes Arrow and pandas raise any exception
        reason = " ".join(str(error).split())  # some of Arrow's messages have several lines
        raise ValueError(f"{path}: not a table of the {stage} stage ({reason}); {remedy}") from None
    missing = [name for name in columns if name not in frame]
    if missing:
        raise ValueError(f"{path}: column {missing[0]} is missing; {remedy}")
    return frame
