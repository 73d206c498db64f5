"""Typed frames: numbers from files and back, and joins on numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from sample_results import distance_row, write_rows
from samples import made, study_rows, template, written

from residual_mass.metrics import budget_text, written_budget
from residual_mass.paper import document, published
from residual_mass.paper.frames import COUNTS, FLAGS, FLOATS, cells_csv, field_texts, read_frame, typed
from residual_mass.paper.tables import find
from residual_mass.spec.columns import FIDELITY_COLUMNS, SCORE_COLUMNS
from residual_mass.spec.specs import TableSpec

METRICS = ("kl", "same_top", "log_ppl_ratio")


@pytest.mark.parametrize("label", published.labels())
def test_the_cells_of_a_file_are_those_that_were_written(label: str, tmp_path: Path) -> None:
    cells = find(label).cells(*published.results(label))
    path = written(tmp_path, cells)
    again = read_frame(path)
    pd.testing.assert_series_equal(again.dtypes, cells.dtypes)
    assert cells_csv(again, find(label).digits) == path.read_text(encoding="utf-8")
    texts = [name for name in cells if name not in FLOATS]
    pd.testing.assert_frame_equal(again[texts], cells[texts])


def test_every_number_of_a_result_has_a_type() -> None:
    """Of what the stages write, only names, labels and texts are text."""
    words = "benchmark backbone length task method maps metric flags data decoding study model_id revision weights"
    words += " phi_sha prompts_sha text continuation state"
    assert {*SCORE_COLUMNS, *FIDELITY_COLUMNS} - FLOATS - COUNTS - FLAGS == set(words.split())


def test_numbers_are_read_exactly_and_what_is_empty_is_unknown() -> None:
    texts = {"value": ["0.1", "", "1e-07"], "n": ["3", "", "0"], "bold": ["1", "", "0"], "maps": ["2k", "", "1"]}
    rows = typed(pd.DataFrame(texts))
    assert rows["value"].tolist()[::2] == [0.1, 1e-07] and rows["value"].isna().tolist() == [False, True, False]
    assert rows["n"].dropna().tolist() == [3, 0] and rows["bold"].tolist() == [True, False, False]
    assert rows["maps"].tolist() == ["2k", "", "1"]


def test_a_file_has_the_digits_of_the_stage() -> None:
    numbers = {
        "quantity": ["kl", "training_seconds", "step_bytes"], "value": [0.11080649, 0.26132559686945034, 4e9],
        "ci_low": [0.06, 0.2571001901999238, None], "n": [6, None, 3], "budget_percent": [4.0, 0.5, None],
        "gain_p_holm": [0.5, None, 1e-9], "bold": [True, False, False], "maps": ["2k", None, ""],
    }  # fmt: skip
    assert field_texts(typed(pd.DataFrame(numbers)), ".6g").to_dict("list") == {
        "quantity": numbers["quantity"], "value": ["0.110806", "0.26132559686945034", "4000000000"],
        "ci_low": ["0.06", "0.2571001901999238", ""], "n": ["6", "", "3"], "budget_percent": ["4", "0.5", ""],
        "gain_p_holm": ["0.500000", "", "0.000000"], "bold": ["1", "", ""], "maps": ["2k", "", ""],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("budget", "in_the_file"), [(4.0, "4.0"), (0.5, "0.50"), (100 / 3, budget_text(100 / 3)), (2.0, "2e0")]
)
def test_budgets_join_as_numbers(budget: float, in_the_file: str, tmp_path: Path) -> None:
    """Whatever their digits in a file, and also where the file has fewer of them than the study."""
    rows = [distance_row("topk", budget, metric=metric, budget_percent=in_the_file) for metric in METRICS]
    spec = TableSpec("mini", "fidelity", ("smol",), ("1k",), (budget,), (), backbone_titles={"smol": "Small"})
    out = tmp_path / "cells.csv"
    document.run(spec, [write_rows(tmp_path, "fidelity", rows)], template("fidelity"), tmp_path / "out.tex", out)
    cells = read_frame(out)
    assert cells["value"].notna().all()
    assert set(cells["budget_percent"]) == {written_budget(budget)}
    assert set(cells["column"]) == {f"{budget:g}%"}


def test_another_budget_is_no_result_of_this_one() -> None:
    rows, spec = study_rows()
    with pytest.raises(ValueError, match="no result for 4k ruler topk 1b 0.50001"):
        made("ruler_sweep", rows, replace(spec, budgets=(0.50001,)))
