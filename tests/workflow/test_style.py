"""The workflow's own form: lint, format, schemas, and the table of keys."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from runs import ROOT, snakemake

PRINTING = ("estimate", "doctor", "verify", "prefetch")
"""Rules that print, and make no file."""
SCHEMAS = sorted((ROOT / "workflow" / "schemas").glob("*.schema.yaml"))


def test_lint_has_nothing_to_say(tmp_path: Path) -> None:
    run = snakemake(tmp_path, "--lint")
    assert run.code == 0, run.output


def test_the_workflow_is_formatted() -> None:
    command = [sys.executable, "-m", "snakefmt", "--check", "Snakefile", "workflow"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def nodes(schema: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Every schema within a schema, with the keys that lead to it."""
    yield path, schema
    for key, inner in schema.get("properties", {}).items():
        yield from nodes(inner, (*path, key))
    for key in schema.get("$defs", {}):
        if "properties" in schema["$defs"][key]:
            yield from nodes(schema["$defs"][key], (*path, key))
    if isinstance(schema.get("additionalProperties"), dict):
        yield from nodes(schema["additionalProperties"], (*path, "<name>"))


@pytest.mark.parametrize("file", SCHEMAS, ids=lambda file: file.stem)
def test_schemas_are_closed_and_described_at_every_level(file: Path) -> None:
    for path, node in nodes(yaml.safe_load(file.read_text())):
        if node.get("type") == "object":
            closed = node.get("additionalProperties")
            assert closed is False or isinstance(closed, dict), path
        if path and path[-1] != "<name>":
            assert node.get("description", "").endswith("."), path


@pytest.mark.parametrize("file", SCHEMAS, ids=lambda file: file.stem)
def test_every_key_is_explained(file: Path) -> None:
    words = set(re.findall(r"[A-Za-z_]+", " ".join(re.findall(r"`([^`]+)`", (ROOT / "config/README.md").read_text()))))
    missing = {path[-1] for path, _ in nodes(yaml.safe_load(file.read_text())) if path} - words - {"<name>"}
    assert not missing


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
