"""Tables, page and comparison of a benchmark whose metric has a unit and no bounds, and is better where it is lower."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from printed import METHODS, caption_of, printed_cells
from sample_report import sample_study
from sample_results import TEMPLATES, edit, result_rows, table_spec, write_rows
from tests.unit.test_metrics import LOSS

from residual_mass.benchmarks.catalogue import BENCHMARKS
from residual_mass.metrics import METRICS
from residual_mass.paper.comparison.picture import picture
from residual_mass.paper.report.findings import collect_gains
from residual_mass.paper.table import Place, load_table
from residual_mass.paper.tables.render import make_published, run
from residual_mass.paper.tables.tally import tally_by_family
from residual_mass.study.specs import ComparisonSpec

_, TOPK, PHI, NOSUB = METHODS


@pytest.fixture(autouse=True)
def ruler_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = tuple(replace(task, metric=LOSS) for task in BENCHMARKS["ruler"])
    monkeypatch.setitem(BENCHMARKS, "ruler", tasks)


def test_a_table_prefers_the_lower_value(tmp_path: Path) -> None:
    rows = result_rows({("topk", 2.0): 7.5, ("topk_phi", 2.0): -3.5, ("topk_phi_nosub", 2.0): 7.0, ("topk", 4.0): 0.1})
    edit(rows, {"task": "all", "method": "topk", "budget_percent": "2"}, flags="floor")
    edit(rows, {"task": "all", "method": "topk_phi", "budget_percent": "2"}, flags="beats_full ceiling")
    out = {name: tmp_path / f"ruler_sweep.{name}" for name in ("tex", "csv", "json")}
    results = [write_rows(tmp_path / "a.csv", rows)]
    run(table_spec(), results, TEMPLATES / "ruler_sweep.tex.j2", out["tex"], out["csv"], out["json"])
    tex = out["tex"].read_text()
    bold = {(row, column) for (_, row, column), cell in printed_cells(tex).items() if cell.bold}
    assert bold == {(PHI, 0), (TOPK, 1), (TOPK, 2), (PHI, 2), (NOSUB, 2)}
    caption = caption_of(tex)
    assert f"{PHI} is below {TOPK} in 1 of 3 cells, equal in 1, mean change $-3.533$." in caption
    assert "1 are at the floor (at least 5) and 1 at the ceiling (at most -1)" in caption
    assert "Alarm, partial-KV values below Full by more than chance: 1 (ruler" in caption
    assert "over examples: 0.125 nats." in caption and "power 80\\%): 0.200 nats." in caption
    (phi,) = [cell for cell in load_table(out["json"], "mini").cells if "beats_full" in cell.flags]
    assert "below Full by more than chance, which is suspicious" in phi.notes


def test_the_page_greens_a_gain_that_is_negative(tmp_path: Path) -> None:
    study = sample_study(tmp_path)
    gains = collect_gains([load_table(path, "paper") for path in study.files.tables])
    better = {row.task: {gain.better for gain in row.gains if gain} for row in gains.rows}
    assert better == {"RULER": {False}, "BABILong": {True}}  # every gain of the sample is positive
    assert "<li>RULER: below in" in study.page() and "<li>BABILong: above in" in study.page()


def test_the_picture_counts_and_ranks_by_what_is_better() -> None:
    labels = ("ruler_sweep", "cross_length_mismatch", "loss_ablation")
    papers = {label: {cell.place: cell.text for cell in make_published(label).cells} for label in labels}
    rows = picture(papers, {}, ComparisonSpec("paper", {}))
    found = {(row["family"], row["statement"]): row["published"] for row in rows}
    for statement, text in {
        "cells with TopK+phi below / equal / above TopK": "1 / 1 / 30",
        "cells above TopK, of those with maps used within their length": "6 of 6",
        "rows, best first": "hedgehog_map > lolcats_loss > kl_only > topk > ours > aux_only > full",
    }.items():
        assert found["RULER", statement] == text


def test_two_metrics_of_a_benchmark_are_never_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METRICS, "loss", LOSS)
    place = Place("1b", "4k", "babilong", "all", method="topk_phi", budget_percent=1)
    texts = {replace(place, quantity=quantity): "0.2" for quantity in ("score", "loss")}
    texts |= {replace(place, quantity=each.quantity, method="topk"): "0.1" for each in list(texts)}
    counted = {name: (each.wins, each.losses) for name, each in tally_by_family(texts).items()}
    assert counted == {"BABILong": (1, 0), "BABILong, loss": (0, 1)}
