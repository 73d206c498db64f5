"""What was skipped is said in one line at the end of a run, with what makes it run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests import conftest, needs

TESTS = Path(needs.__file__).parent
SAMPLE = """
import pytest
from tests.needs import LOCKED, Need, needs

KEYS = Need("without keys", "look under the mat", lambda: False)
HANDS = Need("without hands", "grow some", lambda: True)

@needs(KEYS)
@pytest.mark.parametrize("door", range(3))
def test_doors(door):
    raise AssertionError

@needs(HANDS)
def test_hands():
    pass

def test_locked():
    LOCKED.skip()
"""


def ends(folder: Path, sample: str, *arguments: str) -> list[str]:
    """The last two lines of a run of the tests in `sample`."""
    (folder / "conftest.py").write_text("from tests.needs import pytest_terminal_summary\n")
    (folder / "test_sample.py").write_text(sample)
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", folder, *arguments, folder]
    environment = os.environ | {"PYTHONPATH": str(TESTS.parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return run.stdout.splitlines()[-2:]


@pytest.mark.parametrize("arguments", [[], ["-p", "xdist", "-n", "2"]])
def test_the_line_counts_what_was_skipped_and_says_how_to_run_it(arguments: list[str], tmp_path: Path) -> None:
    line, last = ends(tmp_path, SAMPLE, *arguments)
    locked = "1 without the locked packages (pip install -r requirements.lock)"
    assert line == f"skipped: 3 without keys (look under the mat), {locked}"
    assert last.startswith("1 passed, 4 skipped in ")


def test_nothing_is_said_where_nothing_was_skipped(tmp_path: Path) -> None:
    line, last = ends(tmp_path, "def test_nothing():\n    pass\n")
    assert "skipped" not in line and last.startswith("1 passed in ")


def test_no_test_is_skipped_for_a_reason_that_the_line_cannot_explain() -> None:
    assert conftest.pytest_terminal_summary is needs.pytest_terminal_summary
    for path in TESTS.rglob("*.py"):
        if path not in (Path(needs.__file__), Path(__file__)):
            calls = re.findall(r"pytest\.(?:mark\.skip\w*|skip|importorskip)\b.*", path.read_text())
            assert all(".reason)" in call for call in calls), (path, calls)
