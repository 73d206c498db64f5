"""What is rendered alone: no template and no result makes anything be trained or generated again."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from runs import ROOT, Run, dry_run, made

OF_A_TABLE = {"table": 1, "comparison": 1, "numbers": 1, "document": 1, "report": 1}
"""Jobs that make a table again, and what shows it."""
TABLES_OF_RULER_1K = 2  # ruler_sweep and stress_1pct; the comparisons of maps have files of their own


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, studies: dict[str, Run]) -> Path:
    """A copy of the workflow in which the mini study is up to date."""
    folder = tmp_path_factory.mktemp("finished")
    for name in ("config", "docs", "workflow", "paper_tables/templates"):
        shutil.copytree(ROOT / name, folder / name)
    for name in ("Snakefile", "environment.yml"):
        shutil.copy(ROOT / name, folder)
    (folder / "src").symlink_to(ROOT / "src")
    made(folder, folder / "Snakefile", studies["mini"])
    assert planned(folder) == {}
    return folder


@pytest.mark.parametrize(
    ("changed", "jobs"),
    [
        ("paper_tables/templates/ruler_sweep.tex.j2", OF_A_TABLE),
        ("paper_tables/templates/numbers.tex.j2", {"numbers": 1, "document": 1}),
        ("paper_tables/templates/main.tex.j2", {"document": 1}),
        ("paper_tables/templates/report.html.j2", {"report": 1}),
        ("docs/deviations.md", {"report": 1}),
        ("results/ruler_smol_1k.csv", OF_A_TABLE | {"table": TABLES_OF_RULER_1K}),
        ("results/ablation_loss_smol.csv", OF_A_TABLE),
        (
            "results/runtime_smol.csv",
            {"table": 1, "numbers": 1, "document": 1, "report": 1},
        ),  # the paper has no such table
        ("results/diagnostics/accounting_smol.csv", OF_A_TABLE),
        ("results/diagnostics/claims_smol.csv", {"report": 1}),
        (
            "results/diagnostics/heads_smol_cwe_1k.parquet",
            OF_A_TABLE | {"figure": 2, "audit": 1, "findings": 1},
        ),
    ],
)
def test_a_change_renders_what_shows_it(changed: str, jobs: dict[str, int], finished: Path) -> None:
    path = finished / changed
    before, stat = path.read_text(), path.stat()
    try:
        path.write_text(before + "\n")
        found = planned(finished)
    finally:
        path.write_text(before)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert found == jobs


def planned(folder: Path) -> dict[str, int]:
    """Jobs by rule, without the totals."""
    run = dry_run(folder, "all", snakefile=folder / "Snakefile")
    assert run.code == 0, run.output
    return {name: count for name, count in run.jobs.items() if name not in ("all", "total")}
