"""A finished study reruns only jobs whose numbers can change: none for touched code, all dependent jobs for a new
recipe, and for a template or a result only the jobs that show it.
"""

from __future__ import annotations

import os
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
from runs import changed, planned, snakemake

from residual_mass.recipes import RECIPES

RENDERED = {"table", "comparison", "numbers", "document", "report"}
SCORED = {"score", "score_comparison", "mismatch", "ablation"} | RENDERED
CAPTURED = {"capture", "findings", "figure"} | RENDERED
FIDELITY = {"fidelity", "figure"} | RENDERED - {"comparison"}  # the paper has no such table to compare
FORCED = {"force"} | FIDELITY
BUMPED = {
    "prompts": {"prompts", "generate"} | SCORED | FORCED | CAPTURED,  # captured on RULER's prompts
    "train": {"train", "train_variants", "generate", "kernels", "residual_errors"} | SCORED | FORCED | CAPTURED,
    "generate": {"generate"} | SCORED,
    "score": SCORED,
    "force": FORCED,
    "fidelity": FIDELITY,
    "capture": CAPTURED,
    "kernels": {"kernels", "figure", "document", "report"},
    "residual_errors": {"residual_errors"},  # which tables and figures of the study `methods` read
    "findings": {"findings"} | RENDERED,
    "runtime": {"runtime", "table", "numbers", "document", "report"},  # the paper has no such table to compare
}
"""The rules that run again when a recipe is bumped."""
OF_A_TABLE = {"table": 1, "comparison": 1, "numbers": 1, "document": 1, "report": 1}
"""Jobs that make a table again, and what shows it."""
TABLES_OF_RULER_1K = 2  # ruler_sweep and stress_1pct; the comparisons of maps have files of their own


def test_every_recipe_has_its_rules() -> None:
    assert set(BUMPED) == set(RECIPES)


def test_touched_code_and_configuration_run_nothing(finished: Path) -> None:
    for name in ("src", "workflow", "config"):
        for path in (finished / name).rglob("*.*"):
            os.utime(path)
    os.utime(finished / "Snakefile")
    assert planned(finished) == {}


def test_results_carried_into_a_fresh_checkout_run_nothing(finished: Path, tmp_path: Path) -> None:
    fresh = tmp_path / "fresh"
    made = shutil.ignore_patterns("results", "logs", "mini", ".snakemake", "__pycache__")
    shutil.copytree(finished, fresh, ignore=made, copy_function=shutil.copyfile)  # as git does: every file is new
    for name in ("results", "paper_tables/mini", ".snakemake"):
        shutil.copytree(finished / name, fresh / name)
    newest = max(path.stat().st_mtime for path in (fresh / "results").rglob("*.*"))
    assert min(path.stat().st_mtime for path in (fresh / "src").rglob("*.py")) > newest
    assert planned(fresh) == {}


@pytest.mark.slow
def test_results_copied_without_their_times_are_kept_by_touch(finished: Path, tmp_path: Path) -> None:
    """A copy that gives every file the time of its copy, as `cp -r` does, puts inputs after what was made of them."""
    fresh = tmp_path / "fresh"
    shutil.copytree(finished, fresh, ignore=shutil.ignore_patterns(".snakemake", "__pycache__"))
    inputs = ("assets", "prompts", "phi", "generations")
    for path in (fresh / "results").rglob("*.*"):
        if path.relative_to(fresh / "results").parts[0] not in inputs:
            os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 100))
    assert {"train", "generate"} <= set(planned(fresh))
    touched = snakemake(fresh, "--cores", "1", "--touch", "all", snakefile=fresh / "Snakefile")
    assert touched.code == 0, touched.output
    assert planned(fresh) == {}


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=[pytest.mark.slow] * (name != "findings")) for name in RECIPES]
)
def test_a_bumped_recipe_runs_what_depends_on_it(recipe: str, finished: Path) -> None:
    path = finished / "src" / "residual_mass" / "recipes.py"
    bumped, count = re.subn(rf'("{recipe}": )(\d+)', r"\g<1>1\g<2>", path.read_text())
    assert count == 1
    with changed(path, bumped):
        assert set(planned(finished)) == BUMPED[recipe]


slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("file", "jobs"),
    [
        ("paper_tables/templates/ruler_sweep.tex.j2", OF_A_TABLE),
        slow("paper_tables/templates/main.tex.j2", {"document": 1}),
        ("results/ruler_smol_1k.csv", OF_A_TABLE | {"table": TABLES_OF_RULER_1K}),
        ("results/diagnostics/heads_smol_cwe_1k.parquet", OF_A_TABLE | {"figure": 2, "findings": 1}),
        slow("paper_tables/templates/numbers.tex.j2", {"numbers": 1, "document": 1}),
        slow("paper_tables/templates/report.html.j2", {"report": 1}),
        slow("results/ablation_loss_smol.csv", OF_A_TABLE),
        # The paper has no such table.
        slow("results/runtime_smol.csv", {"table": 1, "numbers": 1, "document": 1, "report": 1}),
        slow("results/diagnostics/accounting_smol.csv", OF_A_TABLE),
    ],
)
def test_a_change_renders_what_shows_it(file: str, jobs: dict[str, int], finished: Path) -> None:
    path = finished / file
    with changed(path, path.read_text() + "\n"):
        assert planned(finished) == jobs
