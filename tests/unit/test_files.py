"""Files are written whole and read back unchanged; `tests/faults` and `tests/fuzz` test failures."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pandas as pd
import pytest
from filelock import FileLock
from matplotlib.figure import Figure

from residual_mass.benchmarks.store import RowStore
from residual_mass.files import atomic_write, locked, read_csv, read_parquet, write_json, write_parquet, write_text
from residual_mass.model.phi_maps import HeadShape, PhiMaps
from residual_mass.paper.figures import style
from residual_mass.provenance import Record
from residual_mass.spec.specs import MapSpec


def test_a_table_has_the_columns_and_rows_that_are_asked_for(tmp_path: Path) -> None:
    frame = pd.DataFrame({"k": [1, 21, 62], "corpus": pd.Categorical(["wiki"] * 3), "e_sub": [0.5, float("nan"), 0.1]})
    write_parquet(path := tmp_path / "rows.parquet", frame)
    read = read_parquet(path, (name for name in ("e_sub", "corpus")), "capture")
    pd.testing.assert_frame_equal(read, frame[["e_sub", "corpus"]])  # in this order; values are for others to judge
    write_text(tmp_path / "rows.csv", "task,value\nall,0.6250\nNA,\n")
    rows = read_csv(tmp_path / "rows.csv", ["value"], "score")
    assert rows.to_dict("records") == [{"task": "all", "value": "0.6250"}, {"task": "NA", "value": ""}]
    again = "delete it and run the score stage again"
    for read, file in ((read_parquet, path), (read_csv, tmp_path / "rows.csv")):
        with pytest.raises(ValueError) as error:
            read(file, ["layer", "head"], "score")
        assert str(error.value) == f"{file}: column layer is missing; {again}"
    write_parquet(path, frame.iloc[:0])
    with pytest.raises(ValueError) as error:
        read_parquet(path, ["k"], "score")
    assert str(error.value) == f"{path}: has no rows; {again}"


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


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o027, 0o077])
def test_files_and_folders_have_the_permissions_that_the_umask_gives(tmp_path: Path, umask: int) -> None:
    """Results are for sharing, whichever library writes them and whatever stood there before."""
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "private.json").touch(0o600)
    shared.chmod(0o2770)  # as of a group's folder: what is made in it has its group
    before = os.umask(umask)
    try:
        write_all_kinds(shared / "folder")
        write_json(shared / "private.json", {})
    finally:
        os.umask(before)
    paths = sorted(shared.rglob("*"))
    files = [path for path in paths if path.is_file()]
    folders = [path for path in paths if path.is_dir()]
    assert (len(files), len(folders)) == (8, 1)
    assert {path.name: permissions(path) for path in files} == {path.name: oct(0o666 & ~umask) for path in files}
    assert [permissions(path) for path in folders] == [oct(0o777 & ~umask)]
    assert {path.stat().st_gid for path in paths} == {shared.stat().st_gid}


def permissions(path: Path) -> str:
    return oct(path.stat().st_mode & 0o777)


def write_all_kinds(folder: Path) -> None:
    write_text(folder / "table.tex", "a & b")
    Record("join", {}, []).write(folder / "table.tex")
    write_parquet(folder / "rows.parquet", pd.DataFrame({"k": [1]}))
    PhiMaps(HeadShape(1, 1, 1, 8), MapSpec(d_emb=8, d_phi=8)).save(folder / "maps.safetensors")
    with RowStore(folder / "store.jsonl", frozenset({"key"})) as store:
        store.append([{"key": "a"}])
    style.save(Figure(figsize=(1, 1)), folder / "figure.pdf", folder / "figure.png")


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
