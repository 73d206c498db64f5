"""tools/mutants.py on a small project."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TOOLS = Path(__file__).parents[2] / "tools"
MUTANTS = """\
[[group]]
file = "src/sums.py"
tests = ["tests/test_sums.py", "tests/test_gone.py"]
mutants = [
  { what = "differences", old = "a + b", new = "a - b" },
  { what = "unused", old = "unused = 1", new = "unused = 2" },
  { what = "absent", old = "a * b", new = "a / b" },
  { what = "twice", old = "def ", new = "async def " },
  { what = "broken", old = "def total(", new = "def total(:" },
]
"""


def test_each_change_is_judged_alone(tmp_path: Path) -> None:
    for folder in ("src", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "src" / "sums.py").write_text("unused = 1\n\ndef total(a, b):\n    return a + b\n\ndef other(): pass\n")
    test = "from sums import total\n\ndef test_zero():\n    assert not total(0, 0)\n\ndef test_total():\n    "
    (tmp_path / "tests" / "test_sums.py").write_text(f"{test}assert total(1, 2) == 3\n")
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["slow", "gpu"]\n')
    (tmp_path / "mutants.toml").write_text(MUTANTS)
    script = "from mutants import *; [verdict(Path('.'), each) for each in read(Path('mutants.toml'))]"
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env={"PYTHONPATH": str(TOOLS)}, capture_output=True, text=True
    )
    assert run.stdout.splitlines() == [
        "src/sums.py: differences: noticed by tests/test_sums.py::test_total",
        "src/sums.py: unused: NOT NOTICED",
        "src/sums.py: absent: does not apply: the text occurs 0 times",
        "src/sums.py: twice: does not apply: the text occurs 2 times",
        "src/sums.py: broken: noticed by tests/test_sums.py (collection)",
    ], run.stderr
