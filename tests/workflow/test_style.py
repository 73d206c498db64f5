"""The workflow's own form: lint and format."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from runs import ROOT, snakemake


def test_lint_has_nothing_to_say(tmp_path: Path) -> None:
    run = snakemake(tmp_path, "--lint")
    assert run.code == 0, run.output


def test_the_workflow_is_formatted() -> None:
    command = [sys.executable, "-m", "snakefmt", "--check", "Snakefile", "workflow"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
