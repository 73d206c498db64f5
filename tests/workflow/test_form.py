"""Checks of the workflow without a run: its form, its report, and the commands in the README."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from runs import ROOT, Run, dry_run, made, snakemake

from residual_mass.cli import _parser

README = (ROOT / "README.md").read_text()
COMMANDS = sorted(set(re.findall(r"^snakemake .*?(?=\s+#|$)", README, re.MULTILINE)))
MEASUREMENTS = sorted(set(re.findall(r"^residual-mass (measure .*?|measure)(?=\s+#|$)", README, re.MULTILINE)))
NO_NETWORK = {f"{name}_proxy": "http://127.0.0.1:9" for name in ("http", "https", "all")}


def test_lint_and_format_have_nothing_to_say(tmp_path: Path) -> None:
    run = snakemake(tmp_path, "--lint")
    assert run.code == 0, run.output
    command = [sys.executable, "-m", "snakefmt", "--check", "Snakefile", "workflow"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_the_catalog_finds_the_workflow(tmp_path: Path) -> None:
    """It reads `workflow/Snakefile`, and lints in the root; the jobs are those of the root's Snakefile."""
    settings = yaml.safe_load((ROOT / ".snakemake-workflow-catalog.yml").read_text())["usage"]
    assert settings["software-stack-deployment"]["conda"] and settings["report"]
    assert "snakemake" in README.lower() and "workflow" in README.lower()
    run = dry_run(tmp_path, "all", snakefile=ROOT / "workflow" / "Snakefile")
    assert run.code == 0 and run.jobs == dry_run(tmp_path, "all").jobs


def test_another_workflow_takes_it_as_a_module(tmp_path: Path) -> None:
    config, snakefile = str(ROOT / "config/config.yaml"), str(ROOT / "workflow/Snakefile")
    (tmp_path / "src").symlink_to(ROOT / "src")
    module = f"module one:\n    snakefile: {snakefile!r}\n    config: config\n"
    module = f"configfile: {config!r}\n{module}use rule * from one\n"
    (tmp_path / "Snakefile").write_text(module)
    run = dry_run(tmp_path, "all", snakefile=tmp_path / "Snakefile")
    assert run.code == 0 and run.jobs == dry_run(tmp_path, "all").jobs, run.output


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_readme_plans(command: str, tmp_path: Path) -> None:
    words = [str(ROOT / word) if word.startswith("workflow/") else word for word in shlex.split(command)[1:]]
    run = dry_run(tmp_path, *words)
    trains_alone = any(word.startswith("results/phi/") for word in words)
    looks_alone = bool({"estimate", "verify"} & set(words))
    few = 0 if looks_alone else 2 if trains_alone else 5
    assert run.code == 0 and run.jobs["total"] > few, run.output


@pytest.mark.parametrize("command", MEASUREMENTS)
def test_a_measurement_of_the_readme_is_understood(command: str) -> None:
    """`tests/unit/measure` runs such commands on a tiny model."""
    assert _parser("measure").parse_args(shlex.split(command)).name == "measure"


def test_the_readme_shows_commands_and_make_targets_that_exist() -> None:
    assert len(COMMANDS) >= 3 and len(MEASUREMENTS) >= 2
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shown = set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE))
    assert {"mini", "test"} <= shown <= targets


@pytest.mark.slow
def test_snakemakes_report_shows_tables_figures_verdicts_and_training(tmp_path: Path, studies: dict[str, Run]) -> None:
    """Of a study whose files are all there, and without a network."""
    folder = made(tmp_path, ROOT / "Snakefile", studies["mini"])
    run = snakemake(folder, "all", "--report", "report.html", **NO_NETWORK)
    assert run.code == 0 and "Report created." in run.output, run.output
    page, head = (folder / "report.html").read_text(), 'results = {"'
    results, _ = json.JSONDecoder().raw_decode(page[page.index(head) + len(head) - 2 :])
    captions = {
        str(result["name"]): " ".join(re.sub(r"<[^>]+>", " ", str(result["caption"])).split())
        for result in results.values()
    }
    for name, part in {
        "ruler_sweep.csv": "Table ruler_sweep of study mini.",
        "ruler_sweep.tex": "Table ruler_sweep of study mini.",
        "entropy_gain.png": "Figure entropy_gain of study mini.",
        "comparison.csv": "Study mini compared with the paper",
        "claims_smol.csv": "checked on smol",
        "training_smol_1k.csv": "How the feature maps of smol trained at 1k:",
        "training_smol_1k-variants.csv": "How the feature maps of smol trained at 1k:",
    }.items():
        assert part in captions[name]
    assert "snakemake." not in "".join(captions.values()) and "<strong>mini</strong>" in page
