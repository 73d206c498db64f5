"""Inputs, outputs and spec of every job of each study equal the reviewed and committed files."""

from __future__ import annotations

import sys
from difflib import unified_diff
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))  # of this checkout, also where tools/mutants.py runs it

from goldens import GOLDEN, golden_jobs, studies  # noqa: E402


@pytest.mark.parametrize("study", studies())
def test_the_jobs_of_a_study_are_those_that_were_reviewed(study: str) -> None:
    golden = (GOLDEN / f"jobs_{study}.txt").read_text("utf-8").splitlines()
    changed = list(unified_diff(golden, golden_jobs(study).splitlines(), "golden", "planned", n=1, lineterm=""))
    assert not changed, "\n".join([*changed[:60], "where this is meant: python tools/goldens.py"])


def test_every_golden_is_of_a_study() -> None:
    assert sorted(path.stem for path in GOLDEN.glob("jobs_*.txt")) == [f"jobs_{study}" for study in studies()]
