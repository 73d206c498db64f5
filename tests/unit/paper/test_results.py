"""A damaged or mixed result CSV is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from sample_results import COLUMNS, Rows, result_rows, write_rows

from residual_mass.paper.results import Score, load_result


def test_the_summary_over_tasks_is_read(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "ruler_smol_1k.csv", result_rows({("topk", 4.0): 0.625}, n=12))
    result = load_result(path)
    assert (result.benchmark, result.backbone, result.length, result.study) == ("ruler", "smol", "1k", "mini")
    assert (result.tasks, result.examples, result.phi_shas) == (2, 12, ("ab" * 32,))
    assert result.scores["topk", 4.0] == Score(0.625, 0.525, 0.775)
    assert len(result.scores) == 10


def change(index: int, **fields: str) -> Callable[[Rows], None]:
    return lambda rows: rows[index].update(fields)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (change(-1, value="nan"), r"all topk_phi_nosub 8: value is 'nan'"),
        (change(-1, value="inf"), r"value is 'inf'"),
        (change(-1, ci_low=""), r"ci_low is ''"),
        (change(-1, study="other"), r"study should have one value, found 'mini' and 'other'"),
        (change(3, model_id="org/Else"), r"model_id should have one value"),
        (change(-1, n="9"), r"not scored on one and the same number of examples"),
        (change(0, method="topk_magic"), r":2: unknown method 'topk_magic'"),
        (change(0, budget_percent="4"), r":2: budget_percent is '4' for method full"),
        (change(1, budget_percent=""), r":3: budget_percent is '' for method topk"),
        (change(1, budget_percent="few"), r":3: budget_percent is 'few', not a finite number"),
        (change(2, budget_percent="2"), r":4: a second row for niah topk 2"),
        (lambda rows: rows.pop(), r"cut short, no row for all topk_phi_nosub at 8%"),
        (lambda rows: rows.pop(4), r"cut short, no row for niah topk_phi at 2%"),
        (lambda rows: rows.__delitem__(slice(20, None)), r"cut short, no row for all full"),
        (lambda rows: rows.__delitem__(slice(0, 20)), r"no row of a single task"),
        (lambda rows: rows.clear(), r"benchmark should have one value, found no row"),
    ],
)
def test_bad_rows_are_refused(tmp_path: Path, edit: Callable[[Rows], None], message: str) -> None:
    edit(rows := result_rows())
    path = write_rows(tmp_path / "ruler_smol_1k.csv", rows)
    with pytest.raises(ValueError, match=rf"^{path}.*{message}"):
        load_result(path)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = write_rows(tmp_path / "whole.csv", result_rows()).read_bytes()
    cut = tmp_path / "cut.csv"
    line_ends = [at + 1 for at, byte in enumerate(whole) if byte == ord("\n")]
    for size in {*line_ends[:-1], *range(0, len(whole), 53), len(whole) - 1}:
        cut.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=rf"^{cut}"):
            load_result(cut)


@pytest.mark.parametrize("column", ["value", "weights", "ci_high"])
def test_a_missing_column_is_named(tmp_path: Path, column: str) -> None:
    (path := tmp_path / "r.csv").write_text(",".join(name for name in COLUMNS if name != column) + "\n")
    with pytest.raises(ValueError, match=rf"{path}: column {column} is missing"):
        load_result(path)


def test_a_missing_file_and_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gone\.csv: no such file"):
        load_result(tmp_path / "gone.csv")
    (binary := tmp_path / "binary.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"binary\.csv: not UTF-8"):
        load_result(binary)
