"""`residual-mass measure` with models of a hub, which this machine serves."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import save_tiny, tiny_llama
from tests.small_hub import Repository, SmallHub, serving

TEXT = "The cat sat on the mat, and the dog looked on. " * 60


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[SmallHub]:
    save_tiny(tiny_llama(5), tmp_path / "assets")
    files = {file.name: file.read_bytes() for file in (tmp_path / "assets/models/tiny-llama").iterdir()}
    open_, gated = Repository("a" * 40, files), Repository("b" * 40, files, gated=True)
    with serving(SmallHub({"models/someone/open": open_, "models/someone/gated": gated})) as small:
        yield small


def measured(model: str, hub: SmallHub, folder: Path) -> subprocess.CompletedProcess[str]:
    """As a user types it, without a login; files that were fetched stay in the folder."""
    (folder / "a.txt").write_text(TEXT)
    arguments = f"measure {model} a.txt --length 128 --tokens 4 --documents 3 --methods topk --device cpu --out found"
    own = {"HF_ENDPOINT": hub.address, "HF_HOME": str(folder / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")} | own
    return subprocess.run(
        [sys.executable, "-m", "residual_mass", *arguments.split()], cwd=folder, capture_output=True, text=True,
        check=False, env=environment,
    )  # fmt: skip


def test_a_model_is_fetched_once(hub: SmallHub, tmp_path: Path) -> None:
    first = measured("someone/open", hub, tmp_path)
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("open, prompts of 128 tokens")
    fetched = [path for path, _ in hub.fetched]
    assert "someone/open/model.safetensors" in fetched and len(set(fetched)) == len(fetched)
    again = measured("someone/open", hub, tmp_path)
    assert again.returncode == 0 and [path for path, _ in hub.fetched] == fetched
    assert "0 of" in again.stderr


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            "someone/gated",
            "someone/gated: access is restricted: accept its licence on its page on the hub, then set HF",
        ),
        ("someone/else", "someone/else: not on the hub, or private: check the name, or log in with `hf auth login`"),
    ],
)
def test_a_model_that_is_not_given_is_told_in_one_line(model: str, message: str, hub: SmallHub, tmp_path: Path) -> None:
    run = measured(model, hub, tmp_path)
    assert run.returncode == 2
    assert message in run.stderr.splitlines()[-1], run.stderr
    assert "Traceback" not in run.stderr
    assert not [file for file in (tmp_path / "found").rglob("*") if file.is_file()]
