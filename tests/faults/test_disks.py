"""Full and read-only disks: stages end with one line that names the file and the remedy, and nothing is lost."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pandas as pd
import pytest
import torch
from tests.faults import stages
from tests.faults.conftest import Undisturbed, names_in
from tests.needs import MOUNTS
from tests.unit.texts.test_assets import SOURCES, make_wheel, write_pins

from residual_mass.files import require_writable, write_parquet, write_text
from residual_mass.machine import preflight
from residual_mass.model.phi_maps import write_safetensors
from residual_mass.texts import assets

KEPT = "what was there before is kept; make room on its disk, or make its folder writable, and run this again"


@contextmanager
def mounted(folder: Path, *arguments: str) -> Iterator[Path]:
    """Skips the test where this user may not mount."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(["mount", *arguments, str(folder)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        MOUNTS.skip()
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def resized(folder: Path, size: str) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(folder)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=256k", "tmpfs") as folder:
        yield folder


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder that this user cannot write to, whoever that is."""
    folder = tmp_path / "read_only"
    folder.mkdir()
    with ExitStack() as stack:
        if os.geteuid() == 0:  # whom permissions do not bind
            stack.enter_context(mounted(folder, "--bind", str(folder)))
            subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True)
        else:
            folder.chmod(0o555)
            stack.callback(folder.chmod, 0o755)
        yield folder


WRITERS: dict[str, Callable[[Path, int], None]] = {
    "text": lambda path, size: write_text(path, "é" * size),
    "safetensors": lambda path, size: write_safetensors(path, {"x": torch.rand(size)}, {"header": "{}"}),
    "parquet": lambda path, rows: write_parquet(path, pd.DataFrame({"x": torch.rand(rows).double().numpy()})),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_file_that_does_not_fit_is_named_and_the_former_one_is_kept(kind: str, small_disk: Path) -> None:
    path = small_disk / "result"
    WRITERS[kind](path, 100)
    before = path.read_bytes()
    with pytest.raises(OSError) as error:
        WRITERS[kind](path, 500_000)
    said = str(error.value)
    assert said.startswith(f"{path}: cannot be written (") and said.endswith(f"); {KEPT}") and "\n" not in said
    assert "No space left on device" in said and said.count("cannot be written") == 1
    assert path.read_bytes() == before and names_in(small_disk) == {"result"}


@pytest.mark.parametrize("size", [100_000, 400_000])  # fits as a wheel but not beside what is in it, and not even so
def test_assets_on_a_full_disk_say_so_and_leave_nothing(
    size: int, small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    texts = {f"first_data/texts/{name}.txt": name * size for name in "ab"}
    wheels = make_wheel(tmp_path, "first-data", texts), make_wheel(tmp_path, "second-data", {"second_data/qa.json": ""})
    out = small_disk / "assets" / "manifest.json"
    with pytest.raises(OSError) as error:
        assets.run(write_pins(tmp_path / "assets.txt", *wheels), out, SOURCES)
    said = str(error.value)
    assert said.startswith(f"{out}: cannot be written (") and said.endswith(f"); {KEPT}") and "\n" not in said
    assert "No space left on device" in said and list(out.parent.iterdir()) == []


def test_a_full_or_read_only_disk_is_told_before_the_work(small_disk: Path, read_only: Path) -> None:
    require_writable(small_disk / "new" / "result")
    with pytest.raises(OSError) as error:
        require_writable(small_disk / "result", read_only / "result")
    assert str(error.value).startswith(f"{read_only / 'result'}: cannot be written (")
    told = f"{read_only}: cannot be written to; make the folder or its disk writable"
    assert preflight.unwritable([small_disk / "result", read_only / "new" / "result"]) == [told]
    with pytest.raises(OSError), open(small_disk / "filler", "wb", buffering=0) as stream:
        while True:
            stream.write(bytes(4096))
    with pytest.raises(OSError) as error:
        require_writable(small_disk / "result")
    assert str(error.value) == f"{small_disk / 'result'}: cannot be written (No space left on device); {KEPT}"


@pytest.mark.slow
@pytest.mark.parametrize("name", stages.NAMES)
def test_stages_on_a_full_disk_say_so_and_go_on_once_there_is_room(
    name: str, undisturbed: Callable[[str], Undisturbed], tmp_path: Path
) -> None:
    """On disks from too small for anything to nearly large enough."""
    expected, log = undisturbed(name), tmp_path / "log"
    needed, refused = sum(map(len, expected.made.values())), 0
    for part in (1, 2, 4, 6, 7):
        size = f"size={max(8192, needed * part // 8)}"
        with mounted(tmp_path / f"disk{part}", "-t", "tmpfs", "-o", size, "tmpfs") as disk:
            log.unlink(missing_ok=True)
            code = stages.run(expected.stage, disk / "out", log)
            if code != 0:
                refused += 1
                (last,) = [line for line in log.read_text().splitlines() if "error:" in line]
                assert code == 2 and last.startswith(f"residual_mass {name}: error: {disk}/out/")
                assert "No space left on device" in last and last.endswith(f"); {KEPT}")
                assert "Traceback" not in log.read_text() and not list(disk.rglob(".*"))
                made = expected.stage.made(disk / "out")
                assert all(expected.made[file].startswith(content) for file, content in made.items())
                resized(disk, "64m")
                assert stages.run(expected.stage, disk / "out", log) == 0, log.read_text()
            assert expected.is_made_in(disk / "out")
    assert refused >= 3
    print(f"{name}: refused {refused} of 5")
