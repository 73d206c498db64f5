"""The workflow for continuous integration asks for what there is, and for no more rights than it needs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def jobs() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in WORKFLOWS:
        yield from yaml.safe_load(path.read_text())["jobs"].items()


def steps() -> Iterator[dict[str, Any]]:
    yield from (step for _, job in jobs() for step in job["steps"])


def matrix() -> dict[str, list[str]]:
    return dict(jobs())["test"]["strategy"]["matrix"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_may_read_and_nothing_else(path: Path) -> None:
    content = yaml.safe_load(path.read_text())
    assert content["permissions"] == {"contents": "read"}
    assert not [name for name, job in content["jobs"].items() if "permissions" in job]
    events = content[True]  # YAML takes the key `on` for a truth value
    assert "pull_request_target" not in events and "secrets" not in path.read_text()


def test_every_action_is_pinned_to_a_commit_and_checkouts_keep_no_credentials() -> None:
    used = [step for step in steps() if "uses" in step]
    assert used and all(re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", step["uses"]) for step in used)
    checkouts = [step for step in used if step["uses"].startswith("actions/checkout@")]
    assert checkouts and all(step["with"]["persist-credentials"] is False for step in checkouts)
    text = "".join(path.read_text() for path in WORKFLOWS)
    assert text.count("uses:") == len(re.findall(r"uses: \S+ # v\d+\.\d+\.\d+$", text, re.MULTILINE))


def test_no_expression_reaches_a_shell() -> None:
    assert not [step["run"] for step in steps() if "${{" in step.get("run", "")]


def test_every_command_is_there() -> None:
    lines = [line.strip() for step in steps() for line in step.get("run", "").splitlines()]
    assert {"make lint", ".ci/run", "make test-numeric", "make test-all"} <= set(lines)
    for program, *words in map(shlex.split, lines):
        if program == "make":
            plan = subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, check=False)
            assert plan.returncode == 0, plan.stderr
        elif "/" in program and not program.startswith(".venv/"):
            assert os.access(ROOT / program, os.X_OK), program
        else:
            assert program in ("read", "python", ".venv/bin/python")


def test_every_version_is_one_that_the_package_supports() -> None:
    assert all(version in SpecifierSet(PROJECT["requires-python"]) for version in matrix()["python"])
    lines = [
        *PROJECT["dependencies"],
        *PROJECT["optional-dependencies"]["pipeline"],
        *PROJECT["optional-dependencies"]["measure"],
    ]
    supported = {r.name: r.specifier for r in map(Requirement, lines)}
    locked, other = matrix()["transformers"]
    assert locked == ""
    asked = {r.name: r.specifier for r in map(Requirement, other.split())}
    assert "4.57.6" in asked["transformers"] and "4.57.6" in supported["transformers"]
    for name, wanted in (("datasets", "4.8.5"), ("huggingface_hub", "0.36.2")):
        assert wanted in asked[name] and wanted in supported[name]


def test_numeric_tests_run_in_the_orders_of_several_cpus() -> None:
    job = dict(jobs())["cpus"]
    assert job["env"]["ATEN_CPU_CAPABILITY"] == "${{ matrix.aten }}"
    assert [each["aten"] for each in job["strategy"]["matrix"]["include"]] == ["default", "avx2", "avx512"]
    plan = subprocess.run(["make", "-n", "test-numeric"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    folders = re.findall(r"tests/unit/\w+", plan)
    assert "tests/unit/core" in folders and all((ROOT / folder).is_dir() for folder in folders)


def test_slow_tests_run_once_a_week_and_on_request() -> None:
    (path,) = WORKFLOWS
    (schedule,) = yaml.safe_load(path.read_text())[True]["schedule"]
    assert re.fullmatch(r"\d+ \d+ \* \* [0-6]", schedule["cron"])
    of_schedule = {name for name, job in jobs() if "schedule" in job.get("if", "")}
    assert of_schedule == {"slow", "vulnerabilities"}
