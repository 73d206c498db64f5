"""What is rendered alone: no template and no result makes anything be trained or generated again."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import changed, planned

OF_A_TABLE = {"table": 1, "comparison": 1, "numbers": 1, "document": 1, "report": 1}
"""Jobs that make a table again, and what shows it."""
TABLES_OF_RULER_1K = 2  # ruler_sweep and stress_1pct; the comparisons of maps have files of their own


@pytest.mark.parametrize(
    ("file", "jobs"),
    [
        ("paper_tables/templates/ruler_sweep.tex.j2", OF_A_TABLE),
        ("paper_tables/templates/numbers.tex.j2", {"numbers": 1, "document": 1}),
        ("paper_tables/templates/main.tex.j2", {"document": 1}),
        ("paper_tables/templates/report.html.j2", {"report": 1}),
        ("docs/deviations.md", {"report": 1}),
        ("results/ruler_smol_1k.csv", OF_A_TABLE | {"table": TABLES_OF_RULER_1K}),
        ("results/ablation_loss_smol.csv", OF_A_TABLE),
        # The paper has no such table.
        ("results/runtime_smol.csv", {"table": 1, "numbers": 1, "document": 1, "report": 1}),
        ("results/diagnostics/accounting_smol.csv", OF_A_TABLE),
        ("results/diagnostics/claims_smol.csv", {"report": 1}),
        (
            "results/diagnostics/heads_smol_cwe_1k.parquet",
            OF_A_TABLE | {"figure": 2, "audit": 1, "findings": 1},
        ),
    ],
)
def test_a_change_renders_what_shows_it(file: str, jobs: dict[str, int], finished: Path) -> None:
    path = finished / file
    with changed(path, path.read_text() + "\n"):
        assert planned(finished) == jobs
