"""The files that archives and readers of a paper's code look for agree with each other and with the study."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import yaml

import residual_mass
from residual_mass.study.plan import load_plan

ROOT = Path(__file__).parents[2]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())
(ARTICLE,) = CITATION["references"]


def test_codemeta_says_what_the_citation_says() -> None:
    meta = json.loads((ROOT / "codemeta.json").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (meta["name"], meta["description"]) == (CITATION["title"], CITATION["abstract"]) and meta["name"] == project[
        "name"
    ]
    assert meta["version"] == str(CITATION["version"]) == residual_mass.__version__
    assert meta["dateModified"] == str(CITATION["date-released"])
    assert (
        meta["license"] == f"https://spdx.org/licenses/{CITATION['license']}"
        and project["license"] == CITATION["license"]
    )
    assert [author["name"] for author in meta["author"]] == [author["name"] for author in CITATION["authors"]]
    assert meta["softwareRequirements"] == [f"Python {project['requires-python']}"]
    (paper,) = meta["referencePublication"]
    assert (paper["name"], paper["@id"]) == (ARTICLE["title"], ARTICLE["url"])


def test_codecheck_lists_what_the_mini_study_makes() -> None:
    check = yaml.safe_load((ROOT / "codecheck.yml").read_text())
    plan = load_plan(ROOT, yaml.safe_load((ROOT / "config/config.yaml").read_text()))
    study = plan.studies["mini"]
    listed = {entry["file"] for entry in check["manifest"]}
    tables = {f"paper_tables/mini/{label}.csv" for label in study.tables}
    figures = {f"paper_tables/mini/figures/{label}.png" for label in study.figures}
    others = {"results/report.html", "paper_tables/mini/comparison.csv", "results/diagnostics/claims_smol.csv"}
    assert listed == tables | figures | others and len(listed) == len(check["manifest"])
    assert check["paper"]["title"] == ARTICLE["title"] and check["paper"]["reference"] == ARTICLE["url"]
    names = [f"{author['given-names']} {author['family-names']}" for author in ARTICLE["authors"]]
    assert [author["name"] for author in check["paper"]["authors"]] == names
