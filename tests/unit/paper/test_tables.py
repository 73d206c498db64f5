"""Tables read back from their LaTeX: every cell, what is refused, what the caption owns up to."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sample_results import TEMPLATES, result_rows, table_spec, write_rows

from residual_mass.paper import published
from residual_mass.paper.tables import layout_of, render_published, run
from residual_mass.specs import METHODS, TableSpec

Printed = dict[tuple[str, str, int], tuple[str, bool]]
"""Text and bold by block title, method and column; a cell over several columns is in each."""


def printed_cells(tex: str) -> Printed:
    body = tex.split(r"\midrule", 1)[1].split(r"\bottomrule")[0]
    cells: Printed = {}
    for block in body.split(r"\midrule"):
        title = re.search(r"\\multirow\{4\}\{\*\}\{(.*)\}", block)
        assert title is not None
        lines = [line for line in block.splitlines() if line.strip().startswith("&")]
        for method, line in zip(METHODS, lines, strict=True):
            column = 0
            for field in line.strip().removesuffix(r"\\").split("&")[2:]:
                spanned = re.fullmatch(r"\\multicolumn\{(\d+)\}\{c\}\{(.*)\}", field.strip())
                width, text = (int(spanned[1]), spanned[2]) if spanned else (1, field.strip())
                plain = re.sub(r"\\textbf\{(.*)\}", r"\1", text)
                cells |= {(title[1], method, column + i): (plain, plain != text) for i in range(width)}
                column += width
    return cells


def published_rows(label: str) -> list[dict[str, str]]:
    with open(Path(published.__file__).with_name(f"{label}.csv"), newline="") as stream:
        return list(csv.DictReader(stream))


def test_the_published_sweep_is_printed_cell_by_cell() -> None:
    cells = printed_cells(render_published("ruler_sweep", TEMPLATES / "ruler_sweep.tex.j2"))
    rows = published_rows("ruler_sweep")
    assert len(rows) == 104
    for row in rows:
        start = 4 * ["1b", "3b"].index(row["backbone"])
        budget = row["budget_percent"]
        columns = range(start, start + 4) if budget == "" else [start + ["0.5", "1", "2", "4"].index(budget)]
        for column in columns:
            assert cells.pop((row["length"], row["method"], column)) == (row["value"], row["bold"] == "1"), row
    assert not cells


def test_the_published_one_percent_table_is_printed_cell_by_cell() -> None:
    cells = printed_cells(render_published("stress_1pct", TEMPLATES / "stress_1pct.tex.j2"))
    titles = {"ruler": "RULER", "babilong": "BABILong"}
    rows = published_rows("stress_1pct")
    assert len(rows) == 48
    for row in rows:
        column = 3 * ["1b", "3b"].index(row["backbone"]) + ["4k", "16k", "64k"].index(row["length"])
        expected = (row["value"], row["bold"] == "1")
        assert cells.pop((titles[row["benchmark"]], row["method"], column)) == expected, row
    assert not cells


def test_the_published_one_percent_table_repeats_the_sweeps() -> None:
    sweeps = {fact.point: fact for label in ("ruler_sweep", "babilong_sweep") for fact in published.load(label)}
    assert [sweeps[fact.point] for fact in published.load("stress_1pct")] == published.load("stress_1pct")


def test_published_values_of_an_unknown_table_are_refused() -> None:
    with pytest.raises(
        ValueError, match="no published values for table 'nothing'; stored are babilong_sweep, ruler_sweep"
    ):
        published.load("nothing")


def table(tmp_path: Path, spec: TableSpec, *results: Path) -> str:
    run(spec, list(results), TEMPLATES / f"{spec.label}.tex.j2", out := tmp_path / f"{spec.label}.tex")
    return out.read_text(encoding="utf-8")


def test_a_sweep_shows_the_values_of_its_files(tmp_path: Path) -> None:
    short = {("full", None): 0.75, ("topk", 2.0): 0.1, ("topk_phi", 2.0): 0.4444, ("topk_phi_nosub", 2.0): 0.4441}
    long = {("full", None): 0.7, ("topk", 8.0): 0.6}
    files = [
        write_rows(tmp_path / "b.csv", result_rows(long, length="2k")),
        write_rows(tmp_path / "a.csv", result_rows(short)),
    ]
    cells = printed_cells(table(tmp_path, table_spec(lengths=("1k", "2k")), *files))
    assert len(cells) == 2 * 4 * 3
    assert [cells["1k", method, 0] for method in METHODS] == [
        ("0.750", False), ("0.100", False), ("0.444", True), ("0.444", True)
    ]  # fmt: skip
    assert [cells["2k", method, 2] for method in METHODS] == [
        ("0.700", False), ("0.600", True), ("0.500", False), ("0.500", False)
    ]  # fmt: skip


def test_the_one_percent_table_takes_the_middle_budget_and_marks_what_is_left_out(tmp_path: Path) -> None:
    values = {("topk", 4.0): 0.3, ("topk_phi", 4.0): 0.4, ("topk_phi_nosub", 4.0): 0.2}
    tex = table(tmp_path, table_spec("stress_1pct"), write_rows(tmp_path / "a.csv", result_rows(values)))
    cells = printed_cells(tex)
    assert [cells["RULER", method, 0][0] for method in METHODS] == ["0.500", "0.300", "0.400", "0.200"]
    assert {cells["BABILong", method, 0] for method in METHODS} == {("--", False)}
    assert r"4\% of the cached positions" in tex and "does not evaluate (BABILong)" in tex


def test_the_middle_of_the_papers_budgets_is_one_percent() -> None:
    assert layout_of(table_spec("stress_1pct", budgets=(0.5, 1.0, 2.0, 4.0))).budget_percent == 1


def test_two_backbones_stand_side_by_side(tmp_path: Path) -> None:
    spec = table_spec(backbones=("smol", "big"), backbone_titles={"big": "Big & bold"})
    big = {"backbone": "big", "model_id": "org/Big-LM"}
    files = [
        write_rows(tmp_path / "a.csv", result_rows()),
        write_rows(tmp_path / "b.csv", result_rows({("topk", 2.0): 1}, **big)),
    ]
    tex = table(tmp_path, spec, *files)
    assert r"& & \multicolumn{3}{c}{Small-LM} & \multicolumn{3}{c}{Big \& bold} \\" in tex
    assert printed_cells(tex)["1k", "topk", 3] == ("1.000", True)
    assert r"\cmidrule(lr){3-5}" in tex and r"\cmidrule(lr){6-8}" in tex


def test_the_caption_names_study_model_and_sample(tmp_path: Path) -> None:
    tex = table(tmp_path, table_spec(), write_rows(tmp_path / "ruler_smol_1k.csv", result_rows()))
    caption = " ".join(tex.split(r"\caption{")[1].split(r"\label")[0].split())
    assert "Study mini, backbone org/Small-LM." in caption
    assert "The paper does not evaluate org/Small-LM; the values are not comparable with the paper's." in caption
    assert "RULER 1k: 8 from 2 tasks" in caption and "interval over examples: 0.125." in caption
    assert "A dash" not in caption and "Random weights" not in caption and "reproduc" not in tex.lower()
    assert (
        "% ruler_smol_1k.csv: org/Small-LM at r1, pretrained weights, phi maps abababababab, 2 tasks, n = 8 per cell"
        in tex
    )


def test_random_weights_are_owned_up_to(tmp_path: Path) -> None:
    facts = {"weights": "random", "model_id": "meta-llama/Llama-3.2-1B-Instruct"}
    tex = table(tmp_path, table_spec(), write_rows(tmp_path / "a.csv", result_rows(**facts)))
    assert "Random weights (meta-llama/Llama-3.2-1B-Instruct)" in tex and "random weights, phi maps" in tex
    assert "not comparable" not in tex


def test_unequal_samples_of_backbones_are_told_apart(tmp_path: Path) -> None:
    files = [
        write_rows(tmp_path / "a.csv", result_rows()),
        write_rows(tmp_path / "b.csv", result_rows(backbone="big", model_id="org/Big-LM", n=4)),
    ]
    tex = table(tmp_path, table_spec(backbones=("smol", "big")), *files)
    assert "RULER 1k: 8 from 2 tasks (smol); RULER 1k: 4 from 2 tasks (big)" in tex


def test_hostile_names_print_and_do_not_run(tmp_path: Path) -> None:
    hostile = "evil_$x$\n\\input{/etc/passwd}%"
    rows = result_rows(backbone=hostile, model_id=hostile, revision="r\n\\end{table}", length="1k")
    spec = table_spec(backbones=(hostile,), backbone_titles={})
    tex = table(tmp_path, spec, write_rows(tmp_path / "a.csv", rows))
    active = [re.split(r"(?<!\\)%", line)[0] for line in tex.splitlines()]
    assert not any(r"\input" in line for line in active)
    assert sum(r"\end{table}" in line for line in active) == 1
    assert r"evil\_\$x\$ \textbackslash{}input\{" in tex


def test_the_same_inputs_give_the_same_bytes(tmp_path: Path) -> None:
    files = [write_rows(tmp_path / f"{length}.csv", result_rows(length=length)) for length in ("1k", "2k")]
    spec = table_spec(lengths=("1k", "2k"))
    assert table(tmp_path, spec, *files) == table(tmp_path, spec, *reversed(files))


def refusal(tmp_path: Path, spec: TableSpec, *results: Path) -> str:
    with pytest.raises(ValueError) as caught:
        table(tmp_path, spec, *results)
    assert not (tmp_path / f"{spec.label}.tex").exists()
    return str(caught.value)


def test_a_budget_that_a_file_lacks_is_an_error(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.csv", result_rows())
    message = refusal(tmp_path, table_spec(budgets=(2.0, 4.0, 16.0)), path)
    assert message.startswith(f"{path}: no cell for ruler smol 1k topk at 16%")


def test_a_file_that_is_not_given_is_an_error(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.csv", result_rows())
    message = refusal(tmp_path, table_spec(lengths=("1k", "2k")), path)
    assert message.startswith("no cell for ruler smol 2k full: ruler_smol_2k.csv was not given")


def test_a_file_of_another_study_is_an_error(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.csv", result_rows(study="paper"))
    assert refusal(tmp_path, table_spec(), path).startswith(
        f"{path}: is of study 'paper', table ruler_sweep is of 'mini'"
    )


def test_files_that_the_table_does_not_show_change_nothing(tmp_path: Path) -> None:
    files = [write_rows(tmp_path / f"{length}.csv", result_rows(length=length)) for length in ("1k", "4k")]
    assert table(tmp_path, table_spec(), *files) == table(tmp_path, table_spec(), files[0])


def test_two_files_for_one_place_are_an_error(tmp_path: Path) -> None:
    files = [write_rows(tmp_path / name, result_rows()) for name in ("a.csv", "b.csv")]
    assert f"{files[1]}: a second file for ruler smol 1k, beside {files[0]}" in refusal(tmp_path, table_spec(), *files)


@pytest.mark.parametrize("fact", [{"model_id": "org/Else"}, {"revision": "r2"}, {"weights": "random"}])
def test_files_that_disagree_on_the_backbone_are_an_error(tmp_path: Path, fact: dict[str, str]) -> None:
    files = [
        write_rows(tmp_path / "a.csv", result_rows()),
        write_rows(tmp_path / "b.csv", result_rows(length="2k", **fact)),
    ]
    assert f"{files[1]}: {next(iter(fact))} is" in refusal(tmp_path, table_spec(lengths=("1k", "2k")), *files)


def test_an_unknown_table_and_a_study_without_its_benchmark_are_errors(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.csv", result_rows())
    assert refusal(tmp_path, table_spec("nothing"), path).startswith(
        "table 'nothing' is unknown; known are ruler_sweep"
    )
    assert "study mini evaluates none of its benchmarks" in refusal(tmp_path, table_spec(benchmarks=("natural",)), path)


def test_the_package_needs_no_torch() -> None:
    code = "import sys, residual_mass.paper.tables, residual_mass.paper.figures; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def has_latex() -> bool:
    return shutil.which("pdflatex") is not None and subprocess.run(["kpsewhich", "multirow.sty"]).returncode == 0


@pytest.mark.skipif(not has_latex(), reason="needs pdflatex with booktabs and multirow")
@pytest.mark.parametrize("label", ["ruler_sweep", "stress_1pct"])
def test_latex_accepts_the_table_whatever_the_names(tmp_path: Path, label: str) -> None:
    hostile = 'a_b & 50% $x$ #1 {y} ~ ^ \\input{z} <|> "q" [r]'
    rows = result_rows(backbone=hostile, model_id=hostile, length="1k")
    spec = table_spec(label, backbones=(hostile,))
    files = [write_rows(tmp_path / f"{label}.csv", rows)]
    document = "\\documentclass{article}\\usepackage{booktabs,multirow}\\begin{document}%s\\end{document}"
    (tmp_path / "main.tex").write_text(document % table(tmp_path, spec, *files), encoding="utf-8")
    command = ["pdflatex", "-halt-on-error", "-interaction=nonstopmode", "main.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
