"""The headline: the same numbers at the top of the page and in the last lines of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from sample_results import Row, distance_row, write_rows
from samples import ROOT, TEMPLATES, template

from residual_mass.metrics import KL
from residual_mass.paper import document, page
from residual_mass.paper.frames import read_frame
from residual_mass.paper.headline import headline
from residual_mass.spec.specs import BackboneSpec, ReportSpec, TableSpec
from residual_mass.study import start
from residual_mass.study.plan import load_plan

METHODS = ("topk", "topk_phi", "scan4_regression_64")
BUDGETS = (2.0, 4.0, 8.0)
METRICS = {"kl": 0.5, "same_top": 0.9, "log_ppl_ratio": 0.1}
LENGTHS = ("1k", "2k")


def distances(length: str) -> list[Row]:
    """Distances that tell method, budget and length apart, with those of maps of another length after the main ones."""
    rows = []
    for metric, value in METRICS.items():
        for number, method in enumerate(METHODS):
            for budget in BUDGETS:
                found = value / (1 + number) / budget / int(length[0])
                interval = {"ci_low": found / 2, "ci_high": found * 2}
                rows.append(distance_row(method, budget, metric=metric, value=found, length=length, **interval))
        rows += [
            distance_row("topk_phi", budget, metric=metric, value=7, length=length, maps="512") for budget in BUDGETS
        ]
    return rows


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The fidelity files of study mini, in the current folder."""
    monkeypatch.chdir(tmp_path)
    Path("results").mkdir()
    return [write_rows(Path("results"), "fidelity", distances(length), length) for length in LENGTHS]


def cells_of(results: list[Path]) -> Path:
    show = TableSpec("mini", "fidelity", ("smol",), LENGTHS, BUDGETS, (), maps=("2k",), backbone_titles={"smol": "S"})
    cells = Path("fidelity.csv")
    document.run(show, results, template("fidelity"), Path("fidelity.tex"), cells)
    return cells


def test_it_is_of_the_greatest_length_and_of_the_main_maps(results: list[Path]) -> None:
    found = headline(read_frame(cells_of(results)), KL.name, 4.0)
    assert list(found) == list(METHODS)
    assert {cell["length"] for cell in found.values()} == {"2k"}
    assert found["topk_phi"]["value"] == pytest.approx(0.5 / 2 / 4 / 2)
    assert headline(read_frame(Path("fidelity.csv")), KL.name, 3.0) == {}


def test_the_last_lines_of_a_run_say_what_the_page_says(results: list[Path]) -> None:
    config = yaml.safe_load((ROOT / "config" / "config.yaml").read_text()) | {"study": "mini"}
    line, _ = start.closing_lines(load_plan(ROOT, config))
    assert line == (
        "KL from full attention in nats (smol, wiki at 2k, 4 % read exactly): "
        "topk 0.0625, topk_phi 0.0312, scan4_regression_64 0.0208"
    )
    backbone = BackboneSpec("mini", "org/LM", "r1", "hub", "float32", "small", 4096, False, name="smol")
    spec = ReportSpec("mini", (backbone,), {}, budgets=BUDGETS, recommended="scan4_regression_64")
    page.run(spec, [cells_of(results)], [], None, TEMPLATES / "report.html.j2", Path("report.html"))
    text = Path("report.html").read_text(encoding="utf-8")
    assert "With 4% of the prompt read exactly" in text
    assert "is 0.0208 nats" in text and "0.0625 (0.0312 to 0.1250)" in text and "Wikipedia, 2k tokens" in text


def test_of_a_single_document_there_is_no_interval(results: list[Path]) -> None:
    rows = [row | {"documents": 1, "ci_low": "", "ci_high": ""} for row in distances("1k")]
    cells = cells_of([write_rows(Path("results"), "fidelity", rows), *results[1:]])
    found = headline(read_frame(cells).query("length == '1k'"), KL.name, 4.0)
    assert page.in_brackets(found["topk"]) == ""


def test_without_the_results_there_is_only_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = yaml.safe_load((ROOT / "config" / "config.yaml").read_text()) | {"study": "mini"}
    assert start.closing_lines(load_plan(ROOT, config)) == [f"All results on one page: {tmp_path}/results/report.html"]
