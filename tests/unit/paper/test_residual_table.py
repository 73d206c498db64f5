"""The table of residual estimators, read back from its LaTeX."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
from printed import LEFT_OUT, caption_of, printed_cells
from rendered import DATA, refusal, table, written_cells
from sample_residuals import Row, distance_row, error_row, write_log, write_rows
from sample_results import table_spec

from residual_mass.paper.numbers import keyed_cells
from residual_mass.paper.table import load_table
from residual_mass.paper.tables.render import make_published
from residual_mass.study.specs import TableSpec

BUDGETS, CORPORA, LENGTHS = (2.0, 4.0, 8.0), ("wiki", "books"), ("1k", "2k")
TITLES = {
    "topk": "Top-$K$", "topk_phi": r"Top-$K{+}\phi$", "topk_moments": "Top-$K$+moments",
    "topk_exact_mass": "Top-$K$+exact mass",
}  # fmt: skip
MEASURED = ("topk", "topk_phi", "topk_moments")
"""Methods whose next tokens are measured as well."""


def error_rows(length: str) -> list[Row]:
    generator = random.Random(length)
    rows = []
    for corpus, method, budget in itertools.product(CORPORA, TITLES, (0.5, *BUDGETS)):
        error = 0.001 if method == "topk_exact_mass" else generator.uniform(0.01, 0.9)
        facts = {
            "corpus": corpus, "length": length, "error": f"{error:.6g}", "error_ci_low": f"{error / 2:.6g}",
            "error_ci_high": f"{error * 2:.6g}", "heads_below_topk": "" if method == "topk" else "0.75",
            "log_z_error": "" if method == "topk" else f"{generator.uniform(-2, 2):.6g}",
        }  # fmt: skip
        facts |= {"state_bytes": 0, "state_share": 0} if method == "topk" else {}
        rows.append(error_row(method, budget, **facts))
    return rows


def distance_rows(length: str) -> list[Row]:
    """KL of some methods, and rows that the table does not show: of other maps, states, texts and metrics."""
    generator = random.Random(f"kl {length}")
    rows = []
    for corpus, method, budget in itertools.product(CORPORA, MEASURED, BUDGETS):
        value = f"{generator.uniform(0.001, 0.3):.6g}"
        row = distance_row(method, budget, text=corpus, length=length, value=value)
        others = [{"state": "dense"}, {"metric": "kl_p90"}, {"text": "ruler"}]
        others += [{"maps": "512"}] if method == "topk_phi" else []
        rows += [row, *(row | other | {"value": "99"} for other in others)]
    return rows


def files(folder: Path, **changes: Any) -> list[Path]:
    paths = []
    for length in LENGTHS:
        for name, rows in (("residual_errors", error_rows(length)), ("fidelity", distance_rows(length))):
            paths.append(write_rows(folder, name, (row | changes for row in rows), length))
    return [*paths, write_log(folder)]


def spec(**changes: Any) -> TableSpec:
    return table_spec("residual_estimators", **{"lengths": LENGTHS, "budgets": BUDGETS, "benchmarks": ()} | changes)


def test_every_value_stands_in_its_place_and_the_best_is_bold(tmp_path: Path) -> None:
    tex = table(tmp_path, spec(), *files(tmp_path))
    errors, masses, distances, costs = (printed_cells(part) for part in tex.split(r"\begin{table}")[1:])
    for length in LENGTHS:
        rows = {(row["corpus"], row["method"], row["budget_percent"]): row for row in error_rows(length)}
        kl = {
            (row["text"], row["method"], row["budget_percent"]): row["value"]
            for row in distance_rows(length)
            if row["value"] != "99"
        }
        for column, (corpus, budget) in enumerate(itertools.product(CORPORA, BUDGETS)):
            best = min(MEASURED, key=lambda method: float(rows[corpus, method, f"{budget:g}"]["error"]))
            for method, title in TITLES.items():
                row = rows[corpus, method, f"{budget:g}"]
                cell = errors[length, title, column]
                assert float(cell.text) == pytest.approx(float(row["error"]), rel=5e-3)
                assert cell.bold == (method == best), "the oracle is the lowest and does not compete"
                mass = masses[length, title, column]
                if method == "topk":
                    assert mass == LEFT_OUT
                else:
                    assert float(mass.text.strip("$")) == pytest.approx(float(row["log_z_error"]), abs=6e-4)
                if method in MEASURED:
                    expected = float(kl[corpus, method, f"{budget:g}"])
                    assert float(distances[length, title, column].text) == pytest.approx(expected, abs=6e-4)
                else:
                    assert distances[length, title, column] == LEFT_OUT
        shown = {title: [costs[length, title, column].text for column in range(4)] for title in TITLES.values()}
        assert shown[TITLES["topk"]] == ["0", r"0.0\%", "none", "none"]
        assert shown[TITLES["topk_phi"]] == ["16,640", r"6.3\%", "200", "231 s"]
    assert "17280 attention rows of 270 heads in 8 packs" in caption_of(tex)


def test_every_cell_has_a_key_and_a_line(tmp_path: Path) -> None:
    table(tmp_path, spec(), *files(tmp_path))
    lines = written_cells(tmp_path)
    keys = [key for key, _ in keyed_cells(load_table(tmp_path / DATA, "mini"))]
    assert len(keys) == len(set(keys)) and "residual_estimators/smol/wiki/1k/topk_phi/4/2k/relative_error" in keys
    (line,) = [
        line for line in lines
        if (line["length"], line["corpus"], line["method"], line["budget_percent"], line["quantity"])
        == ("2k", "books", "topk_moments", "8", "relative_error")
    ]  # fmt: skip
    row = next(row for row in error_rows("2k") if (row["corpus"], row["method"], row["budget_percent"])
               == ("books", "topk_moments", "8"))  # fmt: skip
    assert (line["value"], line["heads_below_topk"], line["packs"]) == (row["error"], "0.75", "8")
    assert line["source"] == "residual_errors_smol_2k.csv"


def test_without_fidelity_and_logs_there_are_errors_alone(tmp_path: Path) -> None:
    paths = [path for path in files(tmp_path) if path.name.startswith("residual")]
    tex = table(tmp_path, spec(), *paths)
    assert tex.count(r"\begin{table}") == 3 and "KL" not in tex
    costs = printed_cells(tex.split(r"\begin{table}")[3])
    assert costs["1k", TITLES["topk_phi"], 3] == LEFT_OUT and costs["1k", TITLES["topk"], 3].text == "none"


def test_what_is_missing_is_refused_in_one_line(tmp_path: Path) -> None:
    paths = files(tmp_path)
    said = refusal(tmp_path, spec(budgets=(2.0, 3.0)), *paths)
    assert said == (
        "no cell for wiki smol 1k topk at 3% in the files of --results; rerun the residual-errors stage with it"
    )
    said = refusal(tmp_path, spec(backbones=("smol", "big")), *paths)
    assert said == "table residual_estimators: no file shows backbone big; pass its files to --results"
    paths = files(tmp_path, study="paper")
    said = refusal(tmp_path, spec(), *paths)
    assert said == f"{paths[0]}: is of study 'paper', table residual_estimators of 'mini'; give its own"


def test_the_paper_has_no_such_table() -> None:
    with pytest.raises(ValueError, match="the paper has no table 'residual_estimators'"):
        make_published("residual_estimators")
