"""What `python -m residual_mass table` says of a file that it cannot trust: one line, and no table."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from sample_results import TEMPLATES, Rows, edit, result_rows, table_spec, write_rows

from residual_mass.core.settings import to_json

HOSTILE = '<script>alert("1")</script> \\input{/etc/passwd} & $(id) 50% #1 ~^_{'


def command(folder: Path, path: Path) -> tuple[list[str], Path, Path]:
    out, cells = folder / "made" / "ruler_sweep.tex", folder / "made" / "ruler_sweep.csv"
    stage = [sys.executable, "-m", "residual_mass", "table", "--spec", to_json(table_spec())]
    files = ["--results", str(path), "--template", str(TEMPLATES / "ruler_sweep.tex.j2")]
    return [*stage, *files, "--out", str(out), "--cells", str(cells)], out, cells


def lacking_a_cell() -> Rows:
    return [row for row in result_rows() if (row["method"], row["budget_percent"]) != ("topk_phi", "4")]


def with_field(**fields: str) -> Callable[[], Rows]:
    return lambda: edit(result_rows(), {"task": "all", "method": "topk", "budget_percent": "2"}, **fields)


def of_a_hostile_task() -> Rows:
    rows = edit(result_rows(), {"task": "vt"}, task=HOSTILE)
    return edit(rows, {"task": HOSTILE, "method": "topk", "budget_percent": "2"}, value="nan")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            lacking_a_cell,
            ": no cell for ruler smol 1k topk_phi at 4%; rerun the generate and score stages with that arm",
        ),
        (
            with_field(value="nan"),
            ":23: all topk 2: value is 'nan', not a finite number; delete it and run the score stage again",
        ),
        (
            with_field(ci_high=""),
            ":23: all topk 2: ci_high is '', not a finite number; delete it and run the score stage again",
        ),
        (
            with_field(method="topk_fi"),
            ":23: unknown method 'topk_fi'; known are full, topk, topk_phi, topk_phi_nosub",
        ),
        (
            of_a_hostile_task,
            f":13: {HOSTILE} topk 2: value is 'nan', not a finite number; delete it and run the score stage again",
        ),
        (
            lambda: result_rows(study="paper"),
            ": is of study 'paper', table ruler_sweep is of 'mini'; rerun it",
        ),
        (
            lambda: result_rows()[:-1],
            ": ruler 1k: cut short, no row for all topk_phi_nosub at 8% with maps 2k; delete "
            "it and run the score stage again",
        ),
    ],
)
def test_a_fault_is_one_line(tmp_path: Path, rows: Callable[[], Rows], message: str) -> None:
    said = refused(tmp_path, write_rows(tmp_path / "ruler_smol_1k.csv", rows()))
    assert said == f"{tmp_path / 'ruler_smol_1k.csv'}{message}"


def refused(folder: Path, path: Path) -> str:
    """What follows the stage's name in the one line that the stage says."""
    arguments, out, cells = command(folder, path)
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "" and not out.exists() and not cells.exists(), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(head := "residual_mass table: error: ")
    return line.removeprefix(head)


def test_a_file_that_was_cut_within_a_line(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "ruler_smol_1k.csv", result_rows())
    path.write_text(path.read_text()[:-40])
    assert refused(tmp_path, path) == (
        f"{path}: empty or cut short, its last line does not end; delete it and run the score stage again"
    )


def test_a_hostile_name_in_a_sound_file_prints_as_it_is(tmp_path: Path) -> None:
    """Of a task that the table shows in its mean alone, and of a model, whose name is in the caption."""
    rows = edit(result_rows(model_id=HOSTILE), {"task": "vt"}, task=HOSTILE)
    arguments, out, cells = command(tmp_path, write_rows(tmp_path / "ruler_smol_1k.csv", rows))
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    read_by_latex = "\n".join(line for line in out.read_text().splitlines() if not line.startswith("%"))
    assert "\\input" not in read_by_latex and "<script>" not in read_by_latex
    assert r"\textless{}script\textgreater{}alert(" in read_by_latex and cells.is_file()
