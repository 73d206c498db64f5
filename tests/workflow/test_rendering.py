"""What is rendered alone: no template and no result makes anything be trained or generated again."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from runs import ROOT, Run, dry_run, made

RENDERING = {"table", "comparison", "numbers", "figure", "document", "document_pdf", "report"}
"""Rules that read results and diagnostics and make what is looked at."""
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
        ("paper_tables/templates/ruler_sweep.tex.j2", {"table": 1, "comparison": 1, "numbers": 1, "document": 1}),
        ("paper_tables/templates/numbers.tex.j2", {"numbers": 1, "document": 1}),
        ("paper_tables/templates/main.tex.j2", {"document": 1}),
        ("results/ruler_smol_1k.csv", {"table": TABLES_OF_RULER_1K, "comparison": 1, "numbers": 1, "document": 1}),
        ("results/ablation_loss_smol.csv", {"table": 1, "comparison": 1, "numbers": 1, "document": 1}),
        ("results/diagnostics/accounting_smol.csv", {"table": 1, "comparison": 1, "numbers": 1, "document": 1}),
        ("results/diagnostics/heads_smol_cwe_1k.parquet", {"figure": 2, "document": 1, "audit": 1, "findings": 1}),
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
    assert {name: found.get(name) for name in jobs} == jobs
    assert set(found) <= RENDERING | {"audit", "findings"} & set(jobs)


def planned(folder: Path) -> dict[str, int]:
    """Jobs by rule, without the totals."""
    run = dry_run(folder, "all", snakefile=folder / "Snakefile")
    assert run.code == 0, run.output
    return {name: count for name, count in run.jobs.items() if name not in ("all", "total")}
