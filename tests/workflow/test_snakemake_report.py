"""Snakemake's own report: what it shows, and that it is made without a network."""

from __future__ import annotations

import json
import re

import pytest
from runs import ROOT, Run, made, snakemake

CAPTIONS = ROOT / "workflow" / "report"
RULES = (ROOT / "workflow" / "rules").glob("*.smk")
NO_NETWORK = {f"{name}_proxy": "http://127.0.0.1:9" for name in ("http", "https", "all")}


def test_every_caption_is_used_and_there() -> None:
    shown = r'shown\(\s*paths\.\w+,\s*"[^"]+",\s*"(\w+)"'
    named = [f"{name}.rst" for file in RULES for name in re.findall(shown, file.read_text())]
    workflow = re.findall(r'^report: "workflow/report/(\w+\.rst)"$', (ROOT / "Snakefile").read_text(), re.MULTILINE)
    assert {*named, *workflow} == {path.name for path in CAPTIONS.iterdir()} and len(workflow) == 1


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, studies: dict[str, Run]) -> str:
    """The report of a study whose files are all there."""
    folder = made(tmp_path_factory.mktemp("report"), ROOT / "Snakefile", studies["mini"])
    run = snakemake(folder, "all", "--report", "report.html", **NO_NETWORK)
    assert run.code == 0 and "Report created." in run.output, run.output
    return (folder / "report.html").read_text()


def shown(page: str) -> dict[str, dict[str, object]]:
    """What the report says of every file, by its name."""
    head = 'results = {"'
    results, _ = json.JSONDecoder().raw_decode(page[page.index(head) + len(head) - 2 :])
    return {str(result["name"]): result for result in results.values()}


@pytest.mark.slow
def test_the_report_shows_tables_figures_verdicts_and_training(page: str) -> None:
    captions = {name: re.sub(r"<[^>]+>|\s+", " ", str(result["caption"])) for name, result in shown(page).items()}
    for name, part in {
        "ruler_sweep.csv": "Table ruler_sweep of study mini.",
        "ruler_sweep.tex": "Table ruler_sweep of study mini.",
        "entropy_gain.png": "Figure entropy_gain of study mini.",
        "comparison.csv": "Study mini beside the paper",
        "comparison_picture.csv": "Study mini beside the paper",
        "claims_smol.csv": "checked on smol",
        "training_smol_1k.csv": "How the feature maps of smol trained at 1k:",
        "training_smol_1k-variants.csv": "How the feature maps of smol trained at 1k:",
    }.items():
        assert part in " ".join(captions[name].split())
    assert "snakemake." not in "".join(captions.values())
    assert "<strong>mini</strong>" in page
