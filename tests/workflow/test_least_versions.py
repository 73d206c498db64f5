"""The least versions in pyproject.toml: an environment of them plans the study, and its planning passes its tests.

torch alone is the one that is here: older wheels of it bring gigabytes of CUDA.
"""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
from environments import linked_environment
from packaging.requirements import Requirement
from runs import ROOT
from tests.needs import INDEX, OLDEST_PYTHON, needs

pytestmark = [pytest.mark.slow, pytest.mark.network, needs(OLDEST_PYTHON)]

PLANNING = (
    "tests/unit/study", "tests/unit/machine", "tests/unit/paper", "tests/workflow/test_dry_runs.py",
    "tests/workflow/test_refusals.py",
)  # fmt: skip


def least_versions() -> Iterator[str]:
    """Yields an exact pin for every requirement of every extra but torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for line in (*project["dependencies"], *chain(*project["optional-dependencies"].values())):
        requirement = Requirement(line)
        if requirement.name in ("torch", project["name"]):
            continue
        (least,) = (bound.version for bound in requirement.specifier if bound.operator == ">=")
        extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
        yield f"{requirement.name}{extras}=={least}"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("least")
    takes = re.compile("torch|functorch|nvidia|cuda|triton").match
    found = linked_environment(folder / "env", lambda name: bool(takes(name)), with_pip=True)
    pip = [found, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    reached = subprocess.run(
        [*pip, "download", "--no-deps", "--dest", folder, "tqdm"], capture_output=True, check=False
    )
    if reached.returncode:
        INDEX.skip()
    made = subprocess.run([*pip, "install", *least_versions()], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout + made.stderr
    return found


def run(python: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(
        [python, "-m", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_the_study_is_planned(python: str, tmp_path: Path) -> None:
    planned = run(python, "snakemake", "--directory", tmp_path, "-n", "--cores", "1", "all")
    assert planned.returncode == 0, planned.stdout + planned.stderr
    assert "this machine lacks nothing" in planned.stdout.splitlines()[-1]


def test_planning_and_rendering_pass_their_tests(python: str) -> None:
    only = "not slow and not gpu and not network"
    tested = run(python, "pytest", "-q", "-p", "no:cacheprovider", "-m", only, *PLANNING)
    assert tested.returncode == 0 and " passed" in tested.stdout, tested.stdout[-6000:] + tested.stderr
