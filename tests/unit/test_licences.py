"""docs/licences.md lists what is locked, pinned and fetched, and nothing else."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from tests.needs import LOCKED

from residual_mass.texts.assets import PINS, SOURCES, read_pins
from residual_mass.texts.names import BABILONG, HUB, LONGBENCH

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "licences.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    found = importlib.util.spec_from_file_location("licences", ROOT / "tools" / "licences.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def rows(title: str) -> list[list[str]]:
    """The cells of the rows below a heading, heads left out."""
    part = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    return [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("|")][2:]


def test_every_locked_package_is_listed_and_no_other() -> None:
    lock = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    assert [f"{name}=={version}" for name, version, _ in rows("Packages")] == lock


def test_no_licence_is_left_open() -> None:
    for cells in rows("Packages"):
        assert re.search("[A-Za-z]", cells[2]) and "not stated" not in cells[2], cells


def test_every_source_of_the_assets_is_listed() -> None:
    pins = read_pins(PINS)
    listed = [tuple(cells) for cells in rows("Models and data from pinned wheels")]
    assert listed == [(s.note, f"{s.package} {pins[s.package]}", s.licence) for s in SOURCES]


def test_everything_of_the_hub_is_listed() -> None:
    backbones = yaml.safe_load((ROOT / "config" / "config.yaml").read_text())["backbones"].values()
    models = {backbone["model_id"] for backbone in backbones if backbone["source"] == "hub"}
    wanted = {*models, *(text.data_set for text in HUB.values()), BABILONG, LONGBENCH, "baber/paul_graham_essays"}
    assert {cells[0] for cells in rows("Models and data from the Hugging Face hub")} == wanted


def test_the_page_is_what_the_script_writes(script: ModuleType) -> None:
    for name, version in script.locked():
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed = "not installed"
        if installed.partition("+")[0] != version:
            LOCKED.skip()
    assert script.page() == PAGE


def test_a_licence_is_read_where_a_package_states_it(script: ModuleType, tmp_path: Path) -> None:
    def stated(fields: str, file: str = "") -> str:
        folder = tmp_path / "some_package-1.0.dist-info"
        (folder / "licenses").mkdir(parents=True, exist_ok=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: some-package\nVersion: 1.0\n{fields}\n")
        (folder / "licenses" / "LICENSE").write_text(file)
        (folder / "RECORD").write_text(f"{folder.name}/licenses/LICENSE,,\n")
        return script.stated_licence(metadata.PathDistribution(folder))

    osi = "Classifier: License :: OSI Approved"
    assert stated(f"License-Expression: MIT AND Zlib\n{osi} :: BSD License") == "MIT AND Zlib"
    assert stated(f"License: the text of it\n{osi} :: BSD License\n{osi} :: MIT License") == "BSD License, MIT License"
    assert stated(f"License: MPL-2.0\n{osi}") == "MPL-2.0"
    assert stated("License: LICENCE.txt", "\n  Apache License\n  Version 2.0\n") == "Apache License"


def test_another_version_than_the_locked_one_is_refused(tmp_path: Path) -> None:
    """The script on a lock that names a version which is not installed."""
    for name in ("config/config.yaml", "tools/licences.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "requirements.lock").write_text("# remark\nnumpy==0.0.1\n")
    command = [sys.executable, str(tmp_path / "tools" / "licences.py")]
    source = {"PYTHONPATH": str(ROOT / "src")}
    run = subprocess.run(command, env=source, capture_output=True, text=True, check=False)
    assert run.returncode == 1 and run.stderr.startswith("numpy: ") and run.stderr.count("\n") == 1
    assert "install 0.0.1 of requirements.lock first" in run.stderr and not (tmp_path / "docs").exists()
