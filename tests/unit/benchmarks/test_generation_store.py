from __future__ import annotations

import json
import os
import re
import resource
from pathlib import Path
from typing import Any

import pytest
from tests.refusals import refused

from residual_mass.benchmarks.store import GENERATED_FIELDS, RowStore


def stored_row(key: str, text: str) -> dict[str, Any]:
    return {
        "key": key, "task": "ruler_vt", "index": 0, "method": "topk", "budget_percent": 3.0, "maps": None, "k": 11,
        "cut_tokens": 0, "text": text, "phi_sha": None, "prompt_sha": "f00",
    }  # fmt: skip


ROWS = [stored_row(f"k{i}", f"línea\u2028{i}") for i in range(3)]
WHOLE = json.dumps(ROWS[0]).encode()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "_store" / "rows.jsonl"
    with RowStore(path, GENERATED_FIELDS) as store:
        store.append(ROWS[:2])
        store.append(ROWS[2:])
    return path


@pytest.mark.parametrize("room", [0, 10, 10_000])
def test_rows_that_do_not_all_fit_are_added_together_once_there_is_room(path: Path, room: int) -> None:
    whole, more = path.read_bytes(), [stored_row(key, "x" * 9000) for key in ("k3", "k4")]
    with RowStore(path, GENERATED_FIELDS) as store:
        old = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + room, old[1]))
        try:
            with pytest.raises(OSError, match=re.escape(str(path))):
                store.append(more)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)
        assert path.read_bytes() == whole and list(store.rows.values()) == ROWS
        store.append(more)
    with RowStore(path, GENERATED_FIELDS) as store:
        assert list(store.rows.values()) == [*ROWS, *more]


def test_torn_last_line_is_cut_off_wherever_it_tore(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = path.read_bytes()
    kept = whole.rfind(b"\n", 0, -1) + 1
    for end in range(kept + 1, len(whole)):
        path.write_bytes(whole[:end])
        caplog.clear()
        with RowStore(path, GENERATED_FIELDS) as store:
            assert list(store.rows.values()) == ROWS[:2]
            store.append(ROWS[2:])
        assert path.read_bytes() == whole
        assert "cutting off a torn last line" in caplog.text


@pytest.mark.parametrize(
    "line",
    [
        b"", b"{", b"[]", b'{"key": 3}', b'{"text": "x"}', b"\xff\xfe", b"\x00\x00", b"[" * 100_000,
        WHOLE.replace(b'"prompt_sha"', b'"prompt_sh`"'), WHOLE.replace(b'"k0"', b"7"),
    ],
)  # fmt: skip
def test_other_malformed_lines_are_named(path: Path, line: bytes) -> None:
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([lines[0], line, *lines[1:]]))
    with refused(f"{path}:2: not a row of this store"), RowStore(path, GENERATED_FIELDS):
        pass


def test_rows_that_contradict_each_other_are_refused(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content + content)
    with RowStore(path, GENERATED_FIELDS) as store:
        assert len(store.rows) == 3
    path.write_bytes(content + content.replace(b"nea", b"NEA"))
    with (
        pytest.raises(ValueError, match=r"rows\.jsonl:4: differs from an earlier row"),
        RowStore(path, GENERATED_FIELDS),
    ):
        pass


def test_rows_are_on_the_disk_once_append_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"
    synced: list[tuple[int, int]] = []
    fsync = os.fsync

    def seen(descriptor: int) -> None:
        fsync(descriptor)
        synced.append((os.fstat(descriptor).st_ino, os.fstat(descriptor).st_size))

    monkeypatch.setattr(os, "fsync", seen)
    with RowStore(path, GENERATED_FIELDS) as store:
        for row in ROWS:
            store.append([row])
            assert synced[-1:] == [(path.stat().st_ino, path.stat().st_size)]
            assert path.read_bytes().endswith(json.dumps(row, sort_keys=True, ensure_ascii=False).encode() + b"\n")
    assert len(synced) == len(ROWS)
