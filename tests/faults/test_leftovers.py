"""Temporary files of killed processes are removed, those of running processes stay, and locks are exclusive."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from residual_mass.files import atomic_write, locked, remove_leftovers, write_json, write_text


@contextmanager
def busy(path: Path, how: str) -> Iterator[subprocess.Popen[str]]:
    """Another process within `how`(path), a context manager of `files`."""
    code = (
        "import pathlib, sys, time; from residual_mass import files\n"
        f"with files.{how}(pathlib.Path({str(path)!r})) as inside:\n"
        "    print(inside, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline()
        yield process
        process.kill()


def temporaries(folder: Path) -> list[Path]:
    return sorted(folder.glob(".*"))


def test_what_a_killed_process_left_goes_when_its_file_is_written_again(tmp_path: Path) -> None:
    path, neighbour = tmp_path / "all.json", tmp_path / "all.json.meta.json"
    for file in (path, neighbour):
        for _ in range(2):
            with busy(file, "atomic_write") as process:
                process.kill()
    assert len(temporaries(tmp_path)) == 2  # of each file one: the second process removed what the first left
    write_json(path, {})
    (left,) = temporaries(tmp_path)
    assert left.name.startswith(".all.json.meta.json.")
    remove_leftovers(neighbour)
    assert temporaries(tmp_path) == [] and path.read_text() == "{}\n"


def test_what_a_living_process_writes_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "all.json"
    with busy(path, "atomic_write") as process:
        write_text(path, "ours")
        remove_leftovers(path)
        (other,) = temporaries(tmp_path)
        with atomic_write(path) as inner:
            assert sorted([other, inner]) == temporaries(tmp_path)
        process.communicate("")
        assert process.returncode == 0
    assert temporaries(tmp_path) == [] and path.read_text() == ""


@pytest.mark.parametrize("name", ["a[b].csv", "no_suffix", ".hidden", "two.dots.tar", "*"])
def test_names_mean_themselves(name: str, tmp_path: Path) -> None:
    mine = tmp_path / f".{name}.abcdefgh{Path(name).suffix}"
    others = [tmp_path / f".{other}.abcdefgh{Path(other).suffix}" for other in ("ab.csv", "x", "ahidden")]
    for file in (mine, *others):
        file.write_text("")
    remove_leftovers(tmp_path / name)
    assert temporaries(tmp_path) == sorted(others)


def test_a_claim_is_of_one_living_process(tmp_path: Path) -> None:
    path = tmp_path / "new" / "checkpoint"
    with busy(path, "locked") as process:
        with pytest.raises(ValueError, match="another job is writing to it; wait for that one or stop it"):
            locked(path).__enter__()
        assert len(temporaries(path.parent)) == 1
        process.kill()
        process.wait()
        with locked(path), pytest.raises(ValueError, match="another job"), locked(path):
            pass
    assert list(path.parent.iterdir()) == []


def test_many_that_claim_take_turns(tmp_path: Path) -> None:
    """Each adds one to a number that only a claim protects; those that are refused try again."""
    path, number = tmp_path / "claim", tmp_path / "number"
    number.write_text("0")
    code = (
        "import pathlib; from residual_mass.files import locked\n"
        f"path, number, done = pathlib.Path({str(path)!r}), pathlib.Path({str(number)!r}), 0\n"
        "while done < 100:\n"
        "    try:\n"
        "        with locked(path):\n"
        "            number.write_text(str(int(number.read_text()) + 1))\n"
        "        done += 1\n"
        "    except ValueError:\n"
        "        pass\n"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert number.read_text() == "300" and not path.with_name(".claim.lock").exists()
