"""Every command that the README shows plans."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from runs import ROOT, dry_run

from residual_mass.cli import _parser

README = (ROOT / "README.md").read_text()
COMMANDS = sorted(set(re.findall(r"^snakemake .*?(?=\s+#|$)", README, re.MULTILINE)))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_plans(command: str, tmp_path: Path) -> None:
    words = [str(ROOT / word) if word.startswith("workflow/") else word for word in shlex.split(command)[1:]]
    run = dry_run(tmp_path, *words)
    trains_alone = any(word.startswith("results/phi/") for word in words)
    looks_alone = bool({"doctor", "estimate", "verify"} & set(words))
    few = 0 if looks_alone else 2 if trains_alone else 5
    assert run.code == 0 and run.jobs["total"] > few, run.output


def test_the_readme_shows_commands() -> None:
    assert len(COMMANDS) >= 3


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shown = set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE))
    assert {"mini", "test"} <= shown <= targets


MEASUREMENTS = sorted(set(re.findall(r"^residual-mass (measure .*?|measure)(?=\s+#|$)", README, re.MULTILINE)))


@pytest.mark.parametrize("command", MEASUREMENTS)
def test_a_measurement_is_understood(command: str) -> None:
    """`tests/unit/measure` runs such commands on a tiny model."""
    assert _parser("measure").parse_args(shlex.split(command)).name == "measure"


def test_the_readme_shows_measurements() -> None:
    assert len(MEASUREMENTS) >= 2
