"""Tables that stages hand on are read whole or refused in one line."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from filelock import FileLock

from residual_mass.files import atomic_write, locked, read_csv, read_parquet, write_text

AGAIN = "delete it and run the capture stage again"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    frame = pd.DataFrame({"k": [1, 21, 62], "corpus": pd.Categorical(["wiki"] * 3), "e_sub": [0.5, float("nan"), 0.1]})
    frame.to_parquet(path := tmp_path / "rows.parquet")
    return path


def refusal(path: Path, *columns: str) -> str:
    with pytest.raises(ValueError) as caught:
        read_parquet(path, columns, "capture")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_columns_come_as_they_stand_and_in_the_order_asked_for(path: Path) -> None:
    read = read_parquet(path, (name for name in ("e_sub", "corpus")), "capture")
    pd.testing.assert_frame_equal(read, pd.read_parquet(path)[["e_sub", "corpus"]])
    assert read["e_sub"].isna().tolist() == [False, True, False]  # values are for others to judge


def test_a_missing_file_names_the_stage(path: Path) -> None:
    path.unlink()
    assert refusal(path, "k") == f"{path}: no such file; run the capture stage"


def test_a_file_that_is_cut_anywhere_is_damaged(path: Path) -> None:
    whole = path.read_bytes()
    for kept in (0, 3, 10, len(whole) // 2, len(whole) - 100, len(whole) - 1):
        path.write_bytes(whole[:kept])
        message = refusal(path, "k")
        assert message.startswith(f"{path}: not a Parquet file (") and message.endswith(f"); {AGAIN}")


def test_damage_within_a_file_is_found(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + b"\xff" * 40 + whole[44:])
    assert refusal(path, "k").startswith(f"{path}: not a Parquet file (")


def test_the_first_missing_column_and_a_file_without_rows_are_named(path: Path) -> None:
    assert refusal(path, "k", "layer", "head") == f"{path}: column layer is missing; {AGAIN}"
    pd.read_parquet(path).iloc[:0].to_parquet(path)
    assert refusal(path, "k") == f"{path}: has no rows; {AGAIN}"


def test_only_what_befalls_the_file_itself_is_said_of_it(tmp_path: Path) -> None:
    path = tmp_path / "result"
    with pytest.raises(FileNotFoundError) as other, atomic_write(path):
        (tmp_path / "input").read_bytes()
    assert other.value.filename == str(tmp_path / "input") and "cannot be written" not in str(other.value)
    with pytest.raises(OSError) as own, atomic_write(path) as temporary:
        temporary.unlink()
        temporary.read_bytes()
    assert str(own.value).startswith(f"{path}: cannot be written (No such file")
    assert list(tmp_path.iterdir()) == []


def test_a_file_takes_its_name_whole_and_after_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has the old file open goes on reading that one, and a machine that dies leaves one of the two."""
    path = tmp_path / "result"
    write_text(path, "old")
    synced: list[tuple[int, int, str]] = []
    fsync = os.fsync

    def seen(descriptor: int) -> None:
        fsync(descriptor)
        of_file = os.fstat(descriptor)
        synced.append((of_file.st_ino, of_file.st_size, path.read_text()))

    monkeypatch.setattr(os, "fsync", seen)
    with open(path) as reader:
        write_text(path, "new and longer")
        assert reader.read() == "old"
    assert path.read_text() == "new and longer"
    assert synced == [(path.stat().st_ino, len("new and longer"), "old")]


def test_a_claim_that_cannot_be_made_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError) as error, locked(path := tmp_path / "file" / "checkpoint"):
        pass
    assert str(error.value).startswith(f"{path}: cannot be written (")


def test_where_there_are_no_locks_a_claim_warns_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(lock: FileLock) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(FileLock, "acquire", no_locks)
    with locked(path := tmp_path / "checkpoint"):
        assert f"{path}: this file system has no locks; run no second job" in caplog.text


def test_the_module_does_not_load_pandas() -> None:
    code = "import sys, residual_mass.files; print({'pandas', 'pyarrow'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_a_csv_cut_in_its_last_field_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "result.csv"
    path.write_text("task,value\nall,0.625\n")
    assert read_csv(path, ["task", "value"], "score") == [{"task": "all", "value": "0.625"}]
    path.write_text("task,value\nall,0.6")
    with pytest.raises(ValueError, match=r"result\.csv: empty or cut short, .* run the score stage again"):
        read_csv(path, ["task", "value"], "score")
