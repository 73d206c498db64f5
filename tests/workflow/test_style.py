"""The workflow's own form: lint, format, and what every rule says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from runs import ROOT, snakemake

PRINTING = ("estimate", "doctor", "verify", "prefetch")
"""Rules that print, and make no file."""


def test_lint_has_nothing_to_say(tmp_path: Path) -> None:
    run = snakemake(tmp_path, "--lint")
    assert run.code == 0, run.output


def test_the_workflow_is_formatted() -> None:
    command = [sys.executable, "-m", "snakefmt", "--check", "Snakefile", "workflow"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_every_rule_says_where_it_logs_and_what_it_takes() -> None:
    rules = [
        text for file in (ROOT / "workflow/rules").glob("*.smk") for text in re.split(r"\nrule ", file.read_text())
    ]
    for rule in (text for text in rules if "shell:" in text):
        name = rule.partition(":")[0]
        directives = ["log", "conda", "threads", "resources", "message"]
        directives += ["input", "output", "benchmark"] * (name not in PRINTING)
        for directive in directives + ["params"] * ("{params." in rule):
            assert f"\n    {directive}:" in rule, f"{name} has no {directive}"
        assert re.search(r"> {log} 2>&1|2>&1 \| tee {log}", rule), name
