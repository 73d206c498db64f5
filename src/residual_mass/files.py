"""Files that are never half-written: atomic replacement, hashes, JSON lines, CSV, Parquet, provenance sidecars."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import os
import platform
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary name in `path`'s folder; on success it replaces `path` in one step, on an exception it is
    removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with open(temporary, "rb") as stream:
            os.fsync(stream.fileno())
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # mkstemp makes private files; results are for sharing
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """Raises ValueError naming the file when it is missing or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON ({error}); delete it and rerun the rule that makes it") from None


def sha256_of(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sha256_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def jsonl(rows: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, sort_keys=True, ensure_ascii=False) + "\n" for row in rows)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All rows of `path`.

    Raises:
        ValueError: the file is missing or a line is not a JSON object; names file and line.
    """
    rows = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: prompts hold U+2028 and the like
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error}); delete it and rerun the rule that makes it") from None
    if lines[-1] == "":
        lines.pop()
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            row = None
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{number}: not a JSON object; delete the file and rerun the rule that makes it")
        rows.append(row)
    return rows


def csv_text(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """A CSV file's text; what a row lacks is empty."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def read_csv(path: Path, columns: Iterable[str], stage: str) -> list[dict[str, str]]:
    """All rows of a CSV file that `stage` wrote, with at least these columns.

    Raises:
        ValueError: the file is missing, cut short or malformed, or lacks a column; names file and line.
    """
    remedy = f"delete it and run the {stage} stage again"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; run the {stage} stage") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error}); {remedy}") from None
    if not text.endswith("\n"):
        raise ValueError(f"{path}: empty or cut short, its last line does not end; {remedy}")
    header, *rows = csv.reader(io.StringIO(text))
    if missing := [name for name in columns if name not in header]:
        raise ValueError(f"{path}: column {missing[0]} is missing; {remedy}")
    for number, row in enumerate(rows, start=2):
        if len(row) != len(header):
            raise ValueError(f"{path}:{number}: {len(row)} fields where the header has {len(header)}; {remedy}")
    return [dict(zip(header, row, strict=True)) for row in rows]


def finite_field(row: Mapping[str, str], name: str, where: str, remedy: str) -> float:
    """A field of a CSV row as a finite number; raises ValueError naming the place, the field and the remedy."""
    try:
        value = float(row[name])
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{where}: {name} is {row[name]!r}, not a finite number; {remedy}")
    return value


def only_value(rows: Iterable[Mapping[str, str]], name: str, path: Path, remedy: str) -> str:
    """The one value that a field has in all rows of `path`; raises ValueError when there is not exactly one."""
    values = dict.fromkeys(row[name] for row in rows)
    if len(values) != 1:
        found = " and ".join(map(repr, values)) or "no row"
        raise ValueError(f"{path}: {name} should have one value, found {found}; {remedy}")
    return next(iter(values))


def read_parquet(path: Path, columns: Iterable[str], stage: str) -> pandas.DataFrame:
    """These columns of a Parquet file that `stage` wrote, one row at least; what they hold is not checked.

    Raises:
        ValueError: the file is missing, damaged or empty, or lacks a column; names the file.
    """
    import pandas  # only here, so that stages without tables start fast
    import pyarrow

    remedy = f"delete it and run the {stage} stage again"
    try:
        frame = pandas.read_parquet(path)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; run the {stage} stage") from None
    except (pyarrow.ArrowInvalid, OSError) as error:
        reason = " ".join(str(error).split())  # some of Arrow's messages have several lines
        raise ValueError(f"{path}: not a Parquet file ({reason}); {remedy}") from None
    columns = list(columns)
    if missing := [name for name in columns if name not in frame]:
        raise ValueError(f"{path}: column {missing[0]} is missing; {remedy}")
    if frame.empty:
        raise ValueError(f"{path}: has no rows; {remedy}")
    return frame[columns]


def write_meta(output: Path, **facts: Any) -> None:
    """Writes `<output>.meta.json`: what ran on what. Never an input of a rule, so it may hold times and hosts."""
    packages = {}
    for name in ("residual-mass", "torch", "transformers", "lm_eval", "datasets", "snakemake", "numpy"):
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    machine = {"python": platform.python_version(), "platform": platform.platform(), "cpus": os.cpu_count()}
    write_json(output.with_name(output.name + ".meta.json"), {**facts, "packages": packages, "machine": machine})
