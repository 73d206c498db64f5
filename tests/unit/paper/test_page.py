"""The page: it has every cell, loads nothing from outside, and begins with findings."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure
from samples import TEMPLATES, made, study_rows, written
from tests.records import recorded

from residual_mass.paper import page
from residual_mass.paper.figures.style import save
from residual_mass.spec.specs import BackboneSpec, ReportSpec

BACKBONE = BackboneSpec("mini", "org/Small<LM>", "r1", "hub", "float32", "small", 4096, False, name="smol")
SPEC = ReportSpec("mini", (BACKBONE,), {"fidelity": "Small"}, budgets=(0.5, 1.0, 2.0), recommended="topk_phi")

VERDICTS = "ruler_sweep,agrees\nruler_sweep,differs by +0.1\nruler_sweep,differs by -2\ndphi_ablation,not run\n"


def distances() -> pd.DataFrame:
    """Cells of a table of fidelity."""
    cells = made("ruler_sweep", *study_rows())
    cells = cells[(cells["length"] == "4k") & (cells["backbone"] == "1b")]
    return cells.assign(table="fidelity", corpus="wiki", quantity="kl", counted="documents", n=16)


def make(folder: Path, **changes: Any) -> str:
    rows, spec = study_rows(gain=0.01, gain_ci_low=-0.1, gain_ci_high=0.1, gain_p=0.5)
    tables = [written(folder, each) for each in (distances(), made("ruler_sweep", rows, spec))]
    figure = folder / "fidelity.png"
    save(Figure(figsize=(1, 1)), figure.with_suffix(".pdf"), figure)
    comparison = folder / "comparison.csv"
    comparison.write_text("table,verdict\n" + VERDICTS)
    given = {"tables": tables, "figures": [recorded(figure)], "comparison": recorded(comparison)} | changes
    out = folder / "report.html"
    page.run(SPEC, *given.values(), TEMPLATES / "report.html.j2", out)
    return out.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    make(folder := tmp_path_factory.mktemp("page"))
    return folder


@pytest.fixture
def html(folder: Path) -> str:
    return (folder / "report.html").read_text(encoding="utf-8")


def test_every_cell_is_on_the_page_with_its_interval_size_and_test(html: str, folder: Path) -> None:
    cells = pd.read_csv(folder / "ruler_sweep.csv", dtype=str, keep_default_na=False).to_dict("records")
    fields = re.findall(r'<td[^>]*data-of="([^"]*)"[^>]*>(?:<b>)?([^<]*)', html.partition('id="ruler_sweep"')[2])
    assert [text for _, text in fields[: len(cells)]] == [cell["text"] for cell in cells]
    for (notes, _), cell in zip(fields, cells, strict=False):
        assert f"95% interval {float(cell['ci_low']):z.3f} to {float(cell['ci_high']):z.3f}" in unescape(notes)
        assert "6500 examples" in notes and "p 1 (Holm)" in notes and "scores.csv" in notes
    bold = html.partition('id="ruler_sweep"')[2].count("<b>")
    assert bold == sum(cell["bold"] == "1" for cell in cells)


def test_nothing_is_loaded_from_outside_and_nothing_runs(html: str) -> None:
    assert not re.search(r"<script|<link|@import|url\(", html)
    assert set(re.findall(r'(?:src|href)="([^"]{5})', html)) <= {"data:", "#fide", "#rule"}
    assert "org/Small&lt;LM&gt;" in html and "<LM>" not in html
    assert "prefers-color-scheme: dark" in html and "width=device-width" in html
    assert "<th>Top-<i>K+φ</i></th>" in html  # mathematics as letters
    assert "remain at <i>p &lt; 0.05</i> after" in " ".join(html.split())


def test_it_opens_with_findings_and_the_figure_of_fidelity(html: str) -> None:
    findings = re.findall(r"<li>(.*)</li>", html)
    assert len(findings) == 2 and "With 1% of the prompt read exactly" in findings[0] and "16 documents" in findings[0]
    kl = distances().set_index(["method", "budget_percent"])["text"]
    assert kl["topk_phi", 1.0] in findings[0] and kl["topk", 1.0] in findings[0]
    tested = (study_rows()[0]["method"] == "topk_phi").sum()
    assert (
        f"in {tested} of {tested} comparisons and below in 0; none of these differences is significant" in findings[1]
    )
    assert (
        html.index("<li>") < html.index("data:image/png") < html.index('id="fidelity"') < html.index('id="ruler_sweep"')
    )
    assert "<tr><th>ruler_sweep</th><td>1</td><td>2</td><td>0</td><td>0</td></tr>" in html


def test_the_same_bytes_twice_and_no_comparison(html: str, tmp_path: Path) -> None:
    assert make(tmp_path) == html
    assert "dphi_ablation" not in html and "Comparison with the paper" not in make(tmp_path, comparison=None)
